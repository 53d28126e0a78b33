"""What `qmq doctor` says of a disk without a byte left: that it is full, and not that its replica
is away.
"""

from __future__ import annotations

import asyncio

import pytest
from qmq_replication.identity import FILE
from support import FullDisk

from qmq.operations.findings import findings
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import Severity
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine


@pytest.mark.parametrize("starts", ["before", "afterwards", "without a spare"])
async def test_a_replica_on_a_full_disk_is_not_called_away(starts: str) -> None:
    """A replica whose files have no spare, as those of release 0.2.0, cannot save its start: it
    waits, and answers operators.
    """
    full: set[str] = set()
    async with TestCluster(
        brokers=3, delay=False, make_disk=lambda name: FullDisk(lambda: name in full)
    ) as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        master = cluster.master()
        crowded, away = (name for name in cluster.groups["group-1"] if name != master)
        machine = cluster.machine(crowded)
        assert isinstance(machine, ReplicaMachine)
        assert machine.node is not None
        data = machine.node.config.data
        if starts != "before":
            await cluster.kill(crowded)
        if starts == "without a spare":
            (data / f"{FILE}.spare").unlink()
        full.add(crowded)
        if starts != "before":
            await machine.start()
        await cluster.kill(away)
        wanted = {
            ("disk-full", f"replica {crowded}"),
            ("replica-away", f"replica {away} of group-1"),
        }
        found: set[tuple[str, str]] = set()
        async with asyncio.timeout(60):
            while found != wanted:
                told = findings(await read_snapshot(mq.metadata))
                found = {
                    (each.code, each.about)
                    for each in told
                    if each.code in ("disk-full", "replica-away")
                }
                await asyncio.sleep(0.02)
        (disk,) = [each for each in told if each.code == "disk-full"]
        assert disk.severity == Severity.CRITICAL
        assert disk.what == "refuses messages: 0 bytes are free, and 64 MiB stay reserved"
