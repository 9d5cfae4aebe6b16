"""Whether a receipt proves what it says: its hash, its samples, and its numbers drawn from them anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.compare import samples_of
from harness.raw import Raw, read_probes
from harness.receipt import Receipt
from harness.recording import mismatches, rates, unaccounted
from harness.summary import points
from slimserve.errors import Finding, UsageError
from slimserve.receipt_file import Unreadable
from slimserve.registry import Registry
from slimserve.shapes import plain

# Numbers are drawn from the same samples by the same program; only the order of additions may differ.
TOLERANCE = 1e-9


def verify(receipt: Receipt, folder: Path) -> list[Finding]:
    """Everything that is wrong with a receipt that could be read; its own hash was right, or it could not be.

    Args:
        receipt: it.
        folder: where it and its samples lie.
    """
    where = str(folder / f"{receipt.id}.json")
    try:
        raws = samples_of(receipt, folder)
    except UsageError as error:
        return list(error.findings)
    return [
        Finding(what, why, "do not use it; measure again", where)
        for what, why in (
            *_samples(receipt, raws),
            *_numbers(receipt, raws),
            *_counts(receipt, raws),
            *_rates(receipt, folder / receipt.samples.file),
        )
    ]


def covers(receipt: Receipt, registry: Registry) -> str:
    """What the receipt is worth to the registry, in words."""
    if receipt.profile is None:
        return "of a server that no profile launched"
    profile = registry.profiles.get(receipt.profile.id)
    if profile is None:
        return f"the registry has no profile {receipt.profile.id} any more"
    citing = [key for key, setting in profile.settings() if setting.evidence.receipt == f"{receipt.id}.json"]
    return f"cited by {len(citing)} settings of {profile.id}" if citing else f"cited by no setting of {profile.id}"


def _samples(receipt: Receipt, raws: list[Raw]) -> Iterator[tuple[str, str]]:
    if len(raws) != receipt.samples.count:
        yield f"there are {len(raws)} samples", f"the receipt states {receipt.samples.count}"
    strangers = {raw.point for raw in raws} - {point.setup.name for point in receipt.points}
    if strangers:
        yield f"samples of {', '.join(sorted(strangers))}", "the receipt has no such point"


def _numbers(receipt: Receipt, raws: list[Raw]) -> Iterator[tuple[str, str]]:
    """Numbers that do not follow from the samples."""
    for stated, found in zip(receipt.points, points([(p.setup, p.server) for p in receipt.points], raws), strict=True):
        drawn = plain(found)
        for key, value in plain(stated).items():
            # What was sent is the client's count; whether every one of them came to something is looked at apart.
            if key != "sent" and not _same(value, drawn[key]):
                yield f"{stated.setup.name}: {key} is not what the samples say", f"it states {value}, they {drawn[key]}"


def _counts(receipt: Receipt, raws: list[Raw]) -> Iterator[tuple[str, str]]:
    """What a whole receipt may not have."""
    if receipt.outcome != "whole":
        return
    for point in receipt.points:
        if point.sent != point.ok + point.failed + point.rejected + point.void:
            yield f"{point.setup.name}: {point.sent} requests were sent", f"{unaccounted(point)}; it is called whole"
        elif point.failed or point.void:
            yield f"{point.setup.name}: {unaccounted(point)}", "it is called whole"
    for what in mismatches([raw for raw in raws if raw.measured]):
        yield what, "it is called whole"


def _rates(receipt: Receipt, samples: Path) -> Iterator[tuple[str, str]]:
    """Rates of the recall battery that do not follow from its answers."""
    try:
        drawn = plain(rates(read_probes(samples)))
    except Unreadable as error:
        yield "the answers to the recall battery cannot be used", str(error)
        return
    stated = plain(receipt.recall)
    for way in sorted({*stated, *drawn}):
        if not _same(stated.get(way), drawn.get(way)):
            yield (
                f"recall, {way}: it is not what the samples say",
                f"it states {stated.get(way)}, they {drawn.get(way)}",
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)
