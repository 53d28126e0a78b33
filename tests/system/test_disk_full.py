"""A real full disk: writes are refused with a clear error, reading and acknowledging continue, and
everything recovers without help.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.embedded import EmbeddedStore
from support import needs, node_config, running
from support.disks import fill, small_disk_at

import qmq
from qmq.broker.config import BrokerConfig
from qmq.errors import DeadlineExceeded, DiskFull
from qmq.log.log_config import LogConfig
from qmq.model import SubjectConfig

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "small", 24) as folder:
        yield folder


@needs.mounts
@pytest.mark.parametrize("reserve", [2 * MIB, 0])
async def test_a_full_disk_refuses_writes_continues_reading_and_recovers(
    small_disk: Path, reserve: int
) -> None:
    log = LogConfig(segment_bytes=4 * MIB, disk_free_bytes_min=reserve)
    async with (
        running(node_config(small_disk / "node", log)) as node,
        qmq.connect(node.address) as mq,
    ):
        sent = 0
        with pytest.raises(DeadlineExceeded, match="space") as refused:
            async with mq.producer("s", delivery_timeout_s=0.5) as producer:
                while True:
                    await producer.send(sent.to_bytes(4, "big") * 16_384)
                    sent += 1
        assert refused.value.outcome is qmq.Outcome.NOT_STORED
        filler = fill(small_disk) if reserve == 0 else None
        consumer = mq.consumer("s", "g", prefetch=10)
        found: list[bytes] = []
        async with asyncio.timeout(30):
            while len(found) < sent:
                part = await consumer.pull(10, timedelta(seconds=1))
                found += part.bodies
                part.ack_later()
        assert found == [number.to_bytes(4, "big") * 16_384 for number in range(sent)]
        if filler is not None:
            filler.unlink()
        for path in (node.store.messages.folder).glob("*.log"):
            assert path.stat().st_size <= 5 * MIB
        subprocess.run(["mount", "-o", "remount,size=48m", str(small_disk)], check=True)
        assert (await mq.send("s", b"again")).sequence == sent
        await consumer.close()
    async with (
        running(node_config(small_disk / "node", log)) as node,
        qmq.connect(node.address) as mq,
    ):
        assert (await mq.consumer("s", "g").pull(10)).bodies == [b"again"]


@needs.mounts
async def test_a_shorter_retention_makes_room_without_a_restart(small_disk: Path) -> None:
    log = LogConfig(segment_bytes=4 * MIB, disk_free_bytes_min=2 * MIB)
    config = node_config(small_disk / "node", log, broker=BrokerConfig(retention_interval_ms=100))
    async with running(config) as node, qmq.connect(node.address) as mq:
        sent = 0
        with pytest.raises(DeadlineExceeded, match="space"):
            async with mq.producer("s", delivery_timeout_s=0.5) as producer:
                while True:
                    await producer.send(sent.to_bytes(4, "big") * 16_384)
                    sent += 1
        await mq.metadata.alter_subject("s", retention_bytes=4 * MIB)
        assert (await mq.send("s", b"again")).sequence == sent
        async with mq.consumer("s", "g") as consumer:
            oldest = (await consumer.pull(1, timedelta(seconds=30))).bodies[0]
        assert 0 < int.from_bytes(oldest[:4], "big") < sent


@needs.mounts
async def test_a_node_works_stops_and_starts_without_a_byte_left(small_disk: Path) -> None:
    """Checkpoints, marks, acknowledgements, buckets of delayed messages and subjects all want to be
    written meanwhile.
    """
    log = LogConfig(segment_bytes=4 * MIB, disk_free_bytes_min=0, checkpoint_interval_ms=100)
    config = node_config(small_disk / "node", log, delay=True)
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(20)])
        await mq.send("s", b"delayed", delay=timedelta(seconds=1))
        await mq.send("s", b"far", delay=timedelta(days=3))
        fill(small_disk)
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(10, timedelta(seconds=30))).bodies == [
                b"%d" % number for number in range(10)
            ]
        with suppress(DiskFull):
            await mq.metadata.create_subject(SubjectConfig("other"))
        with pytest.raises(DeadlineExceeded, match="space"):
            async with mq.producer("s", delivery_timeout_s=0.5) as producer:
                await producer.send(bytes(1_000_000))  # more than checkpoints leave free in between
    fill(small_disk)
    async with running(config) as node, qmq.connect(node.address) as mq:
        filler = fill(small_disk)
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(1, timedelta(seconds=30))).bodies
        filler.unlink()
        assert (await mq.send("s", b"again")).sequence >= 20
        async with mq.consumer("s", "check") as consumer:
            found: list[bytes] = []
            async with asyncio.timeout(60):
                while not {b"again", b"delayed", *(b"%d" % number for number in range(20))} <= set(
                    found
                ):
                    found += (await consumer.pull(30, timedelta(seconds=1))).bodies


@needs.mounts
def test_a_coordination_store_on_a_full_disk_is_not_called_damaged(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(DiskFull, match="free some space"):
        EmbeddedStore(small_disk / "coordination.db")
