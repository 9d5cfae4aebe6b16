"""API keys: named hashes in a file, and who sent which.

The file has one key a line, `NAME sha256:HEX`, and comments behind `#`:

    alice sha256:<64 lower-case hex digits>  # her laptop

Only hashes are kept. Keys made by `--add-key` are 256 random bits, so nobody can find one from its hash by trying, and
one round of SHA-256 serves as well as a slow password hash would; it also costs each request a microsecond only.

A running door looks into the file at most once a second, so a key that is added or removed counts from then on. A file
that is then missing, wrong or open to others changes nothing: the last good keys stay, and the log says so once. The
other way, a slip of the editor would lock everybody out; whoever revokes a key sees in `--list-keys` that it is gone.
A door that starts beside such a file knows no key of it, and admits nobody by it until it is mended. A file that
was not there at the launch is waited for: until it is there none of its keys is asked for, and from then on one is.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from slimserve.admission.rejection import Rejected
from slimserve.errors import Finding, Refused, SlimserveError
from slimserve.profile import ID_PATTERN

REREAD_SECONDS = 1.0
MAX_FILE_BYTES = 1 << 20
MAX_KEY_BYTES = 512
# So many wrong lines tell that a file is wrong; a megabyte of them would take seconds to put into words.
MAX_FINDINGS = 20
# One more key, and its name; no key of the file may have that.
API_KEY_VARIABLE = "SLIMSERVE_API_KEY"
ENVIRONMENT = "environment"

_LINE = re.compile(rf"({ID_PATTERN})[ \t]+sha256:([0-9a-f]{{64}})(?:[ \t]+#.*)?")
_KEY = re.compile(f"[!-~]{{1,{MAX_KEY_BYTES}}}")

log = logging.getLogger(__name__)


def is_name(text: str) -> bool:
    """Whether a key may be called that."""
    return re.fullmatch(ID_PATTERN, text) is not None


def is_usable(key: str) -> bool:
    """Whether `key` can travel in an HTTP header: 1 to 512 printable ASCII characters without a space."""
    return _KEY.fullmatch(key) is not None


def digest(key: str) -> str:
    """The SHA-256 of a key, as the file has it: 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse(text: str, where: Path) -> dict[str, str]:
    """The keys of a file's text: name -> 64 hex digits.

    Raises:
        Refused: with the first 20 lines that are wrong. No line is quoted, since what is wrong with one may be that it
            holds the key itself.
    """
    keys: dict[str, str] = {}
    findings = []

    def wrong(number: int, what: str, why: str, do: str) -> None:
        findings.append(Finding(what, why, do, f"{where}:{number}"))

    hashes = set()
    for number, line in enumerate(text.split("\n"), 1):
        if len(findings) == MAX_FINDINGS:
            break
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            wrong(
                number,
                "the line holds no key",
                "a key is written NAME sha256:HEX, with a name of lower-case letters, digits, dots and hyphens, and"
                " 64 lower-case hex digits",
                "mend or remove the line; slimserve --add-key writes them",
            )
            continue
        name, hashed = match.groups()
        if name == ENVIRONMENT:
            wrong(number, f"a key is named {name}", f"that is the name of {API_KEY_VARIABLE}'s", "give it another name")
        elif name in keys:
            wrong(number, f"there are two keys named {name}", "a name means one key", "rename or remove one of them")
        elif hashed in hashes:
            wrong(number, f"{name} is a key that has a name already", "removing one would leave it valid", "remove one")
        else:
            keys[name] = hashed
            hashes.add(hashed)
    if findings:
        raise Refused(*findings)
    return keys


