"""Admits peers to a control port: bounds on the resources that all peers together can take, and the identity of each peer.

At a port without TLS that only this machine reaches, gRPC accepts the connections. At other ports they come through
`qmq.rpc.relay`, which bounds the new connections in a second, with TLS and without.

    a peer that sends nothing, or stops within its handshake    cut after `handshake_ms`
    connections beyond `handshakes_per_s`                       wait in the system's queue
    more than `handshakes_max` handshakes of TLS under way,
    or half of `connections_max`                                the address with the most loses its oldest
    a connection without calls                                  closed after `idle_ms`; the next call connects again
    a lost peer with a call under way                           cut when it has answered no ping for `ping_timeout_ms`
    connections beyond `connections_max`                        closed immediately
    an address with the most of `connections_max`               through the relay, loses its most silent one to another address
    calls beyond `calls_max`                                    refused immediately (Overloaded)
    messages that are not whole, beyond `unfinished`            through the relay, the address with the most loses a connection
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Self

from qmq.limits import MIB
from qmq.process.files import connections_max, limit
from qmq.rpc.strangers import StrangerBounds
from qmq.security.principal import RpcPeers

UNFINISHED: Final = StrangerBounds(places=10_000, bytes_max=256 * MIB)


@dataclass(frozen=True, slots=True)
class RpcBounds:
    """The bounds of one control port. Times are milliseconds."""

    connections_max: int
    calls_max: int
    handshakes_per_s: int = 250
    """New connections a second, with TLS or without. A TLS handshake takes 2 to 3 ms of the event loop, which also serves calls."""
    handshakes_max: int = 1_000
    """TLS handshakes under way at one time; beyond it, the address with the most loses its oldest."""
    handshake_ms: int = 10_000
    """Time for the TLS handshake, and again for HTTP/2; gRPC's default is two minutes."""
    idle_ms: int = 300_000
    ping_ms: int = 60_000
    """The server pings a connection with a call under way after this time of silence; gRPC's default is two hours."""
    ping_timeout_ms: int = 20_000
    unfinished: StrangerBounds = UNFINISHED
    """The messages that gRPC holds because they are not whole yet, of all calls together (`qmq.rpc.unfinished_messages`)."""

    def fitting(self, descriptors: int) -> Self:
        """These bounds, with no more connections than this process's file descriptors allow, by the number that each takes."""
        return replace(self, connections_max=connections_max(self.connections_max, limit() // descriptors))


@dataclass(frozen=True, slots=True)
class RpcListener:
    """The admission of peers to a port. `refused` is called with the address of each peer that TLS does not accept, and the reason. `peers`
    gets the identity behind each accepted TLS connection.
    """

    bounds: RpcBounds
    refused: Callable[[str, str], None] = lambda _address, _why: None
    peers: RpcPeers = field(default_factory=dict)
    shares_port: bool = False
    """True if other processes of this user may listen at the same port: the kernel gives each connection to one of them (SO_REUSEPORT)."""
    takes_plaintext: bool = False
    """True if a port with TLS also serves peers that speak HTTP/2 without TLS."""
