"""The last receipts of one profile, as they lie in the registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAST = 10
# A receipt is a summary; what is larger is none, and would only hold up the page.
LARGEST_BYTES = 4 << 20


def recent(folder: Path, profile_id: str) -> list[dict[str, Any]]:
    """The newest receipts of `profile_id`, newest first, each with the `file` that it stands in.

    A file that cannot be read, or is no JSON object, is listed with the `problem`: it may be one of them.

    Args:
        folder: `profiles/receipts`; it need not exist.
        profile_id: whose receipts.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for path in folder.rglob("*.json") if folder.is_dir() else ():
        name = str(path.relative_to(folder))
        try:
            written = path.stat().st_mtime
            receipt = _read(path)
        except (OSError, ValueError) as error:
            found.append((0.0, {"file": name, "problem": str(error)}))
            continue
        profile = receipt.get("profile")
        if profile_id in (profile, profile.get("id") if isinstance(profile, dict) else None):
            found.append((written, {**receipt, "file": name}))
    found.sort(key=lambda one: (one[0], one[1]["file"]), reverse=True)
    return [receipt for _, receipt in found[:LAST]]


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"larger than {LARGEST_BYTES} bytes")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("no JSON object")
    return data
