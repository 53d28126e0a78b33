"""How much one request may make a control port hold."""

from __future__ import annotations

import grpc

from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc_server import REQUEST_BYTES_MAX

LOCATE = "/qmq.v1.Meta/Locate"


async def locate(address: str, subject: str, compression: grpc.Compression | None = None) -> grpc.StatusCode:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(LOCATE, request_serializer=pb.LocateRequest.SerializeToString)
        try:
            await call(pb.LocateRequest(subject=subject), compression=compression, timeout=20)
        except grpc.aio.AioRpcError as failure:
            return failure.code()
    return grpc.StatusCode.OK


async def test_a_compressed_request_is_refused_before_it_grows(node: Node) -> None:
    assert await locate(node.address, "s", grpc.Compression.Gzip) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_large_request_is_refused(node: Node) -> None:
    assert await locate(node.address, "s" * (REQUEST_BYTES_MAX + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await locate(node.address, "s" * 1_000_000) is grpc.StatusCode.INVALID_ARGUMENT
