"""The gRPC server of a control port, with bounds on what all peers together can make it hold.

gRPC accepts connections and does their handshakes in threads of its own, beside the event loop. So the loop does not wait for handshakes,
and their rate cannot be bounded as the data port's is: only how many there are at once, and how long each may take.

    a peer that says nothing, or stops within its handshake     cut after `handshake_ms`
    a connection on which nobody calls                          told to go after `idle_ms`; who calls next connects again
    a peer whose machine is gone, with a call under way         cut when it has answered no ping for `ping_timeout_ms`
    connections beyond `connections_max`                        closed at once
    calls beyond `calls_max`                                    answered at once that there are too many (Overloaded)
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
    """Of one control port. Times in milliseconds."""

    connections_max: int
    calls_max: int
    handshake_ms: int = 10_000
    """Until TLS and HTTP/2 are agreed on; gRPC gives two minutes."""
    idle_ms: int = 300_000
    ping_ms: int = 60_000
    """A connection with a call under way that has been silent for so long is asked whether it is there; gRPC waits for two hours."""
    ping_timeout_ms: int = 20_000


def rpc_server(bounds: RpcBounds, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server that listens nowhere yet."""
    options = [
        ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
        # Requests are not compressed: one of 29 KiB could be 30 MiB long in memory.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", bounds.connections_max),
        ("grpc.server_handshake_timeout_ms", bounds.handshake_ms),
        ("grpc.max_connection_idle_ms", bounds.idle_ms),
        ("grpc.keepalive_time_ms", bounds.ping_ms),
        ("grpc.keepalive_timeout_ms", bounds.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", bounds.ping_timeout_ms),
    ]
    return grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=bounds.calls_max)
