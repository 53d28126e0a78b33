"""A program that sends much without waiting: its bytes leave meanwhile, and all of them arrive."""

from __future__ import annotations

import asyncio

from fake_cluster import Cluster, cluster

from qmq.client.connection.connection import WRITE_BYTES, Connection
from qmq.limits import KIB

BATCH = [bytes(100 * KIB)]


async def connected(it: Cluster) -> Connection:
    """The client's connection to the broker, after a first message."""
    producer = it.mq.producer("s")
    await producer.send(b"first")
    (sender,) = producer.senders
    assert sender.connection is not None
    return sender.connection


async def test_many_bytes_leave_while_the_program_still_sends() -> None:
    async with cluster(1) as it:
        stream = (await connected(it)).stream
        producers = [it.mq.producer("s") for _ in range(7)]
        for producer in producers:
            await producer.send(b"x")
        before, rounds = stream.taken_bytes, list[int]()
        asyncio.get_running_loop().call_soon(rounds.append, 1)
        tickets = [producer.send_many(BATCH) for producer in producers]
        assert not rounds, "the event loop went round: the test shows nothing"
        assert stream.taken_bytes - before >= WRITE_BYTES
        for each in tickets:
            await each
        assert [len(sent.bodies[0]) for sent in it.groups[0].arrived[-7:]] == [100 * KIB] * 7


async def test_few_bytes_leave_together_at_the_end_of_the_round() -> None:
    async with cluster(1) as it:
        stream = (await connected(it)).stream
        producer = it.mq.producer("s")
        await producer.send(b"x")
        before = stream.taken_bytes
        tickets = [producer.send_many(BATCH) for _ in range(2)]
        assert stream.taken_bytes == before
        for each in tickets:
            await each
