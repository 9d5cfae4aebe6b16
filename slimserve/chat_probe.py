"""Who listens at an endpoint's address, asked before anything is started or said there."""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import Literal

from slimserve.client import get_json
from slimserve.client_faults import Endpoint, HttpError, NoListener, Silent, Unreachable
from slimserve.errors import Failed, Finding, Refused, SlimserveError

Presence = Literal["serving", "refuses-key", "busy", "other", "nobody"]
# A server that computes on every core answers late; only one that keeps silent makes anybody wait for this long.
PROBE_SECONDS = 5.0


def find(endpoint: Endpoint, *, deadline_seconds: float = PROBE_SECONDS) -> tuple[Presence, Endpoint]:
    """Who listens there, and the endpoint to talk to: without the key when the server asks for none.

    The first request carries no key, and only one that was answered with 401 or 403 is repeated with it: whatever
    else listens on the port must not be told the key.

    Args:
        deadline_seconds: for each of at most two exchanges.

    Returns:
        `serving`: it lists the model. `refuses-key`: it answers 401 or 403 to the key, or there is none to give.
        `busy`: it says 503, or the deadline passed without an answer. `other`: it answers, and is something else or
        does not list the model. `nobody`: nothing takes a connection.

    Raises:
        UsageError: the address or the key cannot be sent.
    """
    keyless = replace(endpoint, api_key=None)
    presence = _ask(keyless, deadline_seconds)
    if presence != "refuses-key" or not endpoint.api_key:
        return presence, keyless
    return _ask(endpoint, deadline_seconds), endpoint


def probe(endpoint: Endpoint, *, deadline_seconds: float = PROBE_SECONDS) -> Presence:
    """Who listens there; as `find`."""
    return find(endpoint, deadline_seconds=deadline_seconds)[0]


def is_serving(endpoint: Endpoint, *, deadline_seconds: float = PROBE_SECONDS) -> bool:
    """Whether the endpoint answers with this key and lists the model. Never raises."""
    try:
        return probe(endpoint, deadline_seconds=deadline_seconds) == "serving"
    except SlimserveError:
        return False


def unusable(presence: Presence, endpoint: Endpoint, *, key_variable: str) -> SlimserveError | None:
    """Why nobody can talk to what listens there; None for `serving` and `nobody`.

    Args:
        endpoint: as it was given to `find`, with the key.
        key_variable: the environment's name for the key.
    """
    url = endpoint.base_url
    if presence == "refuses-key":
        why = f"the key in {key_variable} is not the server's" if endpoint.api_key else "it asks for one, none is set"
        do = f"set {key_variable} to one of its keys (slimserve --add-key NAME makes one), or use another --port"
        return Refused(Finding(f"the endpoint at {url} refuses the key", why, do))
    if presence == "busy":
        try:
            get_json(replace(endpoint, api_key=None), "/models", deadline_seconds=PROBE_SECONDS)
        except HttpError as error:
            if error.status == 503:
                return error  # an endpoint that is not ready says why, and for how long
        except SlimserveError:
            pass
        why = "something took the connection and kept silent: it may be overloaded or frozen"
        do = "wait and try again; slimserve --status says where it stands"
        return Failed(Finding(f"the endpoint at {url} does not answer", why, do))
    if presence == "other":
        why = f"the port is taken by a server that does not list {endpoint.model}"
        do = f"use another --port, or stop it; what it serves is under {url}/models"
        return Refused(Finding(f"something else answers at {url}", why, do))
    return None


def _ask(endpoint: Endpoint, deadline_seconds: float) -> Presence:
    try:
        listed = get_json(endpoint, "/models", deadline_seconds=deadline_seconds)
    except HttpError as error:
        # An endpoint that fetches, loads, restarts or drains says 503 on every path.
        return "refuses-key" if error.status in (401, 403) else "busy" if error.status == 503 else "other"
    except Silent:
        return "busy"
    except NoListener:
        return "nobody"
    except Unreachable as error:
        # No route, or no such host: nobody. A handshake of TLS that fails has somebody at its other end.
        return "other" if isinstance(error.__cause__, ssl.SSLError) else "nobody"
    except Failed:
        return "other"
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return "other"
    known = any(isinstance(entry, dict) and entry.get("id") == endpoint.model for entry in entries)
    return "serving" if known else "other"
