"""Prints the manifest of a checkpoint that lies in a folder, for an author of profiles.

    python -m harness.manifest FOLDER > profiles/weights/NAME.manifest

Every file is listed but README.md, the card, which no engine reads, and names that begin with a dot. The first line
says how many bytes that is: `bytes` of the model file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

CARD = Path("README.md")


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit(f"harness.manifest: {folder} is no folder")
    print(listing(folder), end="")


def listing(folder: Path) -> str:
    """The text of a manifest.

    Args:
        folder: the complete checkpoint.
    """
    lines, total = [], 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if name == CARD or any(part.startswith(".") for part in name.parts):
            continue
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = path.stat().st_size
        total += size
        lines.append(f"sha256:{digest}  {size}  {name}\n")
    return f"# {total} bytes in {len(lines)} files\n{''.join(lines)}"


if __name__ == "__main__":
    main()
