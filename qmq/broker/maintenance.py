"""The background work of a broker: flushes, checkpoints, the commit mark, retention, leases. The
slow parts run in threads, and most flushes in the kernel.

A failed flush is final: `fatal` stops the process before it acknowledges anything else.

`ProducerOwners` says which principal uses a producer id: the first one that sent under it to this
broker, while rules are enforced. A message's id contains the id of its producer, so every consumer
knows it. Without an owner, any principal that may produce to the same subject could begin a newer
session under that id, and the broker would refuse the producer's own batches as those of an older
one (`ProducerFenced`).

Each principal keeps the `IDS_MAX` ids that it began to use last, so a principal that invents ids
pushes out only its own. The next batch of an id that was pushed out claims it again.

What if it crashes here? Owners are in memory. A broker that starts, or becomes master, learns them
from the first batch of each id; a producer that sends continuously claims its id before others can.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, TypeVar

from qmq.broker.broker import Broker
from qmq.broker.reading.fetches import IndexMemory
from qmq.errors import AccessDenied, DiskFull, FlushFailed, LogDamaged, QmqError
from qmq.limits import MIB
from qmq.log.checkpoint import CheckpointPlan, end_checkpoint
from qmq.log.commit_mark import Marker
from qmq.log.log_config import Flush
from qmq.log.retention import Before, Retention
from qmq.log.scrub import Scrubber
from qmq.log.segments import FlushPlan
from qmq.log.store import Store
from qmq.process.kernel_sync import KernelSyncs
from qmq.security.principal import Principal

log = logging.getLogger("qmq.broker")

TICK_S: Final = 0.05
SLOW_TICKS: Final = 20
_INDEX_BYTES_MAX: Final = 16 * MIB
"""Bytes of consume-log entries in memory, after which a checkpoint writes them to files."""

_SCRUB_BYTES: Final = 4 * MIB
_SCRUB_ENTRIES: Final = 2_000
"""What the scrubber checks every second: 4 MiB, a GiB in four minutes. Entries are fewer where they
are small: each takes the interpreter 6 µs, which the messages of that moment wait for.
"""

EXIT_FATAL: Final = 70


_R = TypeVar("_R")


def stop_process(cause: BaseException) -> None:
    """End the process immediately, without another answer. Messages that were not acknowledged are
    not promised. An error that is not ours says where it came from.
    """
    if not isinstance(cause, QmqError):
        traceback.print_exception(cause)
    print(f"qmq: fatal: {cause}", file=sys.stderr, flush=True)
    os._exit(EXIT_FATAL)


class Maintenance:
    """Runs a broker's background work in its event loop."""

    def __init__(
        self,
        broker: Broker,
        fatal: Callable[[BaseException], None] = stop_process,
        *,
        holds_back: Callable[[], bool] = lambda: False,
        retention_before: Before | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        """`holds_back` says whether checkpoints and retention must wait now, for example while a
        replica catches up from nothing. `retention_before` says which messages are too old; without
        it, the broker's clock does.
        """
        self._broker = broker
        self._holds_back = holds_back
        self._fatal = fatal
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(
            3, "qmq-disk"
        )  # so that a flush never waits behind a checkpoint and the scrubber
        self._kernel = KernelSyncs(broker.store.disk.kernel_call())
        self._flush: Future[float] | None = None
        self._running: set[Future[Any]] = set()
        self._scrubber = Scrubber(broker.store)
        self._marker = Marker(broker.store)
        self._index_memory = IndexMemory()
        self._retention_before = retention_before
        self._retention = Retention(broker.store, self._retention_before)
        self._is_stopping = False
        self._is_paused = False
        self._scrubbing: asyncio.Future[LogDamaged | None] | None = None
        self._checkpoint: asyncio.Task[Any] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._flush_at = self._loop.time()
        """When the next flush may begin; flushes that a request waits for are not delayed."""
        self._flush_timer: asyncio.Handle | None = None
        self._checkpoint_ms = self._retention_ms = broker.clock.monotonic_ms()
        self._checkpoint_positions = (self._store.messages.end, self._store.actions.end)

    def start(self) -> None:
        self._ticker = self._loop.create_task(self._tick_forever())

    async def stop(self) -> None:
        """Finish the work under way. The caller closes the store, which flushes.

        A checkpoint that waits for a majority is abandoned, because the majority may never return.
        """
        self._is_stopping = True
        for timer in (self._ticker, self._flush_timer):
            if timer is not None:
                timer.cancel()
        if self._flush is not None:
            await self._until_ended([self._flush])
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint])
        self._retention.end()
        self._is_paused = True  # a turn may still come, and finds no threads
        self._kernel.close()
        self._threads.shutdown(wait=True)

    @property
    def _store(self) -> Store:
        return self._broker.store

    def _in_thread(self, run: Callable[..., _R], *args: Any) -> asyncio.Future[_R]:
        return asyncio.wrap_future(self._submit(run, *args), loop=self._loop)

    def _submit(self, run: Callable[..., _R], *args: Any) -> Future[_R]:
        return self._run(self._threads.submit(run, *args))

    def _run(self, running: Future[_R]) -> Future[_R]:
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    async def _until_ended(self, running: list[Future[Any]]) -> None:
        """Wait for work of threads. A failure is reported where the work began, and not by asyncio
        as never retrieved.
        """
        if running:
            ended, _ = await asyncio.wait(
                [asyncio.wrap_future(each, loop=self._loop) for each in running]
            )
            for each in ended:
                if not each.cancelled():
                    each.exception()

    def quiesce(self) -> None:
        """Block until nothing works on the store, which is about to be reopened."""
        self._kernel.wait()
        wait(list(self._running))
        self._flush = None

    async def pause(self) -> None:
        """Start no further work, and wait until the running work has ended: the store is about to
        be reopened.
        """
        self._is_paused = True
        while self._running or self._checkpoint is not None:
            await self._until_ended(list(self._running))
            if self._checkpoint is not None:
                await asyncio.wait([self._checkpoint])
            await asyncio.sleep(0)

    def go_on(self) -> None:
        """Continue with the broker's current store."""
        self._flush = None
        self._is_paused = False
        self.after_turn()

    @property
    def _must_end(self) -> bool:
        return self._is_stopping or self._is_paused

    # --- flushing ---------------------------------------------------------------------------------

    def after_turn(self) -> None:
        """At the end of a turn, flush unflushed data, unless a flush is under way; the end of a
        flush is a turn, too. So the next flush covers everything that arrived meanwhile, and a slow
        disk makes fewer and larger flushes.
        """
        if self._is_paused or self._flush is not None:
            return
        store = self._broker.store
        wanted = store.index if store.config.flush is Flush.SYNC else store.flush_wanted
        if min(wanted, store.index) > store.flushed_index:  # a request waits for it
            self._begin_flush()
        elif self._flush_timer is None and not store.is_flushed:
            wait_s = self._flush_at - self._loop.time()
            # Not here even if it is due: uvloop writes the turn's answers behind this callback, and
            # they need not wait for a thread.
            later = (
                self._loop.call_soon(self._flush_in_time)
                if wait_s <= 0
                else self._loop.call_later(wait_s, self._flush_in_time)
            )
            self._flush_timer = later

    def _flush_in_time(self) -> None:
        # A timer may be early, which does not matter: uvloop counts whole milliseconds, and calls
        # at once what is due in half of one.
        self._flush_timer = None
        if not self._is_paused and self._flush is None and not self._store.is_flushed:
            self._begin_flush()

    def _begin_flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        store = self._store
        plan = store.begin_flush()
        self._flush_at = self._loop.time() + store.config.flush_interval_ms / 1000
        try:
            flush = self._kernel.begin(plan.files, partial(self._end_flush, store, plan))
        except FlushFailed as failure:
            self._fatal(failure)
            return
        if flush is not None:
            self._flush = self._run(flush)
            return
        self._flush = self._submit(_timed, plan.run)
        # Not as a future of asyncio, which takes the event loop one more round for each flush.
        self._flush.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._end_flush, store, plan, done)
        )

    def _end_flush(self, store: Store, plan: FlushPlan, done: Future[float]) -> None:
        failure = done.exception()
        if failure is not None:
            self._fatal(failure)
            return
        self._broker.counters.flushes.note(done.result())
        if store is self._store:
            self._flush = None
            self._broker.stored(store.end_flush(plan))

    # --- on the clock -----------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(self._tick_s)
            count += 1
            try:
                self._broker.tick()
                if self._is_paused:
                    continue
                self._mark()
                if count % SLOW_TICKS == 0:
                    self.slow_tick(self._broker.clock.monotonic_ms())
            except Exception as cause:
                self._fatal(cause)

    def _mark(self) -> None:
        """Write the commit mark, for readers of the log's files."""
        if self._marker.store is not self._store:
            self._marker = Marker(self._store)
        self._marker.tick(self._broker.clock.monotonic_ms())

    def slow_tick(self, now_ms: int) -> None:
        """Begin what is due of scrubbing, checkpoints and retention."""
        if self._holds_back():
            if self._store.config.is_local_retention_set and self._is_retention_due(now_ms):
                self._begin(self._retaining(self._release_files))
            return
        self._scrub()
        self.after_turn()
        if self._checkpoint is None and self._is_checkpoint_due(now_ms):
            self._begin(self._take_checkpoint())
        elif self._is_retention_due(now_ms):
            self._begin(self._retaining(self._retain))

    def _is_retention_due(self, now_ms: int) -> bool:
        if now_ms - self._retention_ms < self._broker.config.retention_interval_ms:
            return False
        self._retention_ms = now_ms
        return self._checkpoint is None

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a checkpoint or retention; one runs at a time, and `stop` waits for it."""
        self._checkpoint = self._loop.create_task(work)
        self._checkpoint.add_done_callback(self._ended)

    def _ended(self, done: asyncio.Task[Any]) -> None:
        self._checkpoint = None
        failure = None if done.cancelled() else done.exception()
        if failure is not None:
            self._fatal(failure)

    def _scrub(self) -> None:
        """Check some more of the files, so that damage is found while another
        replica can repair it.
        """
        if self._scrubbing is not None and not self._scrubbing.done():
            return
        if self._scrubber.store is not self._store:
            self._scrubber = Scrubber(self._store)
        self._scrubbing = self._in_thread(self._scrubber.slice, _SCRUB_BYTES, _SCRUB_ENTRIES)
        self._scrubbing.add_done_callback(self._scrubbed)

    def _scrubbed(self, done: asyncio.Future[LogDamaged | None]) -> None:
        if done.cancelled():
            return
        failure = done.exception()
        if isinstance(failure, OSError):
            log.warning("scrubbing is interrupted and will continue later: %s", failure)
            return
        if failure is not None:
            self._fatal(failure)
            return
        damage = done.result()
        self._broker.counters.damaged += damage is not None
        if (
            damage is not None
            and self._scrubber.store is self._store
            and not self._broker.report_damage(damage)
        ):
            log.error("%s", damage)

    def _is_checkpoint_due(self, now_ms: int) -> bool:
        store, (messages, actions) = self._store, self._checkpoint_positions
        grown = store.messages.end - messages + store.actions.end - actions
        is_late = grown > 0 and now_ms - self._checkpoint_ms >= store.config.checkpoint_interval_ms
        few = 1024 * len(store.queues)
        return (
            is_late
            or grown >= store.config.checkpoint_bytes
            or self._index_memory.exceeds(store, _INDEX_BYTES_MAX + few)
        )

    async def _take_checkpoint(self) -> bool:
        """True if it was written."""
        try:
            store = self._store
            self._checkpoint_ms = self._broker.clock.monotonic_ms()
            plan = self._broker.begin_checkpoint()
            if plan is None:
                return False
            while self._awaits_commit(store, plan):  # noqa: ASYNC110
                await asyncio.sleep(self._tick_s)
            if store is not self._store or not _may_be_written(store, plan):
                return False
            await self._in_thread(plan.run)
            if store is not self._store:
                return False
            self._note_checkpoint(plan)
        except DiskFull as failure:
            log.warning("taking a checkpoint failed, it will be tried again: %s", failure)
            return False
        except Exception as cause:
            self._fatal(cause)
            return False
        return True

    def _awaits_commit(self, store: Store, plan: CheckpointPlan) -> bool:
        return store is self._store and not self._must_end and not _may_be_written(store, plan)

    def _note_checkpoint(self, plan: CheckpointPlan) -> None:
        self._checkpoint_positions = (
            plan.checkpoint.message_position,
            plan.checkpoint.action_position,
        )
        self._broker.counters.checkpoint_written(self._broker.clock.time_ms())
        self._broker.stored(end_checkpoint(self._store, plan))

    async def _retain(self, retention: Retention) -> None:
        """Drop expired messages, record that in a checkpoint, and only then delete the files.
        Failed parts are retried next time.
        """
        if not await self._forget_old(retention):
            return
        may_hold_files = list(self._running)
        if retention.dropped and await self._take_checkpoint():
            retention.written()
        await self._delete_files(retention, may_hold_files)

    async def _release_files(self, retention: Retention) -> None:
        """While a replica starts over, its disk keeps only what the object store
        does not have yet.
        """
        may_hold_files = list(self._running)
        retention.release()
        await self._delete_files(retention, may_hold_files)

    async def _delete_files(self, retention: Retention, may_hold_files: list[Future[Any]]) -> None:
        if retention.deletable:
            await self._close_dropped(retention.store, may_hold_files)
            self._broker.counters.files_deleted += await self._in_thread(retention.delete)

    async def _retaining(self, work: Callable[[Retention], Coroutine[Any, Any, None]]) -> None:
        """Do some work of retention, and count its failures."""
        if self._retention.store is not self._store:
            self._retention.end()
            self._retention = Retention(self._store, self._retention_before)
        retention = self._retention
        try:
            await work(retention)
        except OSError as failure:
            retention.failures += 1
            log.error("retention failed, it will be tried again: %s", failure)
        finally:
            self._broker.counters.retention_failures += retention.failures
            retention.failures = 0

    async def _forget_old(self, retention: Retention) -> bool:
        """Forget old messages in slices, between which other tasks run. False if it must stop."""
        for _ in retention.steps(self._broker.subjects.retention_settings):
            await asyncio.sleep(0)
            if retention.store is not self._store or self._must_end:
                return False
        return True

    async def _close_dropped(self, store: Store, may_hold_files: list[Future[Any]]) -> None:
        """Close dropped files, unless a running flush may be syncing one of them."""
        if may_hold_files:
            await self._until_ended(may_hold_files)
        for segments in store.logs:
            segments.close_set_aside()


def _may_be_written(store: Store, plan: CheckpointPlan) -> bool:
    """Whether the checkpoint may be written: its content must be committed, because a checkpoint is
    never undone.
    """
    return not store.is_replicated or store.committed_index >= plan.checkpoint.index


def _timed(run: Callable[[], None]) -> float:
    """The seconds that `run` took. Raises as `run`."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


IDS_MAX: Final = 10_000


class ProducerOwners:
    """The owners of producer ids at one broker."""

    def __init__(self, ids_max: int = IDS_MAX) -> None:
        self._ids_max = ids_max
        self._owners: dict[int, Principal] = {}
        self._ids: dict[Principal, dict[int, None]] = {}
        """Of each principal, the oldest first."""

    def claim(self, producer_id: int, principal: Principal) -> None:
        """A principal sends under an id. Raises AccessDenied if another principal owns the id."""
        owner = self._owners.get(producer_id)
        if owner == principal:
            return
        if owner is not None:
            raise AccessDenied(
                f"producer {producer_id:016x} is not {principal}'s: another principal began to "
                "send under this id. After a change of principal, make a new client"
            )
        ids = self._ids.setdefault(principal, {})
        self._owners[producer_id], ids[producer_id] = principal, None
        if len(ids) > self._ids_max:
            oldest = next(iter(ids))
            del ids[oldest], self._owners[oldest]
