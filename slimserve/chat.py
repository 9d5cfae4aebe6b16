"""The terminal client: one answer, or a conversation, from any OpenAI-compatible endpoint.

The model's words go to `out`, everything else to `err`. Sampling is the server's: no sampling field is sent.
"""

from __future__ import annotations

from typing import TextIO

from slimserve.chat_answer import Answer, receive
from slimserve.chat_commands import Conversation, is_command, obey
from slimserve.chat_probe import find, is_serving, probe, unusable
from slimserve.chat_terminal import Interrupts, Lines, OutputLost, Screen, is_empty, wants_colour
from slimserve.client import Stop
from slimserve.client_faults import Endpoint, Unreachable
from slimserve.errors import Failed, Finding, SlimserveError, UsageError

__all__ = [
    "Endpoint",
    "Stop",
    "ask",
    "chat",
    "check_prompt",
    "check_text",
    "find",
    "is_empty",
    "is_serving",
    "probe",
    "unusable",
]

PROMPT = "> "
STOPS_TO_LEAVE = 2


def ask(
    endpoint: Endpoint, prompt: str, *, system: str | None, out: TextIO, err: TextIO, stop: Stop | None = None
) -> int:
    """Ask once; the answer alone goes to `out` as it comes, anything else to `err`.

    Args:
        system: the system prompt; None sends none.
        stop: ends the answer from another thread, or from a signal handler that does not raise.

    Returns:
        The exit code: 0 when there is a whole answer, 1 when there is none or it broke off, 2 when the prompt, the
        system prompt, the address or the key cannot be sent.
    """
    screen = Screen(out, err, colour=wants_colour(err))
    try:
        with Interrupts() as interrupts:
            try:
                check_prompt(prompt)
                check_text(system or "", "the system prompt")
                fault = _turn(endpoint, prompt, Conversation(system), screen, interrupts, stop)
                if fault is not None:
                    raise Failed(fault)
                return 0
            except SlimserveError as error:
                for finding in error.findings:
                    screen.finding(finding)
                return error.exit_code
            except KeyboardInterrupt:
                screen.note("stopped")
                return 1
    except OutputLost as lost:
        screen.give_up(lost)
        return 1


def chat(
    endpoint: Endpoint, *, system: str | None, stdin: TextIO, out: TextIO, err: TextIO, colour: bool = True
) -> int:
    """Talk until the input ends: at a prompt where `stdin` is a terminal, else one turn for each line.

    Args:
        system: the first system prompt; None sends none.
        colour: whether escape sequences may be used; they are only where `err` is a terminal and NO_COLOR is unset.

    Returns:
        The exit code: 0; for input that is not a terminal 1 when any line went without its answer. 1 too when
        the output is closed; 2 when the system prompt cannot be sent.
    """
    colour = colour and wants_colour(err)
    screen = Screen(out, err, colour=colour)
    try:
        with Interrupts() as interrupts:
            try:
                check_text(system or "", "the system prompt")
            except UsageError as error:
                for finding in error.findings:
                    screen.finding(finding)
                return error.exit_code
            lines = Lines(stdin, screen, interrupts, colour=colour)
            return _Session(endpoint, system, lines, screen, interrupts).run()
    except OutputLost as lost:
        screen.give_up(lost)
        return 1


