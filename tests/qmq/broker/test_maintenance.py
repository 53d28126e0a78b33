"""A broker's maintenance: a failed flush, checkpoints, retention, through a real broker on a disk
that can fail.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from support import alone, eventually, intake, needs
from support.disks import FailingKernel, RefusingKernel
from support.retention import begin_retention

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.connection.server import DataServer
from qmq.broker.maintenance import TICK_S, Maintenance
from qmq.client.connection.connection import connect
from qmq.errors import FlushFailed, Overloaded, UnknownConsumer
from qmq.log.actions import Join, PullAction, Pulled
from qmq.log.disk import Disk
from qmq.log.log_config import Flush, LogConfig
from qmq.log.recovery import open_store
from qmq.log.segment_index import SegmentIndex
from qmq.log.segments import segment_name
from qmq.model import SubjectConfig
from qmq.process.event_loop import SystemClock
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind


class FailingDisk(Disk):
    """A disk whose fdatasync can be made to fail."""

    fails = False

    def sync(self, fd: int) -> None:
        if self.fails:
            raise FlushFailed("fdatasync failed (in this test)")
        super().sync(fd)


Served = tuple[Broker, DataServer, list[BaseException]]


@asynccontextmanager
async def served(
    folder: Path, config: LogConfig, disk: Disk | None = None, *, ticks: bool = True, **options: int
) -> AsyncIterator[Served]:
    """A broker alone, with its data port, and the fatal errors that it reported."""
    fatal: list[BaseException] = []
    store = open_store(folder, config, SystemClock(), disk=disk)
    running = alone(
        store, SystemClock(), BrokerConfig(**options), fatal=fatal.append, tick_s=TICK_S
    )
    broker, maintenance, server = running.broker, running.maintenance, running.data
    await server.start("127.0.0.1", 0)
    if ticks:
        maintenance.start()
    try:
        yield broker, server, fatal
    finally:
        await server.stop()
        await maintenance.stop()
        store.close()


@pytest.mark.parametrize(
    "make_disk", [FailingDisk, pytest.param(FailingKernel, marks=needs.kernel_syncs)]
)
async def test_after_a_failed_flush_nothing_is_acknowledged_and_the_process_is_stopped(
    tmp_path: Path, make_disk: Callable[[], FailingDisk | FailingKernel]
) -> None:
    disk = make_disk()
    async with served(tmp_path, LogConfig(flush=Flush.SYNC), disk) as (_, server, fatal):
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        disk.fails = True
        answers: list[object] = []
        batch = encode(b"s", Columns([b"body"]), producer_id=1, batch_sequence=0, create_time_ms=0)
        connection.request(FrameKind.PRODUCE, answers.append, *batch, timeout_s=30)
        await eventually(lambda: fatal)
        assert isinstance(fatal[0], FlushFailed)
        assert answers == []
        disk.fails = False
        connection.close()
        await connection.wait_closed()


@pytest.mark.parametrize("call", ["setup", "submit"])
async def test_where_the_kernel_refuses_its_own_syncs_a_thread_flushes(
    tmp_path: Path, call: str
) -> None:
    disk = RefusingKernel(call, errno.EINVAL)
    async with served(tmp_path, LogConfig(flush=Flush.SYNC), disk) as (broker, server, fatal):
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        for number in range(3):
            answers: list[object] = []
            batch = encode(
                b"s", Columns([b"body"]), producer_id=1, batch_sequence=number, create_time_ms=0
            )
            connection.request(FrameKind.PRODUCE, answers.append, *batch, timeout_s=30)
            await eventually(lambda answers=answers: answers)
        assert broker.store.is_flushed
        assert fatal == []
        connection.close()
        await connection.wait_closed()


async def test_a_write_that_fails_for_another_reason_than_space_is_fatal(tmp_path: Path) -> None:
    class BrokenDisk(Disk):
        fails = False

        def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
            if self.fails:
                raise OSError(5, "Input/output error")
            super().write(fd, buffers, at)

    disk = BrokenDisk()
    async with served(tmp_path, LogConfig(), disk) as (_, server, fatal):
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        disk.fails = True
        batch = encode(b"s", Columns([b"body"]), producer_id=1, batch_sequence=0, create_time_ms=0)
        connection.request(FrameKind.PRODUCE, lambda _: None, *batch, timeout_s=30)
        await eventually(lambda: fatal)
        assert isinstance(fatal[0], OSError)
        disk.fails = False
        connection.close()
        await connection.wait_closed()


async def test_a_flood_of_fetches_does_not_make_the_broker_hold_their_answers(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, LogConfig()) as (broker, server, _):
        queue = broker.store.open_queue("s", 0)
        for number in range(8):
            broker.store.append([intake(queue, [bytes(1 << 20)], number=number)])
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        fetch = wire.Fetch("s", 0, 0, 1 << 40, 0, 8 << 20, [], [], [], 0).pack()
        calls = [connection.call(FrameKind.FETCH, fetch, timeout_s=30) for _ in range(200)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(each, Overloaded) for each in found)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024
        connection.close()
        await connection.wait_closed()


async def test_a_checkpoint_is_taken_while_messages_come(tmp_path: Path) -> None:
    config = LogConfig(checkpoint_bytes=64 * 1024, segment_bytes=256 * 1024)
    async with served(tmp_path, config) as (broker, _, fatal):
        queue = broker.store.open_queue("s", 0)
        number = 0

        def store_more() -> bool:
            nonlocal number
            for _ in range(20):
                broker.store.append([intake(queue, [os.urandom(1000)], number=number)])
                number += 1
            return len(list((tmp_path / "checkpoint").glob("*.qmc"))) >= 2

        await eventually(store_more)
        assert fatal == []
    store = open_store(tmp_path, config, SystemClock())
    assert store.open_queue("s", 0).next_sequence == number
    store.close()


async def test_retention_goes_by_append_time_not_by_the_files_date(tmp_path: Path) -> None:
    """The Java original decides by a file's date, which a copy or a backup changes."""
    async with served(tmp_path, LogConfig(segment_bytes=64 * 1024)) as (broker, _, _):
        queue = broker.store.open_queue("s", 0)
        for number in range(200):
            broker.store.append([intake(queue, [os.urandom(1000)], number=number)])
        for path in (tmp_path / "message").iterdir():
            os.utime(path, (0, 0))
        assert begin_retention(broker.store, SubjectConfig).dropped == []
        assert queue.start_sequence == 0


