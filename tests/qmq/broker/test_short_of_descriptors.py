"""Too few file descriptors for reading a stored file is an overload. It does not end the broker."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import ManualClock, alone, intake

from qmq.broker.broker import Broker
from qmq.client.connection.connection import Connection, connect
from qmq.errors import Overloaded
from qmq.limits import MIB
from qmq.log.checkpoint import begin_checkpoint
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.process.files import refusal_of
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind


class ShortDisk(Disk):
    """A disk on which no file may be opened to be read while `is_short`."""

    is_short = False

    def open_read(self, path: Path) -> int:
        if self.is_short:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open_read(path)


def three_segments(folder: Path, disk: Disk) -> Store:
    config = LogConfig(segment_bytes=20 * MIB)
    store = open_store(folder, config, ManualClock())
    queue = store.open_queue("s", 0)
    for _ in range(5):
        store.append([intake(queue, [bytes(3 * MIB)] * 4)])
    store.begin_flush().run()
    begin_checkpoint(store).run()  # so that reopening the store reads none of the segments
    store.close()
    return open_store(folder, config, ManualClock(), disk=disk)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[ShortDisk, Broker, Connection]]:
    """A broker on three segments, which must report no fatal error, and a connection to it."""
    disk, fatal = ShortDisk(), list[BaseException]()
    store = three_segments(folder, disk)
    running = alone(store, ManualClock(), fatal=fatal.append)
    await running.data.start("127.0.0.1", 0)
    running.maintenance.start()
    connection = await connect(f"127.0.0.1:{running.data.port}", "test")
    yield disk, running.broker, connection
    assert fatal == []
    connection.close()
    await connection.wait_closed()
    await running.data.stop()
    await running.maintenance.stop()
    store.close()


async def test_a_pull_that_waits_hears_of_overload_and_the_next_one_is_served(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (disk, broker, connection):
        request = wire.Attach("s", 0, "g", "c", "i", -1, "latest", 60_000, [], [])
        answer = await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=10)
        session = wire.Attached.unpack(answer.payload).session
        pull = wire.pack_pull(wire.Pull(session, 1, 1, 60_000))
        waiting = asyncio.create_task(connection.call(FrameKind.PULL, pull, timeout_s=10))
        (state,) = broker.dispatch.groups
        while not state.waiters:
            await asyncio.sleep(0)
        disk.is_short = True
        broker.dispatch.reset(state, 0)
        with pytest.raises(Overloaded, match="too few descriptors"):
            await waiting
        disk.is_short = False
        answer = await connection.call(FrameKind.PULL, pull, timeout_s=10)
        assert answer.kind == FrameKind.MESSAGES


async def test_a_duplicate_that_cannot_be_compared_hears_of_overload_too(tmp_path: Path) -> None:
    columns = Columns([bytes(3 * MIB)] * 4)
    same = b"".join(encode(b"s", columns, producer_id=7, batch_sequence=0, create_time_ms=1))
    async with served(tmp_path) as (disk, _, connection):
        disk.is_short = True
        with pytest.raises(Overloaded, match="too few descriptors"):
            await connection.call(FrameKind.PRODUCE, same, timeout_s=10)
        disk.is_short = False
        answer = await connection.call(FrameKind.PRODUCE, same, timeout_s=10)
        assert wire.unpack_produced(answer.payload)[0].base_sequence == 0


def test_any_other_disk_error_is_raised_unchanged() -> None:
    with pytest.raises(OSError, match="I/O"):
        refusal_of(OSError(errno.EIO, "I/O error"))
