"""A client that sends to many subjects holds memory for the busy ones only."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import qmq
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node

SUBJECTS = 400
IDLE_BYTES_MAX = 1_500
"""Where a subject is, and what was sent there, is kept; a producer takes 4,000 bytes more."""


async def send_to_all(mq: qmq.Client, subjects: int) -> None:
    for at in range(0, subjects, 100):
        await asyncio.gather(*[mq.send(f"s-{number}", b"x") for number in range(at, at + 100)])


async def test_what_an_idle_subject_needs_is_given_up_and_what_a_busy_one_needs_is_kept(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await send_to_all(mq, 100)
        mq._idle.look(100)
        receipt = await mq.send("s-7", b"busy")
        mq._idle.look(100)
        assert [each.subject for each in mq.producers] == ["s-7"]
        mq._idle.look(100)
        mq._idle.look(100)
        assert not mq.producers
        again = await mq.send("s-7", b"again")
        assert (again.sequence, again.id.producer_id) == (receipt.sequence + 1, receipt.id.producer_id)
        assert [each.subject for each in mq.producers] == ["s-7"]


async def test_a_producer_with_an_undecided_message_is_kept(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"x")
        mq._idle.look(1)
        sending = asyncio.create_task(mq.send("s", b"y"))
        await asyncio.sleep(0)
        mq._idle.look(1)
        mq._idle.look(1)
        assert (await sending).sequence == 1


async def test_an_ordered_subject_is_given_up_too_and_its_order_goes_on(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(SubjectConfig("o", order=Order.STRICT, logical_partitions=16), partitions=2)
        for number in range(5):
            await mq.send("o", b"%d" % number, key="k")
            mq._idle.look(1)
            mq._idle.look(1)
            assert not mq.producers
        async with mq.ordered_consumer("o", "g") as consumer:
            assert [(await anext(consumer)).body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_memory_of_idle_subjects_comes_back(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await send_to_all(mq, 100)
        gc.collect()
        tracemalloc.start(1)
        try:
            await send_to_all(mq, 100 + SUBJECTS)
            made = {id(each) for each in mq.producers}
            mq._idle.look(len(made))
            mq._idle.look(len(made))
            await asyncio.sleep(1.1)  # the timers that watched for stalled answers end
            gc.collect()
            client = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/qmq/client/*"), tracemalloc.Filter(True, "*/qmq/delivery/*")]
            )
        finally:
            tracemalloc.stop()
        held = sum(each.size for each in client.statistics("filename"))
        assert held / SUBJECTS < IDLE_BYTES_MAX
