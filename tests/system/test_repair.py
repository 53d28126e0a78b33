"""Failing disks: full, refusing to sync, flipping a bit. The group continues, and the damaged
replica repairs itself or stops loudly.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from support import needs
from system.group import Group
from system.workload import under_load

import qmq
from qmq.errors import DeadlineExceeded, Outcome

pytestmark = pytest.mark.xdist_group("faults")

BULK = [bytes(10_000)] * 800
"""More than a broker writes before it looks at its free space again."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Put a disk of 200 MiB under a folder, with what is in it; afterwards what was written is on
    the big one.
    """
    kept = folder.with_name(folder.name + ".kept")
    shutil.move(folder, kept)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)], check=True)
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield folder
        shutil.rmtree(kept)
        shutil.copytree(folder, kept)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        shutil.move(kept, folder)


def fill(folder: Path) -> Path:
    """Leave less than a broker wants to spare."""
    filler = folder / "filler"
    filler.write_bytes(bytes(max(shutil.disk_usage(folder).free - (20 << 20), 0)))
    return filler


@needs.mounts
async def test_a_slave_with_a_full_disk_delays_no_one_and_catches_up_later(
    group: Group, tmp_path: Path
) -> None:
    slave = await group.slave()
    await asyncio.to_thread(group.cluster.stop, slave)
    with small_disk(group.store(slave).parent) as folder:
        await asyncio.to_thread(group.cluster.start, slave)
        async with (
            under_load(group, "full-slave", tmp_path) as work,
            qmq.connect(group.server) as mq,
        ):
            filler = await asyncio.to_thread(fill, folder)
            await mq.send_many("faults.bulk", BULK)
            await work.wait_for_acks(500)
            found = await group.describe_all()
            assert found[slave].last_index < found[await group.master()].last_index
            filler.unlink()
            await group.settled_peer(slave)
        await asyncio.to_thread(group.cluster.stop, slave)
    await asyncio.to_thread(group.cluster.start, slave)
    await group.settled()


@needs.mounts
async def test_a_master_with_a_full_disk_refuses_messages_until_there_is_room(
    group: Group, tmp_path: Path
) -> None:
    chosen = await group.slave()
    await asyncio.to_thread(group.cluster.stop, chosen)
    with small_disk(group.store(chosen).parent) as folder:
        await asyncio.to_thread(group.cluster.start, chosen)
        async with (
            under_load(group, "full-master", tmp_path) as work,
            qmq.connect(group.server) as mq,
        ):
            await mq.metadata.transfer("g1", chosen)
            filler = await asyncio.to_thread(fill, folder)
            producer = mq.producer("faults.bulk", delivery_timeout_s=2.0)
            with pytest.raises(DeadlineExceeded, match="less than") as refused:
                for _ in range(5):
                    await producer.send_many(BULK)
            assert refused.value.outcome is Outcome.NOT_STORED
            with suppress(DeadlineExceeded):  # the same of the other batches
                await producer.flush()
            filler.unlink()
            await work.wait_for_acks(500)
            await producer.send_many(BULK)
        await asyncio.to_thread(group.cluster.stop, chosen)
    await asyncio.to_thread(group.cluster.start, chosen)
    await group.settled()


@needs.strace
async def test_a_replica_whose_sync_fails_stops_loudly_and_the_others_continue(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "sync", tmp_path) as work:
        master = await group.master()
        pid = next(each.pid for each in group.cluster.status() if each.service == master)
        # Of a sync by the kernel, EIO becomes the result: the third word of its event.
        reported = (bytes(16) + (-errno.EIO).to_bytes(8, "little", signed=True)).hex()
        tracer = subprocess.Popen(
            [
                "strace",
                "-f",
                "-q",
                "-e",
                "trace=fdatasync,io_getevents",
                "-e",
                "inject=fdatasync:error=EIO:when=1",
                "-e",
                f"inject=io_getevents:poke_exit=@arg4={reported}:when=1",
                "-o",
                str(tmp_path / "strace"),
                "-p",
                str(pid),
            ]
        )
        try:
            await group.master(other_than=master)
            await work.wait_for_acks(300)
        finally:
            await asyncio.to_thread(tracer.wait, 20)
        assert "fdatasync failed" in group.cluster.log(master).read_text()
        await asyncio.to_thread(group.cluster.start, master)
        await group.settled_peer(master)


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


async def test_a_bit_flipped_in_a_slaves_tail_is_found_at_its_start_and_repaired(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "bit-tail", tmp_path) as work:
        slave = await group.slave()
        await work.wait_for_acks(500)
        await asyncio.to_thread(group.cluster.kill, slave)
        segment = max((group.store(slave) / "message").iterdir())
        flip(segment, segment.stat().st_size - 5_000)
        await asyncio.to_thread(group.cluster.start, slave)
        await group.settled_peer(slave)


async def test_a_bit_flipped_in_old_messages_is_found_at_reading_and_repaired(
    group: Group, tmp_path: Path
) -> None:
    async with qmq.connect(group.server) as mq:
        bodies = [b"%06d" % number for number in range(20_000)]
        await mq.send_many("faults.old", bodies)
        await group.settled()
        async with under_load(group, "bit-old", tmp_path):
            slave = await group.slave()
            await group.settled_peer(slave)
            await asyncio.to_thread(group.cluster.stop, slave)
            segment = max((group.store(slave) / "message").iterdir())
            at = segment.read_bytes().find(b"005001005002") + 3
            assert at > 3
            flip(segment, at)
            await asyncio.to_thread(group.cluster.start, slave)
            await group.settled_peer(slave)
            await mq.metadata.transfer("g1", slave)
            found: list[bytes] = []
            async with mq.consumer("faults.old", "late") as consumer:
                while len(found) < len(bodies):
                    got = await consumer.pull(1_000, timedelta(seconds=20))
                    found += [message.body for message in got]
                    await got.ack_sync()
            assert found == bodies
