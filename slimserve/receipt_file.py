"""A receipt as a file: read whole or not at all, whoever wrote it and whatever it holds.

What it holds is the harness's affair (`harness.receipt`). The registry and the operator's page need a few of its facts,
cheaply: this is plain data, of which no more is known than that nobody has touched it since it was written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

# Counts up with the shape, and with what a number means: `verify` draws all of them from the samples again.
SCHEMA = 1
# A receipt is a summary; what is larger is none, and would only hold up whoever reads it.
LARGEST_BYTES = 4 << 20
SCHEMA_NAME = "schema.json"
# A receipt has six. What is read here is put into JSON again by whoever shows it, with levels of its own around it.
MAX_DEPTH = 64


class Unreadable(ValueError):
    """A file that is no receipt, or not as it was written; the text is one sentence without a name."""


def digest(data: dict[str, Any]) -> str:
    """SHA-256, in hex, of everything that a receipt says but the hash itself."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """The receipt in `path`.

    Raises:
        Unreadable: it is not there, no plain file, too large, no receipt, of another schema, or changed.
    """
    data = load(path)
    if data.get("schema") != SCHEMA or not isinstance(data.get("sha256"), str):
        raise Unreadable(f"it is no receipt of schema {SCHEMA}: `schema` is {_shown(data.get('schema'))}")
    if digest(data) != data["sha256"]:
        raise Unreadable("its content does not have the hash that it states: it was changed after it was written")
    return data


def load(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, whatever it says.

    Raises:
        Unreadable: it is not there, no plain file, too large, or no JSON object.
    """
    text = read_bytes(path, LARGEST_BYTES)
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(data, ensure_ascii=False).encode()  # half of a surrogate pair is no text that could be sent
        if not _is_flat(data):
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    except (ValueError, RecursionError) as error:  # among them text that is no UTF-8
        cut = "it is empty" if not text.strip() else f"it is no JSON, or was cut off: {_one_line(error)}"
        raise Unreadable(cut) from None
    if not isinstance(data, dict):
        raise Unreadable("no JSON object")
    return data


def read_bytes(path: Path, largest: int) -> bytes:
    """The bytes of a plain file of at most `largest` bytes; links are not followed, and nothing is waited for.

    Raises:
        Unreadable: it is none.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unreadable("there is no such file") from None
    except OSError as error:
        linked = error.errno == errno.ELOOP
        raise Unreadable("it is a symbolic link" if linked else f"it cannot be read: {error.strerror}") from None
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("it is no plain file")
        if facts.st_size > largest:
            raise Unreadable(f"larger than {largest} bytes")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(facts.st_size)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    finally:
        os.close(file)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number in it is too large")
    return value


def _is_flat(data: object) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return True
        level = [each for values in inside for each in values]
    return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
