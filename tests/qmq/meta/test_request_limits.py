"""How much one request may make a control port hold."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.server import REQUEST_BYTES_MAX

LOCATE = "/qmq.v1.Meta/Locate"


Metadata = Sequence[tuple[str, str]]


async def locate(
    address: str,
    subject: str,
    compression: grpc.Compression | None = None,
    metadata: Metadata | None = None,
) -> grpc.StatusCode:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(LOCATE, request_serializer=pb.LocateRequest.SerializeToString)
        try:
            await call(
                pb.LocateRequest(subject=subject),
                compression=compression,
                metadata=metadata,
                timeout=20,
            )
        except grpc.aio.AioRpcError as failure:
            return failure.code()
    return grpc.StatusCode.OK


async def test_a_compressed_request_is_refused_before_it_grows(node: Node) -> None:
    assert await locate(node.address, "s", grpc.Compression.Gzip) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_large_request_is_refused(node: Node) -> None:
    assert (
        await locate(node.address, "s" * (REQUEST_BYTES_MAX + 1))
        is grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert await locate(node.address, "s" * 1_000_000) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_flood_of_metadata_is_refused(node: Node) -> None:
    for metadata in (
        [("a", "x" * 100_000)],
        [(f"a{number}", "x" * 100) for number in range(1_000)],
    ):
        assert (
            await locate(node.address, "s", metadata=metadata) is grpc.StatusCode.RESOURCE_EXHAUSTED
        )
    assert await locate(node.address, "s", metadata=[("a", "x")]) is grpc.StatusCode.NOT_FOUND, (
        "it is answered"
    )
