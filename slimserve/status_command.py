"""`slimserve --status`: the endpoints of this user on this machine, and what killed ones have left behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimserve import paths
from slimserve.engine.control import Control
from slimserve.engine.endpoints import Endpoint, living
from slimserve.engine.record import Leftover, leftovers
from slimserve.engine.state import State, moment
from slimserve.shapes import plain

DOOR_SECONDS = 2.0
# Of a crash's last words so much is for a person at a terminal.
LAST_LINES = 5
LINE_CHARACTERS = 160


def look(environment: Mapping[str, str]) -> dict[str, Any]:
    """Every endpoint with its state, and every engine whose supervisor is dead, as JSON data."""
    runs = paths.runs_folder(environment)
    return {
        "endpoints": [_endpoint(one) for one in living(runs)],
        "leftovers": [_leftover(one) for one in leftovers(runs)],
    }


def render(data: Mapping[str, Any], now: float) -> str:
    """The same for a person."""
    lines = [line for endpoint in data["endpoints"] for line in _lines(endpoint, now)]
    for left in data["leftovers"]:
        pids = " ".join(map(str, left["pids"]))
        lines.append(f"{left['profile']}  an engine whose supervisor died: processes {pids}")
        lines.append(f"    the next start ends it; by hand: kill -9 {pids}")
    return "\n".join(lines) or "no endpoint runs"


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    own = {name: getattr(endpoint, name) for name in ("profile", "pid", "port", "url", "page", "log", "node")}
    return {**own, **endpoint.reach.to_json(), **plain(endpoint.status), "door": _door(endpoint)}


def _door(endpoint: Endpoint) -> dict[str, Any] | None:
    """What the door says of itself; None while no engine serves, or none that answers."""
    if endpoint.port == 0 or endpoint.status.state not in (State.READY, State.DRAINING):
        return None
    try:
        return dict(plain(Control(Path(endpoint.control)).door(DOOR_SECONDS)))
    except OSError:
        return None


def _leftover(leftover: Leftover) -> dict[str, Any]:
    record = leftover.record
    pids = [process.pid for process in leftover.processes]
    return {"profile": record.profile_id, "port": record.port, "pids": pids, "record": str(leftover.path)}


def _lines(endpoint: Mapping[str, Any], now: float) -> list[str]:
    spent = max(0, int(now - endpoint["since"]))
    lines = [f"{endpoint['profile']}  {endpoint['state']} since {moment(endpoint['since'])} ({_duration(spent)})"]
    lines.append(f"    {endpoint['reason']}")
    door = endpoint["door"]
    if door is not None:
        lines.append(f"    {door['in_flight']} of {door['cap']} in flight, {door['waiting']} waiting at the door")
    elif endpoint["port"] and endpoint["state"] in (State.READY, State.DRAINING):
        lines.append(f"    the engine has not answered within {DOOR_SECONDS:g} s")
    if endpoint["restarts"]:
        lines.append(f"    restarted {_times(endpoint['restarts'])}")
    if (crash := endpoint["crash"]) is not None:
        lines.append(f"    last crash {moment(crash['when'])}: {crash['what']}")
        lines.append(f"    {crash['why']}")
        if endpoint["state"] != State.READY:  # later they are in the log, and in the JSON
            words = crash["last_words"]
            lines += [f"    | {_short(one)}" for one in words[-LAST_LINES:]]
            if len(words) > LAST_LINES:
                lines.append(f"    what it said before: --status --json, or {crash['log']}")
    if endpoint["node"]:
        lines.append(f"    {endpoint['node']}")
    keys = "asks for a key" if endpoint["asks_for_key"] else "asks for no key"
    pages = ", ".join(endpoint["origins"]) or "none"
    if endpoint["port"]:
        lines.append(f"    listens on {endpoint['listens']}, {keys}; web pages that may call: {pages}")
        lines.append(f"    {endpoint['url']}   page {endpoint['page'] or 'off'}   process {endpoint['pid']}")
    else:
        lines.append(f"    no endpoint of its own   process {endpoint['pid']}")
    lines.append(f"    log {endpoint['log']}")
    return ["".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line) for line in lines]


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}..."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{left} s"
