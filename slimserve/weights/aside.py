"""Whatever stands in the place of a file or folder of ours, and is of another kind, is moved aside and named.

It is not ours to remove, and neither mkdir nor a rename gets past it: without this no --fetch could ever mend it. What
we write is never written through a link: the bytes would land in somebody's other file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from slimserve.weights import store

Say = Callable[[str], None]


def for_file(path: Path, target: Path, say: Say, links: bool) -> None:
    """Clear the place of a file.

    Args:
        path: the place.
        target: the checkpoint's folder; what is moved goes beside it.
        say: told what was moved, and where to.
        links: whether a link that leads to a file is right as well.

    Raises:
        Refused: it cannot be looked at.
        OSError: it cannot be moved.
    """
    _clear(path, target, say, links, stat.S_ISREG, "file")


def for_folder(path: Path, target: Path, say: Say, links: bool) -> None:
    """Clear the place of a folder; otherwise as `for_file`.

    Raises:
        Refused: it cannot be looked at.
        OSError: it cannot be moved.
    """
    _clear(path, target, say, links, stat.S_ISDIR, "folder")


def _clear(path: Path, target: Path, say: Say, links: bool, right: Callable[[int], bool], kind: str) -> None:
    itself = store.look(path, follow=False)
    if itself is None:
        return
    seen = store.look(path) if links else itself
    if seen is None or not right(seen.st_mode):
        say(f"{path} is not a {kind}: moved to {move(path, target)}")


def move(path: Path, target: Path) -> Path:
    """Rename `path` to a name beside `target` that is free: <name>.replaced-<n>.

    Returns:
        Where it is now.

    Raises:
        OSError: it cannot be moved.
    """
    # Beside the checkpoint, not inside: what is inside .partial becomes part of the checkpoint, or is cleaned away.
    name = path.name if path.parent == target.parent else f"{target.name}.{path.name}"
    number = 1
    while os.path.lexists(new := target.with_name(f"{name}.replaced-{number}")):
        number += 1
    os.rename(path, new)
    return new
