"""Shared by the tests of keys: two of them, and files that hold them."""

from __future__ import annotations

import hashlib
from pathlib import Path

ALICE, BOB = "sk-slim-alice", "sk-slim-bob"


def line(name: str, key: str) -> str:
    """A key as a line of the file; the hash is taken here, not by what is tested."""
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path
