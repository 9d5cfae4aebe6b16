"""One file of a Hugging Face repository, continued where an earlier attempt stopped.

huggingface_hub finds the endpoint, the token, the proxy and the retries by its own rules. The byte range is ours: the
library's own `hf_hub_download` starts a file anew after a kill, and a shard has gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from slimserve.errors import Failed, Finding
from slimserve.model import HuggingFace
from slimserve.weights.manifest_file import ManifestFile

if TYPE_CHECKING:
    from collections.abc import Mapping

_RETRY = "run --fetch again: it continues where it stopped"


class _Counted:
    """A file that tells how long it has become, for the library that writes it."""

    def __init__(self, stream: BinaryIO, report: Callable[[int], None]) -> None:
        self._stream, self._report = stream, report

    def write(self, data: bytes) -> int:
        written = self._stream.write(data)
        self._report(self._stream.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def download(
    source: HuggingFace,
    environ: Mapping[str, str],
    file: ManifestFile,
    part: Path,
    report: Callable[[int], None],
    patient: bool,
) -> None:
    """Bring `file` to `part`, whose bytes so far are kept and continued.

    Args:
        source: repository and commit.
        environ: HF_ENDPOINT, when set, names the Hub or a mirror of it.
        file: name, size and hash.
        part: where the bytes go.
        report: called with the bytes that `part` has.
        patient: ask again for a while when nobody answers: right in the middle of a download, wrong at its start.

    Raises:
        Failed: the Hub cannot be reached, refuses, or has another file; what arrived stays in `part`.
        OSError: the disk is full or not writable.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the meter is ours
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or None
    assert source.revision is not None  # a checkpoint with a manifest has one
    url = huggingface_hub.hf_hub_url(source.repo, file.name, revision=source.revision, endpoint=endpoint)
    headers = build_hf_headers(token=environ.get("HF_TOKEN") or None)
    try:
        metadata = huggingface_hub.get_hf_file_metadata(
            url, headers=headers, endpoint=endpoint, retry_on_errors=patient
        )
        _same(source, file, metadata.commit_hash, metadata.size, metadata.etag)
        _plain(url, headers, file, part, report)
    except errors.OfflineModeIsEnabled:
        raise Failed(
            Finding(
                f"{file.name} of {source.repo} is not here, and HF_HUB_OFFLINE forbids to fetch it",
                "the weights have to be complete before the engine starts",
                "unset HF_HUB_OFFLINE, or copy the complete folder from another machine",
            )
        ) from None
    except errors.HfHubHTTPError as error:
        raise Failed(_refused(source, file, error)) from None
    except Exception as error:
        # The library's HTTP client is httpx or its successor, by version: its errors are told by their base's name.
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if not kinds & {"HTTPError", "FileMetadataError"}:
            raise
        at = endpoint or huggingface_hub.constants.ENDPOINT
        what = f"{file.name} of {source.repo} did not arrive from {at}: {error or type(error).__name__}"
        raise Failed(Finding(what, "the weights have to be complete before the engine starts", _network(at))) from None


def _network(endpoint: str) -> str:
    return f"check that this machine reaches {endpoint} (a mirror: HF_ENDPOINT; a proxy: HTTPS_PROXY), then {_RETRY}"


def _plain(url: str, headers: dict[str, str], file: ManifestFile, part: Path, report: Callable[[int], None]) -> None:
    from huggingface_hub.file_download import http_get

    with part.open("ab") as stream:
        there = stream.tell()
        if there > file.bytes:
            stream.truncate(0)
            there = 0
        report(there)
        # Compressed, a byte range would not be one of the file's.
        plain = {**headers, "Accept-Encoding": "identity"}
        try:
            counted = cast(BinaryIO, _Counted(stream, report))
            http_get(url, counted, resume_size=there, headers=plain, expected_size=file.bytes)
        except OSError as error:
            # The library's word for a body that ended early; the other errors of this kind carry an errno.
            if error.errno is None and "Consistency check failed" in str(error):
                why = "the connection broke, or the server has another file"
                raise Failed(Finding(f"{file.name} ended early", why, _RETRY)) from None
            raise
        finally:
            stream.flush()
        os.fsync(stream.fileno())


def _same(source: HuggingFace, file: ManifestFile, commit: str | None, size: int | None, etag: str | None) -> None:
    """Find out before the download, not after it, that the Hub has another file."""
    problems = []
    if commit is not None and commit != source.revision:
        problems.append((f"the Hub answered with commit {commit}", f"the model file pins {source.revision}"))
    if size is not None and size != file.bytes:
        problems.append((f"{file.name} is {size} bytes on the Hub", f"the manifest says {file.bytes}"))
    hashes = {40: "git-blob-sha1", 64: "sha256"}
    if etag is not None and hashes.get(len(etag)) == file.kind and etag != file.hex:
        problems.append((f"{file.name} has {file.kind} {etag} on the Hub", f"the manifest says {file.hex}"))
    if problems:
        do = "do not use it: a pinned revision does not change; check HF_ENDPOINT, or that the mirror is a true one"
        raise Failed(*(Finding(what, why, do) for what, why in problems))


def _refused(source: HuggingFace, file: ManifestFile, error: Any) -> Finding:
    from huggingface_hub import errors

    status = error.response.status_code if error.response is not None else 0
    commit = (source.revision or "")[:12]
    what = f"{file.name} of {source.repo} at {commit}: the Hub answered {status or error}"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        do = "accept the model's licence on its page with your account, and set HF_TOKEN to a token of it"
        return Finding(what, "the repository gives its files only to accounts that were let in", do)
    if isinstance(error, errors.RevisionNotFoundError):
        why = "the pinned revision is gone, and another one is another model"
        return Finding(what, why, "use a profile whose revision still exists")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        do = "check HF_ENDPOINT, or the manifest against the repository"
        return Finding(what, "the pinned revision has no such file", do)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        why = "the repository does not exist, is private, or the token is not valid; the Hub does not say which"
        return Finding(what, why, "set HF_TOKEN to a token that may read it, or unset a wrong one; check HF_ENDPOINT")
    return Finding(what, "it is busy or out of order", f"wait a moment, then {_RETRY}")
