"""The conversation, and the commands that act on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slimserve.chat_answer import Answer
from slimserve.errors import Finding

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation; the system prompt stays",
    "/system [TEXT]": 'show the system prompt, or set it from the next turn on; "" removes it',
    "/stats": "turns, tokens and the last rate",
    "/quit": "leave, as Ctrl-D does",
}
NAMES = tuple(line.split()[0] for line in COMMANDS)
HINT = "a message that begins with / is sent when a space stands ahead of it; Ctrl-C stops an answer"


@dataclass
class Totals:
    """What the session used, as the server counted it.

    `cached_tokens` is None until the server tells any; `uncounted` are the answers that came without a count.
    """

    turns: int = 0
    uncounted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    last_rate: float | None = None

    def add(self, answer: Answer) -> None:
        """Count one answer that was kept."""
        self.turns += 1
        self.last_rate = answer.tokens_per_second
        if answer.usage is None:
            self.uncounted += 1
            return
        self.prompt_tokens += answer.usage.prompt_tokens
        self.completion_tokens += answer.usage.completion_tokens
        if answer.usage.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + answer.usage.cached_tokens

    def __str__(self) -> str:
        parts = [f"{_of(self.turns, 'turn')}", f"{_of(self.prompt_tokens, 'prompt token')}"]
        if self.cached_tokens is not None:
            parts[-1] += f" ({self.cached_tokens} cached)"
        parts.append(_of(self.completion_tokens, "completion token"))
        if self.uncounted:
            parts.append(f"{self.uncounted} of the turns without a count")
        if self.last_rate is not None:
            parts.append(f"last {self.last_rate:.1f} tokens/s")
        return ", ".join(parts)


@dataclass
class Conversation:
    """What is sent with each question: the system prompt and the turns that have an answer.

    Reasoning is never part of it: a model's template drops old thoughts, and an endpoint that kept them would
    answer the chat differently from any other client. `kept_last` tells whether the last question was kept.
    """

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    kept_last: bool = False

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages of a request, the question last. The question is kept only by `keep`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def keep(self, question: str, answer: Answer) -> None:
        """Keep the turn when the answer has text, a partial one too; else the question is taken back."""
        self.kept_last = answer.has_text
        if not self.kept_last:
            return
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
        self.totals.add(answer)


def is_command(line: str) -> bool:
    """Whether a line is for the chat and not for the model."""
    return line.startswith("/")


def obey(line: str, conversation: Conversation, note: Callable[[str], None]) -> Finding | None:
    """Run a command other than /quit.

    Args:
        note: takes what the command says.

    Returns:
        What is wrong with the line; None when it was carried out.
    """
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name not in NAMES:
        return _unknown(name)
    if argument and name != "/system":
        return Finding(f"{name} takes nothing behind it", f"found {argument!r}", f"write {name} alone")
    if name == "/help":
        width = max(map(len, COMMANDS))
        note("\n".join([*(f"{usage:<{width}}  {what}" for usage, what in COMMANDS.items()), HINT]))
    elif name == "/clear":
        conversation.turns.clear()
        note("the conversation is empty")
    elif name == "/stats":
        note(str(conversation.totals))
    elif not argument:
        note(f"system prompt: {conversation.system}" if conversation.system else "there is no system prompt")
    else:
        conversation.system = None if argument == '""' else argument
        note("the system prompt is removed" if conversation.system is None else "the system prompt is set")
    return None


def _unknown(name: str) -> Finding:
    # Only a slip of the hand needs it.
    import difflib

    near = difflib.get_close_matches(name.casefold(), NAMES, n=1, cutoff=0.5)
    meant = f"write {near[0]}" if near else "write /help for the list"
    return Finding(
        f"there is no command {name}",
        f"the commands are {', '.join(NAMES)}",
        f"{meant}; to send the line as a message, put a space ahead of it",
    )


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
