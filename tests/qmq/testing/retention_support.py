"""A cluster whose messages move to an object store, and how a test knows that they did."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from support import eventually

import qmq
from qmq.errors import LogDamaged
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.retention import begin_retention, end_retention
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine

SOON = timedelta(seconds=20)


def log_config(objects: Path) -> LogConfig:
    """Nothing of the message log stays in memory, and only the last segment on the disk."""
    url = f"file://{objects}"
    return LogConfig(segment_bytes=64 * KIB, cache_bytes=0, tail_bytes=0, object_store_url=url, local_retention_bytes=0)


def replica(cluster: TestCluster, name: str = "") -> ReplicaMachine:
    machine = cluster.machine(name or cluster.master())
    assert isinstance(machine, ReplicaMachine)
    return machine


async def until_cold(cluster: TestCluster) -> None:
    """Wait until the store has every sealed segment of the master; then let its local retention delete their files."""
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