async def test_a_pull_on_an_unknown_session_must_attach_again(tmp_path: Path) -> None:
    async with served(tmp_path, LogConfig()) as (_, server, _):
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        with pytest.raises(UnknownConsumer, match="attach again"):
            await connection.call(
                FrameKind.PULL, wire.pack_pull(wire.Pull(77, 1, 1, 0)), timeout_s=10
            )
        connection.close()
        await connection.wait_closed()


class GatedDisk(Disk):
    """A disk whose flushes wait for the test; it counts them."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.syncs = 0

    def sync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.syncs += 1
            self.gate.wait()
        super().sync(fd)


async def test_a_slow_disk_makes_one_flush_of_all_that_came_meanwhile_and_then_rests(
    tmp_path: Path,
) -> None:
    disk = GatedDisk()
    async with served(tmp_path, LogConfig(flush_interval_ms=0), disk, ticks=False) as (
        broker,
        _,
        _,
    ):
        queue = broker.store.open_queue("s", 0)
        broker.append_own([intake(queue, [b"a"])])
        await eventually(lambda: broker.store.is_flushed)
        before = disk.syncs
        disk.gate.clear()
        for number in range(1, 50):
            broker.append_own([intake(queue, [b"a"], number=number)])
            await asyncio.sleep(0)
        assert not broker.store.is_flushed
        disk.gate.set()
        await eventually(lambda: broker.store.is_flushed)
        assert disk.syncs - before == 2, "one of the first, one of the others"
        for _ in range(5):
            broker.turn()
        await asyncio.sleep(0)
        assert disk.syncs - before == 2, "there is nothing to flush"


async def test_a_flush_that_fails_while_the_broker_stops_is_reported_once(tmp_path: Path) -> None:
    class BrokenGatedDisk(GatedDisk):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            if threading.current_thread() is not threading.main_thread():
                raise FlushFailed("fdatasync failed (in this test)")

    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["message"])
    )
    disk, fatal = BrokenGatedDisk(), list[BaseException]()
    disk.gate.clear()
    store = open_store(tmp_path, LogConfig(flush_interval_ms=0), SystemClock(), disk=disk)
    running = alone(store, SystemClock(), BrokerConfig(), fatal=fatal.append, tick_s=TICK_S)
    running.broker.append_own([intake(store.open_queue("s", 0), [b"a"])])
    await eventually(lambda: disk.syncs)
    stopping = asyncio.create_task(running.maintenance.stop())
    await asyncio.sleep(0)  # it waits for the flush
    disk.gate.set()
    await stopping
    await eventually(lambda: fatal)
    store.close()
    # asyncio reports a failure that was not retrieved when its future is collected
    del (
        running,
        stopping,
        store,
    )
    gc.collect()
    assert [type(each) for each in fatal] == [FlushFailed]
    assert reported == []


async def test_an_interval_between_flushes_does_not_delay_a_requested_flush(tmp_path: Path) -> None:
    async with served(tmp_path, LogConfig(flush_interval_ms=3_600_000)) as (broker, server, _):
        connection = await connect(f"127.0.0.1:{server.port}", "test")
        for number in range(3):
            batch = encode(
                b"s", Columns([b"body"]), producer_id=1, batch_sequence=number, create_time_ms=0
            )
            await connection.call(FrameKind.PRODUCE_FLUSHED, b"".join(batch), timeout_s=30)
            assert broker.store.is_flushed
        batch = encode(b"s", Columns([b"body"]), producer_id=1, batch_sequence=3, create_time_ms=0)
        await connection.call(FrameKind.PRODUCE, b"".join(batch), timeout_s=30)
        assert not broker.store.is_flushed
        connection.close()
        await connection.wait_closed()


INTERVAL_MS = 3_600_000


class EarlyTimers(asyncio.SelectorEventLoop):
    """A loop whose timers for flushes are early, as those of uvloop are by up to half of a
    millisecond.
    """

    set = 0

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if delay > INTERVAL_MS / 2000:
            self.set, delay = self.set + 1, 0.0
        return super().call_later(delay, callback, *args, context=context)


def test_a_timer_that_is_early_begins_the_flush_and_is_not_set_again_and_again(
    tmp_path: Path,
) -> None:
    loop = EarlyTimers()

    async def flushed_twice() -> None:
        async with served(tmp_path, LogConfig(flush_interval_ms=INTERVAL_MS), ticks=False) as (
            broker,
            _,
            _,
        ):
            queue = broker.store.open_queue("s", 0)
            for number in range(2):
                broker.append_own([intake(queue, [b"a"], number=number)])
                await eventually(lambda: broker.store.is_flushed)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(flushed_twice())
    assert loop.set == 1, "for the second flush; the first need not wait"


async def test_retention_is_not_held_up_by_flushes_that_follow_each_other(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=64 * 1024, retention_ms=1)
    async with served(tmp_path, config, retention_interval_ms=1) as (broker, _, fatal):
        queue, number = broker.store.open_queue("s", 0), 0

        def store_more() -> bool:
            nonlocal number
            for _ in range(20):
                broker.append_own([intake(queue, [os.urandom(1000)], number=number)])
                number += 1
            return broker.counters.files_deleted > 0

        await eventually(store_more)
        assert fatal == []


async def test_a_replica_that_takes_no_checkpoint_deletes_files_that_the_store_has(
    tmp_path: Path,
) -> None:
    """It begins its log again, and copies more than its disk may keep."""
    config = LogConfig(
        segment_bytes=64 * 1024, object_store_url="file:///nowhere", local_retention_bytes=0
    )
    async with served(tmp_path, config, ticks=False, retention_interval_ms=1) as (broker, _, fatal):
        log, queue = broker.store.messages, broker.store.open_queue("s", 0)
        for number in range(20):
            broker.append_own([intake(queue, [os.urandom(8_000)], number=number)])
        base, end = log.bases[0], log.bases[1]
        index = SegmentIndex(base, end - base, end - base, (0,), log.read(base, 64))
        log.write_index(index)
        assert log.note_index(index)
        maintenance = Maintenance(broker, fatal.append, holds_back=lambda: True, tick_s=0.001)
        maintenance.start()
        await eventually(lambda: not (log.folder / segment_name(base)).exists())
        await maintenance.stop()
        assert (log.start, log.local_start) == (base, end)
        assert (log.folder / segment_name(end)).exists(), "the store does not have this one"
        assert not list((tmp_path / "checkpoint").glob("*"))
        assert fatal == []


async def test_a_checkpoint_between_two_turns_repeats_no_action_at_a_restart(
    tmp_path: Path,
) -> None:
    """A frame has changed the groups, and the turn that writes its actions to the log comes after
    the checkpoint.
    """
    async with served(tmp_path / "running", LogConfig(), ticks=False) as (broker, _, fatal):
        queue = broker.store.open_queue("s", 0)
        broker.append_own([intake(queue, [b"a", b"b", b"c"])])
        broker.turn()
        broker.store.act(Join("s", 0, "g", "consumer", "incarnation", 30_000, 0))
        broker.store.act(PullAction("s", 0, "g", "consumer", (Pulled(0, 3, 1),)))
        plan = broker.begin_checkpoint()
        assert plan is not None
        plan.run()
        broker.turn()
        broker.store.begin_flush().run()
        expected = queue.share("g").to_state()
        assert fatal == []
        shutil.copytree(tmp_path / "running", tmp_path / "killed")
    store = open_store(tmp_path / "killed", LogConfig(), SystemClock())
    assert store.open_queue("s", 0).share("g").to_state() == expected
    store.close()
