"""What can go wrong, as one tree.

    SlimserveError
    |- UsageError       exit 2: the command line asks for something that does not exist
    |- RegistryError    exit 2: a profile, model, platform or machine file is wrong
    |- Refused          exit 3: the files are right, but this cannot or must not run here
    `- Failed           exit 1: it was allowed to run, and broke while running

Each carries `findings`: what is wrong, why, and what to do about it. All findings of one kind of check are
collected before the error is raised, so that a person mends a file once and not once a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import ClassVar

from slimserve.records import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        what: the fact, with the value that was found.
        why: the reason that it matters, or the rule that it breaks.
        do: what the reader can do about it.
        where: `file:line` when a file is at fault, else empty.
    """

    what: str
    why: str
    do: str
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        text = f"{head}\n  why: {self.why}\n  do:  {self.do}"
        # Keys of files and lines of logs are quoted here; what they hold must not steer a terminal.
        return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)

    def to_json(self) -> dict[str, str]:
        """The finding as a JSON object; `where` is left out when no file is at fault."""
        return {key: value for key, value in asdict(self).items() if value or key != "where"}


class SlimserveError(Exception):
    """Base of the tree. `exit_code` is what the command returns."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *findings: Finding) -> None:
        if not findings:
            raise ValueError("an error without a finding tells the reader nothing")
        self.findings: tuple[Finding, ...] = findings
        super().__init__("\n".join(str(finding) for finding in findings))


class UsageError(SlimserveError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class RegistryError(SlimserveError):
    """A profile, model, platform or machine file is wrong."""

    exit_code = 2


class Refused(SlimserveError):
    """The request is understood, but must not run here."""

    exit_code = 3


class Failed(SlimserveError):
    """It was allowed to run, and broke while running."""

    exit_code = 1


def raise_if_any(kind: type[SlimserveError], findings: Sequence[Finding]) -> None:
    """Raise `kind` with all `findings` when there are any.

    Raises:
        SlimserveError: of the given kind.
    """
    if findings:
        raise kind(*findings)
