"""Paused groups, consumers and clients at the broker: frame by frame for lanes, with clients for
the rest, over real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from lane_support import SUBJECT, world
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.subjects import (
    EVERY,
    PauseKind,
    PauseRecord,
    SettingsRecord,
    Whom,
    pause_key,
    settings_key,
)
from qmq_coordination.view import ClusterView
from support import node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.client.connection.connection import Connection, connect
from qmq.errors import UnknownConsumer
from qmq.model import GroupSettings
from qmq.node.broker_assembly import ViewRules
from qmq.node.dev_node import Node
from qmq.process.event_loop import SystemClock
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Verdict

_R = TypeVar("_R")

WAIT_MS, LEASE_MS = 20_000, 1_000
KINDS = [
    Whom(PauseKind.GROUP, SUBJECT, "g"),
    Whom(PauseKind.GROUP, EVERY, "g"),
    Whom(PauseKind.CONSUMER, SUBJECT, "g", "c1"),
    Whom(PauseKind.CLIENT, name="test"),
]


async def pause(node: Node, whom: Whom) -> None:
    await node.coordination.put(pause_key(whom), PauseRecord(1).encode())
    await node.view.refresh()


async def resume(node: Node, whom: Whom) -> None:
    await node.coordination.delete(pause_key(whom))
    await node.view.refresh()


async def begun(asking: Coroutine[Any, Any, _R]) -> asyncio.Task[_R]:
    """A request in flight, before all later requests of its connection."""
    task = asyncio.create_task(asking)
    await asyncio.sleep(0)
    return task


# --- rules over the view --------------------------------------------------------------------------


async def test_settings_are_looked_up_once_and_again_when_the_view_has_others() -> None:
    store, news = EmbeddedStore(), list[int]()
    view = ClusterView(store)
    rules = ViewRules(view, GroupSettings(2, (10,)), lambda: news.append(1))
    found = rules.settings("s", "g")
    assert (found, rules.settings("s", "g") is found) == (GroupSettings(2, (10,)), True)
    await store.put("/qmq/subjects/t", b'{"name": "t"}')
    await view.refresh()
    assert (rules.settings("s", "g") is found, news) == (True, [])
    await store.put(settings_key(EVERY, "g"), SettingsRecord(9).encode())
    await view.refresh()
    assert (rules.settings("s", "g"), news) == (GroupSettings(9, (10,)), [1])
    await store.close()


# --- ordered subjects -----------------------------------------------------------------------------


@pytest.mark.parametrize("whom", KINDS, ids=str)
async def test_a_paused_lane_gets_no_messages_settles_and_continues_when_resumed(
    tmp_path: Path, whom: Whom
) -> None:
    async with world(tmp_path) as it:
        await it.produce([b"a", b"b", b"c", b"d"])
        lane = await it.attach(lease_ms=1_000)
        _, first = await it.pull(lane, messages_max=2)
        await pause(it.node, whom)
        delivery, nothing = await it.pull(lane, 2)
        assert (len(first), nothing, delivery.next_sequence, delivery.is_end) == (2, [], 2, False)
        await it.settle(lane, (0, 1))
        pulling = await begun(it.pull(lane, 2, wait_ms=WAIT_MS))
        await it.connection.call(FrameKind.HEARTBEAT, wire.pack_session(lane.session), timeout_s=10)
        assert not pulling.done()
        await resume(it.node, whom)
        assert [got.sequence for got in (await pulling)[1]] == [2, 3]


async def test_a_paused_consumer_s_lane_does_not_hold_up_those_of_others(tmp_path: Path) -> None:
    async with world(tmp_path, (1, 0, 8), (2, 8, 16)) as it:
        other = await it.another()
        mine, theirs = (
            await it.attach(it.part(1, 0, 8).range),
            await other.attach(it.part(2, 8, 16).range, consumer="c2", partition=2),
        )
        await pause(it.node, Whom(PauseKind.CONSUMER, SUBJECT, "g", "c1"))
        await it.produce([b"a"], lps=[0])
        await it.produce([b"b"], lps=[8], partition=2)
        assert len((await other.pull(theirs, wait_ms=WAIT_MS))[1]) == 1
        assert (await it.pull(mine))[1] == []
        other.connection.close()
        await other.connection.wait_closed()


# --- unordered subjects ---------------------------------------------------------------------------


class Shifted(SystemClock):
    """A clock that a test puts forward."""

    ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


class Puller:
    """One consumer, frame by frame."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name = connection, name
        self.session = 0

    async def attach(self, group: str = "g") -> None:
        request = wire.Attach(
            SUBJECT, 0, group, self.name, "life", -1, "earliest", LEASE_MS, [], []
        )
        answer = await self.connection.call(FrameKind.ATTACH, request.pack(), timeout_s=10)
        self.session = wire.Attached.unpack(answer.payload).session

    async def pull(self, messages_max: int, wait_ms: int = 0) -> list[int]:
        """Sequences."""
        payload = wire.pack_pull(wire.Pull(self.session, messages_max, 1 << 20, wait_ms))
        _, _, ranges, _, _ = wire.unpack_delivery(
            (await self._ask(FrameKind.PULL, payload)).payload
        )
        return [each.first_sequence + at for each in ranges for at in range(each.count)]

    async def settle(self, first: int, last: int) -> tuple[int, int]:
        """How many were settled, and how many were stale."""
        payload = wire.pack_settle(self.session, [wire.Settlement(first, last, Verdict.ACK, 0)])
        answer = await self.connection.call(
            FrameKind.SETTLE, payload, timeout_s=10, deadline_ms=10_000
        )
        return wire.unpack_settled(answer.payload)

    async def heartbeat(self) -> None:
        await self._ask(FrameKind.HEARTBEAT, wire.pack_session(self.session))

    async def _ask(self, kind: FrameKind, payload: bytes) -> Frame:
        return await self.connection.call(kind, payload, timeout_s=30)


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[tuple[Node, Puller, Puller]]:
    """A node with four messages, and two consumers of one group. Each consumer has its own client
    and connection.
    """
    async with running(node_config(tmp_path), Shifted()) as node, qmq.connect(node.address) as mq:
        for number in range(4):
            await mq.send(SUBJECT, b"%d" % number)
        pullers = [
            Puller(await connect(node.data_address, client), name)
            for client, name in (("test", "c1"), ("other", "c2"))
        ]
        for each in pullers:
            await each.attach()
        yield node, pullers[0], pullers[1]
        for each in pullers:
            each.connection.close()
            await each.connection.wait_closed()


