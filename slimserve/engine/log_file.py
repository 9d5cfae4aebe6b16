"""The engine's log as a file: a plain one, opened without waiting for whoever should be at the other end of a pipe."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_to_append(path: Path) -> int:
    """A descriptor that appends to the log, which is made with mode 0600 where there is none; links are not followed.

    Raises:
        OSError: it cannot be made or opened, or it is no plain file.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)


def open_to_read(path: Path) -> BinaryIO:
    """The log, to be read.

    Raises:
        OSError: there is none, it cannot be opened, or it is no plain file.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def _open(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # A pipe that nobody reads, a socket, a device that is not there.
        raise (_no_file(path) if error.errno == errno.ENXIO else error) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path.name} is no plain file", str(path))
