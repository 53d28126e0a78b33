"""How long a vanished consumer keeps messages from the others, and how many consumers there may
be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from lane_support import Mute, world
from support import ManualClock, intake

from qmq import limits
from qmq.broker.broker import Broker
from qmq.broker.config import GRANTED_LEASE_MS_MAX, BrokerConfig
from qmq.errors import Overloaded
from qmq.log.actions import Join
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.wire import frame_payloads as wire

MAX_MS = GRANTED_LEASE_MS_MAX
HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(tmp_path, LogConfig(), ManualClock())
    found.append([intake(found.open_queue("s", 0), [b"x"])])
    found.begin_flush().run()
    yield found
    found.close()


def broker_on(store: Store) -> tuple[Broker, ManualClock]:
    clock = ManualClock()
    broker = Broker(store, SubjectConfig, clock, BrokerConfig(), asyncio.get_running_loop())
    broker.turn()
    return broker, clock


def attach(
    broker: Broker,
    consumer: str,
    peer: Mute,
    *,
    lease_ms: int = HOUR_MS,
    start: str = "earliest",
    received: int = -1,
) -> wire.Attached:
    return broker.dispatch.attach(
        peer, wire.Attach("s", 0, "g", consumer, "i", -1, "earliest", lease_ms, [], [])
    )


async def test_a_lease_of_an_hour_is_shortened_and_the_answer_says_so(store: Store) -> None:
    broker, clock = broker_on(store)
    assert attach(broker, "c", Mute()).lease_ms == MAX_MS
    assert attach(broker, "short", Mute(), lease_ms=2_000).lease_ms == 2_000
    store.act(Join("s", 0, "g", "old", "i", HOUR_MS, -1))  # as an older version granted it
    assert attach(broker, "old", Mute()).lease_ms == MAX_MS
    clock.now_ms += MAX_MS + 1
    broker.dispatch.tick()
    assert store.open_queue("s", 0).shares["g"].holders == {}


async def test_a_group_has_so_many_consumers_and_those_it_has_may_come_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUP_CONSUMERS_MAX", 3)
    broker, clock = broker_on(store)
    for number in range(3):
        attach(broker, f"c{number}", Mute())
    with pytest.raises(Overloaded, match="3 consumers, the limit"):
        attach(broker, "c3", Mute())
    attach(broker, "c1", Mute())
    clock.now_ms += MAX_MS + 1
    broker.dispatch.tick()
    attach(broker, "c3", Mute())


async def test_a_connection_reads_so_many_queues(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTION_SESSIONS_MAX", 2)
    broker, _ = broker_on(store)
    peer = Mute()
    attach(broker, "a", peer)
    attach(broker, "b", peer)
    with pytest.raises(Overloaded, match="reads 2 queues"):
        attach(broker, "c", peer)
    broker.dispatch.disconnected(peer)
    attach(broker, "c", peer)


async def test_a_lane_is_granted_for_no_longer_and_a_connection_reads_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTION_SESSIONS_MAX", 1)
    async with world(tmp_path) as it:
        await it.put_group("other")
        lane = await it.attach(lease_ms=HOUR_MS)
        assert lane.lease_ms == MAX_MS
        with pytest.raises(Overloaded, match="reads 1 lanes"):
            await it.attach(group="other")
        await it.detach(lane)
        await it.attach(group="other")
