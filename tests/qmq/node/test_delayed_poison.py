"""Delayed batches that an older version let in, and of which no message can be made: they hold up
nothing but themselves.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from support import eventually, node_config, running
from support.hostile import LIES, crc, region_of

import qmq
from qmq.delay.batches import SchedulePlace
from qmq.delay.broker import schedule_of
from qmq.delay.plan_log import runs_of
from qmq.log.actions import PlanAction
from qmq.log.store import Intake
from qmq.node.dev_node import Node
from qmq.proto.v1 import delay_pb2
from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns, parse_header

SOON = timedelta(milliseconds=1)


def store_poison(node: Node, lie: str, subject: str = "s", *, in_s: int = 0) -> None:
    """Store a message that intake would refuse."""
    assert node.delay is not None
    broker = node.delay.broker
    region = region_of(lie, subject=subject.encode(), due_ms=int(time.time() + in_s) * 1000)
    broker.append_own(
        [Intake(broker.store.open_queue(subject, 0), region, crc(region), parse_header(region), 0)]
    )


async def test_delayed_messages_are_listed_beside_those_that_cannot_be_read(tmp_path: Path) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        receipt = await mq.send("s", b"good", delay=timedelta(days=1))
        for number, lie in enumerate(LIES):
            store_poison(node, lie, f"s{number}", in_s=86_400)
        listed = await mq.metadata.list_delayed(delay_pb2.ListDelayedRequest(messages_max=100))
        assert str(receipt.delayed_id) in [each.id for each in listed.messages]
        # those that claim to be compressed cannot be read
        assert len(listed.messages) == 1 + len(LIES) - 2
        assert sum([each.pending for each in (await mq.delayed.stats()).groups]) == 1 + len(LIES)


def bad_messages(node: Node) -> int:
    """Those that were set aside and those that cannot be read."""
    assert node.delay is not None
    engine = node.delay.work.require_engine()
    return engine.dispatcher.set_aside + len(engine.damaged)


def stored(node: Node, subject: str, partition: int = 0) -> int:
    """Messages that reached the real-time broker."""
    queue = node.broker.store.queue(subject, partition)
    return 0 if queue is None else queue.next_sequence


HARMLESS = {"a number beyond a message id", "a create time before 1970"}
"""It leaves under another number; with its delta the time is 1970."""


@pytest.mark.sampled
async def test_delayed_poison_holds_up_no_other_message_also_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = node_config(tmp_path, delay=True)
    subjects = dict(zip(LIES, (f"s{number}" for number in range(len(LIES))), strict=True))
    counts = {subject: 2 + (lie in HARMLESS) for lie, subject in subjects.items()}
    bad = len(LIES) - len(HARMLESS)
    async with running(config) as node, qmq.connect(node.address) as mq:
        for lie, subject in subjects.items():
            await mq.metadata.create_subject(qmq.SubjectConfig(subject))
            store_poison(node, lie, subject)
            await mq.send_many(subject, [b"1", b"2"], delays=SOON)
        await eventually(
            lambda: all(stored(node, subject) == count for subject, count in counts.items())
        )
        await eventually(lambda: bad_messages(node) == bad)
        assert "is set aside" in caplog.text
        assert "cannot be read and stays pending" in caplog.text
    async with running(config) as node, qmq.connect(node.address) as mq:
        for subject in subjects.values():
            await mq.send(subject, b"3", delay=SOON)
        await eventually(
            lambda: all(stored(node, subject) == count + 1 for subject, count in counts.items())
        )
        await eventually(lambda: bad_messages(node) == bad)


async def test_one_poison_message_does_not_stop_the_others_of_its_batch(tmp_path: Path) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=64), partitions=1
        )
        assert node.delay is not None
        broker, now_ms, end_ms = node.delay.broker, int(time.time() * 1000), (1 << 63) - 1
        columns = Columns(
            [b"bad", b"bad", b"bad"],
            keys=[b"k"] * 3,
            create_deltas=[0, 1, 2],
            due_times_ms=[now_ms] * 3,
        )
        _, region = encode(
            b"o",
            columns,
            producer_id=9,
            batch_sequence=0,
            create_time_ms=end_ms,
            flags=BatchFlag.ORDERED,
        )
        broker.append_own(
            [Intake(broker.store.open_queue("o", 0), region, crc(region), parse_header(region), 0)]
        )
        await mq.send("o", b"good", key="k", delay=SOON)
        await mq.send("o", b"good", key="l", delay=SOON)
        await eventually(lambda: stored(node, "o", 1) == 2 and bad_messages(node) == 3)


async def test_an_unreadable_plan_is_given_up_and_its_readable_messages_go(tmp_path: Path) -> None:
    """Its messages were planned by the master before; one of them is damaged since."""
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        assert node.delay is not None
        broker = node.delay.broker
        await node.delay.work.stop()
        store_poison(node, "garbage that claims zstd")
        await mq.send("s", b"readable", delay=SOON)
        schedule = schedule_of(broker.store)
        await eventually(lambda: sum(each.messages for each in schedule.buckets()) == 2)
        (bucket,) = [each.bucket for each in schedule.buckets()]
        broker.act(
            PlanAction(
                1,
                "s",
                0,
                "broker-0",
                77,
                0,
                runs_of([SchedulePlace(bucket, 0), SchedulePlace(bucket, 1)]),
            )
        )
        await broker.committed()
    async with running(node_config(tmp_path, delay=True)) as node:
        await eventually(lambda: stored(node, "s") == 1 and bad_messages(node) >= 1)
