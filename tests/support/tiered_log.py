"""A message log with sealed segments, and an object store with faults.

A cluster whose messages move to an object store, and how a test knows that they did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import obstore.store
import pytest

import qmq
from qmq.errors import LogDamaged
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine
from qmq.tiering.object_store import Objects, StoreAway
from support import ManualClock, eventually, intake
from support.retention import begin_retention, end_retention

CHUNK_BYTES = 10_000
CONFIG = LogConfig(segment_bytes=64 * KIB)


def grow(store: Store, batches: int, seed: int = 1) -> None:
    """Append batches of 16 KiB; four of them fill a segment."""
    random, queue = Random(seed), store.open_queue("s", 0)
    for _ in range(batches):
        store.append(
            [intake(queue, [random.randbytes(16 * KIB - 500)], number=queue.next_sequence)]
        )
    store.commit(store.index)


@contextmanager
def log_at(folder: Path, batches: int = 13, seed: int = 1) -> Iterator[Store]:
    """A store with three or four sealed segments, all of it committed."""
    store = open_store(folder, CONFIG, ManualClock())
    grow(store, batches, seed)
    try:
        yield store
    finally:
        store.close()


def in_memory() -> Objects:
    """An object store in this process."""
    return Objects(obstore.store.MemoryStore())


class FaultyObjects:
    """An object store that fails as `faults` says, by the number of the call; the first call is
    1.
    """

    def __init__(
        self,
        inner: Objects,
        fails: Callable[[int], bool] = lambda _: False,
        *,
        loses_answers: bool = False,
    ) -> None:
        self.inner = inner
        self.fails = fails
        self.loses_answers = loses_answers
        """Whether a call that fails has done its work all the same."""
        self.calls = 0
        self.names: list[tuple[str, str]] = []
        """(method, name) of each call."""

    def create(self, name: str, data: bytes) -> bool:
        found: bool = self._call("create", name, data)
        return found

    def get(self, name: str) -> bytes | None:
        found: bytes | None = self._call("get", name)
        return found

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def _call(self, method: str, name: str, *data: bytes) -> Any:
        self.calls += 1
        self.names.append((method, name))
        fails = self.fails(self.calls)
        if fails and not self.loses_answers:
            raise StoreAway(f"{method} {name} failed (in this test)")
        result = getattr(self.inner, method)(name, *data)
        if fails:
            raise StoreAway(f"the answer to {method} {name} was lost (in this test)")
        return result


SOON = timedelta(seconds=20)


def log_config(objects: Path) -> LogConfig:
    """Nothing of the message log stays in memory, and only the last segment on the disk."""
    url = f"file://{objects}"
    return LogConfig(
        segment_bytes=64 * KIB,
        cache_bytes=0,
        tail_bytes=0,
        object_store_url=url,
        local_retention_bytes=0,
    )


def replica(cluster: TestCluster, name: str = "") -> ReplicaMachine:
    machine = cluster.machine(name or cluster.master())
    assert isinstance(machine, ReplicaMachine)
    return machine


async def until_cold(cluster: TestCluster) -> None:
    """Wait until the store has every sealed segment of the master; then let its local retention
    delete their files.
    """
    node = replica(cluster).node
    assert node is not None
    log = node.broker.store.messages
    await eventually(lambda: all(log.has_index(base) for base in log.bases[:-1]))
    end_retention(begin_retention(node.broker.store, node.broker.subjects.retention_settings))
    assert len(log.bases) > 2
    assert (log.start, log.local_start) == (0, log.bases[-1])
    assert len(list(log.folder.glob("*.log"))) == 1


def bodies(count: int) -> list[bytes]:
    random = Random(1)
    return [b"%03d" % number + random.randbytes(8 * KIB) for number in range(count)]


def behind_damage(failure: LogDamaged, name: str) -> int:
    """The sequence at which the error's remedy continues."""
    assert name in failure.message
    found = re.search("put it back from a copy.*qmq group reset --to ([0-9]+)", failure.message)
    assert found is not None
    return int(found[1])


async def until_damage(mq: qmq.Client, name: str, tags: list[str]) -> tuple[list[bytes], int]:
    """What a consumer gets before the damage, and where it may continue."""
    got: list[bytes] = []
    consumer = mq.consumer("s", group="g", tags_any=tags)
    with pytest.raises(LogDamaged) as failure:
        while True:
            got += [message.body for message in await consumer.pull(50, SOON)]
    await consumer.close()
    return got, behind_damage(failure.value, name)
