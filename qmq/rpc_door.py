"""How a control port lets peers in: bounds on the resources that all peers together can take, and who they are.

Without TLS gRPC accepts the connections. With TLS they come through `qmq.security.rpc_relay`, which bounds their handshakes.

    a peer that sends nothing, or stops within its handshake    cut after `handshake_ms`
    handshakes of TLS beyond `handshakes_per_s`                 wait in the system's queue
    more than `handshakes_max` of them under way                the oldest is broken off
    a connection on which nobody calls                          closed after `idle_ms`; the next call connects again
    a peer whose machine is gone, with a call under way         cut when it has answered no ping for `ping_timeout_ms`
    connections beyond `connections_max`                        closed at once
    calls beyond `calls_max`                                    refused at once (Overloaded)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qmq.security.principal import RpcPeers


@dataclass(frozen=True, slots=True)
class RpcBounds:
    """Bounds of one control port. Times are milliseconds."""

    connections_max: int
    calls_max: int
    handshakes_per_s: int = 250
    """Of TLS. One takes 2 to 3 ms of the event loop, which has calls to serve."""
    handshakes_max: int = 1_000
    """Of TLS, under way at one time: of more, the oldest is broken off."""
    handshake_ms: int = 10_000
    """For TLS, and again for HTTP/2; gRPC's default is two minutes."""
    idle_ms: int = 300_000
    ping_ms: int = 60_000
    """The server pings a connection that has a call under way and was silent for so long; gRPC's default is two hours."""
    ping_timeout_ms: int = 20_000


@dataclass(frozen=True, slots=True)
class RpcDoor:
    """How a port lets peers in. `refused` is called with the address of each peer that TLS does not accept, and why. `peers` is filled with
    who is behind each connection that TLS did accept.
    """

    bounds: RpcBounds
    refused: Callable[[str, str], None] = lambda _address, _why: None
    peers: RpcPeers = field(default_factory=dict)
    shares_port: bool = False
    """Whether other processes of this user may listen at the port, too: the kernel gives each connection to one of them (SO_REUSEPORT)."""
    takes_plaintext: bool = False
    """Whether a port with TLS also serves peers that speak HTTP/2 without it."""
