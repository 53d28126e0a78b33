"""Administrative work and damage must not delay a broker: searches yield, and an unreadable sector
is answered with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import ManualClock, alone, eventually, intake
from support.disks import BadSectors

from qmq.broker.admin import LOOKS_AT_ONCE, BrokerAdmin
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.dispatch.sessions import QueueGroup, QueueGroups
from qmq.client.connection.connection import connect
from qmq.errors import LogDamaged, MessageNotFound
from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.consume_log import FILE_ENTRIES, IndexEntry
from qmq.log.disk import BLOCK_BYTES, Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import MessageId, SubjectConfig
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

NOW_MS = ManualClock().now_ms


def store_on(folder: Path, disk: Disk | None = None) -> Store:
    return open_store(
        folder, LogConfig(segment_bytes=64 * 1024, cache_bytes=0), ManualClock(), disk=disk
    )


def broker_on(folder: Path, disk: Disk | None = None) -> Broker:
    return Broker(
        store_on(folder, disk),
        SubjectConfig,
        ManualClock(),
        BrokerConfig(),
        asyncio.get_running_loop(),
    )


@asynccontextmanager
async def counting_turns() -> AsyncIterator[list[int]]:
    """How often others had their turn meanwhile."""
    turns = [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await asyncio.sleep(0)
    turns[0] = 0
    yield turns
    counting.cancel()


def write_entries(store: Store) -> None:
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)


async def test_a_search_for_a_message_gives_way_after_each_file(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    queue = broker.store.open_queue("s", 0)
    for number in range(2 * FILE_ENTRIES + 10):
        queue.index.append(
            IndexEntry(number, number * 100, NOW_MS, 5, number, 0, number * 100, 100, 1)
        )
    queue.next_sequence = queue.visible_sequence = queue.index.count
    write_entries(broker.store)
    async with counting_turns() as turns:
        with pytest.raises(MessageNotFound):
            await BrokerAdmin(broker, "g1").find_message("s", MessageId(NOW_MS << 20 | 1, 0, 0))
    assert turns[0] >= 3
    broker.store.close()


class CountedGroups(QueueGroups):
    """Counts how often all of them were gone through."""

    walks = 0

    def __iter__(self) -> Iterator[QueueGroup]:
        self.walks += 1
        return super().__iter__()


async def test_ticks_do_not_go_through_all_groups(tmp_path: Path) -> None:
    clock = ManualClock()
    broker = Broker(
        store_on(tmp_path), SubjectConfig, clock, BrokerConfig(), asyncio.get_running_loop()
    )
    groups = broker.dispatch.groups = CountedGroups(broker.counters)
    for number in range(50):
        groups.state(broker.store.open_queue(f"s{number}", 0), "g")
    for _ in range(20):
        clock.now_ms += 50
        broker.tick()
    assert groups.walks == 0
    broker.store.close()


async def test_looking_at_many_queues_gives_way(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    for number in range(5 * LOOKS_AT_ONCE):
        broker.store.append([intake(broker.store.open_queue(f"s{number}", 0), [b"x"])])
    async with counting_turns() as turns:
        assert len(await BrokerAdmin(broker, "g1").queues("")) == 5 * LOOKS_AT_ONCE
        assert await BrokerAdmin(broker, "g1").groups("", "") == []
    assert turns[0] >= 5
    broker.store.close()


async def test_a_message_is_found_by_its_id_while_it_is_kept(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    queue = broker.store.open_queue("s", 0)
    producer = NOW_MS << 20 | 1
    for number in range(3):
        broker.store.append([intake(queue, [b"a", b"b"], producer=producer, number=number)])
    admin = BrokerAdmin(broker, "g1")
    found = await admin.find_message("s", MessageId(producer, 1, 1))
    assert (found.view.base_sequence, found.index) == (2, 1)
    queue.start_sequence = 4
    with pytest.raises(MessageNotFound):
        await admin.find_message("s", MessageId(producer, 1, 1))
    broker.store.close()


async def test_a_bad_sector_of_a_broker_alone_is_an_answer_not_its_end(tmp_path: Path) -> None:
    disk = BadSectors()
    fatal: list[BaseException] = []
    running = alone(store_on(tmp_path, disk), ManualClock(), fatal=fatal.append)
    broker, maintenance, server = running.broker, running.maintenance, running.data
    queue = broker.store.open_queue("s", 0)
    for number in range(100):
        broker.store.append([intake(queue, [bytes(900)], number=number)])
    broker.store.begin_flush().run()
    disk.spoil(tmp_path / "message" / f"{0:020d}.log", 5 * BLOCK_BYTES)
    await server.start("127.0.0.1", 0)
    maintenance.start()
    connection = await connect(f"127.0.0.1:{server.port}", "test")
    sequence, failures = 0, list[str]()
    while sequence < 100:
        fetch = wire.Fetch("s", 0, sequence, 1 << 40, 0, 8 << 20, [], [], [], 0).pack()
        try:
            answer = await connection.call(FrameKind.FETCH, fetch, timeout_s=10)
            sequence = wire.unpack_fetched(answer.payload)[0].next_sequence
        except LogDamaged as damage:
            failures.append(damage.message)
            sequence += 1
    assert 4 <= len(failures) <= 6
    assert all("qmq group reset" in message for message in failures)
    await eventually(lambda: broker.counters.damaged > 0)
    assert fatal == []
    connection.close()
    await connection.wait_closed()
    await server.stop()
    await maintenance.stop()
    broker.store.close()
