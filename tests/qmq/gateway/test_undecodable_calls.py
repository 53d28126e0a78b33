"""Bytes that are no request, in every call of RocketMQ's service: the client hears that it sent
them, and the log stays empty.
"""

from __future__ import annotations

import grpc
import pytest
from gateway_stub import gateway_on

from qmq.proto.rocketmq import service_pb2 as calls
from qmq.testing import TestCluster

SERVICE = calls.DESCRIPTOR.services_by_name["MessagingService"]


async def test_bytes_that_are_no_request_are_refused_by_every_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with TestCluster() as cluster, gateway_on(cluster) as stub:
        said = dict[str, str]()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stub.gateway.port}") as channel:
            for method in SERVICE.methods:
                call = channel.stream_stream(f"/{SERVICE.full_name}/{method.name}")(
                    iter([b"\xff\xff"]), metadata=stub.headers, timeout=30
                )
                try:
                    answers = [each async for each in call]
                    said[method.name] = (
                        str(calls.TelemetryCommand.FromString(answers[0]).status.code)
                        if answers
                        else "nothing"
                    )
                except grpc.aio.AioRpcError as failure:
                    said[method.name] = failure.code().name
        assert said.pop("Telemetry") not in ("UNKNOWN", "nothing")
        assert set(said.values()) == {"INVALID_ARGUMENT"}
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
