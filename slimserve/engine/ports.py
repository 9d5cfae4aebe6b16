"""Whether an engine could listen where it is told to, asked before anything is started."""

from __future__ import annotations

import errno
import socket

from slimserve.engine import procfs
from slimserve.errors import Finding, Refused


def require_free(host: str, port: int) -> None:
    """Bind and listen at `host`:`port` as the engine will, and let go of it.

    Raises:
        Refused: the port is taken, needs rights that we lack, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, 0, socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise Refused(
            Finding(
                f"the host {host!r} has no address: {error.strerror}",
                "the engine listens on an address of this machine",
                "use 127.0.0.1, or an address that `ip address` shows",
            )
        ) from error
    try:
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen()
    except OSError as error:
        raise Refused(_explain(host, port, error)) from error
    if _is_reserved(family, address, port):
        raise Refused(
            Finding(
                f"port {port} on {host} is taken by a process that does not listen on it yet",
                "an engine that is still loading holds its port so; the one started second would fail after its load",
                f"wait for the other or stop it (`ss -tlnp`, `ps`), or use another port than {port}",
            )
        )


def _is_reserved(family: int, address: object, port: int) -> bool:
    """Whether somebody has bound the port without listening, which SO_REUSEADDR on both sides lets through.

    A plain bind fails on such a socket, but on an old connection as well (TIME_WAIT); those /proc lists, and with any
    in the list the answer stays no, since then a plain bind proves nothing.
    """
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error.errno == errno.EADDRINUSE and not procfs.sockets(port)
    return False


def _explain(host: str, port: int, error: OSError) -> Finding:
    if error.errno == errno.EADDRINUSE:
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
        "the engine listens on an address of this machine",
        "use 127.0.0.1, or an address that `ip address` shows",
    )
