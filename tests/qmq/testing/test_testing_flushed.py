"""Operations that wait for a flush on a majority, and those that do not, on disks whose syncs the
test holds up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

import qmq
from qmq.errors import InvalidArgument
from qmq.testing import TestCluster
from qmq.testing.machine import MortalDisk


class Gates:
    """Disks whose flushes wait while they are shut; what is synced in the event loop is not held
    up.
    """

    def __init__(self) -> None:
        self._open: dict[str, threading.Event] = {}

    def make_disk(self, name: str) -> MortalDisk:
        """The disk for TestCluster."""
        gate = self._open.setdefault(name, threading.Event())
        gate.set()
        return GatedDisk(gate)

    def shut(self) -> None:
        """No flush ends from now on."""
        for gate in self._open.values():
            gate.clear()

    def open(self, *names: str) -> None:
        """Let those end that wait, of some or of all."""
        for name in names or self._open:
            self._open[name].set()


class GatedDisk(MortalDisk):
    """See Gates."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def sync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._gate.wait()
        super().sync(fd)


@asynccontextmanager
async def gated(brokers: int) -> AsyncIterator[tuple[TestCluster, Gates, qmq.Client]]:
    """A cluster with gates, which are open at first and at the end."""
    gates = Gates()
    async with TestCluster(brokers=brokers, delay=False, make_disk=gates.make_disk) as cluster:
        mq = cluster.client()
        try:
            yield cluster, gates, mq
        finally:
            gates.open()


async def test_acks_flushed_waits_for_a_majoritys_disks_and_delays_no_other_send() -> None:
    async with gated(3) as (cluster, gates, mq):
        await mq.send("clicks", b"warm")
        gates.shut()
        waiting = asyncio.ensure_future(mq.send("payments", b"10", acks="flushed"))
        await mq.send("clicks", b"a")
        gates.open(cluster.master())
        await mq.send("clicks", b"b")
        await mq.send("payments", b"not so dear")
        assert not waiting.done()
        gates.open()
        assert (await waiting).subject == "payments"


async def test_a_node_alone_answers_acks_flushed_when_its_disk_has_it() -> None:
    async with gated(1) as (_, gates, mq):
        await mq.send("clicks", b"warm")
        gates.shut()
        waiting = asyncio.ensure_future(mq.send("payments", b"10", acks="flushed"))
        await mq.send("clicks", b"a")
        await mq.send("payments", b"not so dear")
        assert not waiting.done()
        gates.open()
        await waiting


async def test_a_subject_with_sync_flush_waits_and_its_neighbours_do_not() -> None:
    async with gated(3) as (_, gates, mq):
        await mq.metadata.create_subject(qmq.SubjectConfig("payments", flush=qmq.SubjectFlush.SYNC))
        await mq.send("payments", b"warm")
        await mq.send("clicks", b"warm")
        gates.shut()
        waiting = asyncio.ensure_future(mq.send("payments", b"10"))
        hasty = asyncio.ensure_future(mq.send("payments", b"11", acks="master"))
        await mq.send("clicks", b"a")
        assert not waiting.done()
        assert not hasty.done(), "the owner of the subject decides"
        gates.open()
        await asyncio.gather(waiting, hasty)


async def test_when_a_subject_is_flushed_can_be_changed_while_it_is_used() -> None:
    async with gated(3) as (_, gates, mq):
        await mq.send("payments", b"warm")
        await mq.metadata.set_subject_flush("payments", qmq.SubjectFlush.SYNC)
        await mq.metadata.set_subject_flush("payments", qmq.SubjectFlush.DEFAULT)
        gates.shut()
        await mq.send("payments", b"10")
        assert (await mq.metadata.list_subjects("payments"))[0].settings.flush == "default"


async def test_an_ordered_producer_may_wait_for_the_flush_too() -> None:
    async with gated(3) as (_, gates, mq):
        await mq.metadata.create_subject(
            qmq.SubjectConfig("rows", order=qmq.Order.STRICT, logical_partitions=8), partitions=1
        )
        await mq.send("rows", b"warm", key="k")
        gates.shut()
        waiting = asyncio.ensure_future(mq.send("rows", b"1", key="k", acks="flushed"))
        await mq.send("rows", b"2", key="l")
        assert not waiting.done()
        gates.open()
        await waiting


async def test_acks_flushed_survive_a_new_master() -> None:
    async with gated(3) as (cluster, gates, mq):
        await mq.send("payments", b"warm")
        gates.shut()
        waiting = asyncio.ensure_future(mq.send("payments", b"10", acks="flushed"))
        await mq.send("payments", b"behind it")
        old = cluster.master()
        gates.open(old)
        await cluster.kill(old)
        gates.open()
        await waiting
        got = [message.body async for message in _few(mq, 3)]
        assert b"10" in got


async def _few(mq: qmq.Client, count: int) -> AsyncIterator[qmq.Message]:
    async with mq.consumer("payments", "g") as consumer:
        async for message in consumer:
            yield message
            count -= 1
            if not count:
                return


async def test_acks_are_one_of_three_words() -> None:
    async with TestCluster(delay=False) as cluster:
        with pytest.raises(InvalidArgument, match="'quorum', 'flushed' or 'master'"):
            await cluster.client().send("s", b"x", acks="disk")


async def test_a_delayed_message_may_wait_for_the_flush_of_its_delay_group() -> None:
    gates = Gates()
    async with TestCluster(make_disk=gates.make_disk) as cluster:
        mq = cluster.client()
        try:
            await mq.send("s", b"warm", delay=timedelta(hours=1))
            gates.shut()
            waiting = asyncio.ensure_future(
                mq.send("s", b"1", delay=timedelta(hours=1), acks="flushed")
            )
            await mq.send("s", b"2", delay=timedelta(hours=1))
            assert not waiting.done()
            gates.open()
            await waiting
        finally:
            gates.open()
