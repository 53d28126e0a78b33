"""The gRPC server of a control port, with the bounds of its `RpcListener`, and the refusal of calls that mean another server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc

from qmq.errors import QmqError
from qmq.rpc.bodies import REQUEST_BYTES_MAX, late_stream, late_unary
from qmq.rpc.channel import MESSAGE_BYTES_MAX, abort
from qmq.rpc.listener import RpcListener
from qmq.rpc.server_name import METADATA_KEY, NameSource, ServerName

_STREAMS_MAX: Final = 1000
"""The most calls under way on one connection."""


def rpc_server(door: RpcListener, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
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
    return grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=bounds.calls_max)


class NameCheck(grpc.aio.ServerInterceptor):
    """Refuses calls that mean another server than this one, `own`. Calls without a name are accepted: release 0.2.0 sends none."""

    def __init__(self, own: NameSource) -> None:
        self._own = own

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
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

    return late_stream(handler, refuse_stream) if handler.response_streaming else late_unary(handler, refuse)


def add_unregistered(add: Callable[[Any, Any], None], service: object, server: grpc.aio.Server) -> None:
    """Add a service by generated code, without registering its methods with gRPC's core: calls are found by their names.

    gRPC's loop keeps a task for each registered method of a server, and waits for all of these tasks again at each call.
    """
    add(service, _Unregistered(server))


class _Unregistered:
    """Takes the handlers of generated code for a server."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Does nothing: the generic handlers have the same methods."""
