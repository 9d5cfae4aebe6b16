"""The last receipts of one profile, as they lie in the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimserve.receipt_file import SCHEMA_NAME, Unreadable, read

LAST = 10


def recent(folder: Path, profile_id: str) -> list[dict[str, Any]]:
    """The newest receipts of `profile_id`, newest first, each with the `file` that it stands in.

    A file that is no receipt, or not as it was written, is listed with the `problem`: it may be one of them.

    Args:
        folder: `profiles/receipts`; it need not exist.
        profile_id: whose receipts.
    """
    found: list[dict[str, Any]] = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        if path.name == SCHEMA_NAME:
            continue
        name = path.name.encode(errors="backslashreplace").decode()  # that of a file may be no text
        try:
            receipt = read(path)
        except Unreadable as error:
            found.append({"file": name, "problem": str(error)})
            continue
        profile = receipt.get("profile")
        if isinstance(profile, dict) and profile.get("id") == profile_id:
            found.append({**receipt, "file": name})
    found.sort(key=lambda one: (str(one.get("written", "")), one["file"]), reverse=True)
    return found[:LAST]
