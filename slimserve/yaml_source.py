"""YAML files as plain data that remembers its lines.

The loader reads a deliberately small YAML: one document, string keys, no anchors, no aliases, no tags, scalars by
the YAML 1.2 core rules (in 1.1 `no` is false, `1e-5` is a string and `22:22` a number). It walks the event stream
itself, so that depth is bounded before anything recurses and a duplicate key is seen before it is lost.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from slimserve.errors import Finding, RegistryError
from slimserve.shapes import Loc

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_DIGITS = 40

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """One file's data with the line of each key.

    Args:
        path: the file, as it is shown to a reader.
        data: None, bool, int, float, str, list and dict with string keys.
        lines: 1-based line of the key (or list item) at each location.
    """

    path: Path
    data: Plain
    lines: dict[Loc, int] = field(default_factory=dict)

    def line(self, loc: Loc) -> int:
        """Line of `loc`, or of the deepest part of it that the file has."""
        for size in range(len(loc), -1, -1):
            if loc[:size] in self.lines:
                return self.lines[loc[:size]]
        return 1

    def where(self, loc: Loc = ()) -> str:
        """`file:line` of `loc`."""
        return f"{self.path}:{self.line(loc)}"


def read_document(path: Path) -> Document:
    """Read one YAML (or JSON) file.

    Args:
        path: the file; shown in messages as it is given.

    Returns:
        Its data with line numbers.

    Raises:
        RegistryError: with every problem of the file that can be seen at once.
    """
    return parse_document(path, _read_text(path))


def parse_document(path: Path, text: str) -> Document:
    """Parse `text` as the content of `path`; see `read_document`.

    Raises:
        RegistryError: with every problem that can be seen at once.
    """
    unprintable = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if unprintable:
        where = f"{path}:{text.count(chr(10), 0, unprintable.start()) + 1}"
        what = f"character U+{ord(unprintable[0]):04X} is not allowed"
        raise RegistryError(Finding(what, "YAML files hold printable text only", "remove it", where))
    builder = _Builder(path)
    try:
        builder.build(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        builder.problems.append(_syntax(path, line, text, error.problem or "it does not parse"))
    if builder.problems:
        raise RegistryError(*builder.problems)
    return Document(path, builder.data, builder.lines)


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RegistryError(
                Finding("is not a regular file", "only plain files are read", "name a YAML file", str(path))
            )
        if status.st_size > MAX_BYTES:
            raise RegistryError(
                Finding(
                    f"is {status.st_size:,} bytes",
                    f"files over {MAX_BYTES:,} bytes are not read: a registry file is a few kilobytes",
                    "check that this is the file that was meant",
                    str(path),
                )
            )
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RegistryError(
            Finding("cannot be read", reason, "check the path and its permissions", str(path))
        ) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RegistryError(
            Finding(
                f"byte 0x{raw[error.start]:02x} is not UTF-8",
                "registry files are UTF-8 text",
                "save the file as UTF-8",
                f"{path}:{line}",
            )
        ) from None


def _syntax(path: Path, line: int, text: str, problem: str) -> Finding:
    lines = text.splitlines()
    shown = lines[line - 1] if line <= len(lines) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())] or "'\\t'" in problem:
        return Finding(
            "a tab is used for indentation", "YAML allows spaces only", "replace the tab by spaces", f"{path}:{line}"
        )
    return Finding(
        f"is not valid YAML: {problem}",
        "nothing of this file can be trusted",
        "mend the syntax at this line",
        f"{path}:{line}",
    )


class _Builder:
    """Turns the event stream into data; every problem that leaves the stream readable is collected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: Plain = None
        self.lines: dict[Loc, int] = {(): 1}
        self.problems: list[Finding] = []

    def build(self, events: Iterator[yaml.Event]) -> None:
        documents = 0
        # One frame per open collection: (container, location, pending key or None).
        stack: list[tuple[list[Plain] | dict[str, Plain], Loc, str | None]] = []
        for event in events:
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._problem(
                        line, "holds a second document", "one file is one thing", "remove the `---` and what follows"
                    )
                    return
            elif isinstance(event, yaml.AliasEvent):
                self._problem(
                    line, f"uses the alias *{event.anchor}", "aliases hide what a file says", "write the value out"
                )
                self._place(stack, None, line)
            elif isinstance(event, yaml.ScalarEvent):
                self._decorations(event, line)
                if stack and isinstance(stack[-1][0], dict) and stack[-1][2] is None:
                    self._key(stack, event.value, line)
                else:
                    self._place(stack, self._scalar(event, line), line)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._decorations(event, line)
                if len(stack) >= MAX_DEPTH:
                    self._problem(
                        line, f"is nested more than {MAX_DEPTH} deep", "no registry file needs that", "flatten it"
                    )
                    return
                if stack and isinstance(stack[-1][0], dict) and stack[-1][2] is None:
                    self._problem(
                        line, "uses a list or mapping as a key", "keys are names", "use a plain name as the key"
                    )
                    return
                container: list[Plain] | dict[str, Plain] = {} if isinstance(event, yaml.MappingStartEvent) else []
                stack.append((container, self._place(stack, container, line), None))
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                stack.pop()

    def _key(self, stack: list[tuple[list[Plain] | dict[str, Plain], Loc, str | None]], key: str, line: int) -> None:
        container, loc, _ = stack[-1]
        if key in container:
            path = ".".join(map(str, (*loc, key)))
            first = self.lines[(*loc, key)]
            self._problem(
                line,
                f"{path} is given twice",
                f"line {first} gives it first; one of the two would be lost",
                "keep one of them",
            )
        else:
            self.lines[(*loc, key)] = line
        stack[-1] = (container, loc, key)

    def _place(
        self, stack: list[tuple[list[Plain] | dict[str, Plain], Loc, str | None]], value: Plain, line: int
    ) -> Loc:
        """Put `value` where the stream stands and return its location."""
        if not stack:
            self.data = value
            return ()
        container, loc, key = stack[-1]
        if isinstance(container, list):
            here: Loc = (*loc, len(container))
            self.lines[here] = line
            container.append(value)
            return here
        if key is None:  # an alias in the place of a key; already reported
            return loc
        container[key] = value
        stack[-1] = (container, loc, None)
        return (*loc, key)

    def _decorations(self, event: yaml.NodeEvent, line: int) -> None:
        if event.anchor is not None:
            self._problem(
                line,
                f"uses the anchor &{event.anchor}",
                "aliases hide what a file says",
                "write the value out where it is used",
            )
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            self._problem(line, f"uses the tag {tag}", "types come from the schema", "remove the tag")

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Plain:
        text: str = event.value
        if not event.implicit[0]:  # quoted, or a block scalar
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self._problem(
                    line,
                    f"holds a number of {len(text)} digits",
                    "no quantity here needs that many",
                    "check the number",
                )
                return None
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self._problem(
                    line,
                    f"holds a number of {len(text)} characters",
                    "no quantity here needs that many",
                    "check the number",
                )
                return None
            number = math.inf if text[-1] in "fFnN" else float(text)  # .inf and .nan end in a letter
            if not math.isfinite(number):
                self._problem(
                    line,
                    f"{text} is not a finite number",
                    "no setting can be infinite or undefined",
                    "give a finite number",
                )
                return None
            return number
        return text

    def _problem(self, line: int, what: str, why: str, do: str) -> None:
        self.problems.append(Finding(what, why, do, f"{self.path}:{line}"))
