"""A master's write lease for ordered messages: it begins with the master's lease, ends before that
lease, and closes partitions that were fenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from qmq_coordination.coordination_store import NO_LEASE, LeaseId
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.ordered_records import Fence, fence_key
from qmq_replication.coordinator import Holding
from support import ManualClock, eventually

from qmq.errors import NotMaster
from qmq.node.replica.status import WriteLease


class FakeQueue:
    sealed = None

    def __init__(self, name: str) -> None:
        self.id = name


class FakeBroker:
    """Remembers what it was asked to close."""

    def __init__(self) -> None:
        self.serves = True
        self.asked = 0
        self.sealed: dict[str, tuple[str, int]] = {}
        self.store = self

    def require_serving(self) -> None:
        self.asked += 1
        if not self.serves:
            raise NotMaster("not yet")

    def open_queue(self, subject: str, number: int) -> FakeQueue:
        return FakeQueue(f"{subject}/{number}")

    def seal(self, queue: FakeQueue, change_id: str, to_version: int) -> int:
        self.sealed[queue.id] = change_id, to_version
        return 0


class World:
    def __init__(self, store: EmbeddedStore) -> None:
        self.store, self.broker, self.clock = store, FakeBroker(), ManualClock()
        self.right = WriteLease(self.broker, store, "g", self.clock, lease_ms=lambda: 5000)  # type: ignore[arg-type]

    def held(self, lease: int, *, epoch: int = 3, asked_ms: int | None = None) -> None:
        self.right.held(
            epoch,
            Holding(epoch, LeaseId(lease)),
            self.clock.now_ms if asked_ms is None else asked_ms,
        )


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[World]:
    world = World(EmbeddedStore(tmp_path / "store.db"))
    yield world
    world.right.end()
    await world.store.close()


async def test_there_is_no_mastership_before_the_store_confirmed_the_lease(it: World) -> None:
    assert not it.right()
    it.right.held(3, Holding(3, NO_LEASE), it.clock.now_ms)
    it.right.held(3, Holding(4, LeaseId(1)), it.clock.now_ms)
    await asyncio.sleep(0)
    assert not it.right()
    it.held(1)
    await eventually(it.right)


async def test_the_right_ends_before_the_lease_does_counted_from_before_it_was_asked_for(
    it: World,
) -> None:
    it.held(1)
    await eventually(it.right)
    begin = it.clock.now_ms
    it.clock.now_ms = begin + 4499
    assert it.right()
    it.clock.now_ms = begin + 4500
    assert not it.right()
    it.held(1, asked_ms=begin + 1000)
    assert it.right()
    it.clock.now_ms = begin + 1000 + 4500
    assert not it.right()


async def test_fences_are_closed_before_there_is_a_right_under_another_lease(it: World) -> None:
    it.held(1)
    await eventually(it.right)
    await it.store.put(fence_key("g", "orders", 5), Fence("c7", 8).encode())
    await it.store.put(fence_key("other", "orders", 6), Fence("c7", 8).encode())
    it.held(1)
    assert it.broker.sealed == {}
    it.right.end()
    it.broker.serves = False
    it.held(2)
    await eventually(lambda: it.broker.asked > 1)
    assert not it.right()
    it.broker.serves = True
    await eventually(it.right)
    assert it.broker.sealed == {"orders/5": ("c7", 8)}


async def test_a_lost_mastership_ends_the_right_at_once(it: World) -> None:
    it.held(1)
    await eventually(it.right)
    it.right.end()
    assert not it.right()
