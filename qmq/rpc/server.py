"""The gRPC server of a control port, with the bounds of its `RpcListener`, and the refusal of calls
that mean another server.

`RpcListener` bounds the resources that all peers together can take, and has the identity of each
peer. At a port without TLS that only this machine reaches, gRPC accepts the connections. At other
ports they come through `qmq.rpc.relay`, which bounds the new connections in a second, with TLS and
without.

    a peer that sends nothing, or stops within its handshake    cut after `handshake_ms`
    connections beyond `handshakes_per_s`                       wait in the system's queue
    more than `handshakes_max` handshakes of TLS under way,
    or half of `connections_max`                                the address with the most loses its
                                                                oldest
    a connection without calls                                  closed after `idle_ms`; the next
                                                                call connects again
    a lost peer with a call under way                           cut when it has answered no ping for
                                                                `ping_timeout_ms`
    connections beyond `connections_max`                        closed immediately
    an address with the most of `connections_max`               through the relay, loses its most
                                                                silent one to another address
    calls beyond `calls_max`                                    refused immediately (Overloaded)
    messages that are not whole, beyond `unfinished`            through the relay, the address with
                                                                the most loses a connection

`RequestBodies` reads the body of a request after its caller is known, and bounds the bodies of
callers without a name. gRPC reads a request before it calls a method with one request, so it holds
16 MiB for callers that say nothing about themselves. It calls a method with a stream of requests
first, and the bytes on the wire are the same. So the methods of a server are served as streams:

    metadata, certificate  ──▶  who is it?  ──▶  `read`: the only request  ──▶  the method

Meanwhile a call that sends its body holds what HTTP/2 allows without a reader, 64 KiB. gRPC does
not tell how many bytes of a request are there: the body of a stranger that is not whole after
`GRACE_S` counts as REQUEST_BYTES_MAX (`qmq.rpc.strangers`), and has `time_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, Self

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import InvalidArgument, Overloaded, QmqError
from qmq.limits import MIB
from qmq.process.address import host_of
from qmq.process.files import connections_max, limit
from qmq.rpc.channel import MESSAGE_BYTES_MAX, abort
from qmq.rpc.server_name import METADATA_KEY, NameSource, ServerName
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.security.principal import UNIX_PEER, RpcPeers

UNFINISHED: Final = StrangerBounds(places=10_000, bytes_max=256 * MIB)


@dataclass(frozen=True, slots=True)
class RpcBounds:
    """The bounds of one control port. Times are milliseconds."""

    connections_max: int
    calls_max: int
    handshakes_per_s: int = 250
    """New connections a second, with TLS or without. A TLS handshake takes 2 to 3 ms of the event
    loop, which also serves calls.
    """
    handshakes_max: int = 1_000
    """TLS handshakes under way at one time;
    beyond it, the address with the most loses its oldest.
    """
    handshake_ms: int = 10_000
    """Time for the TLS handshake, and again for HTTP/2; gRPC's default is two minutes."""
    idle_ms: int = 300_000
    ping_ms: int = 60_000
    """The server pings a connection with a call under way after this time of silence; gRPC's
    default is two hours.
    """
    ping_timeout_ms: int = 20_000
    unfinished: StrangerBounds = UNFINISHED
    """The messages that gRPC holds because they are not whole yet,
    of all calls together (`qmq.rpc.relay`).
    """

    def fitting(self, descriptors: int) -> Self:
        """These bounds, with no more connections than this process's file descriptors allow, by the
        number that each takes.
        """
        return replace(
            self, connections_max=connections_max(self.connections_max, limit() // descriptors)
        )


@dataclass(frozen=True, slots=True)
class RpcListener:
    """The admission of peers to a port. `refused` is called with the address of each peer that TLS
    does not accept, and the reason. `peers` gets the identity behind each accepted TLS connection.
    """

    bounds: RpcBounds
    refused: Callable[[str, str], None] = lambda _address, _why: None
    peers: RpcPeers = field(default_factory=dict)
    shares_port: bool = False
    """True if other processes of this user may listen at the same port: the kernel gives each
    connection to one of them (SO_REUSEPORT).
    """
    takes_plaintext: bool = False
    """True if a port with TLS also serves peers that speak HTTP/2 without TLS."""


REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
GRACE_S: Final = 1.0
BOUNDS: Final = StrangerBounds(places=16, bytes_max=16 * REQUEST_BYTES_MAX)


class RequestBodies:
    """The bodies under way at one server."""

    def __init__(self, bounds: StrangerBounds = BOUNDS, grace_s: float = GRACE_S) -> None:
        self._time_s, self._grace_s = bounds.time_s, grace_s
        self._strangers = Strangers(bounds, time.monotonic)

    async def read(self, context: Any, stranger: str) -> Any:
        """The request of a call. `stranger` is the address of a caller without a name
        (`peer_address`), "" for one with a name.

        Raises InvalidArgument if there is none, or bytes that are no such request; Overloaded if a
        stranger's was not whole in time.
        """
        loop = asyncio.get_running_loop()
        host = peer_host(stranger) if stranger else ""
        try:
            async with asyncio.timeout(None) as limit:

                def late() -> None:
                    limit.reschedule(loop.time() + self._time_s)
                    self._strangers.came(limit, host, lambda: limit.reschedule(loop.time()))
                    self._strangers.received(limit, REQUEST_BYTES_MAX)

                timer = loop.call_later(self._grace_s, late) if host else None
                try:
                    found = await context.read()
                finally:
                    if timer is not None:
                        timer.cancel()
                    self._strangers.left(limit)
        except DecodeError:
            raise InvalidArgument(
                "the bytes of the call are not a request of this method"
            ) from None
        except TimeoutError:
            raise Overloaded(
                "the request did not arrive in time: show a token or a certificate, or send "
                "it again"
            ) from None
        if found is grpc.aio.EOF:
            raise InvalidArgument("the call has no request")
        return found


def peer_host(address: str) -> str:
    """The host of a peer, for whose network its requests count (`qmq.rpc.strangers`), or `unix`."""
    return address if address == UNIX_PEER else host_of(address)


def late_unary(handler: Any, serve: Callable[[Any], Awaitable[Any]]) -> Any:
    """The handler of a method with one answer;
    `serve` gets the context, and reads the request itself.
    """

    async def served(_: Any, context: Any) -> Any:
        return await serve(context)

    return grpc.stream_unary_rpc_method_handler(
        served, handler.request_deserializer, handler.response_serializer
    )


def late_stream(handler: Any, serve: Callable[[Any], AsyncIterator[Any]]) -> Any:
    """The handler of a method with a stream of answers; `serve` as for `late_unary`."""

    async def served(_: Any, context: Any) -> AsyncIterator[Any]:
        async for each in serve(context):
            yield each

    return grpc.stream_stream_rpc_method_handler(
        served, handler.request_deserializer, handler.response_serializer
    )


_STREAMS_MAX: Final = 1000
"""The most calls under way on one connection."""


def rpc_server(
    door: RpcListener, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A gRPC server that does not listen yet: give it to `Network.serve`, with the same door."""
    bounds = door.bounds
    options = [
        ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
        # The server accepts no compressed requests: 29 KiB could become 30 MiB in memory.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
        ("grpc.so_reuseport", int(door.shares_port)),
        ("grpc.max_allowed_incoming_connections", bounds.connections_max),
        ("grpc.server_handshake_timeout_ms", bounds.handshake_ms),
        ("grpc.max_connection_idle_ms", bounds.idle_ms),
        ("grpc.keepalive_time_ms", bounds.ping_ms),
        ("grpc.keepalive_timeout_ms", bounds.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", bounds.ping_timeout_ms),
    ]
    return grpc.aio.server(
        interceptors=interceptors, options=options, maximum_concurrent_rpcs=bounds.calls_max
    )


class NameCheck(grpc.aio.ServerInterceptor):
    """Refuses calls that mean another server than this one, `own`. Calls without a name are
    accepted: release 0.2.0 sends none.
    """

    def __init__(self, own: NameSource) -> None:
        self._own = own

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        meant = next((value for key, value in metadata if key == METADATA_KEY), "")
        if handler is None or not meant:
            return handler
        try:
            self._own().require(ServerName.unpack(str(meant)))
        except QmqError as refusal:
            return _refusing(handler, refusal)
        return handler


def _refusing(handler: Any, refusal: QmqError) -> Any:
    """A handler of the same kind that answers with the error, without reading the request."""

    async def refuse(context: Any) -> NoReturn:
        await abort(context, refusal, "")

    async def refuse_stream(context: Any) -> AsyncIterator[Any]:
        await abort(context, refusal, "")
        yield

    return (
        late_stream(handler, refuse_stream)
        if handler.response_streaming
        else late_unary(handler, refuse)
    )


def add_unregistered(
    add: Callable[[Any, Any], None], service: object, server: grpc.aio.Server
) -> None:
    """Add a service by generated code, without registering its methods with gRPC's core: calls are
    found by their names.

    gRPC's loop keeps a task for each registered method of a server, and waits for all of these
    tasks again at each call.
    """
    add(service, _Unregistered(server))


class _Unregistered:
    """Takes the handlers of generated code for a server."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Does nothing: the generic handlers have the same methods."""
