"""The gRPC server of a control port, with bounds on the resources that all peers together can take.

gRPC accepts connections and does their handshakes in its own threads, so handshakes do not block the event loop. Their rate cannot be
limited as on the data port; only their number at one time and the duration of each can.

    a peer that sends nothing, or stops within its handshake    cut after `handshake_ms`
    a connection on which nobody calls                          closed after `idle_ms`; the next call connects again
    a peer whose machine is gone, with a call under way         cut when it has answered no ping for `ping_timeout_ms`
    connections beyond `connections_max`                        closed at once
    calls beyond `calls_max`                                    refused at once (Overloaded)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from qmq.rpc import MESSAGE_BYTES_MAX

REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
_STREAMS_MAX: Final = 1000
"""Calls under way on one connection."""


@dataclass(frozen=True, slots=True)
class RpcBounds:
    """Bounds of one control port. Times are milliseconds."""

    connections_max: int
    calls_max: int
    handshake_ms: int = 10_000
    """For TLS and HTTP/2 together; gRPC's default is two minutes."""
    idle_ms: int = 300_000
    ping_ms: int = 60_000
    """The server pings a connection that has a call under way and was silent for so long; gRPC's default is two hours."""
    ping_timeout_ms: int = 20_000


def rpc_server(bounds: RpcBounds, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), *, shares_port: bool = False) -> grpc.aio.Server:
    """A gRPC server that does not listen yet. With `shares_port`, other processes of this user may listen at its port, too: the kernel
    gives each connection to one of them (SO_REUSEPORT).
    """
    options = [
        ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
        # The server accepts no compressed requests: 29 KiB could become 30 MiB in memory.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_allowed_incoming_connections", bounds.connections_max),
        ("grpc.server_handshake_timeout_ms", bounds.handshake_ms),
        ("grpc.max_connection_idle_ms", bounds.idle_ms),
        ("grpc.keepalive_time_ms", bounds.ping_ms),
        ("grpc.keepalive_timeout_ms", bounds.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", bounds.ping_timeout_ms),
    ]
    return grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=bounds.calls_max)
