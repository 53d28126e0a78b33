"""The engine of a delay group's master: sends messages as they become due. It runs while the master
serves.

    tick        every 500 ms: the wheel gives what is due, the loader moves the horizon on if it is
                near
    dispatch    due and late messages in turn, a few hundred at a time: read, and put into the
                dispatcher, as long as it has room
    read ahead  schedule logs of near buckets are read and checked, in a thread
    late        messages that were due before this master began, slice by slice
    close       buckets whose time has passed and that have no pending messages

The engine does not wait for commits: a plan is in the log after its messages, so a committed plan
means committed messages. Due messages without room in the dispatcher stay in the wheel. On ordered
subjects no message overtakes another: while there are late messages, newly due ones are *held*
until the late ones are sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from qmq.broker.parts import ServingBroker
from qmq.broker.timekeeper import SteadyClock
from qmq.delay.batches import DueMessage, Places, SchedulePlace
from qmq.delay.buckets import PAUSE_S, BucketInfo
from qmq.delay.config import DelayConfig
from qmq.delay.dispatcher import DueDispatcher
from qmq.delay.plan_log import StorePlanLog, is_half, is_seed, places_of
from qmq.delay.schedule import Schedule
from qmq.delay.wheel import InThread, Loader, Wheel
from qmq.errors import InvariantBroken, NotMaster
from qmq.limits import MIB
from qmq.log.actions import Close, PlanAction
from qmq.process.event_loop import Clock
from qmq.wire.batch_columns import BatchFlag

log = logging.getLogger("qmq.delay")

CLOSE_S: Final = 10.0
BUCKET_BYTES_MAX: Final = 24 * 1024 * MIB
"""An index row can address 32 GiB (buckets.INDEX_ROW); messages that arrive before the next
check must fit above this.
"""
SETTLE_S: Final = 0.05
_ORDERED: Final = int(BatchFlag.ORDERED)
_T = TypeVar("_T")


class DeliveryStatus(NamedTuple):
    """The state of delivery, for people. See DelayDescription in delay.proto."""

    buckets: list[BucketInfo]
    wheel_messages: int
    wheel_bytes: int
    horizon_ms: int
    waiting: int
    planned: int
    lateness_p50_ms: int
    lateness_p99_ms: int
    delivered: int
    troubles: list[tuple[str, int, str]]
    """(subject, waiting messages, reason)."""
    time_ms: int
    clock_step_ms: int


class Engine:
    """Sends due messages while this replica is master. Call `start` once and `stop` once."""

    def __init__(
        self,
        schedule: Schedule,
        writer: ServingBroker,
        clock: Clock,
        config: DelayConfig,
        make_dispatcher: Callable[[StorePlanLog], DueDispatcher],
        fatal: Callable[[BaseException], None],
        timekeeper: SteadyClock | None = None,
        run: InThread | None = None,
    ) -> None:
        self.schedule = schedule
        self._unsubscribe: Callable[[], None] = lambda: None
        self.clock = clock
        self.config = config
        self._timekeeper = timekeeper
        self._fatal = fatal
        self.writer = writer
        self._loop = asyncio.get_running_loop()
        self.wheel = Wheel(config.tick_ms)
        self._run = run or self._in_thread
        self.loader = Loader(
            schedule,
            self.wheel,
            self._run,
            wheel_messages_max=config.wheel_messages_max,
            slice_messages_max=config.slice_messages_max,
            load_ahead_ms=config.load_ahead_ms,
        )
        self._awake = asyncio.Event()
        """There may be due messages, or room for them in the dispatcher."""
        self.plan_log = StorePlanLog(writer, schedule, clock.time_ms, self._awake.set)
        self.dispatcher = make_dispatcher(self.plan_log)
        self._held: deque[Places] = deque()
        """Due messages of ordered subjects that wait until late ones are sent."""
        self._parked: dict[str, deque[Places]] = {}
        """Due messages of subjects that cannot be delivered and have enough messages
        in the dispatcher.
        """
        self._reviving: deque[str] = deque()
        """Parked subjects that can be delivered again, as of the last tick."""
        self.damaged: list[tuple[SchedulePlace, str]] = []
        """Due messages that cannot be read, and why. They stay pending."""
        self.full_buckets: set[int] = set()
        """Buckets whose files have reached their largest size."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_late_turn = False
        self._boundary_ms = 0

    async def _in_thread(self, run: Callable[[], _T]) -> _T:
        return await self._loop.run_in_executor(None, run)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """The master serves: everything in the schedule is committed. Plans of earlier masters are
        sent first.
        """
        readable: list[DueMessage] = []
        for plan in list(self.schedule.plans.values()):
            places = places_of(plan)
            messages = self._read(Places.of(places))
            if len(messages) == len(places):
                self.dispatcher.resume(plan, messages)
            else:
                readable += self._give_up(plan, messages)
        if readable:
            self.dispatcher.put(readable)
        self._begin(self._begin_counting)

    def _give_up(self, plan: PlanAction, messages: list[DueMessage]) -> list[DueMessage]:
        """A plan that cannot be sent unchanged: its readable messages are sent again, with their
        ids, although they may be stored already.
        """
        log.error(
            (
                "plan %d to %r cannot be read completely and is given up: %d of its messages "
                "will be sent again"
            ),
            plan.number,
            plan.subject,
            len(messages),
        )
        self.plan_log.void(plan)
        return messages

    async def _begin_counting(self) -> None:
        """After the start of a process its clock may be wrong: until the time is known, nothing is
        due. Messages stored meanwhile are loaded.
        """
        while self._timekeeper is not None and not self._timekeeper.is_settled:  # noqa: ASYNC110 - it is asked by another task
            await asyncio.sleep(SETTLE_S)
        self._unsubscribe = self.schedule.subscribe(self._pending, lambda: self.loader.reach_ms)
        self.loader.begin(self.clock.time_ms())
        for work in (
            self._tick,
            self._ahead,
            self._read_ahead,
            self._dispatch,
            self._late,
            self._close,
        ):
            self._begin(work)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(self._loop.create_task(self._guarded(work)))

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except NotMaster:
            pass  # losing the mastership stops this engine
        except Exception as cause:
            self._fatal(cause)

    def halt(self) -> None:
        """The mastership is lost, or the process ends: plan nothing more."""
        self._unsubscribe()
        self.dispatcher.halt()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Wait for the tasks that `halt` stopped."""
        self.halt()
        await self.dispatcher.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pending(self, places: Places) -> None:
        """Messages became pending: they were stored, moved, or are next runs."""
        self.loader.stored(places)
        if int(places.due_times_ms.min()) <= self._boundary_ms:
            self._awake.set()

    # --- time -------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        tick_ms = self.config.tick_ms
        while True:
            now_ms = self.clock.time_ms()
            self._boundary_ms = now_ms // tick_ms * tick_ms
            self._reviving = deque(self._parked)
            self._awake.set()
            left_ms = tick_ms - self.clock.time_ms() % tick_ms
            await asyncio.sleep(max(left_ms, self.config.pause_ms) / 1000)

    async def _ahead(self) -> None:
        """Advance the horizon beside the ticks, since reading a slice takes a while."""
        while True:
            while self.schedule.file_near(self.clock.time_ms() + 2 * self.config.load_ahead_ms):  # noqa: ASYNC110 - it works
                await asyncio.sleep(0)
            while await self.loader.ahead(self.clock.time_ms()):
                self._awake.set()
            await asyncio.sleep(max(self.config.tick_ms, self.config.pause_ms) / 1000)

    async def _read_ahead(self) -> None:
        """Read near buckets ahead beside the ticks, so that single messages can be read quickly
        when they are due.
        """
        while True:
            now_ms = self.clock.time_ms()
            piece = self.schedule.read_ahead(now_ms, now_ms + self.config.load_ahead_ms)
            if piece is None:
                await asyncio.sleep(max(self.config.tick_ms, self.config.pause_ms) / 1000)
            else:
                self.schedule.note_read_ahead(await self._run(piece))
                await asyncio.sleep(PAUSE_S)

    async def _late(self) -> None:
        while not self.loader.is_late_done:
            if len(self.loader.late) < self.config.read_messages:
                await self.loader.more_late()
                self._awake.set()
            else:
                await asyncio.sleep(self.config.tick_ms / 5000)
        self._awake.set()

    async def _close(self) -> None:
        """Close finished buckets, up to the first one that is not."""
        while True:
            self.full_buckets = {
                info.bucket
                for info in self.schedule.buckets()
                if info.stored_bytes > BUCKET_BYTES_MAX
            }
            await asyncio.sleep(CLOSE_S)
            before = self.closable()
            if before > self.schedule.closed_before:
                self.writer.act(Close(before))

    def closable(self) -> int:
        """The first bucket that must stay."""
        over = (self.clock.time_ms() - self.config.keep_ms) // self.schedule.bucket_ms
        left = [info.bucket for info in self.schedule.buckets() if info.pending]
        return min([over, *left])

    # --- dispatching ------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._has_room():
                parked = self._next_parked()
                if parked is not None:
                    self._put(self._read(self._pending_of(parked)))
                elif (found := self._next()) is not None:
                    self._dispatch_some(*found)
                else:
                    break
                await asyncio.sleep(0)  # let other tasks run

    def _has_room(self) -> bool:
        """Whether the dispatcher has room.
        Messages of subjects that cannot be delivered do not count.
        """
        waiting, most = self.dispatcher.waiting, self.config.waiting_messages_max
        return (
            waiting < most
            or waiting - sum(stuck for _, stuck, _ in self.dispatcher.troubles()) < most
        )

    def _next_parked(self) -> Places | None:
        """Some messages of a parked subject that can be delivered again."""
        while self._reviving:
            subject = self._reviving[0]
            chunks = self._parked.get(subject)
            if chunks and self.dispatcher.stuck(subject) <= self.config.stuck_messages_max // 2:
                places = chunks.popleft()
                if not chunks:
                    del self._parked[subject]
                return places
            self._reviving.popleft()
        return None

    def _next(self) -> tuple[Places, bool] | None:
        """(some due messages, whether all earlier ones are sent);
        late ones and newly due ones in turn.
        """
        if self._held and self._is_late_through:
            return self._held.popleft(), True
        self._is_late_turn = not self._is_late_turn
        for is_late in (self._is_late_turn, not self._is_late_turn):
            wheel = self.loader.late if is_late else self.wheel
            places = wheel.advance(self._boundary_ms, self.config.read_messages)
            if len(places):
                return places, is_late or self._is_late_through
        return None

    @property
    def _is_late_through(self) -> bool:
        return self.loader.is_late_done and not len(self.loader.late)

    def _dispatch_some(self, places: Places, is_first: bool) -> None:
        messages: list[DueMessage] = []
        held: list[DueMessage] = []
        for message in self._read(self._pending_of(places)):
            if is_seed(message):
                self.plan_log.seed(message)
            elif is_half(message):
                self.plan_log.drop(message)
            elif not is_first and message.flags & _ORDERED:
                held.append(message)
            else:
                messages.append(message)
        if held:
            self._held.append(
                Places.of([message.place for message in held], [message.due_ms for message in held])
            )
        self._put(self._parking(messages))

    def _parking(self, messages: list[DueMessage]) -> list[DueMessage]:
        """The messages without those to be parked: of subjects that are parked or stuck."""
        subjects = {message.subject for message in messages}
        stuck = {
            each
            for each in subjects
            if each in self._parked or self.dispatcher.stuck(each) >= self.config.stuck_messages_max
        }
        for subject in stuck:
            its = [message for message in messages if message.subject == subject]
            chunk = Places.of(
                [message.place for message in its], [message.due_ms for message in its]
            )
            self._parked.setdefault(subject, deque()).append(chunk)
        return (
            [message for message in messages if message.subject not in stuck] if stuck else messages
        )

    def _put(self, messages: list[DueMessage]) -> None:
        if messages:
            self.plan_log.take(messages)
            self.dispatcher.put(messages)

    def _pending_of(self, places: Places) -> Places:
        """The messages that are still pending: not cancelled, not moved, and not in the dispatcher
        again after a void plan.
        """
        mask = self.schedule.are_pending(places)
        in_dispatch, leaving = self.plan_log.in_dispatch, self.plan_log.leaving
        if in_dispatch or leaving:
            mask &= np.array(
                [place not in in_dispatch and place not in leaving for place in places], np.bool_
            )
        return places if mask.all() else places[mask]

    def _read(self, places: Places) -> list[DueMessage]:
        if not len(places):
            return []
        try:
            return self.schedule.read(places)
        except InvariantBroken:
            raise
        except Exception as failure:
            if len(places) == 1:
                log.error(
                    "a due message cannot be read and stays pending: %s: %s",
                    type(failure).__name__,
                    failure,
                )
                self.damaged.append((next(iter(places)), str(failure)))
                return []
        middle = len(places) // 2
        return self._read(places[:middle]) + self._read(places[middle:])

    # --- for people -------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are due and not planned yet."""
        parked = sum(len(places) for chunks in self._parked.values() for places in chunks)
        return self.dispatcher.waiting + sum(map(len, self._held)) + parked + len(self.loader.late)

    def status(self) -> DeliveryStatus:
        """The state of delivery, for operators."""
        dispatcher, lateness, now_ms = self.dispatcher, self.plan_log.lateness, self.clock.time_ms()
        damaged = [
            (f"bucket {place.bucket}, message {place.ordinal}", 1, why)
            for place, why in self.damaged
        ]
        return DeliveryStatus(
            [info for info in self.schedule.buckets() if info.pending],
            len(self.wheel),
            self.wheel.nbytes,
            self.loader.horizon_ms,
            self.waiting,
            dispatcher.planned,
            lateness.percentile(now_ms, 50),
            lateness.percentile(now_ms, 99),
            lateness.delivered,
            dispatcher.troubles() + damaged,
            now_ms,
            self._timekeeper.step_ms if self._timekeeper is not None else 0,
        )
