"""A broker group that copies its sealed segments to an object store, while its masters change."""

from __future__ import annotations

from pathlib import Path
from random import Random

from support import eventually

from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.segments import segment_name
from qmq.node.metrics.broker import STORE_BYTES as STORED
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine
from qmq.tiering.stored_segment import decode_manifest


async def test_masters_that_replace_each_other_store_every_sealed_segment_once(
    tmp_path: Path,
) -> None:
    random = Random(1)
    log = LogConfig(segment_bytes=64 * KIB, object_store_url=f"file://{tmp_path}")
    async with TestCluster(brokers=3, delay=False, log=log) as cluster:
        mq = cluster.client()
        for _ in range(2):
            for _ in range(12):
                await mq.send("orders", random.randbytes(16 * KIB))
            before = cluster.master()
            await cluster.kill(before)
            await cluster.until_master(other_than=before)
            await cluster.restart(before)
        machine = cluster.machine(cluster.master())
        assert isinstance(machine, ReplicaMachine)
        assert machine.node is not None
        segments = machine.node.broker.store.messages
        folder = tmp_path / next(iter(cluster.groups)) / "message"

        def stored() -> set[int]:
            return {int(path.parent.name) for path in folder.glob("*/manifest")}

        await eventually(lambda: stored() == set(segments.bases[:-1]))
        for base in segments.bases[:-1]:
            chunks = sorted((folder / f"{base:020d}").glob("0*"))
            data = b"".join([path.read_bytes() for path in chunks])
            assert data == (segments.folder / segment_name(base)).read_bytes()
            manifest = decode_manifest((folder / f"{base:020d}" / "manifest").read_bytes())
            assert manifest.segment.size == len(data)
        await eventually(lambda: stored_bytes(machine) == segments.bases[-1])


def stored_bytes(machine: ReplicaMachine) -> float:
    """The stored bytes in the replica's metric."""
    assert machine.node is not None
    readings = [
        reading
        for source in machine.node.sources()
        for reading in source.read()
        if reading is not None
    ]
    return sum(
        value
        for reading in readings
        if reading.figure is STORED
        for _, value in reading.rows
        if isinstance(value, (int, float))
    )
