"""The text that prompts are made of: works in the public domain, by paragraph (README.md in this folder)."""

from __future__ import annotations

import functools
import hashlib
import lzma
from pathlib import Path

from slimserve.errors import Failed, Finding

FOLDER = Path(__file__).resolve().parent
# Of the unpacked text: a corpus that has changed gives other prompts, and no result of before can be repeated.
SHA256 = {
    "austen": "42b7d1c756f065185a1f9ea5cc8cedff873b293ba24bd868667910b3a216b819",
    "jargon": "0238a3d26b690802c8bcce5dcb55ac01d5cf71866ced4e06cc25c20bd4d69819",
    "devil": "470f14f555f56a72026dfe99b83e5fb58432ba584c82e25f7a51c69c42ce4a70",
}
WORKS = tuple(SHA256)


@functools.cache
def paragraphs(work: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """The paragraphs of `work` in their order; no two are the same.

    Args:
        work: one of `WORKS`.
        folder: where the files are.

    Raises:
        Failed: the file is not there, is damaged, or is not the one that came with the program.
    """
    path = folder / f"{work}.txt.xz"
    try:
        text = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise _unusable(path, str(error)) from None
    if hashlib.sha256(text).hexdigest() != SHA256[work]:
        raise _unusable(path, "its text has another hash than the one that came with the program")
    return tuple(text.decode().splitlines())


def _unusable(path: Path, why: str) -> Failed:
    return Failed(
        Finding(f"{path} cannot be used", why, "restore it from the repository: prompts come from nowhere else")
    )
