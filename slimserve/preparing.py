"""What has to be right before the engine starts: its caches, the values that GPUs exchange, the weights."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from slimserve import weights
from slimserve.engine import command, variables
from slimserve.engine.fetching import Cancelled
from slimserve.errors import Finding, Refused, raise_if_any
from slimserve.plan import Plan
from slimserve.profile import Profile
from slimserve.session import Session
from slimserve.subject import Subject
from slimserve.telling import say
from slimserve.weights.meter import Meter, Tick


def prepare(session: Session, plan: Plan, tick: Tick) -> None:
    """What the engine needs when it starts: caches that can be written, GPUs that tell the truth, whole weights.

    Args:
        tick: told how far it has come, beside the person at the terminal.

    Raises:
        Refused, Failed: one of them cannot be had.
    """
    _make_caches(session, plan.subject.profile)
    _try_gpus(session, plan, tick)
    with metered() as meter:

        def both(done: int, total: int, name: str) -> None:
            meter(done, total, name)
            tick(done, total, name)

        prepare_weights(session, plan, both)


def prepare_weights(session: Session, plan: Plan, tick: Tick) -> Path:
    """Have the weights of `plan` complete, whole and of the right shape.

    What is not there is fetched. What is there and damaged is refused: a start is not the time to download it again
    unasked, and a disk that loses files wants to be looked at.

    Args:
        tick: told of each step.

    Returns:
        Their folder.

    Raises:
        Refused, Failed: they could not be had, or what is there is not what the model file says.
    """
    folder = plan.weights.folder
    if not folder.is_dir():
        fetch_weights(session, plan.subject, folder, tick)
    check_weights(session, plan.subject, folder, tick)
    return folder


@contextlib.contextmanager
def metered() -> Iterator[Tick]:
    """Progress on the terminal; an interruption says what becomes of the weights."""
    meter = Meter(sys.stderr)
    try:
        yield meter
    except (KeyboardInterrupt, Cancelled):
        meter.close()
        say("stopped; what has arrived is kept, and the next --fetch goes on from there")
        raise
    finally:
        meter.close()


def fetch_weights(session: Session, subject: Subject, folder: Path, tick: Tick) -> None:
    """Download or copy, and verify, what is not there or damaged.

    Raises:
        Refused, Failed: it could not be had.
    """
    checkpoint = subject.model.checkpoints[subject.profile.quant]
    weights.fetch(
        checkpoint, folder, session.manifest(subject), tick, session.environment, profiles=session.registry.folder
    )


def check_weights(session: Session, subject: Subject, folder: Path, tick: Tick) -> None:
    """See that the weights are whole and of the right shape.

    Raises:
        Refused: with everything that is wrong.
    """
    files = session.manifest(subject)
    weightless = subject.model.checkpoints[subject.profile.quant].generated is not None
    findings = weights.check(folder, files, weightless=weightless)
    findings += weights.check_config(folder, subject.model.geometry)
    if not findings and weights.state(folder, files).kind != "verified":
        try:
            findings = weights.verify(folder, files, tick)
        except OSError as error:
            why = "without it every start would read all of the weights again"
            raise Refused(
                Finding(f"the stamp of {folder} cannot be written: {error.strerror}", why, "make it writable once")
            ) from None
    raise_if_any(Refused, findings)


def _try_gpus(session: Session, plan: Plan, tick: Tick) -> None:
    """See that what the GPUs exchange arrives, with the profile's own variables.

    Raises:
        Refused: it does not, or not in time.
    """
    if not plan.gpus:
        return
    from slimserve.preflight import exchange

    profile = {name: setting.value for name, setting in plan.subject.profile.environment.items()}
    environment = exchange.environment(plan.gpus, session.environment, profile)
    names = [exchange.name(gpu) for gpu in plan.gpus]
    outcome = exchange.run(names, "cuda", environment, look=lambda: tick(0, 0, "values are exchanged between the GPUs"))
    raise_if_any(Refused, list(outcome.concerns()))
    say(f"values exchanged: {outcome}")


def _make_caches(session: Session, profile: Profile) -> None:
    """Make the engine's private caches before it starts: it would fail on them minutes later, or share another's."""
    for name in variables.CACHES.values():
        folder = command.engine_cache(session.cache, profile.id) / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise Refused(
                Finding(
                    f"the engine's cache {folder} cannot be written: {error.strerror}",
                    "compiled kernels are kept there",
                    "mend its permissions, or give SLIMSERVE_CACHE a folder that can be written",
                )
            ) from None
