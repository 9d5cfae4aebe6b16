"""A package index on loopback, with wheels made on the spot, that can hold an answer back."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a pure wheel into `folder`.

    Args:
        files: path inside the wheel -> text; entry_points.txt goes into its metadata folder.
    """
    info = f"{name}-{version}.dist-info"
    entries = {f"{info}/{path}" if path == "entry_points.txt" else path: text for path, text in files.items()}
    entries[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    entries[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    entries[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*entries, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in entries.items():
            archive.writestr(path, text)
    return wheel


def sha256(path: Path) -> str:
    """The hash as a lock file gives it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, index: Index, **kwargs: Any) -> None:
        self.index = index
        super().__init__(*args, directory=str(index.folder), **kwargs)

    def do_GET(self) -> None:
        self.index.asked.append(self.path)
        if self.index.held_back and self.index.held_back in self.path:
            self.index.reached.set()
            self.index.released.wait(60)
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: `asked` tells."""


class Index:
    """Serves `folder`: each subfolder of it is one index in the simple layout.

    Args:
        held_back: requests whose path contains this set `reached` and wait for `released`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.held_back = ""
        self.reached, self.released = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, index=self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def url(self, name: str) -> str:
        """Where the index in this subfolder answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}/"

    def add(self, name: str, package: str, version: str, files: dict[str, str]) -> str:
        """Put a new wheel into an index; its sha256."""
        folder = self.folder / name / package.replace("_", "-")
        wheel = make_wheel(folder, package, version, files)
        links = "".join(f'<a href="{quote(each.name)}">{each.name}</a>\n' for each in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")
        return sha256(wheel)

    def __enter__(self) -> Index:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
