"""Make harness/corpus/*.txt.xz from the Debian packages that carry the works.

    apt-get download r-cran-janeaustenr jargon-text dict-devil
    python tools/corpus.py FOLDER_OF_THE_PACKAGES

Each file holds the paragraphs of its works, in their order, one a line: long enough to be prose, mostly letters, ASCII
where a plain form exists, none of them twice. harness/corpus/README.md names the works, their licences and the hashes.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "harness" / "corpus"
MIN_LETTERS = 60
# Below it: tables, drawings, addresses.
MIN_SHARE = 0.9
PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
    }
)


def austen(root: Path) -> Iterator[str]:
    """Lines of the six novels; each is a character vector in R's own format."""
    raw = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    place = 0
    while place < len(raw):
        stream = zlib.decompressobj()
        data = stream.decompress(raw[place + 4 :])  # after the length that it has once it is decompressed
        place = len(raw) - len(stream.unused_data)
        yield from _strings(data)
        yield ""


def _strings(data: bytes) -> Iterator[str]:
    """The texts of one serialised character vector (format X, version 3)."""
    (encoding,) = struct.unpack(">i", data[14:18])
    place = 18 + encoding
    kind, count = struct.unpack(">ii", data[place : place + 8])
    if data[:2] != b"X\n" or kind & 0xFF != 16:
        sys.exit("a novel is no longer a character vector: read what the package holds now")
    place += 8
    for _ in range(count):
        _, size = struct.unpack(">ii", data[place : place + 8])
        yield data[place + 8 : place + 8 + max(size, 0)].decode()
        place += 8 + max(size, 0)


def jargon(root: Path) -> Iterator[str]:
    """Lines of the Jargon File, without the braces of its cross references."""
    text = gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode()
    yield from text.replace("{", "").replace("}", "").splitlines()


def devil(root: Path) -> Iterator[str]:
    """Lines of The Devil's Dictionary, from where its preface begins."""
    text = gzip.decompress((root / "usr/share/dictd/devil.dict.dz").read_bytes()).decode()
    yield from text[text.index("_The Devil's Dictionary_ was begun") :].splitlines()


def paragraphs(lines: Iterator[str]) -> list[str]:
    """Prose of `lines`, a paragraph each."""
    found: dict[str, None] = {}
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    for block in blocks:
        text = " ".join(block.split()).translate(PLAIN)
        letters = sum(letter.isascii() and (letter.isalpha() or letter in " ,.;:'\"!?-") for letter in text)
        if letters >= MIN_LETTERS and letters >= MIN_SHARE * len(text):
            found[text] = None
    return list(found)


def main() -> None:
    """Write the files, and say what each holds."""
    packages = Path(sys.argv[1])
    for name, package, lines in (
        ("austen", "r-cran-janeaustenr", austen),
        ("jargon", "jargon-text", jargon),
        ("devil", "dict-devil", devil),
    ):
        (archive,) = packages.glob(f"{package}_*.deb")
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
            kept = paragraphs(lines(Path(root)))
        text = ("\n".join(kept) + "\n").encode()
        packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
        (FOLDER / f"{name}.txt.xz").write_bytes(packed)
        digits = hashlib.sha256(text).hexdigest()
        print(f"{name}: {len(kept)} paragraphs, {len(text)} bytes, {len(packed)} packed, sha256 {digits}")


if __name__ == "__main__":
    main()