class _Session:
    """A conversation on a terminal, or one turn for each line of another input."""

    def __init__(self, endpoint: Endpoint, system: str | None, lines: Lines, screen: Screen, interrupts: Interrupts):
        self._endpoint, self._lines, self._screen, self._interrupts = endpoint, lines, screen, interrupts
        self._conversation = Conversation(system)
        self._failures = 0
        self._stops_in_a_row = 0

    def run(self) -> int:
        """Read and answer until the end; returns the exit code."""
        if self._lines.interactive:
            self._screen.note(
                f"{self._endpoint.model} at {self._endpoint.base_url}; /help lists the commands, Ctrl-D leaves"
            )
        while self._stops_in_a_row < STOPS_TO_LEAVE:
            try:
                line = self._lines.read(PROMPT)
            except KeyboardInterrupt:
                self._stopped_at_prompt()
                continue
            except UnicodeError:
                self._fail(Finding("a line of the input is not UTF-8", "a message is text", "convert it with iconv"))
                continue
            if line is None:
                if self._lines.interactive:
                    self._screen.note("")
                break
            if self._lines.interactive:
                self._stops_in_a_row = 0
            if line.rstrip() == "/quit":
                break
            if is_command(line):
                self._fail(obey(line.rstrip(), self._conversation, self._screen.note))
            elif line.strip() and not self._answer(line):
                return 1
        return 1 if self._failures and not self._lines.interactive else 0

    def _answer(self, question: str) -> bool:
        """One turn. Returns whether to go on."""
        try:
            self._fail(_turn(self._endpoint, question, self._conversation, self._screen, self._interrupts))
            self._stops_in_a_row = 0
        except KeyboardInterrupt:
            self._failures += 1
            # At a terminal the prompt comes next, and Ctrl-C counts there. A pipe has no prompt: twice is leave.
            self._stops_in_a_row += not self._lines.interactive
            self._screen.note(
                "stopped; what came is kept" if self._conversation.kept_last else "stopped; the question is taken back"
            )
        except SlimserveError as error:
            self._fail(*error.findings)
            # With nobody there to start the server again, each further line would fail alike.
            return self._lines.interactive or not isinstance(error, Unreachable | UsageError)
        return True

    def _stopped_at_prompt(self) -> None:
        self._failures += 1
        typed = self._lines.typed
        self._stops_in_a_row = 0 if typed else self._stops_in_a_row + 1
        hint = not typed and self._stops_in_a_row < STOPS_TO_LEAVE
        # The terminal has echoed ^C on the line of the prompt.
        self._screen.note("\n" * self._lines.interactive + "Ctrl-C again, Ctrl-D or /quit leaves" * hint)

    def _fail(self, *findings: Finding | None) -> None:
        for finding in findings:
            if finding is not None:
                self._failures += 1
                self._screen.finding(finding)


def _turn(
    endpoint: Endpoint,
    question: str,
    conversation: Conversation,
    screen: Screen,
    interrupts: Interrupts,
    stop: Stop | None = None,
) -> Finding | None:
    """One question and its answer. The conversation stays usable whatever happens.

    Returns:
        Why a stream that ended is no answer; None when it is one.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped it.
        SlimserveError: it broke off, or never began.
    """
    answer = Answer()
    messages = conversation.asking(question)
    try:
        with interrupts.allowed():
            receive(answer, endpoint, messages, words=screen.words, thoughts=screen.thoughts, stop=stop)
    except KeyboardInterrupt:
        screen.check_taking()
        raise
    finally:
        conversation.keep(question, answer)
        screen.end_answer()
    fault = answer.fault()
    if fault is None:
        screen.note(_summary(answer))
    return fault


def _summary(answer: Answer) -> str:
    """The line below an answer. A rate is shown only from the server's own count."""
    parts = []
    if answer.usage is not None:
        parts.append(f"{answer.usage.completion_tokens} tokens")
    if answer.first_token_seconds is not None:
        parts.append(f"first after {answer.first_token_seconds:.2f} s")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut off: the token budget or the context is used up (finish_reason length)")
    elif answer.finish_reason != "stop":
        parts.append(f"finish_reason {answer.finish_reason}")
    return f"[{', '.join(parts)}]"


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that cannot be asked.

    Raises:
        UsageError: it is empty, or no text.
    """
    if not prompt.strip():
        raise UsageError(Finding("the prompt is empty", "there is nothing to answer", "give a text behind -p"))
    check_text(prompt, "the prompt")


def check_text(text: str, option: str) -> None:
    """Refuse a text of the command line that no message can carry: its bytes were not UTF-8.

    Args:
        option: what the text was given as, in words or as the option's name.

    Raises:
        UsageError: it is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            Finding(f"{option} is not UTF-8", "a message is text", "convert it with iconv and ask again")
        ) from None
