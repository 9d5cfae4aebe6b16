"""What a run has measured so far, on the disk: for the case that it is killed before it can write a receipt.

A journal is written load by load and taken away when the receipt is there. One that nobody is writing any more is what
a killed run left. It proves nothing, since nobody knows what else was sent; what it holds can still be looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections import Counter
from pathlib import Path

from harness.raw import read_unfinished
from harness.receipt import Unusable
from slimserve.receipt_file import Unreadable

SUFFIX = ".unfinished.gz"


class Journal:
    """The journal of a run, locked as long as that lives.

    Raises:
        OSError: it cannot be made; or, of `write`, not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (open for as long as the run goes on)
        # Where there are no locks, a run that goes on is told as one that was killed.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._packer = zlib.compressobj(wbits=31)

    def write(self, lines: bytes) -> None:
        """Append lines, so that they can be read whatever becomes of this process."""
        packed = memoryview(self._packer.compress(lines) + self._packer.flush(zlib.Z_SYNC_FLUSH))
        while packed:
            packed = packed[self._file.write(packed) :]

    def remove(self) -> None:
        """Take it away; the receipt says all of it."""
        self.path.unlink()
        self._file.close()


def left(folder: Path) -> list[Unusable]:
    """The journals in a folder, each with a sentence."""
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    return [Unusable(path.name, _told(path)) for path in paths]


def _told(path: Path) -> str:
    try:
        if _is_written(path):
            return "a run that is under way writes it"
        counts = Counter(raw.point for raw in read_unfinished(path) if raw.measured)
    except Unreadable as error:
        return f"its run was killed, and {error}"
    loads = ", ".join(f"{count} of {point}" for point, count in counts.items())
    return f"its run was killed and proves nothing; zcat shows its requests: {loads or 'none'}"


def _is_written(path: Path) -> bool:
    """Whether the run that writes it is alive."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(file)
    return False
