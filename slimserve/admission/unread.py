"""Clients that take nothing of their answers."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable


class Unread:
    """Sees to it that what is written to a connection is read.

    Args:
        transport: of the connection.
        seconds: for which nothing may be taken.
        has_more: whether more is being written, as far as anybody but the client is concerned.
        cut_off: ends the connection.
    """

    __slots__ = ("_cut_off", "_has_more", "_seconds", "_timer", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        seconds: float,
        has_more: Callable[[], bool],
        cut_off: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._seconds = seconds
        self._has_more = has_more
        self._cut_off = cut_off
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """See to it from now on, if there is anything to read."""
        self.end()
        if self._transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._look, self._unread)

    def end(self) -> None:
        """See to nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int) -> None:
        if self._has_more() or self._unread < before:
            self.watch()
        else:
            self._cut_off()

    @property
    def _unread(self) -> int:
        """Bytes that the client has not taken: the kernel holds megabytes of them, and frees them by the heap."""
        queue = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int(self._transport.get_write_buffer_size() + struct.unpack("i", queue)[0])
