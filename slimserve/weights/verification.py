"""Whether the weights on disk are what the manifest says: cheaply before each launch, byte for byte once."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from slimserve.errors import Failed, Finding, Refused, raise_if_any
from slimserve.model import Geometry
from slimserve.shapes import plain
from slimserve.weights import safetensors_file, store
from slimserve.weights.manifest_file import Manifest, ManifestFile
from slimserve.weights.meter import Tick

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CHUNK = 8 << 20
_FETCH = "fetch the weights again with --fetch; what is whole is kept"
# The largest that is known is 34 MB.
_MAX_JSON_BYTES = 1 << 30


def check(folder: Path, manifest: Manifest, *, weightless: bool = False) -> list[Finding]:
    """Look for missing, truncated and foreign files without reading the data: fit for each start.

    Args:
        folder: the complete checkpoint.
        manifest: its files.
        weightless: it is a configuration alone, for dummy weights.

    Returns:
        Every problem, each naming its file; empty when there is none.
    """
    findings: list[Finding] = []
    bad: set[str] = set()
    for file in manifest:
        path = folder / file.name
        try:
            status = path.stat()
        except OSError as error:
            findings.append(_unreadable(path, f"{file.name} is not there", "the manifest lists it", error))
        else:
            if not stat.S_ISREG(status.st_mode):
                findings.append(_finding(path, f"{file.name} is not a file", "the manifest lists it"))
            elif status.st_size != file.bytes:
                what = f"{file.name} is {status.st_size} bytes long"
                findings.append(_finding(path, what, f"the manifest says {file.bytes}"))
            else:
                continue
        bad.add(file.name)
    if weightless:
        return findings
    return findings + list(_check_shards(folder, {file.name for file in manifest}, bad))


def _check_shards(folder: Path, listed: set[str], bad: set[str]) -> Iterator[Finding]:
    """The index is followed, whatever its shards are called."""
    if INDEX in bad or SINGLE in bad:
        return  # said already
    if INDEX not in listed:
        yield from _check_shard(folder, SINGLE, None)
        return
    try:
        index = _read_json(folder / INDEX)
        weight_map = index["weight_map"]
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            shards.setdefault(shard, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield _finding(folder / INDEX, f"{INDEX} has no readable weight_map", f"{type(error).__name__}: {error}")
        return
    if not shards:
        yield _finding(folder / INDEX, f"{INDEX} names no shard", "there would be no weights to load")
    for shard, tensors in shards.items():
        if shard in bad:
            continue
        if shard not in listed:
            why = "the index names it and the manifest does not, so it cannot be checked"
            yield _finding(folder / INDEX, f"shard {str(shard)[:80]} is foreign", why)
        else:
            yield from _check_shard(folder, shard, tensors)


def _check_shard(folder: Path, name: str, tensors: set[str] | None) -> Iterator[Finding]:
    try:
        header = safetensors_file.read_header(folder / name)
    except Failed as error:
        yield from error.findings
        return
    except OSError as error:
        why = "the engine would start on uninitialised weights"
        yield _unreadable(folder / name, f"{name} cannot be read", why, error)
        return
    missing = sorted((tensors or set()) - header.keys())
    if missing:
        why = f"the index puts {len(missing)} tensors into it that its header does not have"
        yield _finding(folder / name, f"{name} does not hold {missing[0]}", why)


def _finding(path: Path, what: str, why: str) -> Finding:
    return Finding(what, why, _FETCH, str(path))


def _unreadable(path: Path, what: str, why: str, error: OSError) -> Finding:
    """What is missing is fetched; what only cannot be read is not, since fetching it again would not help."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return _finding(path, f"{what}: {error.strerror}", why)
    return store.unreadable(path, error)


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"larger than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_config(folder: Path, geometry: Geometry) -> list[Finding]:
    """Hold the checkpoint's `config.json` against the shapes that the plan counts with.

    Args:
        folder: the complete checkpoint.
        geometry: of the model file; a shape that it leaves out is not looked at.

    Returns:
        A finding for each shape that is missing or differs. None is ever assumed.
    """
    path = folder / "config.json"
    try:
        config = _read_json(path)
        text = config.get("text_config", config)
        where = "text_config." if text is not config else ""
        values = {name: text.get(name) for name in Geometry.__dataclass_fields__}
    except (OSError, ValueError, AttributeError) as error:
        return [_finding(path, "config.json is not a readable JSON object", str(error))]
    findings = []
    do = "mend the geometry of the model file, or the revision that it pins: one of them is of another model"
    for name, wanted in plain(geometry, nulls=False).items():
        found = values[name]
        if found == wanted and type(found) is type(wanted):
            continue
        what = f"{where}{name} is missing"
        if found is not None:
            what = f"{where}{name} = {found!r}, the model file says {wanted}"
        findings.append(Finding(what, "memory and slots are counted with it", do, str(path)))
    return findings


def hash_file(path: Path, file: ManifestFile, progress: Callable[[int], None] | None = None) -> str:
    """The hash of `path` as the manifest counts it, in hex digits.

    Args:
        path: the bytes.
        file: what they should be.
        progress: called with the bytes read so far.

    Raises:
        OSError: it cannot be read.
    """
    hasher, done = file.hasher(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done)
    return hasher.hexdigest()


def mismatch(path: Path, file: ManifestFile, found: str, do: str = _FETCH) -> Finding:
    """The finding for a file with the wrong hash."""
    return Finding(f"{file.name} has {file.kind} {found}", f"the manifest says {file.hex}", do, str(path))


def verify(folder: Path, manifest: Manifest, progress: Tick) -> list[Finding]:
    """Hash what the stamp does not vouch for, and stamp what is right.

    Args:
        folder: the complete checkpoint.
        manifest: its files.
        progress: called with bytes done, bytes in all, and the file's name.

    Returns:
        A finding for each file that is missing or has another hash; empty when all of it is right.

    Raises:
        Refused: a file is there and cannot be read: nothing says that it is wrong.
        OSError: the stamp cannot be written.
    """
    good = store.read_stamp(folder, manifest)
    rest = [file for file in manifest if file.name not in good]
    done, total = 0, sum(file.bytes for file in rest)
    findings: list[Finding] = []
    unreadable: list[Finding] = []
    for file in rest:
        path = folder / file.name
        try:
            before = store.key(path)
            # Opening a pipe would wait for ever.
            regular = stat.S_ISREG(path.stat().st_mode)
            found = hash_file(path, file, partial(_report, progress, done, total, file.name)) if regular else ""
        except (FileNotFoundError, NotADirectoryError) as error:
            findings.append(_finding(path, f"{file.name} is not there: {error.strerror}", "the manifest lists it"))
        except OSError as error:
            unreadable.append(store.unreadable(path, error))
        else:
            if not regular:
                findings.append(_finding(path, f"{file.name} is not a file", "the manifest lists it"))
            elif found == file.hex:
                good[file.name] = before
            else:
                findings.append(mismatch(path, file, found))
        done += file.bytes
    if rest:
        store.write_stamp(folder, manifest, good)
    raise_if_any(Refused, unreadable)
    return findings


def _report(progress: Tick, done: int, total: int, name: str, read: int) -> None:
    progress(done + read, total, f"verifying {name}")
