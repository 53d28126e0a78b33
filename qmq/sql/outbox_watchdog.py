"""The watchdog sends committed messages that were not sent because a process died or no broker was
reachable. Of several watchdogs one is active.

    keeping the lease    look ─ take ─ renew ...
    working, while held  look what waits ─ choose ─ for each subject: OutboxSender.send_left

Both are decided by outbox_turns.py.

Rules:
* Each subject that has work has a task, and the next look leaves it alone until that ends. A
  subject that fails is skipped for a while.
* A watchdog never ends because of a database error: it logs the error, and tries again after a
  growing pause.
* The lease is released at the end, so that another watchdog takes over immediately; after a crash
  others wait until the lease expires, `lease` long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from qmq import limits
from qmq.errors import InvalidArgument
from qmq.sql.debezium_outbox import DebeziumIntake, DebeziumTable
from qmq.sql.outbox_message import error_text, holder_text
from qmq.sql.outbox_relay import OutboxSender, log
from qmq.sql.outbox_runner import EngineRunner
from qmq.sql.outbox_sender import Sender
from qmq.sql.outbox_statements import Operations
from qmq.sql.outbox_turns import (
    HeldLease,
    LeaseRow,
    Patience,
    Step,
    WaitingRow,
    after_asking,
    choose,
    next_step,
    wait_s,
)

LOOK_ROWS: Final = 5_000
"""The largest number of rows that one look reads, without their contents."""
ROUND_MESSAGES: Final = 2_000
"""The largest number of messages of a subject that are sent at a time."""
ROUND_BYTES: Final = 4 * limits.MIB
SUBJECTS_MAX: Final = 32
"""The largest number of subjects that are sent at a time."""
FINISH_S: Final = 3.0
"""How long the watchdog waits for unfinished work at its end."""
LEAVE_S: Final = 2.0
"""How long releasing the lease may take."""


class Watchdog:
    """The watchdog of one outbox table, made by `Watchdogs`."""

    def __init__(
        self,
        rows: OutboxSender,
        holder: str,
        lease_s: float,
        look_s: float,
        now: Callable[[], float] = time.monotonic,
        intake: DebeziumIntake | None = None,
    ) -> None:
        self._rows, self._table = rows, rows.table
        self._holder, self._lease_s, self._look_s, self._now = holder, lease_s, look_s, now
        self._intake = intake
        self._held: HeldLease | None = None
        self._row: LeaseRow | None = None
        self._has_looked = False
        self._work = asyncio.Event()
        self._patience = Patience()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self.sent = 0
        """The number of messages that this watchdog sent."""

    @property
    def is_working(self) -> bool:
        """Whether this watchdog holds the lease."""
        return self._held is not None and self._held.is_held(self._now())

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_lease())
                group.create_task(self._send_all())
        finally:
            await self._finish()
            await self._release_lease()

    async def _finish(self) -> None:
        """Wait a short time for unfinished work, so that sent rows are deleted."""
        tasks = list(self._busy.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=FINISH_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    # --- the lease --------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(0.1, 5.0),
                retry=retry_if_exception_type(Exception),
                before_sleep=self._complain,
            ):
                with attempt:
                    await self._step()
            await asyncio.sleep(wait_s(self._held, self._row, self._now(), self._look_s))

    async def _step(self) -> None:
        if self._held is None:
            self._row = await self._table.view_lease()
        step = next_step(self._held, self._row, self._now())
        asked_at = self._now()
        if step is Step.CREATE:
            await self._table.create_lease()
        elif step is Step.TAKE and self._row is not None:
            token = self._row.token
            is_changed = await self._table.changed(
                self._table.statements.take_lease(self._holder, token, self._lease_ms)
            )
            self._set_lease(after_asking(token + 1, is_changed, asked_at, self._lease_s))
        elif step is Step.RENEW and self._held is not None:
            token = self._held.token
            is_changed = await self._table.changed(
                self._table.statements.renew_lease(self._holder, token, self._lease_ms)
            )
            self._set_lease(after_asking(token, is_changed, asked_at, self._lease_s))

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _set_lease(self, held: HeldLease | None) -> None:
        if (held is None) != (self._held is None):
            log.info(
                "watchdog %s of outbox %s %s",
                self._holder,
                self._table.statements.table,
                "works" if held else "lost its lease",
            )
        self._held = held
        if held is not None:
            self._work.set()
        else:
            self._work.clear()

    async def _release_lease(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._table.changed(
                    self._table.statements.release_lease(self._holder, held.token)
                )
        except (
            Exception
        ) as failure:  # any exception of a driver: other watchdogs wait until the lease expires
            log.info(
                "watchdog %s could not release its lease: %s", self._holder, error_text(failure)
            )

    # --- the work ---------------------------------------------------------------------------------

    async def _send_all(self) -> None:
        while True:
            await self._work.wait()
            is_news = False
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(0.1, 5.0),
                retry=retry_if_exception_type(Exception),
                before_sleep=self._complain,
            ):
                with attempt:
                    is_news = self.is_working and await self.start_deliveries()
            await self._wait_for_work(is_news)

    async def _wait_for_work(self, is_news: bool) -> None:
        """Wait until a subject's task has ended or some time has passed."""
        if self._busy and is_news:
            await asyncio.wait(
                self._busy.values(), timeout=self._look_s, return_when=asyncio.FIRST_COMPLETED
            )
        else:
            await asyncio.sleep(self._look_s)

    async def start_deliveries(self) -> bool:
        """Start tasks for subjects with waiting messages. Returns whether any task is running."""
        if self._intake is not None:
            await self._intake.move()
        after = -1
        # Later pages must not take messages of keys that an earlier page had or left out: they
        # would overtake earlier messages.
        seen = [*self._busy, *self._patience.resting(self._now())]
        while len(self._busy) < SUBJECTS_MAX:
            rows = await self._table.waiting(after, LOOK_ROWS, seen)
            self._begin(
                [row for row in rows if row.subject not in seen]
            )  # the largest number of subjects that one statement can leave out
            if len(rows) < LOOK_ROWS:
                break
            after = rows[-1].id
            seen += {row.subject for row in rows}.difference(seen)
        return bool(self._busy)

    def _begin(self, rows: Sequence[WaitingRow]) -> None:
        for subject, ids in choose(rows, ROUND_MESSAGES, ROUND_BYTES).items():
            if len(self._busy) < SUBJECTS_MAX and subject not in self._busy:
                task = self._busy[subject] = asyncio.get_running_loop().create_task(
                    self._deliver(subject, ids)
                )
                task.add_done_callback(lambda _, subject=subject: self._busy.pop(subject, None))  # type: ignore[misc]

    async def _deliver(self, subject: str, ids: Sequence[int]) -> None:
        try:
            left = await self._rows.send_left(subject, ids)
            self.sent += left.sent
            if left.sent or not left.readable:
                self._patience.sent(subject)
            else:
                self._patience.failed(subject, self._now())
        except Exception as failure:  # any exception of a driver
            self._patience.failed(subject, self._now())
            log.warning(
                "watchdog %s could not send to %s: %s", self._holder, subject, error_text(failure)
            )

    def _complain(self, state: RetryCallState) -> None:
        failure = state.outcome.exception() if state.outcome is not None else None
        log.warning(
            "watchdog %s of outbox %s: %s",
            self._holder,
            self._table.statements.table,
            error_text(failure) if failure else "",
        )


