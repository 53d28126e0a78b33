"""Idle queues and groups cost no work: a tick, an attach, a disconnect or a message takes as many
calls beside 10,000 as beside 100.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lane_support import Mute
from support import ManualClock, alone, intake

from qmq.broker.broker import Broker
from qmq.broker.maintenance import SLOW_TICKS, Maintenance
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire import frame_payloads as wire

FEW, MANY = 100, 10_000
SLACK = 60
"""Calls that may differ: a heap or a table is a little deeper, a clock is asked once more."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """The calls of functions, of Python and of C, in this thread."""
    found = [0]

    def called(_frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            found[0] += 1

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def attached(broker: Broker, peer: Mute, number: int) -> wire.Attached:
    """A consumer of its own group on the subject of that number."""
    request = wire.Attach(
        f"s{number}", 0, f"g{number}", f"c{number}", "0" * 16, -1, "earliest", 30_000, [], []
    )
    return broker.dispatch.attach(peer, request)


def filled(broker: Broker, count: int) -> None:
    """So many subjects with a message, and with a group whose consumer has taken it and waits for
    more.
    """
    store, peer = broker.store, Mute()
    queues = [store.open_queue(f"s{number}", 0) for number in range(count)]
    broker.append_own([intake(queue, [b"x"], number=number) for number, queue in enumerate(queues)])
    for number in range(count):
        session = attached(broker, peer, number).session
        broker.dispatch.pull(peer, 1, wire.Pull(session, 10, 1_000, 20_000), 0)
        broker.dispatch.pull(peer, 2, wire.Pull(session, 10, 1_000, 20_000), 0)
    broker.turn()


def ticks(broker: Broker, maintenance: Maintenance, _peer: Mute) -> None:
    for _ in range(SLOW_TICKS):
        broker.tick()
    maintenance.slow_tick(broker.clock.monotonic_ms())


def comes_and_goes(broker: Broker, _maintenance: Maintenance, peer: Mute) -> None:
    attached(broker, peer, 7)
    broker.disconnected(peer)
    broker.turn()


def sends(broker: Broker, _maintenance: Maintenance, _peer: Mute) -> None:
    store = broker.store
    broker.append_own([intake(store.open_queue("s7", 0), [b"more"], number=1 + store.index)])
    broker.turn()


Work = Callable[[Broker, Maintenance, Mute], None]


async def calls_beside(count: int, folder: Path, work: Work) -> int:
    store: Store = open_store(folder, LogConfig(), clock := ManualClock())
    running = alone(store, clock, fatal=pytest.fail)
    try:
        filled(running.broker, count)
        work(running.broker, running.maintenance, Mute())  # what happens once happens here
        with counted() as calls:
            work(running.broker, running.maintenance, Mute())
        return calls[0]
    finally:
        await running.maintenance.stop()
        store.close()


@pytest.mark.parametrize("work", [ticks, comes_and_goes, sends])
def test_work_does_not_grow_with_idle_queues_and_groups(work: Work, tmp_path: Path) -> None:
    few, many = [
        asyncio.run(calls_beside(count, tmp_path / str(count), work)) for count in (FEW, MANY)
    ]
    assert many <= few + SLACK
