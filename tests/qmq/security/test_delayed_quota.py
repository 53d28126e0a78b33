"""The quota of delayed messages bounds how many of a subject wait in a delay group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from support import eventually

import qmq
from qmq.errors import QuotaExceeded
from qmq.node.replica.node import ReplicaNode
from qmq.testing import TestCluster, virtual
from qmq.testing.machine import ReplicaMachine
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import HEADER, HEADER_BYTES, FrameKind
from qmq.wire.frame_payloads import unpack_error

HOUR = timedelta(hours=1)


def delay_node(cluster: TestCluster) -> ReplicaNode:
    """The delay group's master."""
    machine = cluster.machine(cluster.master("delay"))
    assert isinstance(machine, ReplicaMachine)
    assert machine.node is not None
    return machine.node


@asynccontextmanager
async def limited(limit: int, *, delay: int = 1) -> AsyncIterator[tuple[TestCluster, qmq.Client]]:
    """A cluster in which each subject `later*` may have so many delayed messages."""
    async with TestCluster(delay=delay, clock=virtual()) as cluster:
        mq = cluster.client()
        await mq.access.put_quota("subject:later*", {"delayed_messages": limit})
        await mq.send("other", b"0", delay=HOUR)
        await eventually(lambda: delay_node(cluster).broker.access.has_quotas)
        yield cluster, mq


async def test_a_subject_has_so_many_delayed_messages_and_no_more() -> None:
    async with limited(3) as (cluster, mq):
        ids = [
            (await mq.send("later", b"%d" % number, delay=HOUR)).delayed_id for number in range(3)
        ]
        with pytest.raises(
            QuotaExceeded, match=r"'later' has 3 delayed messages .* and 1 more are over the 3"
        ) as caught:
            await mq.send("later", b"x", delay=HOUR)
        assert "qmq delay cancel" in caught.value.message
        await mq.send("later", b"at once")
        await mq.send("later.too", b"another subject", delay=HOUR)
        await mq.send_many("other", [b"x"] * 5, delays=HOUR)
        assert ids[0] is not None
        assert ids[1] is not None
        await mq.delayed.move(ids[0], HOUR * 2)
        with pytest.raises(QuotaExceeded):
            await mq.send("later", b"a moved message waits still", delay=HOUR)
        await mq.delayed.cancel(ids[1])
        await mq.send("later", b"in its place", delay=HOUR)
        await cluster.clock.advance(hours=1, seconds=1)
        schedule = delay_node(cluster).broker.store.projection
        await eventually(lambda: schedule.pending.of("later") == 1)
        await mq.send_many("later", [b"1", b"2"], delays=HOUR)
        with pytest.raises(QuotaExceeded):
            await mq.send("later", b"x", delay=HOUR)


async def test_subjects_that_a_principal_created_have_so_many_delayed_messages_together() -> None:
    async with TestCluster(delay=1, clock=virtual()) as cluster:
        mq = cluster.client()
        await mq.access.put_quota("*", {"delayed_messages": 3})
        await mq.send("one", b"0", delay=HOUR)
        await eventually(lambda: delay_node(cluster).broker.access.has_quotas)
        created_by = delay_node(cluster).view.subject("one").created_by
        await mq.send_many("two", [b"1", b"2"], delays=HOUR)
        await eventually(lambda: delay_node(cluster).view.subject("two") is not None)
        for name in ("one", "two"):
            with pytest.raises(
                QuotaExceeded, match=f"that {created_by} created have 3 delayed messages"
            ):
                await mq.send(name, b"x", delay=HOUR)
        await cluster.clock.advance(hours=1, seconds=1)
        await eventually(lambda: not delay_node(cluster).broker.store.projection.pending.all())
        await mq.send("two", b"x", delay=HOUR)


async def test_a_batch_finds_room_whole_or_not_at_all() -> None:
    async with limited(5) as (_, mq):
        with pytest.raises(QuotaExceeded, match="6 more"):
            await mq.send_many("later", [b"x"] * 6, delays=HOUR)
        await mq.send_many("later", [b"x"] * 5, delays=HOUR)


async def test_a_recurring_message_takes_one_place_whatever_runs_it_has() -> None:
    async with limited(1) as (cluster, mq):
        await mq.send("later", b"x", cron="0 * * * *", zone="UTC")
        await cluster.clock.advance(hours=5)
        with pytest.raises(QuotaExceeded, match="'later' has 1 delayed messages"):
            await mq.send("later", b"x", delay=HOUR)


async def test_the_next_master_continues_counting() -> None:
    async with limited(3, delay=3) as (cluster, mq):
        await mq.send_many("later", [b"x"] * 3, delays=HOUR)
        first = cluster.master("delay")
        await cluster.kill(first)
        await cluster.until_master("delay", other_than=first)
        with pytest.raises(QuotaExceeded, match="has 3"):
            await mq.send("later", b"x", delay=HOUR)


async def test_a_retry_of_a_stored_batch_is_answered_over_the_quota_too() -> None:
    async with limited(1) as (cluster, mq):
        await mq.send("later", b"now")
        broker = delay_node(cluster).broker
        await eventually(lambda: broker.access.has_quotas and broker.look_up("later") is not None)
        due_ms = broker.clock.time_ms() + 60_000
        answers: dict[int, bytes] = {}

        class Asker:
            """A broker's end of a client's connection."""

            def send(self, answer: bytes) -> None:
                answers[HEADER.unpack_from(answer)[4]] = answer

        def ask(request_id: int, number: int) -> None:
            envelope, region = encode(
                b"later",
                Columns([b"x"], due_times_ms=[due_ms]),
                producer_id=1,
                batch_sequence=number,
                create_time_ms=1,
            )
            broker.produce(Asker(), request_id, memoryview(envelope + region))

        ask(1, 0)
        ask(2, 0)  # in the same write
        await eventually(lambda: len(answers) == 2)
        ask(3, 0)
        ask(4, 1)
        await eventually(lambda: len(answers) == 4)
        kinds = {
            request_id: HEADER.unpack_from(answer)[1] for request_id, answer in answers.items()
        }
        assert kinds == {
            1: FrameKind.PRODUCED,
            2: FrameKind.PRODUCED,
            3: FrameKind.PRODUCED,
            4: FrameKind.ERROR,
        }
        assert answers[1][HEADER_BYTES:] == answers[2][HEADER_BYTES:] == answers[3][HEADER_BYTES:]
        assert isinstance(unpack_error(answers[4][HEADER_BYTES:]), QuotaExceeded)
