"""Retention beside the broker's other work: it continues on a full disk, with a damaged queue, and
with a file that cannot be deleted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support import ManualClock, alone, eventually, intake

from qmq.broker.config import BrokerConfig
from qmq.errors import DiskFull
from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import SubjectConfig

CONFIG = LogConfig(segment_bytes=64 * 1024)


class CountingClock(ManualClock):
    """Counts how often the time was read: once in each maintenance tick."""

    looks = 0

    def monotonic_ms(self) -> int:
        self.looks += 1
        return self.now_ms


class Kept:
    """A broker with its maintenance, which keeps 100 kB of each subject."""

    def __init__(
        self, folder: Path, config: LogConfig, disk: Disk, *, is_replicated: bool = False
    ) -> None:
        self.folder, self.clock, self.fatal = folder, CountingClock(), list[BaseException]()
        self.store = open_store(folder, config, self.clock, disk=disk, is_replicated=is_replicated)
        look_up = lambda name: SubjectConfig(name, retention_bytes=100_000)  # noqa: E731
        broker_config = BrokerConfig(retention_interval_ms=0)
        running = alone(
            self.store, self.clock, broker_config, look_up=look_up, fatal=self.fatal.append
        )
        self.broker, self.maintenance = running.broker, running.maintenance

    def fill(self, count: int, subject: str = "s", start: int = 0) -> None:
        queue = self.store.open_queue(subject, 0)
        for number in range(start, start + count):
            self.store.append([intake(queue, [bytes(4000)], number=number)])

    def segments(self) -> int:
        return len(list((self.folder / "message").glob("*.log")))

    async def some_ticks(self) -> None:
        seen = self.clock.looks
        await eventually(lambda: self.clock.looks > seen + 60)


@asynccontextmanager
async def kept(
    folder: Path, disk: Disk | None = None, config: LogConfig = CONFIG
) -> AsyncIterator[Kept]:
    found = Kept(folder, config, disk or Disk())
    try:
        yield found
    finally:
        await found.maintenance.stop()
        found.store.close()


def checkpoint(store: Store) -> None:
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)


class NoMajority:
    """A committer without a majority."""

    def written(self, index: int) -> None:
        return

    stored = flush_wanted = written


class FullDisk(Disk):
    """A disk without room for a checkpoint while `is_full`."""

    is_full = True
    refused = 0

    def replace(self, path: Path, data: bytes) -> None:
        if self.is_full:
            self.refused += 1
            raise DiskFull("no space left (in this test)")
        super().replace(path, data)


async def test_what_a_full_disk_kept_from_being_deleted_goes_later(tmp_path: Path) -> None:
    disk = FullDisk()
    async with kept(tmp_path, disk) as broker:
        broker.fill(200)
        before = broker.segments()
        broker.maintenance.start()
        await eventually(lambda: disk.refused >= 3)
        assert broker.segments() == before > len(broker.store.messages.bases)
        disk.is_full = False
        kept_files = len(broker.store.messages.bases)
        await eventually(lambda: broker.broker.counters.files_deleted == before - kept_files)
        assert broker.segments() == kept_files
        assert broker.fatal == []


async def test_what_a_full_disk_kept_goes_after_a_restart_too(tmp_path: Path) -> None:
    disk = FullDisk()
    async with kept(tmp_path, disk) as broker:
        broker.fill(200)
        broker.maintenance.start()
        await eventually(lambda: disk.refused >= 1)
    async with kept(tmp_path) as broker:
        broker.maintenance.start()
        await eventually(lambda: broker.segments() == len(broker.store.messages.bases) < 5)
        assert broker.store.open_queue("s", 0).next_sequence == 200


async def test_a_damaged_consume_log_does_not_end_retention_of_the_others(tmp_path: Path) -> None:
    async with kept(tmp_path) as broker:
        broker.fill(20, "bad")
        checkpoint(broker.store)
        for path in (tmp_path / "consume").iterdir():
            path.unlink()
        broker.fill(200, "good")
        broker.clock.now_ms += CONFIG.retention_ms + 1
        broker.fill(100, "good", start=200)
        before = broker.segments()
        broker.maintenance.start()
        await eventually(
            lambda: (
                broker.broker.counters.files_deleted > 0
                and broker.broker.counters.retention_failures > 1
            )
        )
        assert broker.segments() < before
        assert broker.store.open_queue("good", 0).start_sequence >= 200
        assert broker.fatal == []


async def test_a_file_that_cannot_be_deleted_is_tried_again(tmp_path: Path) -> None:
    class Stubborn(Disk):
        refuses = True

        def delete(self, path: Path) -> None:
            if self.refuses and path.stem == f"{0:020d}":
                raise PermissionError("not now (in this test)")
            super().delete(path)

    disk = Stubborn()
    async with kept(tmp_path, disk) as broker:
        broker.fill(200)
        broker.maintenance.start()
        await eventually(lambda: broker.broker.counters.retention_failures >= 2)
        assert broker.segments() == len(broker.store.messages.bases) + 1
        disk.refuses = False
        await eventually(lambda: broker.segments() == len(broker.store.messages.bases))
        assert broker.fatal == []


async def test_while_files_are_deleted_no_checkpoint_begins_and_stopping_waits(
    tmp_path: Path,
) -> None:
    class SlowDisk(Disk):
        checkpoints = 0

        def __init__(self) -> None:
            self.deletes, self.may_go_on = threading.Event(), threading.Event()

        def delete(self, path: Path) -> None:
            self.deletes.set()
            assert self.may_go_on.wait(30)
            super().delete(path)

        def replace(self, path: Path, data: bytes) -> None:
            self.checkpoints += 1
            super().replace(path, data)

    disk = SlowDisk()
    async with kept(
        tmp_path, disk, LogConfig(segment_bytes=64 * 1024, checkpoint_bytes=64 * 1024)
    ) as broker:
        broker.fill(200)
        broker.maintenance.start()
        await eventually(disk.deletes.is_set)
        written = disk.checkpoints
        broker.fill(100, start=200)
        await broker.some_ticks()
        assert disk.checkpoints == written
        stopping = asyncio.ensure_future(broker.maintenance.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        disk.may_go_on.set()
        await stopping
        assert broker.segments() < 200 * 4000 // (64 * 1024)


async def test_stopping_gives_up_a_checkpoint_that_waits_for_a_majority(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=64 * 1024, checkpoint_bytes=64 * 1024)
    replica = Kept(tmp_path, config, Disk(), is_replicated=True)
    replica.broker.committer = NoMajority()
    replica.store.append_barrier(1)
    replica.fill(50)
    replica.maintenance.start()
    await replica.some_ticks()
    async with asyncio.timeout(10):
        await replica.maintenance.stop()
    assert list((tmp_path / "checkpoint").glob("*.qmc")) == []
    assert replica.fatal == []
    replica.store.close()
