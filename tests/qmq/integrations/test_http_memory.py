"""Receiving over HTTP holds a bounded part of bodies that are small on disk and large when they are
decompressed.
"""

from __future__ import annotations

import gc

import pytest
from support import memory_at_most

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("starlette", reason="needs starlette: pip install 'qmq[http]'")

import qmq  # noqa: E402
from qmq.integrations.http.site import HttpConfig, HttpServer  # noqa: E402
from qmq.limits import MIB  # noqa: E402
from qmq.node.dev_node import Node  # noqa: E402

COUNT = 200


async def test_receives_without_a_verdict_hold_a_bounded_part_and_lose_nothing(node: Node) -> None:
    async with (
        qmq.connect(node.address) as mq,
        mq.producer("zeros", compression="zstd") as producer,
    ):
        for _ in range(COUNT):
            await producer.send(bytes(MIB))
    server = HttpServer(
        HttpConfig("127.0.0.1", 0), lambda token: qmq.connect(node.address, state_dir=False)
    )
    await server.start()
    found: list[int] = []
    # Client and server share an event loop: while one parses an answer, the other may find that
    # a kept connection was idle for too long.
    one_each = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=one_each) as client:
        # An answer is held in several forms, by the server and by the client of this test.
        with memory_at_most(64 * MIB):
            while len(found) < COUNT:
                answer = await client.post(
                    "/subjects/zeros/groups/g/receive", json={"wait_s": 20, "messages_max": 100}
                )
                found += [each["attempt"] for each in answer.json()["messages"]]
                del answer
                gc.collect()  # an answer of httpx refers to itself
    await server.stop()
    assert found == [1] * COUNT
