"""The safetensors file: its header read without the data, and a file written tensor after tensor.

Eight bytes hold the length of a JSON header as little-endian unsigned; the header maps tensor names to dtype, shape
and a [begin, end) range in the data that follows it. So 100 KB of a 5 GB shard tell how long the shard has to be.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimserve.errors import Failed, Finding

# The format's own limit: a longer header is refused by every reader, so a longer one here is garbage.
MAX_HEADER_BYTES = 100_000_000
# Bytes an element; F4 packs two, so sizes are counted in bits.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FETCH = "fetch the weights again with --fetch; what is whole is kept"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: dtype by the format's name (`BF16`), shape as the model's code has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's data, in bytes."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors that a file says it holds, after its size has been held against its header.

    Args:
        path: a safetensors file.

    Returns:
        The tensors by name.

    Raises:
        Failed: the file is truncated, has bytes too many, or is not safetensors; the finding names the file.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size < 8:
        raise _bad(path, f"is {size} bytes long", "the first eight bytes hold the length of the header")
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise _bad(path, f"says that its header has {length} bytes", f"2 to {MAX_HEADER_BYTES} is legal")
        if 8 + length > size:
            raise _bad(path, f"is truncated: {size} bytes", f"its header alone ends at byte {8 + length}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        tensors, data_bytes = _tensors(header)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "has an unreadable header", str(error)) from None
    expected = 8 + length + data_bytes
    if size != expected:
        state = "is truncated" if size < expected else "has bytes too many"
        raise _bad(path, f"{state}: {size} bytes", f"its header describes {expected} bytes")
    return tensors


def _tensors(header: Any) -> tuple[dict[str, Tensor], int]:
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    tensors: dict[str, Tensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor = Tensor(name, str(entry["dtype"]), tuple(_count(n) for n in entry["shape"]))
            begin, end = (_count(n) for n in entry["data_offsets"])
            wanted = tensor.bytes
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"tensor {name!r}: {type(error).__name__}: {error}") from None
        if end - begin != wanted:
            kind = f"{tensor.dtype}{list(tensor.shape)}"
            raise ValueError(f"tensor {name!r}: {kind} is {wanted} bytes, its range {begin}..{end}")
        tensors[name] = tensor
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise ValueError(f"tensor {name!r} starts at byte {begin}, the one before it ends at {position}")
        position = end
    return tensors, position


def _count(value: Any) -> int:
    # Neither true nor 2.0 nor 1e999: every reader of the format takes whole numbers only.
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} is not a whole number of at least 0")
    return value


def _bad(path: Path, what: str, why: str) -> Failed:
    return Failed(Finding(f"{path.name} {what}", why, _FETCH, str(path)))


def write(path: Path, tensors: Sequence[Tensor], data: Iterable[bytes]) -> None:
    """Write a file tensor after tensor: never more than one of them in memory. The same input gives the same bytes.

    Args:
        path: the file; overwritten.
        tensors: what the header says, in the order of the data.
        data: the bytes of each tensor, in the same order, little-endian and row-major.

    Raises:
        ValueError: the data do not fit the header.
        OSError: the disk is full or the file not writable.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.bytes],
        }
        position += tensor.bytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # data that start at a multiple of 8 can be mapped and used in place
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor, chunk in zip(tensors, data, strict=True):
            if len(chunk) != tensor.bytes:
                raise ValueError(f"{tensor.name}: {len(chunk)} bytes of data, the header says {tensor.bytes}")
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())
