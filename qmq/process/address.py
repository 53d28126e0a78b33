"""Addresses: how they are written, and which of them other machines can reach. Opens no connection;
qmq/rpc/network.py does.

    host:port               TCP; an IPv6 host in brackets
    unix:/path/socket       a Unix domain socket: for processes of one machine; its folder's
                            permissions protect it

A server whose listen address is host `unix:/run/qmq/a` and port 20881 listens on the socket
`/run/qmq/a:20881`, and its address is `unix:/run/qmq/a:20881`: code that joins host and port works
for sockets, too. The system limits a socket's path to 107 bytes. Data ports and control ports
(gRPC) have the same kinds of address.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument
from qmq.text import PORT_MAX, joined, whole_number

UNIX: Final = "unix:"
METASERVER_PORT: Final = 20880
_PATH_BYTES_MAX: Final = 107
"""The longest path of a socket on Linux, in bytes, without the zero byte after it. Other systems
allow a few less.
"""


class Address(NamedTuple):
    """A parsed address: the `path` of a Unix domain socket, or a host and a port."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return UNIX + self.path if self.path else joined(self.host, self.port)


def parse(address: str, default_port: int | None = None) -> Address:
    """Parse an address. Without `default_port` the address must have a port.
    Raises InvalidArgument.
    """
    text = address.strip()
    if text.startswith(UNIX):
        return Address("", 0, checked_path(text[len(UNIX) :]))
    host, separator, port = text.rpartition(":")
    if default_port is not None and (not separator or text.endswith("]")):
        host, port = text, str(default_port)
    number = whole_number(port, PORT_MAX, 1)
    is_wrong = host.startswith("[") != host.endswith("]") or (
        ":" in host and not host.startswith("[")
    )
    if not host or number is None or is_wrong:
        example = f"localhost:{default_port or 20880}"
        raise InvalidArgument(
            f"{address!r} is not an address: write host:port, such as {example} or "
            f"[::1]:{default_port or 20880}, or unix:/path/socket"
        )
    return Address(host, number)


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Metaservers' addresses such as "host:port" or "unix:/path/socket", or several, as a list or
    with commas. Raises InvalidArgument.
    """
    found = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    parsed = [str(parse(each, METASERVER_PORT)) for each in found]
    if not parsed:
        raise InvalidArgument("give at least one metaserver's address")
    return parsed


def host_of(address: str) -> str:
    """The host of an address, an IPv6 host without its brackets; of a socket, UNIX and its folder.
    Raises InvalidArgument.
    """
    place = parse(address)
    return UNIX + place.path.rpartition(":")[0] if place.path else place.host.strip("[]")


def checked_path(path: str) -> str:
    if not path.startswith("/"):
        raise InvalidArgument(
            f"a socket's address has its whole path, unix:/path/socket, not {UNIX + path!r}"
        )
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise InvalidArgument(
            f"the path of a socket has at most {_PATH_BYTES_MAX} bytes, not "
            f"{len(os.fsencode(path))}: {path}"
        )
    return path


def is_local(host: str) -> bool:
    """True if only this machine can reach a port on this host. A name other than localhost counts
    as reachable from other machines.
    """
    bare = host.strip("[]")
    try:
        return (
            host.startswith(UNIX) or bare == "localhost" or ipaddress.ip_address(bare).is_loopback
        )
    except ValueError:
        return False


def is_private(address: str, *, is_encrypted: bool) -> bool:
    """True if other machines cannot read the traffic to an address."""
    place = parse(address)
    return is_encrypted or bool(place.path) or is_local(place.host)


def require_private(address: str, *, is_encrypted: bool) -> None:
    """Raise InvalidArgument if a token would travel to another machine in plain text."""
    if not is_private(address, is_encrypted=is_encrypted):
        raise InvalidArgument(
            f"a token is not sent to {address} in plain text: use TLS (QMQ_TLS_CA, or "
            "qmq.connect(tls=...))"
        )
