"""Small files of the kernel as text."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, limit_bytes: int = 1 << 24) -> str | None:
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
    return b"".join(parts).decode("utf-8", "replace")


def printable(text: str) -> str:
    """`text` with every character that cannot be printed replaced, so that it is safe on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
