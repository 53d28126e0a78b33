"""Stores whose queues tests delete or purge."""

from __future__ import annotations

from pathlib import Path

from support import ManualClock, intake

from qmq.limits import KIB
from qmq.log.actions import AnyAction, Begin
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Store

CONFIG = LogConfig(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB)


def opened(folder: Path) -> Store:
    return open_store(folder, CONFIG, ManualClock())


def queue_of(store: Store, partition: int = 0) -> Queue:
    queue = store.queue("s", partition)
    assert queue is not None
    return queue


def used_store(folder: Path, partition: int, actions: tuple[AnyAction, ...] = ()) -> Store:
    """A store whose queue has 15 messages of a producer, and a group at its beginning; further actions are taken behind them."""
    store = opened(folder)
    queue = store.open_queue("s", partition)
    for number in range(5):
        store.append([intake(queue, [b"old"] * 3, number=number)])
    store.act(Begin("s", partition, "g", "", 0))
    for action in actions:
        store.act(action)
    store.write_actions()
    return store
