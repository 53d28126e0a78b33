"""gRPC: a call's caller is known before its request is read, and requests of strangers that do not
end are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import node_config, running

from qmq.errors import QmqError
from qmq.rpc.channel import abort
from qmq.rpc.network import NETWORK
from qmq.rpc.server import (
    RequestBodies,
    RpcBounds,
    RpcListener,
    late_stream,
    late_unary,
    rpc_server,
)
from qmq.rpc.strangers import StrangerBounds

LONG_S = 3600.0


class Echo(grpc.aio.ServerInterceptor):
    """Reads requests late. A call with the metadata `name` has a name."""

    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)

        async def unary(context: Any) -> Any:
            named = any(key == "name" for key, _ in context.invocation_metadata())
            try:
                return await self._bodies.read(context, "" if named else "10.0.0.1:7")
            except QmqError as failure:
                await abort(context, failure, "")

        async def stream(context: Any) -> AsyncIterator[Any]:
            yield await unary(context)

        return (
            late_stream(handler, stream)
            if handler.response_streaming
            else late_unary(handler, unary)
        )


async def _unused(_: bytes, __: Any) -> bytes:
    raise AssertionError("the interceptor answers")


@asynccontextmanager
async def echoing(bounds: StrangerBounds, grace_s: float = 0) -> AsyncIterator[grpc.aio.Channel]:
    door = RpcListener(RpcBounds(100, 100))
    server = rpc_server(door, (Echo(RequestBodies(bounds, grace_s)),))
    handlers = {
        "Ask": grpc.unary_unary_rpc_method_handler(_unused),
        "Follow": grpc.unary_stream_rpc_method_handler(_unused),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    served = await NETWORK.serve(server, "127.0.0.1", 0, door)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            yield channel
    finally:
        await served.stop(None)


async def unfinished() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def ended(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as failure:
        return f"{failure.code().name}: {failure.details()}"
    return "answered"


async def test_requests_pass_whole_also_to_methods_with_a_stream_of_answers() -> None:
    body = bytes(4_000_000)
    async with echoing(StrangerBounds(10, time_s=LONG_S), grace_s=LONG_S) as channel:
        assert await channel.unary_unary("/t/Ask")(body) == body
        assert [each async for each in channel.unary_stream("/t/Follow")(body)] == [body]


async def test_strangers_requests_beyond_the_places_are_ended_and_others_served() -> None:
    async with echoing(StrangerBounds(2, bytes_max=1 << 40, time_s=LONG_S)) as channel:
        ask = channel.stream_unary("/t/Ask")
        calls = [asyncio.ensure_future(ended(ask(unfinished()))) for _ in range(3)]
        done, under_way = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert "did not arrive in time" in done.pop().result()
        assert len(under_way) == 2
        assert await channel.unary_unary("/t/Ask")(b"x", metadata=(("name", "a"),)) == b"x"
        for each in under_way:
            each.cancel()


async def test_a_strangers_request_has_its_time_and_one_with_a_name_has_more() -> None:
    async with echoing(StrangerBounds(10, bytes_max=1 << 40, time_s=0)) as channel:
        ask = channel.stream_unary("/t/Ask")
        named = asyncio.ensure_future(ended(ask(unfinished(), metadata=(("name", "a"),))))
        assert "did not arrive in time" in await ended(ask(unfinished()))
        assert not named.done()
        named.cancel()


async def test_a_call_without_a_request_is_refused() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async with echoing(StrangerBounds(10, time_s=LONG_S), grace_s=LONG_S) as channel:
        assert "the call has no request" in await ended(channel.stream_unary("/t/Ask")(nothing()))


@pytest.mark.parametrize(
    "metadata", [(("authorization", "Bearer qmq_made-up"),), (("qmq-server", "other/meta/x"),)]
)
async def test_a_metaserver_refuses_a_token_and_a_wrong_name_before_the_request(
    tmp_path: Path, metadata: Sequence[Any]
) -> None:
    async with (
        running(node_config(tmp_path)) as node,
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        assert not (
            await ended(
                channel.stream_unary("/qmq.v1.Meta/Locate")(unfinished(), metadata=metadata)
            )
        ).startswith("answered")
