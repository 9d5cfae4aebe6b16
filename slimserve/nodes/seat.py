"""Which node this is and where the first one is: judged before anything is started. Nothing is sent anywhere."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from slimserve.errors import Finding, Refused, UsageError
from slimserve.exposure import addresses
from slimserve.subject import Subject

DEFAULT_NODE_PORT = 8010
# What the engine's ports between nodes may be bound to: nobody asks on them who speaks.
_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8"))
)
_SIOCGIFCONF = 0x8912
_MOST_ADDRESSES = 1024
_ENTRY_BYTES = 40  # struct ifreq on 64-bit Linux: 16 bytes of name, then the address


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one node among those of an endpoint.

    Args:
        rank: of the node; node 0 owns the endpoint.
        count: of nodes.
        head: address of node 0 in the network between the nodes.
        port: TCP port of our own rendezvous there; the engine has the next two.
        address: this node's address in that network.
        interface: the name of the network interface with that address; empty: not known, in a plan.
    """

    rank: int
    count: int
    head: str
    port: int
    address: str
    interface: str

    @property
    def engine_port(self) -> int:
        """Where the engines of the other nodes find that of node 0."""
        return self.port + 1

    @property
    def ranks_port(self) -> int:
        """Where the ranks of all nodes meet."""
        return self.port + 2

    @property
    def is_head(self) -> bool:
        """Whether this node owns the endpoint."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count}, node 0 at {self.head}:{self.port}"


def chosen(subject: Subject, rank: int | None, head: str | None, port: int | None) -> Seat | None:
    """The seat that a command line names; None for a profile of one node.

    Raises:
        Refused: the profile has one node and a seat is named, or several and it is not; or what is named cannot be.
    """
    count, name = subject.platform.nodes, subject.profile.id
    if count == 1:
        if rank is None and head is None and port is None:
            return None
        what = "--node" if rank is not None else "--head" if head is not None else "--node-port"
        why = "its engine runs on this machine alone"
        raise Refused(Finding(f"{what} is for profiles of several nodes, and {name} has one", why, "leave it out"))
    if rank is None or head is None:
        raise Refused(
            Finding(
                f"{name} spans {count} nodes, and one command starts one",
                "each node has to know its rank and the address of node 0; the endpoint is on node 0",
                f"type one of these on each node{typed(subject, head)}",
            )
        )
    check_rank(subject, rank)
    where = private_address(head)
    address = where if rank == 0 else _facing(where, port or DEFAULT_NODE_PORT)
    if rank == 0:
        _must_be_ours(where)
    return Seat(rank, count, where, port or DEFAULT_NODE_PORT, address, interface_of(address))


def planned(subject: Subject, rank: int | None, head: str | None, port: int | None) -> list[Seat]:
    """The nodes of a profile that is only planned; what a node finds out of the network has a name in capitals.

    Args:
        rank: of the one that is asked for; None: all.
        head: address of node 0, where it is known.

    Raises:
        Refused: the profile has one node, or no such one, or the address could not be used.
    """
    count = subject.platform.nodes
    if count == 1:
        chosen(subject, rank, head, port)
    if rank is not None:
        check_rank(subject, rank)
    where = private_address(head) if head is not None else "ADDRESS_OF_NODE_0"
    return [
        Seat(one, count, where, port or DEFAULT_NODE_PORT, where if one == 0 else f"ADDRESS_OF_NODE_{one}", "INTERFACE")
        for one in (range(count) if rank is None else [rank])
    ]


def typed(subject: Subject, head: str | None = None) -> str:
    """What to type on each node, a line each."""
    lines = (
        f"\n       {rank}: slimserve {subject.profile.id} --serve --node {rank} --head {head or 'ADDRESS_OF_NODE_0'}"
        for rank in range(subject.platform.nodes)
    )
    return "".join(lines)


def check_rank(subject: Subject, rank: int) -> None:
    """See that there is such a node.

    Raises:
        Refused: there is none.
    """
    count = subject.platform.nodes
    if not 0 <= rank < count:
        why = f"{subject.profile.id} has {count} node{'s' if count > 1 else ''}"
        do = f"give one of {', '.join(map(str, range(count)))}" if count > 1 else "leave --node out"
        raise Refused(Finding(f"there is no node {rank}", why, do))


def private_address(host: str) -> str:
    """The one private IPv4 address of `host`.

    Raises:
        Refused: it has none or several, or one beyond private networks.
    """
    found = sorted({str(entry[4][0]) for entry in addresses(host)})
    do = "give the IPv4 address that node 0 has in the private network between the nodes"
    if len(found) != 1:
        raise Refused(Finding(f"--head {host} is {', '.join(found)}", "all nodes have to mean the same address", do))
    address = ipaddress.ip_address(found[0].partition("%")[0])
    if address.version != 4:
        why = "the pinned engine takes the port between its replicas from IPv4 alone"
        raise Refused(Finding(f"--head {host} is an address of IPv6", why, do))
    if not any(address in network for network in _PRIVATE):
        ranges = ", ".join(map(str, _PRIVATE))
        why = f"the engine's ports between nodes ask nobody who they are; only private addresses may be used: {ranges}"
        raise Refused(Finding(f"--head {host} is no private address", why, do))
    return str(address)


def _must_be_ours(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            why = "node 0 listens there for the others"
            do = "give an address that `ip address` shows on this node, or this node's own --node"
            what = f"--head {address} is no address of this node ({error.strerror}), and --node 0 says that it is"
            raise Refused(Finding(what, why, do)) from None


def _facing(head: str, port: int) -> str:
    """Our own address towards `head`: a socket that is connected to it and sends nothing knows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, port))
        except OSError as error:
            why = error.strerror or str(error)
            do = "see that this node has an address in the network of node 0: `ip route`"
            raise Refused(Finding(f"there is no way from here to node 0 at {head}", why, do)) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that has `address`.

    Raises:
        Refused: none has it.
    """
    buffer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (length,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for start in range(0, length, _ENTRY_BYTES):
        entry = buffer[start : start + _ENTRY_BYTES].tobytes()
        if socket.inet_ntoa(entry[20:24]) == address:
            return entry[:16].split(b"\0", 1)[0].decode(errors="replace").partition(":")[0]
    if ipaddress.ip_address(address).is_loopback:
        return "lo"  # all of 127.0.0.0/8 is this machine's, and only the first is listed
    raise Refused(
        Finding(
            f"no network interface of this node has the address {address}",
            "the engine's collectives are told the interface by its name",
            "see `ip address`",
        )
    )


def usage(options: Mapping[str, object]) -> None:
    """See that a node without an endpoint is told nothing about one.

    Args:
        options: of the endpoint, as typed, with their values; None: not given.

    Raises:
        UsageError: it is.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        why = "the endpoint is on node 0"
        raise UsageError(Finding(f"{given[0]} is for node 0 alone", why, "leave it out here"))
