"""The listening sockets, taken before anything is started, and why one cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from slimserve.engine import procfs
from slimserve.engine.endpoints import Endpoint
from slimserve.engine.state import moment
from slimserve.errors import Finding, Refused
from slimserve.exposure import addresses

# Connections that the kernel keeps while nobody accepts: a flood of them during a hand-over must not be refused.
BACKLOG = 2048
PAGE_HOST, PAGE_PORT = "127.0.0.1", 8001


def url(host: str, port: int) -> str:
    """The OpenAI-compatible root, as a client on this machine wants it.

    Args:
        host: where the endpoint listens; one that listens on every address is reached over loopback.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host or '127.0.0.1'}:{port}/v1"
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def listen(host: str, port: int, ours: Iterable[Endpoint] = ()) -> socket.socket:
    """Bind `host`:`port` and listen; the caller owns the socket. Nobody accepts on it yet.

    Args:
        ours: endpoints of this user; when one of them has the port, it is named.

    Raises:
        Refused: the port is taken, needs rights that we lack, or the host is no address of this machine.
    """
    family, kind, protocol, _, address = addresses(host, port)[0]
    if _is_reserved(family, address, port):
        raise Refused(
            Finding(
                f"port {port} on {host} is taken by a process that does not listen on it yet",
                "a server that is still loading may hold its port so; of two the second would never be reached",
                f"wait for the other or stop it (`ss -tlnp`, `ps`), or use another port than {port}",
            )
        )
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise Refused(_explain(host, port, error, ours)) from error
    return server


def listen_for_page(port: int | None, own: int, ours: Sequence[Endpoint] = ()) -> tuple[socket.socket, str]:
    """A listening socket on loopback for the operator page: at `port`, or at 8001 when that is free, or anywhere.

    Args:
        port: the one that was named; None: none was.
        own: the endpoint's own port.
        ours: as for `listen`.

    Returns:
        The socket, and why it is not at 8001, in words; empty when nothing is to be said.

    Raises:
        Refused: `port` was named and cannot be had.
    """
    if port is not None:
        return listen(PAGE_HOST, port, ours), ""
    if own == PAGE_PORT:
        return listen(PAGE_HOST, 0), f"{PAGE_PORT} is the endpoint's own"
    try:
        return listen(PAGE_HOST, PAGE_PORT, ours), ""
    except Refused as refused:
        return listen(PAGE_HOST, 0), refused.findings[0].what


def _is_reserved(family: int, address: object, port: int) -> bool:
    """Whether somebody has bound the port without listening, which SO_REUSEADDR on both sides lets through.

    A plain bind fails on such a socket, but on an old connection as well (TIME_WAIT); those /proc lists, and with any
    in the list the answer stays no, since then a plain bind proves nothing.
    """
    if port == 0:
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error.errno == errno.EADDRINUSE and not procfs.sockets(port)
    return False


def _explain(host: str, port: int, error: OSError, ours: Iterable[Endpoint]) -> Finding:
    if error.errno == errno.EADDRINUSE:
        for endpoint in ours:
            if endpoint.port == port:
                return Finding(
                    f"port {port} on {host} is taken by the endpoint of {endpoint.profile} (process {endpoint.pid}), "
                    f"{endpoint.status.state} since {moment(endpoint.status.since)}",
                    "two servers cannot listen on one port",
                    f"use that one, stop it (`kill {endpoint.pid}`), or use another port; see slimserve --status",
                )
            if endpoint.page is not None and urlsplit(endpoint.page).port == port:
                return Finding(
                    f"port {port} on {host} is taken by the operator page of {endpoint.profile}'s endpoint "
                    f"(process {endpoint.pid})",
                    "two servers cannot listen on one port",
                    "use another port, or start that endpoint with another --page-port",
                )
        holder = procfs.listener(port)
        who = f"process {holder.pid} ({holder.name})" if holder else "a process that /proc does not show to this user"
        return Finding(
            f"port {port} on {host} is taken by {who}",
            "two servers cannot listen on one port",
            f"stop {'it' if holder else 'the other server (`sudo ss -tlnp` names it)'}, or use another port",
        )
    if error.errno == errno.EACCES:
        return Finding(
            f"port {port} may not be used by this user",
            "ports below net.ipv4.ip_unprivileged_port_start (1024 as a rule) need a privilege",
            "use a port from 1024 up",
        )
    return Finding(
        f"cannot listen on {host}:{port}: {error.strerror}",
        "the endpoint listens on an address of this machine",
        "use 127.0.0.1, or an address that `ip address` shows",
    )
