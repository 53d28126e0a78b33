"""`qmq gateway --processes N`: several processes on one port. A process that dies is restarted."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from gateway_stub import message, receive_request

from qmq.gateway.receipts import GATEWAY_ID_BYTES
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.testing import TestCluster

pytestmark = pytest.mark.long

HEADERS = (("x-mq-client-id", "stub"),)


@asynccontextmanager
async def gateway_of(
    cluster: TestCluster, port: int, processes: int, *more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ready when all of its processes are. At the end it stops cleanly."""
    options = (
        "--server",
        cluster.address,
        "--port",
        str(port),
        "--processes",
        str(processes),
        *more,
    )
    command = (sys.executable, "-m", "qmq.cli", "gateway", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        await until_said(process, f"{processes} processes are ready at 127.0.0.1:{port}")
        yield process
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_said(process: asyncio.subprocess.Process, what: str) -> None:
    assert process.stdout is not None
    while what not in (line := (await process.stdout.readline()).decode()):
        assert line, "the gateway ended"


async def gateway_that_answers(port: int) -> bytes:
    """The process that a new connection reaches: its messages' handles name it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = MessagingServiceStub(channel)
        sent = await stub.SendMessage(
            calls.SendMessageRequest(messages=[message("orders")]),
            metadata=HEADERS,
            wait_for_ready=True,
        )
        assert sent.status.code == api.OK
        while True:
            async for answer in stub.ReceiveMessage(
                receive_request("orders", batch=1), metadata=HEADERS
            ):
                if answer.HasField("message"):
                    handle = answer.message.system_properties.receipt_handle
                    return base64.urlsafe_b64decode(handle + "==")[:GATEWAY_ID_BYTES]


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_connections_at_one_port_reach_all_processes_and_a_dead_one_comes_back() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    async with TestCluster() as cluster, gateway_of(cluster, port, 2) as process:
        seen: set[bytes] = set()
        while len(seen) < 2:
            seen.add(await gateway_that_answers(port))
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        await until_said(process, "is ready at")
        while len(seen) < 3:
            seen.add(await gateway_that_answers(port))


async def test_each_process_serves_http_at_a_port_of_its_own() -> None:
    httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    first = port + 1
    async with (
        TestCluster() as cluster,
        gateway_of(cluster, port, 2, "--http-port", str(first)),
        httpx.AsyncClient(timeout=60) as http,
    ):
        for number in range(2):
            sent = await http.post(
                f"http://127.0.0.1:{first + number}/subjects/orders", content=b"7"
            )
            assert sent.status_code == 200, sent.text
