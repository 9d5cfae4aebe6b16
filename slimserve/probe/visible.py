"""CUDA_VISIBLE_DEVICES: which of the GPUs that exist a CUDA program sees, and in which order.

The rules are those of the CUDA programming guide (environment variables) and of the MIG user guide (enumeration):
numbers, UUIDs and unambiguous beginnings of UUIDs; the first entry that names nothing ends the list; an entry given
twice empties it; one MIG instance at most, and no whole card beside it. Like PyTorch, which the engine asks, a list
is all numbers, all GPU-... or all MIG-..., and an entry of another kind ends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from slimserve.probe.text import printable
from slimserve.records import dataclass

_NUMBER = re.compile(r"\+?([0-9]{1,9})")
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True)
class Candidate:
    """A card or a MIG instance that can be named.

    Args:
        uuid: GPU-... or MIG-...
        parent: UUID of the card for a MIG instance, else "".
        instance: numbers of the GPU instance and the compute instance of a MIG instance; None when unknown.
    """

    uuid: str
    parent: str = ""
    instance: tuple[int, int] | None = None


@dataclass(frozen=True)
class Selection:
    """What is visible.

    Args:
        positions: places in the list of candidates, in the order in which a CUDA program numbers them.
        by_number: whether the variable chose cards by number.
        problems: what is wrong with the variable, one sentence each.
    """

    positions: tuple[int, ...]
    by_number: bool = False
    problems: tuple[str, ...] = ()


def select(value: str | None, candidates: Sequence[Candidate]) -> Selection:
    """Apply CUDA_VISIBLE_DEVICES.

    Args:
        value: the variable; None when it is not set.
        candidates: the cards in the driver library's order, then all their MIG instances.

    Returns:
        The visible ones. Unset shows all cards. It never fails: what is wrong is in `problems`.
    """
    cards = [position for position, candidate in enumerate(candidates) if not candidate.parent]
    if value is None:
        return Selection(tuple(cards))
    if not value.strip() or value.strip() == "-1":  # the two usual ways to hide all, and no mistake
        return Selection(())
    entries = [entry.strip() for entry in value.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), "")
    find = partial(_by_uuid, kind=kind, candidates=candidates) if kind else partial(_by_number, cards=cards)
    return _walk(entries, find, kind)


def _walk(entries: list[str], find: Callable[[str], int | str], kind: str) -> Selection:
    positions: list[int] = []
    problems: list[str] = []
    by_number = not kind
    for place, entry in enumerate(entries):
        found = find(entry)
        if isinstance(found, str):
            # "0,1,-1" is a customary way to end a list on purpose.
            if entry != "-1":
                rest = len(entries) - place - 1
                dropped = f"; with it the {rest} after it are dropped" if rest else ""
                problems.append(f"entry {place + 1}, {_shown(entry)}, {found}{dropped}")
            break
        if found in positions:
            problem = f"entry {place + 1}, {_shown(entry)}, names a GPU that is named before it, which hides every GPU"
            return Selection((), by_number, (problem,))
        if by_number and not _NUMBER.fullmatch(entry):
            problems.append(f"entry {place + 1}, {_shown(entry)}, is read by its first digits alone")
        positions.append(found)
    if kind == "MIG-" and len(positions) > 1:
        problems.append(f"it names {len(positions)} MIG instances, and a program sees the first alone")
        del positions[1:]
    return Selection(tuple(positions), by_number, tuple(problems))


def _by_number(entry: str, cards: list[int]) -> int | str:
    """The position of a card, or what is wrong with the entry."""
    found = _NUMBER.match(entry)
    if not found:
        return (
            "is neither a number nor a UUID"
            if not entry.startswith(("GPU-", "MIG-"))
            else "is a UUID in a list of numbers"
        )
    number = int(found[1])
    if number >= len(cards):
        return f"names a GPU that is not there: {len(cards)} found, counted from 0"
    return cards[number]


def _by_uuid(entry: str, kind: str, candidates: Sequence[Candidate]) -> int | str:
    """The position of a card or an instance, or what is wrong with the entry."""
    if not entry.startswith(kind):
        return f"is not one of {kind}..., as the first entry is"
    old = _OLD_MIG.fullmatch(entry)
    if old:
        wanted = (int(old[2]), int(old[3]))
        found = [
            p for p, c in enumerate(candidates) if c.parent.startswith(old[1]) and c.parent and c.instance == wanted
        ]
    else:
        found = [p for p, c in enumerate(candidates) if c.uuid.startswith(entry) and bool(c.parent) == (kind == "MIG-")]
    if not found:
        return "names no GPU of this machine" if kind == "GPU-" else "names no MIG instance of this machine"
    if len(found) > 1:
        return f"is the beginning of {len(found)} UUIDs"
    return found[0]


def _shown(entry: str) -> str:
    return repr(printable(entry if len(entry) <= 60 else entry[:57] + "..."))