def is_there(path: Path) -> bool:
    """Whether something has the file's name, be it a link into nowhere; so it is too when that cannot be known."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def load(path: Path) -> dict[str, str]:
    """The keys of a file: name -> 64 hex digits.

    Raises:
        Refused: it cannot be read, is open to others, or a line is wrong.
    """
    return parse(_read(path), path)


def _read(path: Path) -> str:
    try:
        # Not to wait for a writer where a pipe has the name.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unfit(path, "is no file", "keys are read from one", "name a file in SLIMSERVE_KEYS")
            if status.st_mode & 0o077:
                why = f"its mode is {stat.S_IMODE(status.st_mode):o}: who can write it can let anybody in"
                raise _unfit(path, "is open to other users", why, f"run: chmod 600 {path}")
            if status.st_uid not in (0, os.geteuid()):
                why = f"user {status.st_uid} could let anybody in, and the endpoint runs as user {os.geteuid()}"
                raise _unfit(path, "belongs to somebody else", why, f"run: chown {os.geteuid()} {path}")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise _unfit(path, "is larger than 1 MiB", "that is no list of keys", "name another in SLIMSERVE_KEYS")
        return data.decode()
    except OSError as error:
        why = f"the system says: {error.strerror}"
        do = "mend that; to ask for no key, start the endpoint again without the file"
        raise _unfit(path, "cannot be read", why, do) from None
    except UnicodeDecodeError:
        raise _unfit(path, "is no text", "it holds bytes that are not UTF-8", "write it as UTF-8") from None


def _unfit(path: Path, what: str, why: str, do: str) -> Refused:
    return Refused(Finding(f"the keys file {path} {what}", why, do))


class Keyring:
    """The keys that count right now.

    Args:
        keys_file: the file, read again as it changes; None: there is none.
        hashes: name -> 64 hex digits of keys that are not in the file.
        awaited: whether the file need not be there yet, and counts from the moment in which it is.
        origins: of the web pages that may call where no key is asked for.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        keys_file: Path | None,
        hashes: Mapping[str, str],
        *,
        awaited: bool = False,
        origins: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.required = bool(hashes)
        self._awaited = awaited
        self._origins = frozenset(origin.encode() for origin in origins)
        self._file = keys_file
        self._fixed = [(name, hashed.encode()) for name, hashed in hashes.items()]
        self._keys = self._fixed
        self._clock = clock
        self._text: str | None = None
        self._complaint = ""
        self._due = clock()
        self._current()  # what is wrong with the file is in the log before anybody knocks

    def holder(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        """The name of the key that a request carries; None where no key is asked for.

        Args:
            headers: names in lower case, as ASGI has them.

        Raises:
            Rejected: 401, there is no key or not one that counts; 403, no key is asked for, and a web page calls that
                was not named.
        """
        keys = self._current()
        if not self.required:
            self._refuse_strange_pages(headers)
            return None
        presented = hashlib.sha256(_presented(headers)).hexdigest().encode()
        found = None
        for name, hashed in keys:  # all of them, so that the time tells nothing about which
            if hmac.compare_digest(presented, hashed):
                found = name
        if found is None:
            raise _unauthorized("the API key is not known here: it was mistyped, removed or never added")
        return found

    def _refuse_strange_pages(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Hold off the pages that somebody on this machine happens to open.

        A browser keeps them from reading what another site answers, but not when their own name is made to resolve to
        this machine; then nothing but `Origin`, which programs do not send, tells them from those who belong here.
        """
        if any(name == b"origin" and value not in self._origins for name, value in headers):
            message = (
                "web pages may not call this endpoint, which asks for no key, unless its operator named their origin"
                " with --origin; or add a key with --add-key"
            )
            raise Rejected(403, message, code="origin_not_allowed")

    def _current(self) -> list[tuple[str, bytes]]:
        if self._file is None or self._clock() < self._due:
            return self._keys
        self._due = self._clock() + REREAD_SECONDS
        if self._awaited and not is_there(self._file):
            return self._keys
        self._awaited, self.required = False, True  # for good: who takes the file away opens nothing
        before, self._text = self._text, None
        try:
            self._text = _read(self._file)
            if self._text != before:  # what was wrong with it then is as wrong now, and was said
                read = parse(self._text, self._file)
                self._keys = [*self._fixed, *((name, hashed.encode()) for name, hashed in read.items())]
                self._complaint = ""
                log.info("%d keys are read from %s", len(read), self._file)
        except SlimserveError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the keys stay as they were: %s", error)
        return self._keys


def _presented(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The one key that a request carries."""
    keys = []
    seen = set()
    for name, value in headers:
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in seen:
            raise _unauthorized(f"the request has several {name.decode()} headers")
        seen.add(name)
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise _unauthorized("the authorization header holds no bearer token")
        keys.append(value.strip(b" \t"))
    if not keys:
        raise _unauthorized("the request carries no API key")
    if len(keys) == 2 and not hmac.compare_digest(*keys):
        raise _unauthorized("the authorization and x-api-key headers hold different keys")
    if not is_usable(keys[0].decode("latin-1")):
        raise _unauthorized(f"the API key is not 1 to {MAX_KEY_BYTES} printable ASCII characters without a space")
    return keys[0]


def _unauthorized(what: str) -> Rejected:
    message = (
        f"{what}. This endpoint asks for a key. Send one that its operator gave you, as `Authorization: Bearer KEY` or"
        " `x-api-key: KEY`."
    )
    return Rejected(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
