"""The chat's two outputs, its input, and Ctrl-C.

The model's words go to `out`, everything else to `err`, so that a redirected answer is the answer alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TextIO

from slimserve.errors import Finding

TICK_SECONDS = 0.1
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# All of C0 and C1 but the tab and the line feed: on a terminal they move the cursor, set the title, type answers.
CONTROL_CHARACTERS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
# No answer is indented further; what is longer is passed on as it is, so that no server makes us hold its blanks.
INDENT_CHARACTERS = 1 << 12


class OutputLost(Exception):
    """A stream takes no more: a closed pipe, a full disk, a terminal that is gone."""

    def __init__(self, stream: TextIO, fault: OSError) -> None:
        self.stream, self.fault = stream, fault
        super().__init__(str(fault))


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether escape sequences may go to `stream`. Source: no-color.org."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Screen:
    """Writes an answer as it comes.

    Args:
        out: takes the model's words and nothing else.
        err: takes the reasoning, notes and findings.
        colour: whether what is dim may be shown so.
    """

    def __init__(self, out: TextIO, err: TextIO, *, colour: bool) -> None:
        self.out, self.err, self._colour = out, err, colour
        self._blank = ""
        self._begun = False
        self._out_line_open = False
        self._thinking = False
        self._err_line_open = False
        self._stuck = False

    def words(self, text: str) -> None:
        """A piece of the answer. Blank lines ahead of it, which follow a thought, are left out."""
        if not self._begun:
            # Only the line that has no end yet is held: whether it is blank is open.
            text = self._blank = LEADING_BLANK_LINES.sub("", self._blank + text)
            if not text.strip() and len(text) <= INDENT_CHARACTERS:
                return
        self._close_thought()
        self._begun = True
        self._out_line_open = not text.endswith("\n")
        _write(self.out, text)

    def thoughts(self, text: str) -> None:
        """A piece of the reasoning, under a heading of its own."""
        if not self._thinking:
            text = text.lstrip()
            if not text:
                return
            self._thinking = True
            if self._out_line_open and self.out.isatty():
                _write(self.out, "\n")
                self._out_line_open = False
            self._dim("thinking\n")
        self._dim(text)
        self._err_line_open = not text.endswith("\n")

    def end_answer(self) -> None:
        """Close what is open, so that the next thing begins on a line of its own."""
        self._close_thought()
        if self._out_line_open and not self._stuck:
            _write(self.out, "\n")
        self._blank, self._begun, self._out_line_open = "", False, False

    def note(self, text: str) -> None:
        """A line of the tool's own."""
        self._dim(text)
        _write(self.err, "\n")

    def finding(self, finding: Finding) -> None:
        """What went wrong."""
        _write(self.err, f"{finding}\n")

    def check_taking(self) -> None:
        """After a Ctrl-C: see that `out` still takes something, since no second one could end a write to it.

        Raises:
            OutputLost: it is a pipe that nobody empties.
        """
        if self.out.isatty():
            return
        with contextlib.suppress(OSError, ValueError):
            # What stands behind a file or a buffer in memory cannot be waited for, and need not be.
            _, taking, _ = select.select([], [self.out.fileno()], [], 0)
            if not taking:
                self._stuck = True
                raise OutputLost(self.out, BlockingIOError("nobody reads it"))

    def give_up(self, lost: OutputLost) -> None:
        """Leave without a second complaint: what the lost stream still holds has nowhere to go."""
        # The interpreter flushes at its exit, and would fail, or wait, once more.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, lost.stream.fileno())
            os.close(nowhere)
        if lost.stream is self.out and not isinstance(lost.fault, BrokenPipeError):
            fault = lost.fault.strerror or str(lost.fault)
            with contextlib.suppress(OutputLost):
                self.finding(
                    Finding(
                        f"the answer could not be written: {fault}",
                        "the output is full, stuck or gone",
                        "send the output elsewhere",
                    )
                )

    def _close_thought(self) -> None:
        if self._thinking and self._err_line_open:
            _write(self.err, "\n")
        self._thinking = self._err_line_open = False

    def _dim(self, text: str) -> None:
        # Piece by piece, so that no interruption leaves the terminal dim.
        _write(self.err, text, *((DIM, PLAIN) if self._colour else ("", "")))


def _write(stream: TextIO, text: str, before: str = "", after: str = "") -> None:
    try:
        if stream.isatty():
            text = text.translate(CONTROL_CHARACTERS)
        encoding = stream.encoding or "utf-8"
        stream.write(before + text.encode(encoding, "replace").decode(encoding) + after)
        stream.flush()
    except OSError as fault:
        raise OutputLost(stream, fault) from fault


