"""Files of samples whose keys are right and whose values are anything: a sentence, and never a traceback."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from receipts_support import make

from harness import journal
from harness.compare import compare
from harness.raw import pack, probe_line, read_probes, read_samples
from harness.recall.scoring import Probe
from harness.receipt import Receipt
from harness.recording import rates
from harness.verify import verify
from slimserve.errors import SlimserveError
from slimserve.receipt_file import Unreadable

ODD: list[Any] = [10**400, -(10**400), -1, 0, 1e300, float("inf"), float("nan"), True, None, "", "x", "\ud800"]
ODD += [[], {}, [[]], {"a": 1}, 0.5, [None], [10**400], ["x"], [1e308] * 3, 1 << 40, [1 << 40], 1e9, -1e9, 5e-324]
NONE = {
    "point": (3, None, []),
    "round": ("x", 1e3, -1, 10**400, [], None),
    "asked": (3, [1], [1, 2, 3], ["x", 1], [1.5, 1]),
    "arrivals_us": ("x", 3, ["1"], [1e3], [10**400], [True, 1]),
    "counts": ("x", 3, [1], [1.5] * 64, [True] * 64, [1 << 40] * 64, list(range(64, 0, -1))),
    "phase": ("warm", None, []),
    "outcome": ("okay", None, {}),
    "asked_s": ("x", None, [], 10**400, float("inf"), float("nan"), True),
    "completion_tokens": ("x", [], 1.5, -1, 10**400, True),
    "status": ("200", 1.5, []),
    "finish_reason": (3, []),
    "retries": (None, "x", 1.5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("receipts")


@pytest.fixture(scope="module")
def receipt(folder: Path) -> Receipt:
    return make(folder, concurrencies=(2,))


def forged(receipt: Receipt, folder: Path, place: int, key: str, value: Any) -> Receipt:
    """The receipt with another sample at that place, as whoever forges it would write it."""
    lines = gzip.decompress((folder / receipt.samples.file).read_bytes()).splitlines()
    lines[place] = json.dumps({**json.loads(lines[place]), key: value}).encode()
    packed = pack(b"".join(line + b"\n" for line in lines))
    (folder / "forged.samples.gz").write_bytes(packed)
    (folder / f"forged{journal.SUFFIX}").write_bytes(packed)
    digits = hashlib.sha256(packed).hexdigest()
    return replace(receipt, samples=replace(receipt.samples, file="forged.samples.gz", sha256=digits))


@pytest.mark.parametrize("key", NONE)
def test_a_value_that_no_sample_has_is_damage(receipt: Receipt, folder: Path, key: str) -> None:
    for value in NONE[key]:
        forgery = forged(receipt, folder, 0, key, value)
        with pytest.raises(Unreadable, match="damaged"):
            read_samples(folder / "forged.samples.gz")
        (finding,) = verify(forgery, folder)
        assert "damaged" in finding.why
        (left,) = journal.left(folder)
        assert "damaged" in left.problem


def test_no_value_is_a_traceback(receipt: Receipt, folder: Path) -> None:
    keys = json.loads(gzip.decompress((folder / receipt.samples.file).read_bytes()).splitlines()[0])
    for key in (*keys, "more"):
        for value in ODD:
            forgery = forged(receipt, folder, -1, key, value)
            verify(forgery, folder)
            with contextlib.suppress(SlimserveError):
                compare(forgery, receipt, folder, folder)


def test_answers_of_a_battery_are_typed_too(folder: Path) -> None:
    good = Probe("own-0a", "code", "cold", "own", 90, 0.5, False, 0, "1234567", "right", "", 120, 0)
    path = folder / "probes.samples.gz"
    path.write_bytes(pack(probe_line(good)))
    assert read_probes(path) == [good]
    for key in (*asdict(good), "more"):
        for value in ODD:
            line = json.dumps({"probe": {**asdict(good), key: value}}, separators=(",", ":"))
            path.write_bytes(pack(line.encode() + b"\n"))
            with contextlib.suppress(Unreadable):
                rates(read_probes(path))
