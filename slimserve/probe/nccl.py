"""NCCL's settings that a program started here would find.

NCCL reads its environment, then ~/.nccl.conf, then /etc/nccl.conf; what was set first stays (NCCL's guide, "Environment
Variables"). The home folder is the one of the user's account, whatever HOME says. The engine is given none of the
caller's variables, but the files reach it all the same.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slimserve.machine import ENVIRONMENT, NcclSetting
from slimserve.probe.text import printable, read_text

_LINE = re.compile(r"\s*(NCCL_[A-Z0-9_]+)\s*=\s*(.*?)\s*")
_NAME = re.compile(r"NCCL_[A-Z0-9_]+")
_LIMIT_BYTES = 1 << 16
_LONGEST_VALUE = 200


def account_home() -> Path | None:
    """The home folder of this user's account; None when there is none."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a number without an account, as in many containers
        return None


def read_settings(root: Path, environ: Mapping[str, str], home: Path | None) -> tuple[NcclSetting, ...]:
    """Every setting, those of the environment first; of a name in several files the first one, which counts.

    Args:
        root: folder that holds `etc`.
        environ: the variables.
        home: where the user's own file is looked for; None: nowhere.
    """
    found = [_setting(name, value, ENVIRONMENT) for name, value in sorted(environ.items()) if _NAME.fullmatch(name)]
    paths = [] if home is None else [home / ".nccl.conf"]
    of_files: dict[str, NcclSetting] = {}
    for path in (*paths, root / "etc/nccl.conf"):
        for name, value in _lines(path):
            of_files.setdefault(name, _setting(name, value, printable(str(path))))
    return (*found, *of_files.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    # A pipe in its place would keep us, as it would keep NCCL.
    for line in (read_text(path, _LIMIT_BYTES) or "").splitlines() if path.is_file() else ():
        if match := _LINE.fullmatch(line):
            yield match[1], match[2]


def _setting(name: str, value: str, source: str) -> NcclSetting:
    return NcclSetting(name=name, value=printable(value)[:_LONGEST_VALUE], source=source)
