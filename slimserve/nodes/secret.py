"""The secret that the nodes of an endpoint share: by it each proves to the other that it belongs to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from slimserve.errors import Finding, Refused

VARIABLE = "SLIMSERVE_NODE_SECRET"
FILE_VARIABLE = "SLIMSERVE_NODE_SECRET_FILE"
# Who listens in on a proof may try secrets against it for as long as he likes.
LEAST_BYTES, MOST_BYTES = 32, 4096
_MAKE = "make one with `openssl rand -hex 32`, and give every node the same one"


def load(environment: Mapping[str, str]) -> bytes:
    """The secret of this user's environment, or of the file that it names.

    Raises:
        Refused: there is none, both are given, others can read the file, or it is too short to be a secret.
    """
    own, named = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if own and named:
        why = "one of them would be ignored, and which one is not said"
        raise Refused(Finding(f"{VARIABLE} and {FILE_VARIABLE} are both set", why, "unset one of them"))
    if not own and not named:
        why = "nodes prove to each other that they belong together, over loopback too"
        raise Refused(Finding("there is no secret of the nodes", why, f"set {VARIABLE} or {FILE_VARIABLE}; {_MAKE}"))
    where = FILE_VARIABLE if named else VARIABLE
    secret = _read(Path(named)) if named else os.fsencode(own or "")
    secret = secret.strip()
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        why = f"a secret has {LEAST_BYTES} to {MOST_BYTES} bytes: shorter ones are found by trying"
        raise Refused(Finding(f"the secret of {where} has {len(secret)} bytes", why, _MAKE))
    return secret


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o077:
                why = "whoever knows the secret can join the endpoint as a node"
                do = f"let it be a file of this user or of root with mode 600: chmod 600 {path}"
                raise Refused(Finding(f"{path} is not for this user alone", why, do))
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        why = f"{FILE_VARIABLE} names it"
        raise Refused(Finding(f"{path} cannot be read: {error.strerror}", why, _MAKE)) from None
