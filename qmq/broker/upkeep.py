"""What a broker does besides answering: flushing, checkpoints, retention, leases. The slow parts run in threads.

A failed flush is final: the process must stop at once, before it acknowledges anything else; `fatal` sees to that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from qmq.broker.broker import Broker
from qmq.errors import DiskFull
from qmq.limits import MIB
from qmq.log.checkpointing import CheckpointPlan, begin_checkpoint, end_checkpoint
from qmq.log.config import Flush
from qmq.log.retention import begin_retention, end_retention
from qmq.log.store import FlushPlan

log = logging.getLogger("qmq.broker")

TICK_S: Final = 0.05
SLOW_TICKS: Final = 20
_INDEX_BYTES_MAX: Final = 16 * MIB
"""Consume-log entries in memory only, beyond which a checkpoint writes them out."""

EXIT_FATAL: Final = 70


def stop_process(cause: BaseException) -> None:
    """Stop now, without a further word to any client: what was not acknowledged was never promised."""
    print(f"qmq: fatal: {cause}", file=sys.stderr, flush=True)
    os._exit(EXIT_FATAL)


class Upkeep:
    """Runs a broker's background work in its event loop."""

    def __init__(self, broker: Broker, fatal: Callable[[BaseException], None] = stop_process) -> None:
        self._broker = broker
        self._store = broker.store
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, "qmq-disk")
        self._flush: asyncio.Future[None] | None = None
        self._checkpoint: asyncio.Task[Any] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._flushed_ms = self._checkpoint_ms = self._retention_ms = broker.clock.monotonic_ms()
        self._checkpoint_positions = (self._store.messages.end, self._store.actions.end)
        broker.on_turn_end = self.after_turn
        broker.fatal = fatal

    def start(self) -> None:
        """Begin."""
        self._ticker = self._loop.create_task(self._tick_forever())

    async def stop(self) -> None:
        """Finish what is under way. The caller closes the store, which flushes."""
        if self._ticker is not None:
            self._ticker.cancel()
        for task in (self._flush, self._checkpoint):
            if task is not None:
                await asyncio.wait([task])
        self._threads.shutdown(wait=True)

    # --- flushing ------------------------------------------------------------------------------------------------------

    def after_turn(self) -> None:
        """End of a turn: begin a flush if one is due and none is under way."""
        if self._flush is None and self._is_flush_due():
            self._begin_flush()

    def _is_flush_due(self) -> bool:
        if self._store.config.flush is Flush.SYNC:
            return self._broker.awaits_flush
        return self._store.unflushed_messages >= self._store.config.flush_messages

    def _begin_flush(self) -> None:
        plan = self._store.begin_flush()
        self._flushed_ms = self._broker.clock.monotonic_ms()
        self._flush = self._loop.run_in_executor(self._threads, plan.run)
        self._flush.add_done_callback(lambda done: self._end_flush(plan, done))

    def _end_flush(self, plan: FlushPlan, done: asyncio.Future[None]) -> None:
        self._flush = None
        if done.cancelled():
            return
        failure = done.exception()
        if failure is not None:
            self._fatal(failure)
            return
        self._broker.flushed(self._store.end_flush(plan))

    # --- on the clock --------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(TICK_S)
            count += 1
            try:
                self._broker.tick()
                if count % SLOW_TICKS == 0:
                    self._slow_tick(self._broker.clock.monotonic_ms())
            except Exception as cause:
                self._fatal(cause)

    def _slow_tick(self, now_ms: int) -> None:
        store = self._store
        is_late = now_ms - self._flushed_ms >= store.config.flush_interval_ms
        if self._flush is None and not store.is_flushed and is_late:
            self._begin_flush()
        if self._checkpoint is None and self._is_checkpoint_due(now_ms):
            self._checkpoint = self._loop.create_task(self._take_checkpoint())
        elif now_ms - self._retention_ms >= self._broker.config.retention_interval_ms:
            self._retention_ms = now_ms
            if self._checkpoint is None:
                self._checkpoint = self._loop.create_task(self._retain())

    def _is_checkpoint_due(self, now_ms: int) -> bool:
        store, (messages, actions) = self._store, self._checkpoint_positions
        grown = store.messages.end - messages + store.actions.end - actions
        in_memory = sum([queue.index.tail_bytes for queue in store.queues.values()])
        is_late = grown > 0 and now_ms - self._checkpoint_ms >= store.config.checkpoint_interval_ms
        few = 1024 * len(store.queues)
        return is_late or grown >= store.config.checkpoint_bytes or in_memory > _INDEX_BYTES_MAX + few

    async def _take_checkpoint(self) -> bool:
        """True if it was written."""
        try:
            plan = begin_checkpoint(self._store)
            self._checkpoint_ms = self._broker.clock.monotonic_ms()
            await self._loop.run_in_executor(self._threads, plan.run)
            self._note_checkpoint(plan)
        except DiskFull as failure:
            log.warning("no checkpoint for now: %s", failure)
            return False
        except Exception as cause:
            self._fatal(cause)
            return False
        finally:
            self._checkpoint = None
        return True

    def _note_checkpoint(self, plan: CheckpointPlan) -> None:
        self._checkpoint_positions = (plan.checkpoint.message_position, plan.checkpoint.action_position)
        self._broker.flushed(end_checkpoint(self._store, plan))

    async def _retain(self) -> None:
        """Forget what retention takes, write that down, and only then delete."""
        try:
            if self._flush is not None:  # it may hold a file that retention would close under it
                await asyncio.wait([self._flush])
            taken = begin_retention(self._store, self._broker.subject_or_none)
            if taken and await self._take_checkpoint():
                await self._loop.run_in_executor(self._threads, end_retention, taken)
        finally:
            self._checkpoint = None