@pytest.mark.parametrize("whom", KINDS, ids=str)
async def test_a_pull_that_waits_while_it_is_paused_is_served_when_it_is_resumed(
    it: tuple[Node, Puller, Puller], whom: Whom
) -> None:
    node, one, _ = it
    assert await one.pull(1) == [0]
    await pause(node, whom)
    assert await one.pull(1) == []
    pulling = await begun(one.pull(2, WAIT_MS))
    await one.heartbeat()
    assert not pulling.done()
    await resume(node, whom)
    assert await pulling == [1, 2]


async def test_others_of_the_group_get_what_a_paused_consumer_would_have_got(
    it: tuple[Node, Puller, Puller],
) -> None:
    node, one, other = it
    await pause(node, Whom(PauseKind.CLIENT, name="test"))
    pulling = await begun(one.pull(1, WAIT_MS))
    await one.heartbeat()
    assert await other.pull(10, WAIT_MS) == [0, 1, 2, 3]
    assert not pulling.done()
    async with qmq.connect(node.address) as mq:
        await mq.send(SUBJECT, b"4")
        await resume(node, Whom(PauseKind.CLIENT, name="test"))
    assert await pulling == [4]


async def test_a_pause_of_a_broadcast_group_is_of_all_its_consumers(
    it: tuple[Node, Puller, Puller],
) -> None:
    node, one, other = it
    group, consumer = (
        Whom(PauseKind.GROUP, SUBJECT, "all"),
        Whom(PauseKind.CONSUMER, SUBJECT, "all", "c1"),
    )
    for each in (one, other):
        await each.attach(f"all%{each.name}")
    await pause(node, group)
    assert (await one.pull(1), await other.pull(1)) == ([], [])
    await pause(node, consumer)
    await resume(node, group)
    assert (await one.pull(1), await other.pull(1)) == ([], [0])
    await resume(node, consumer)
    assert await one.pull(1) == [0]


async def test_a_paused_consumer_keeps_what_it_holds_by_its_heartbeats_and_may_settle_it(
    it: tuple[Node, Puller, Puller],
) -> None:
    node, one, other = it
    clock = node.broker.clock
    assert isinstance(clock, Shifted)
    assert await one.pull(2) == [0, 1]
    await pause(node, Whom(PauseKind.GROUP, SUBJECT, "g"))
    for _ in range(3):
        clock.ahead_ms += LEASE_MS - 100
        await one.heartbeat()
        node.broker.tick()
    assert await one.settle(0, 0) == (1, 0)
    clock.ahead_ms += LEASE_MS + 1
    node.broker.tick()
    with pytest.raises(UnknownConsumer):
        await one.heartbeat()
    await other.attach()
    await resume(node, Whom(PauseKind.GROUP, SUBJECT, "g"))
    assert await other.pull(1, WAIT_MS) == [1]


async def test_operators_see_who_is_paused_and_by_which_client_it_consumes(tmp_path: Path) -> None:
    own = BrokerConfig(retries=GroupSettings(2, (10,)))
    async with (
        running(node_config(tmp_path, broker=own)) as node,
        qmq.connect(node.address, name="box") as mq,
    ):
        await mq.send(SUBJECT, b"0")
        async with mq.consumer(SUBJECT, "g", name="c1", ack="explicit") as consumer:
            assert len(await consumer.pull(1)) == 1
            await mq.metadata.pause_client("box")
            (group,) = await mq.metadata.describe_groups(SUBJECT, "g")
            (held,) = group.consumers
            assert (group.is_paused, held.name, held.client, held.is_paused) == (
                False,
                "c1",
                "box",
                True,
            )
            await mq.metadata.resume_client("box")
            await mq.metadata.pause_group(SUBJECT, "g")
            (group,) = await mq.metadata.describe_groups(SUBJECT, "g")
            assert (group.is_paused, group.consumers[0].is_paused) == (True, True)
        found = await mq.metadata.group_settings(SUBJECT, "g")
        assert (
            found.attempts_max,
            list(found.retry_delays_ms),
            found.attempts_from,
            found.delays_from,
        ) == (2, [10], "", "")
