"""Raw samples as lines of a compressed file: what was asked and what came, one request a line.

Behind the requests of the workload come those of the recall battery, in a form of their own.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.recall.scoring import Probe
from harness.sample import Job, Sample, is_number
from slimserve.receipt_file import Unreadable, read_bytes
from slimserve.shapes import ShapeError, build

# A day of requests takes less; what is larger was not written by this program.
LARGEST_BYTES = 256 << 20
LARGEST_TEXT = 2 << 30
LONGEST_LINE = 64 << 20
# Times are kept to the microsecond, below which neither client nor clock can tell anything.
_DIGITS = 6
_PROBE = b'{"probe":'


@dataclass(frozen=True)
class Raw:
    """One request of a run.

    Args:
        point: name of the load that it was part of.
        round: number of the repetition, from 0.
        prompt_tokens_asked: None where the number was not exact.
        output_tokens_asked: None where the answer may end by itself.
        sample: what came.
    """

    point: str
    round: int
    prompt_tokens_asked: int | None
    output_tokens_asked: int | None
    sample: Sample

    @classmethod
    def of(cls, point: str, round_number: int, job: Job, sample: Sample) -> Raw:
        """What is kept of a job and its sample."""
        output = job.max_tokens if job.ignore_eos else None
        return cls(point, round_number, job.asked_prompt_tokens, output, sample)

    @property
    def measured(self) -> bool:
        """Whether it is no part of the warm-up."""
        return self.sample.phase == "measure"

    def line(self) -> bytes:
        """The request as a line of JSON; arrivals as microseconds since the one before, which compress well."""
        record = self.sample.as_record()
        last, steps = 0, []
        for moment in record.pop("arrivals_s"):
            now = round(moment * 1e6)
            steps.append(now - last)
            last = now
        for name in ("asked_s", "sent_s", "ended_s"):
            record[name] = round(record[name], _DIGITS)
        data = {
            "point": self.point,
            "round": self.round,
            "asked": [self.prompt_tokens_asked, self.output_tokens_asked],
            "arrivals_us": steps,
            **record,
        }
        return json.dumps(data, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Raw:
        """The request of a line.

        Raises:
            ValueError: it is none.
        """
        try:
            data: dict[str, Any] = json.loads(line)
            point, number, (prompt, output) = data.pop("point"), data.pop("round"), data.pop("asked")
            now, arrivals = 0, []
            for step in data.pop("arrivals_us"):
                now += step
                arrivals.append(now / 1e6)
            sample = Sample.from_record({**data, "arrivals_s": arrivals})
            if not (isinstance(point, str) and is_number(number)):
                raise ValueError("its point or its round is none")
            if not all(tokens is None or is_number(tokens) for tokens in (prompt, output)):
                raise ValueError("what was asked for is none")
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"a line is no sample: {error}") from None
        return cls(point, number, prompt, output, sample)


def read_samples(path: Path) -> tuple[bytes, list[Raw]]:
    """The compressed bytes, and the requests of the workload that are in them.

    Raises:
        Unreadable: the file is not there, no plain file, too large, cut off, or holds something else.
    """
    packed = read_bytes(path, LARGEST_BYTES)
    with _readable():
        return packed, [Raw.from_line(line) for line in _lines(packed) if not line.startswith(_PROBE)]


def read_probes(path: Path) -> list[Probe]:
    """The requests of the recall battery.

    Raises:
        Unreadable: as of `read_samples`.
    """
    with _readable():
        return [_probe(line) for line in _lines(read_bytes(path, LARGEST_BYTES)) if line.startswith(_PROBE)]


def read_unfinished(path: Path) -> list[Raw]:
    """The requests of the workload in a file that was not written to its end, as far as it goes.

    Raises:
        Unreadable: as of `read_samples`, but that the end may be missing.
    """
    packed = read_bytes(path, LARGEST_BYTES)
    with _readable():
        return [Raw.from_line(line) for line in _lines(packed, whole=False) if not line.startswith(_PROBE)]


def probe_line(probe: Probe) -> bytes:
    """A request of the recall battery as a line."""
    return _PROBE + json.dumps(asdict(probe), separators=(",", ":")).encode() + b"}\n"


def _probe(line: bytes) -> Probe:
    try:
        probe = build(Probe, json.loads(line)["probe"])
        if probe.depth is None and not probe.note and probe.kind in ("code", "place"):
            raise ValueError("a fact has neither depth nor note")
        return probe
    except (TypeError, LookupError, RecursionError, ShapeError) as error:
        raise ValueError(f"a line is no answer of a battery: {error}") from None


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OSError, zlib.error) as error:
        words = " ".join(str(error).split())[:120]
        raise Unreadable(f"the samples are damaged or cut off: {words}") from None


def _lines(packed: bytes, whole: bool = True) -> Iterator[bytes]:
    """Lines of the unpacked text, which is never held as a whole: a small file may unpack to any size.

    Args:
        packed: compressed.
        whole: the end has to be there; else the lines are those that are.
    """
    unpacker, left, rest, total = zlib.decompressobj(wbits=31), packed, b"", 0
    while not unpacker.eof:
        text = unpacker.decompress(left, 1 << 20)
        left = unpacker.unconsumed_tail
        total += len(text)
        if not text and not left and not unpacker.eof:
            if not whole:
                return
            raise ValueError("the end is missing")
        *lines, rest = (rest + text).split(b"\n")
        if total > LARGEST_TEXT or len(rest) > LONGEST_LINE:
            raise ValueError("they unpack to more than a run can have")
        yield from lines
    if rest or unpacker.unused_data:
        raise ValueError("something follows the last line")


def pack(lines: bytes) -> bytes:
    """Lines as the compressed file of them; the same lines give the same bytes."""
    return gzip.compress(lines, mtime=0)
