"""The recall battery as the last part of a run: which one a profile gets, and what a receipt keeps of it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from harness.client import Target
from harness.counters import Metrics, counted, reading
from harness.recall import PRESETS, Settings, run_battery
from harness.recall.dots import Dots
from harness.recall.scoring import Probe
from harness.receipt import Battery, BatteryVerdict, ServerCounts
from slimserve.client_faults import Endpoint
from slimserve.errors import Finding, Refused, SlimserveError, UsageError
from slimserve.shapes import nearest
from slimserve.subject import Subject

NONE = "none"
NAMES = (*PRESETS, NONE)


@dataclass(frozen=True)
class Preset:
    """A battery by its name."""

    name: str
    settings: Settings


def choose(name: str | None, subject: Subject, launched: bool = True) -> Preset | None:
    """The battery for a profile.

    Args:
        name: one of NAMES; None: the one that the model states. Where it states none, a processor gets the battery for
            very small models, as it gets the smaller workloads. That is also for contexts too short for another one,
            and a profile with dummy weights gets none.
        subject: the profile with its model and platform.
        launched: it is asked itself. Of another server nobody knows how long its contexts are.

    Raises:
        UsageError: there is none of that name.
        Refused: the profile cannot be asked so.
    """
    if name is not None and name not in NAMES:
        do = f"use one of {', '.join(NAMES)}"
        raise UsageError(Finding(f"--recall {name[:80]!r} is no battery", nearest(name, NAMES), do))
    profile, longest = subject.profile, subject.profile.engine.max_model_len.value
    dummy = profile.engine.load_format is not None
    if name == NONE or (name is None and dummy):
        return None
    if dummy:
        why = "its weights are dummies (engine.load_format), and no answer of theirs is right"
        raise Refused(Finding(f"{profile.id} cannot be asked what it remembers", why, "leave --recall out"))
    if name is None:
        name = subject.model.recall or ("small" if subject.platform.gpus is None else "standard")
        name = name if PRESETS[name].longest_tokens <= longest else "small"
    settings = PRESETS[name]
    if launched and settings.longest_tokens > longest:
        what = f"the {name} recall battery takes contexts of up to {settings.longest_tokens:,} tokens"
        why = f"{profile.id} takes {longest:,} (engine.max_model_len)"
        fitting = [one for one in PRESETS if PRESETS[one].longest_tokens <= longest]
        raise Refused(Finding(what, why, f"use --recall {' or '.join([*fitting, NONE])}"))
    if "tools" not in subject.model.traits:
        settings = replace(settings, tool_conversations=0)
    return Preset(name, settings)


class Recall:
    """The battery of one command: each server is asked once, and every receipt of it says what came of that.

    Args:
        preset: the battery.
        stream: where it is shown how it goes on.
    """

    def __init__(self, preset: Preset, stream: TextIO) -> None:
        self._preset, self._stream = preset, stream
        self._said: dict[Target, tuple[Battery, Sequence[Probe]]] = {}

    def of(self, target: Target, name: str, metrics: Metrics) -> tuple[Battery, Sequence[Probe]]:
        """What a server's answers are worth; it is asked when it was not yet."""
        if target not in self._said:
            self._said[target] = ask(self._preset, target, name, metrics, self._stream)
        return self._said[target]


def ask(preset: Preset, target: Target, name: str, metrics: Metrics, stream: TextIO) -> tuple[Battery, Sequence[Probe]]:
    """Ask a server everything, and say what became of it, whatever that was.

    Args:
        preset: the battery.
        target: the server, which has to speak `/chat/completions`.
        name: of the server.
        metrics: the server's.
        stream: where it is shown how it goes on.
    """
    seed = secrets.randbits(48)
    with contextlib.suppress(OSError):  # nobody reads it any more; what is asked is asked
        print(f"recall: the {preset.name} battery, {name}", file=stream, flush=True)
    dots = Dots(stream)
    probes: Sequence[Probe] = ()
    verdict: BatteryVerdict
    server = ServerCounts()
    try:
        before = reading(metrics)
        report = run_battery(Endpoint(target.url, target.model, target.key), preset.settings, seed=seed, on_probe=dots)
        verdict, findings, probes = report.verdict, [what for _, what in report.findings], report.probes
        server = counted(before, reading(metrics))
    except KeyboardInterrupt:
        verdict, findings = "aborted", ["it was interrupted"]
    except SlimserveError as error:
        verdict, findings = "inconclusive", [f"it broke off: {error.findings[0].what}"]
    finally:
        dots.close()
    battery = Battery(preset=preset.name, seed=seed, verdict=verdict, findings=tuple(findings), server=server)
    return battery, probes