class Watchdogs:
    """The watchdogs of some databases and tables in this process. `async with` runs them in the
    background; or `await run()`.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        tables: Sequence[str],
        sender: Sender,
        holder: str,
        lease: timedelta,
        look_s: float,
        debezium: DebeziumTable | None = None,
    ) -> None:
        if not isinstance(lease, timedelta) or not timedelta(seconds=1) <= lease <= timedelta(
            hours=1
        ):
            raise InvalidArgument(f"lease is a timedelta of a second to an hour, not {lease!r}")
        if not engines or not tables:
            raise InvalidArgument("a watchdog needs a database and a table")
        if debezium is not None and len(tables) > 1:
            raise InvalidArgument(
                "rows of Debezium's layout go into one outbox table: name one, or run "
                "another watchdog"
            )
        self.dogs = [
            Watchdog(
                OutboxSender(Operations(EngineRunner(engine), table), sender),
                holder_text(f"{holder}:{uuid4().hex[:8]}"),
                lease.total_seconds(),
                look_s,
                intake=None
                if debezium is None
                else DebeziumIntake(EngineRunner(engine), debezium, table),
            )
            for engine in engines
            for table in tables
        ]
        """One watchdog for each database and table."""
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            for dog in self.dogs:
                group.create_task(dog.run())

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