class Interrupts:
    """Ctrl-C, raised as KeyboardInterrupt only where `allowed`, and remembered elsewhere.

    Between an answer and the next prompt the history is put in order; an exception out of nowhere there would lose
    a turn. A process that was started with SIGINT ignored (a background job) keeps ignoring it.
    """

    def __init__(self) -> None:
        self.before_raise: Callable[[], None] | None = None
        self._armed = self._pending = False

    def __enter__(self) -> Interrupts:
        self._previous = signal.getsignal(signal.SIGINT)
        # Only the main thread may set a handler, and only there is one called.
        self._installed = threading.current_thread() is threading.main_thread() and self._previous != signal.SIG_IGN
        if self._installed:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise KeyboardInterrupt inside, one that came shortly before included."""
        try:
            self._armed = True
            if self._pending:
                self._pending = self._armed = False
                raise KeyboardInterrupt
            yield
        finally:
            self._armed = False

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Wake a blocked `input` now and then.

        The interpreter's readline loop looks for signals only when its wait for a key is cut short. A Ctrl-C that
        comes while it still draws the key before would stay unseen until the next key; the tick cuts the wait short.
        """
        if not self._installed:
            yield
            return
        previous = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._armed:
            self._pending = True
            return
        # One exception for one window: a second Ctrl-C must not hit the handling of the first.
        self._armed = False
        if self.before_raise is not None:
            self.before_raise()
        raise KeyboardInterrupt


class Lines:
    """Reads lines: with readline where a person types, and as they come from a pipe or a file.

    Args:
        stdin: where from.
        screen: its `err` takes the prompt.
        interrupts: guards each read.
        colour: whether escape sequences may be sent, which pasting several lines as one needs.
    """

    def __init__(self, stdin: TextIO, screen: Screen, interrupts: Interrupts, *, colour: bool) -> None:
        self._stdin, self._screen, self._interrupts = stdin, screen, interrupts
        self.typed = ""
        self.interactive = stdin.isatty()
        if isinstance(stdin, io.TextIOWrapper):
            # A text stream that met a bad byte cannot go on behind it, unless it lets it pass for `read` to find.
            # One that was read from already keeps its way.
            with contextlib.suppress(io.UnsupportedOperation):
                stdin.reconfigure(errors="surrogateescape")
        self._edit = self.interactive and screen.err.isatty() and _are_the_process_own(stdin, screen)
        if self._edit:
            try:
                import readline
            except ImportError:
                # An interpreter may be built without it; the terminal's own line editing is left then.
                self._edit = False
                return
            self._line_buffer = readline.get_line_buffer
            # A tab in a text that is pasted is a tab, and not a question for the names of files.
            readline.parse_and_bind("set disable-completion on")
            readline.parse_and_bind(f"set enable-bracketed-paste {'on' if colour else 'off'}")

    def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of the input.

        Raises:
            KeyboardInterrupt: on Ctrl-C; `typed` then holds what stood on the line, where that can be known.
            UnicodeError: the line is not text. The next read goes on behind it.
        """
        self.typed = ""
        line = self._read_edited(prompt) if self._edit else self._read_plain(prompt)
        if line is not None:
            line.encode()
        return line

    def _read_plain(self, prompt: str) -> str | None:
        if self.interactive:
            _write(self._screen.err, prompt)
        with self._interrupts.allowed():
            line = self._stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def _read_edited(self, prompt: str) -> str | None:
        with _stdout_on_stderr(), self._interrupts.ticking(), contextlib.suppress(EOFError):
            try:
                self._interrupts.before_raise = self._remember
                with self._interrupts.allowed():
                    return input(prompt)
            finally:
                self._interrupts.before_raise = None
        return None

    def _remember(self) -> None:
        self.typed = self._line_buffer()


def is_empty(stdin: TextIO) -> bool:
    """Whether an input that nobody types has ended before its first byte; a pipe that may still bring some has not."""
    if stdin.isatty() or not isinstance(stdin, io.TextIOWrapper):
        return False
    poll = select.poll()
    poll.register(stdin, select.POLLIN)
    buffered = stdin.buffer
    return bool(poll.poll(0)) and isinstance(buffered, io.BufferedReader) and not buffered.peek(1)


def _are_the_process_own(stdin: TextIO, screen: Screen) -> bool:
    """Whether the streams are those that `input` and readline use, whatever the caller was given."""
    return stdin is sys.stdin and screen.out is sys.stdout and screen.err is sys.stderr


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Descriptor 1 is descriptor 2 inside: `input` knows no other place for its prompt and its echo."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
