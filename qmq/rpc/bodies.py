"""Reads the body of a gRPC request after its caller is known, and bounds the bodies of callers without a name.

gRPC reads a request before it calls a method with one request, so it holds 16 MiB for callers that say nothing about themselves. It calls
a method with a stream of requests first, and the bytes on the wire are the same. So the methods of a server are served as streams:

    metadata, certificate  ──▶  who is it?  ──▶  `read`: the only request  ──▶  the method

Meanwhile a call that sends its body holds what HTTP/2 allows without a reader, 64 KiB. gRPC does not tell how many bytes of a request are
there: the body of a stranger that is not whole after `GRACE_S` counts as REQUEST_BYTES_MAX (`qmq.rpc.strangers`), and has `time_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import InvalidArgument, Overloaded
from qmq.process.address import host_of
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.security.principal import UNIX_PEER

REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
GRACE_S: Final = 1.0
BOUNDS: Final = StrangerBounds(places=16, bytes_max=16 * REQUEST_BYTES_MAX)


class RequestBodies:
    """The bodies under way at one server."""

    def __init__(self, bounds: StrangerBounds = BOUNDS, grace_s: float = GRACE_S) -> None:
        self._time_s, self._grace_s = bounds.time_s, grace_s
        self._strangers = Strangers(bounds, time.monotonic)

    async def read(self, context: Any, stranger: str) -> Any:
        """The request of a call. `stranger` is the address of a caller without a name (`peer_address`), "" for one with a name.

        Raises InvalidArgument if there is none, or bytes that are no such request; Overloaded if a stranger's was not whole in time.
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
            raise InvalidArgument("the bytes of the call are not a request of this method") from None
        except TimeoutError:
            raise Overloaded("the request did not arrive in time: show a token or a certificate, or send it again") from None
        if found is grpc.aio.EOF:
            raise InvalidArgument("the call has no request")
        return found


def peer_host(address: str) -> str:
    """The host of a peer, for whose network its requests count (`qmq.rpc.strangers`), or `unix`."""
    return address if address == UNIX_PEER else host_of(address)


def late_unary(handler: Any, serve: Callable[[Any], Awaitable[Any]]) -> Any:
    """The handler of a method with one answer; `serve` gets the context, and reads the request itself."""

    async def served(_: Any, context: Any) -> Any:
        return await serve(context)

    return grpc.stream_unary_rpc_method_handler(served, handler.request_deserializer, handler.response_serializer)


def late_stream(handler: Any, serve: Callable[[Any], AsyncIterator[Any]]) -> Any:
    """The handler of a method with a stream of answers; `serve` as for `late_unary`."""

    async def served(_: Any, context: Any) -> AsyncIterator[Any]:
        async for each in serve(context):
            yield each

    return grpc.stream_stream_rpc_method_handler(served, handler.request_deserializer, handler.response_serializer)
