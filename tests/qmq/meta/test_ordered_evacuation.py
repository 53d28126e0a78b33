"""Partitions leave a broker group that was there and has lost its master, by themselves; and stay
where groups are well, or come later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from meta_support import SUBJECT, World
from qmq_coordination.broker_groups import group_key
from qmq_coordination.view import ClusterView
from support import ManualClock, eventually

from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.resharding import PATIENCE_MS, RENEWED_MS, Evacuation
from qmq.model import Fencing


class Setting:
    """A world, and a leader's evacuation that runs when the test says so."""

    def __init__(self, world: World) -> None:
        self.world, self.clock = world, ManualClock()
        self.view = ClusterView(world.embedded, monotonic_s=lambda: self.clock.now_ms / 1000)
        masters: Any = world.brokers
        self.controller = Controller(
            world.embedded, self.view, masters, self.clock, new_id=world.new_id
        )
        self.start()

    def start(self) -> None:
        """The metaserver starts, or starts again."""
        self.controller.leader.is_leader = True
        self.evacuation = Evacuation(self.view, self.controller, self.clock)

    async def members(self, *names: str) -> None:
        for name in names:
            await self.world.embedded.put(
                group_key(name, "members"), b'{"version": 1, "voters": ["x"], "learners": []}'
            )

    async def look(self, *, after_ms: int = 0) -> None:
        await self.view.refresh()
        self.clock.now_ms += after_ms
        self.evacuation.check()

    def groups(self) -> list[str]:
        state = self.view.ordered(SUBJECT)
        assert state is not None
        assert state.route is not None
        return [part.group for part in state.route.partitions]


@pytest.fixture
async def it() -> AsyncIterator[Setting]:
    setting = Setting(World())
    yield setting
    await setting.controller.stop()
    await setting.world.embedded.close()


async def ready(it: Setting, *, fencing: Fencing = Fencing.LEASE) -> None:
    """A metaserver, and then a cluster."""
    await it.look()
    await it.world.create(partitions=4, fencing=fencing)
    await it.members("a", "b", "c")
    await it.look()


async def test_writers_need_not_wait_for_a_broker_group_that_is_gone(it: Setting) -> None:
    await ready(it)
    assert it.groups() == ["a", "b", "a", "b"]
    await it.world.lose_master("a")
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    await eventually(lambda: it.groups() == ["b"] * 4)
    state = it.view.ordered(SUBJECT)
    assert state is not None
    assert len(state.fenced) == 2
    assert "no master" in state.changes[2].reason


async def test_a_group_that_elects_keeps_its_partitions(it: Setting) -> None:
    await ready(it)
    await it.world.lose_master("a")
    await it.look()
    await it.look(after_ms=PATIENCE_MS - 1)
    it.world.brokers.down.clear()
    await it.world.elect("a", 2)
    await it.look(after_ms=1)
    await it.look(after_ms=10 * PATIENCE_MS)
    assert it.groups() == ["a", "b", "a", "b"]


async def test_a_subject_that_is_fenced_by_majority_stays(it: Setting) -> None:
    await ready(it, fencing=Fencing.MAJORITY)
    await it.world.lose_master("a")
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    assert it.evacuation.moving == {}


async def test_with_no_group_left_to_go_to_nothing_is_moved(it: Setting) -> None:
    await ready(it)
    for group in ("a", "b", "c"):
        await it.world.lose_master(group)
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    assert it.evacuation.moving == {}
    assert it.groups() == ["a", "b", "a", "b"]


async def test_only_the_leader_moves_and_only_by_a_fresh_view(it: Setting) -> None:
    await ready(it)
    await it.world.lose_master("a")
    it.controller.leader.is_leader = False
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    assert it.evacuation.moving == {}
    it.controller.leader.is_leader = True
    await it.look()
    it.clock.now_ms += 60_000
    it.evacuation.check()
    assert it.evacuation.moving == {}


async def test_a_group_that_has_not_come_since_the_metaserver_began_is_not_lost(
    it: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    await ready(it)
    await it.world.lose_master("a")
    it.start()
    await it.look()
    await it.look(after_ms=100 * RENEWED_MS)
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    assert it.groups() == ["a", "b", "a", "b"]
    assert [
        record.args for record in caplog.records if "since this metaserver began" in record.message
    ] == [("a", "a")]
    it.world.brokers.down.clear()
    await it.world.elect("a", 2)
    await it.look()
    await it.world.lose_master("a")
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    await eventually(lambda: it.groups() == ["b"] * 4)


@pytest.mark.parametrize("stayed_ms", [RENEWED_MS - 1, RENEWED_MS])
async def test_a_masters_key_that_outlived_its_master_proves_nothing(
    it: Setting, stayed_ms: int
) -> None:
    """Everything lost its power: the store still has the keys when it starts, until their leases
    end. A master that stayed longer than its lease was there.
    """
    await ready(it)
    it.start()
    await it.look()
    await it.look(after_ms=stayed_ms)
    await it.look()
    await it.world.lose_master("a")
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    if stayed_ms < RENEWED_MS:
        assert it.evacuation.moving == {}
        assert it.groups() == ["a", "b", "a", "b"]
    else:
        await eventually(lambda: it.groups() == ["b"] * 4)


async def test_the_next_leader_knows_which_groups_were_there(it: Setting) -> None:
    it.controller.leader.is_leader = False
    await ready(it)
    await it.world.lose_master("a")
    await it.look()
    it.controller.leader.is_leader = True
    await it.look()
    await it.look(after_ms=PATIENCE_MS)
    await eventually(lambda: it.groups() == ["b"] * 4)
