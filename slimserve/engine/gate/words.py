"""The word of each process of the engine: a file in the run folder that says what it resolved, and what differs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimserve.engine.gate.checks import CHECKS
from slimserve.engine.record import read_fields, write_fields
from slimserve.errors import Finding, Refused, raise_if_any

FOLDER_NAME = "gate"
RESOLVED_NAME = "resolved.json"
_MEASURED = frozenset(check.name for check in CHECKS if check.measured)


def canonical(value: Any) -> str:
    """JSON data as one text, the same for the same data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def write(
    folder: Path, process: str, tag: str, findings: Sequence[Finding], observed: Mapping[str, Any], config: Any
) -> None:
    """Write the word of `process`, whole or not at all.

    Args:
        folder: of the words.
        process: its name.
        tag: of the start: a word of another start counts for nothing.
        findings: what differs from the plan.
        observed: what was compared, as JSON data.
        config: the whole configuration, as JSON data; None where another process writes it.

    Raises:
        OSError: it cannot be written.
    """
    word = {
        "process": process,
        "tag": tag,
        "findings": [finding.to_json() for finding in findings],
        "observed": dict(observed),
        "config": config,
    }
    write_fields(folder / f"{process}.json", word)


class Words:
    """The words of one start, for the supervisor.

    Args:
        run_folder: of the run; the words lie in a folder of their own below it.
        processes: those that have to give their word.
        tag: of the start.
    """

    def __init__(self, run_folder: Path, processes: Sequence[str], tag: str) -> None:
        self.folder = run_folder / FOLDER_NAME
        self.resolved_path = run_folder / RESOLVED_NAME
        self._processes, self._tag = tuple(processes), tag

    def prepare(self) -> None:
        """Make the folder, and forget the words of earlier starts.

        Raises:
            OSError: it cannot be made.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (*self.folder.glob("*.json"), self.resolved_path):
            path.unlink(missing_ok=True)

    def differences(self) -> list[Finding]:
        """What differs from the plan, by the words that are there; each setting once, however many processes say so."""
        found: dict[str, Finding] = {}
        for word in self._given():
            for fields in word["findings"]:
                finding = Finding(fields["what"], fields["why"], fields["do"])
                found.setdefault(finding.what.split(": ", 1)[0], finding)
        return list(found.values())

    def check(self) -> None:
        """Look at the words that are there.

        Raises:
            Refused: a process is not what was planned; with a finding for each setting.
        """
        raise_if_any(Refused, self.differences())

    def close(self) -> str:
        """Require the word of every process, and write down what they resolved; returns its SHA-256, in hex.

        Raises:
            Refused: one is not what was planned, or the gate has not run in it, or nothing can be written.
        """
        self.check()
        if missing := self.missing():
            raise Refused(
                Finding(
                    f"the gate has not run in {', '.join(missing)}",
                    "what nobody has looked at may have resolved anything",
                    "see that the engine finds our entry point `vllm.general_plugins`: install slimserve beside it",
                )
            )
        try:
            return self.resolve()
        except OSError as error:
            raise Refused(
                Finding(
                    f"cannot write {self.resolved_path}: {error.strerror}",
                    "receipts carry the hash of the resolved configuration",
                    "make the folder writable for this user, or free space there",
                )
            ) from error

    def missing(self) -> list[str]:
        """The processes whose word is not there."""
        given = {word["process"] for word in self._given()}
        return [process for process in self._processes if process not in given]

    def tensors(self) -> int:
        """How many tensors of weights the ranks looked at and found finite."""
        return sum(word["observed"].get("weight_tensors", 0) for word in self._given())

    def resolve(self) -> str:
        """Write the resolved configuration of all processes beside the words; returns its SHA-256, in hex.

        What follows from the memory of the moment is in the file and not in the hash.

        Raises:
            OSError: it cannot be written.
        """
        words = {word["process"]: word for word in self._given()}
        resolved = {
            "settings": {
                process: {name: value for name, value in word["observed"].items() if name not in _MEASURED}
                for process, word in words.items()
            },
            "config": next((word["config"] for word in words.values() if word["config"] is not None), None),
        }
        measured = {
            process: {name: value for name, value in word["observed"].items() if name in _MEASURED}
            for process, word in words.items()
        }
        digest = hashlib.sha256(canonical(resolved).encode()).hexdigest()
        write_fields(self.resolved_path, {"sha256": digest, "resolved": resolved, "measured": measured})
        return digest

    def _given(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(OSError):  # without the folder there are no words
            for path in sorted(self.folder.glob("*.json")):
                word = read_fields(path)
                if word is not None and word.get("tag") == self._tag:
                    yield word
