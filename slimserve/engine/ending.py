"""Why an engine ended, in words: its exit status, the kernel's out-of-memory counters, the last lines of its log."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from slimserve.engine import log_file

TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024
# The first error of an engine is the cause, and what follows it may be long: so much is searched, and so much shown.
_SEARCHED_BYTES = 1 << 20
_CAUSE_LINES = 12
# What a client asked for wrongly is logged as an error too. Its first mark is enough: a line that repeats that would
# else be gone through once for each.
_ERROR = re.compile(
    r"^(?!(?>.*?ErrorInfo\().*\bcode=4\d\d\b).*\b(ERROR|CRITICAL)\b|Traceback \(most recent call last\)"
)
# As it begins to serve the engine lists its routes, a line each: after a short life nothing else would be left to read.
_ROUTES = re.compile(r"\[launcher\.py:\d+\] (Available routes are:|Route: )")


def status_in_words(status: int) -> str:
    """An exit status as `subprocess` gives it: `exit status 3`, or `signal 9 (SIGKILL)` for -9."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


def oom_counters(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """How many processes the kernel has killed for want of memory, by where it counts them.

    Args:
        proc, cgroups: roots of the two file systems.

    Returns:
        A counter by name, for the whole machine and for our control group (versions 1 and 2); those that cannot be
        read are left out.
    """
    places = {"this machine": proc / "vmstat"}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places["our control group"] = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            places["our memory control group"] = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
    return {
        name: int(line.split()[1])
        for name, place in places.items()
        for line in _lines(place)
        if line.startswith("oom_kill ")
    }


def memory_verdict(status: int, before: dict[str, int], after: dict[str, int]) -> str:
    """What the counters say about an end with `status`; empty when there is nothing to say."""
    rose = [name for name, count in after.items() if count > before.get(name, count)]
    if rose:
        return f"the kernel's out-of-memory killer struck meanwhile (its counter of {' and of '.join(rose)} rose)"
    if status != -signal.SIGKILL:
        return ""
    if after:
        return "somebody killed it; not the kernel's out-of-memory killer, whose counters stand still"
    return "probably the kernel's out-of-memory killer, whose counters cannot be read here"


def tail(log: Path, start: int = 0, lines: int = TAIL_LINES) -> list[str]:
    """The last `lines` lines that were written to `log` from byte `start` on.

    Without control characters, and without the engine's list of its routes.
    """
    return _end(log, start, _TAIL_BYTES)[-lines:]


def last_words(log: Path, start: int) -> tuple[str, ...]:
    """What `log`, from byte `start` on, has to say about an end: its last lines, and the first error before them."""
    try:
        lines = _end(log, start, _SEARCHED_BYTES)
    except OSError:
        return ()  # somebody has taken the log away
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    if first >= len(lines) - TAIL_LINES:
        return tuple(lines[-TAIL_LINES:])
    return (*lines[first : first + _CAUSE_LINES], "...", *lines[_CAUSE_LINES - TAIL_LINES + 1 :])


def _end(log: Path, start: int, most_bytes: int) -> list[str]:
    with log_file.open_to_read(log) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - most_bytes))
        text = file.read(most_bytes).decode(errors="replace")
    kept = [line for line in text.splitlines() if not _ROUTES.search(line)]
    return ["".join(mark for mark in line if mark.isprintable() or mark == "\t") for line in kept]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
