"""`profiles/weights/<id>.manifest`: every file of a checkpoint with its size and hash, a line a file.

    # where the list comes from
    sha256:<64 hex digits>  <bytes>  <name>
    git-blob-sha1:<40 hex digits>  <bytes>  <name>

The second form is git's own hash of a small file whose sha256 nobody publishes.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

from slimserve.errors import Finding, RegistryError, raise_if_any
from slimserve.records import dataclass

Kind = Literal["sha256", "git-blob-sha1"]
Manifest = tuple["ManifestFile", ...]
_DIGITS: dict[str, int] = {"sha256": 64, "git-blob-sha1": 40}
_FORM = "write: sha256:<64 hex digits>  <bytes>  <name>, or git-blob-sha1:<40 hex digits>  <bytes>  <name>"
# The longest of ours is 40 KB; a file that is much longer is not a manifest.
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class ManifestFile:
    """One file.

    Args:
        name: its path inside the checkpoint's folder.
        bytes: its size.
        kind: which hash `hex` is.
        hex: the hash in lower-case hex digits.
    """

    name: str
    bytes: int
    kind: Kind
    hex: str

    def hasher(self) -> hashlib._Hash:
        """A fresh hash of this file's kind, to be fed the file's bytes."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.bytes}\0".encode(), usedforsecurity=False)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Args:
        path: the file.

    Returns:
        The files, in the manifest's order; at least one.

    Raises:
        RegistryError: with every bad line, each with `file:line`.
    """
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        what = f"the manifest cannot be read: {reason}"
        raise RegistryError(
            Finding(what, "it says what the weights have to be", "restore the file", str(path))
        ) from None
    files: dict[str, ManifestFile] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parsed = _parse(line.removesuffix("\r"))
        if isinstance(parsed, ManifestFile) and parsed.name not in files:
            files[parsed.name] = parsed
            continue
        what = parsed if isinstance(parsed, str) else f"{parsed.name} is listed twice"
        why = "each file has one size and one hash that it is checked against"
        findings.append(Finding(what, why, _FORM, f"{path}:{number}"))
    if not files and not findings:
        what = "lists no file" if len(raw) else f"is empty or larger than {MAX_BYTES} bytes"
        why = "a checkpoint without files cannot be checked"
        findings.append(Finding(f"the manifest {what}", why, _FORM, f"{path}:1"))
    raise_if_any(RegistryError, findings)
    return tuple(files.values())


def digest(manifest: Manifest) -> str:
    """The manifest's own hash: of what it says, not of its comments or their order."""
    lines = sorted(f"{file.kind}:{file.hex}  {file.bytes}  {file.name}" for file in manifest)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parse(line: str) -> ManifestFile | str:
    """The file that a line describes, or what is wrong with it."""
    parts = line.split("  ", 2)
    if len(parts) != 3:
        return f"{line[:60]!r} is not hash, size and name with two spaces between"
    kind, _, digits = parts[0].partition(":")
    if kind not in _DIGITS:
        return f"{kind[:40]!r} is not a known hash"
    if not re.fullmatch(r"[0-9a-f]*", digits) or len(digits) != _DIGITS[kind]:
        return f"a {kind} has {_DIGITS[kind]} lower-case hex digits, here are {len(digits)} characters"
    if not re.fullmatch(r"[0-9]{1,18}", parts[1]):
        return f"{parts[1][:40]!r} is not a size in bytes"
    name = parts[2]
    segments = name.split("/")
    # Dot files are the store's own: its stamp must not be a file that somebody sends.
    inside = name.isprintable() and "\\" not in name and len(name) <= 255 and all(s and s[0] != "." for s in segments)
    if not inside or name != name.strip():
        return f"{name[:60]!r} is not a plain relative path"
    return ManifestFile(name, int(parts[1]), "sha256" if kind == "sha256" else "git-blob-sha1", digits)
