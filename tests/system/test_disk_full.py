"""A real full disk: writes are refused with a clear error, reading and acknowledging continue, and everything recovers without help."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import needs
import pytest
from support import node_config, running

import qmq
from qmq.errors import DeadlineExceeded
from qmq.log.log_config import LogConfig

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@needs.mounts
@pytest.mark.parametrize("reserve", [2 * MIB, 0])
async def test_a_full_disk_refuses_writes_continues_reading_and_recovers(small_disk: Path, reserve: int) -> None:
    log = LogConfig(segment_bytes=4 * MIB, disk_free_bytes_min=reserve)
    async with running(node_config(small_disk / "node", log)) as node, qmq.connect(node.address) as mq:
        sent = 0
        with pytest.raises(DeadlineExceeded, match="space") as refused:
            async with mq.producer("s", delivery_timeout_s=0.5) as producer:
                while True:
                    await producer.send(sent.to_bytes(4, "big") * 16_384)
                    sent += 1
        assert refused.value.outcome is qmq.Outcome.NOT_STORED
        filler = small_disk / "filler"
        if reserve == 0:
            file = os.open(filler, os.O_WRONLY | os.O_CREAT)
            with suppress(OSError):
                while True:
                    os.write(file, bytes(4096))
            os.close(file)
        consumer = mq.consumer("s", "g", prefetch=10)
        found: list[bytes] = []
        async with asyncio.timeout(30):
            while len(found) < sent:
                part = await consumer.pull(10, timedelta(seconds=1))
                found += part.bodies
                part.ack_later()
        assert found == [number.to_bytes(4, "big") * 16_384 for number in range(sent)]
        filler.unlink(missing_ok=True)
        for path in (node.store.messages.folder).glob("*.log"):
            assert path.stat().st_size <= 5 * MIB
        subprocess.run(["mount", "-o", "remount,size=48m", str(small_disk)], check=True)
        assert (await mq.send("s", b"again")).sequence == sent
        await consumer.close()
    async with running(node_config(small_disk / "node", log)) as node, qmq.connect(node.address) as mq:
        assert (await mq.consumer("s", "g").pull(10)).bodies == [b"again"]
