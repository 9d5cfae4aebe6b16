"""Small files of the kernel."""

from __future__ import annotations

import re
from pathlib import Path


def read_text(path: Path, limit_bytes: int = 1 << 24) -> str | None:
    """As `read_bytes`, decoded; what is no text becomes question marks."""
    data = read_bytes(path, limit_bytes)
    return None if data is None else data.decode("utf-8", "replace")


def read_bytes(path: Path, limit_bytes: int = 1 << 24) -> bytes | None:
    """The start of a file, at most `limit_bytes`; None when it cannot be read.

    The kernel writes such files as they are read, so a small limit also bounds its work.
    """
    try:
        with path.open("rb", buffering=0) as file:
            parts: list[bytes] = []
            left = limit_bytes
            while left > 0 and (part := file.read(min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
    except OSError:
        return None
    return b"".join(parts)


def printable(text: str) -> str:
    """`text` with every character that cannot be printed replaced, so that it is safe on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def field(text: str, name: str) -> str | None:
    """Of a file of lines `name: value`, the value after `name:` at the start of a line."""
    found = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def kib(text: str | None) -> int | None:
    """A size such as `12 kB` in bytes; None when it is none."""
    found = re.fullmatch(r"([0-9]+) kB", text or "")
    return int(found[1]) * 1024 if found else None
