"""A model of a delay group without disks and networks between replicas: one log with a committed
prefix, and masters that take over.

The real schedule, engine, plan log, wheel, loader and admin run on it. A master writes the actions
of one turn as one entry, which is committed a little later. When a master dies, the committed
entries stay, and perhaps some of the others. A master that is *cut off* does not notice and
continues. Such a master commits nothing more, and sends only plans that were committed.

A simple model of `qmq.delay.dispatcher` and the real-time brokers, with connections that lose
answers, refuse, or are down.

A broker answers a batch with a known producer id and number as it did the first time, and does not
store it again. The model needs nothing else of a real-time broker. A dispatcher sends a subject's
batches one by one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from google_crc32c import value as crc32c
from ordersim.loop import ProcessLoop
from sim.world import World

from qmq.delay.admin import EngineAdmin
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.config import DelayConfig
from qmq.delay.engine import Engine
from qmq.delay.plan_log import Draft, StorePlanLog
from qmq.delay.schedule import Schedule
from qmq.errors import NotMaster
from qmq.log.actions import PlanAction, ScheduleAction
from qmq.log.disk import Disk
from qmq.model import SCHEDULE_ID

BATCH = 5


class RealTime:
    """The messages stored at the real-time brokers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_away = False
        self.gone: set[str] = set()
        """Subjects that nobody has."""
        self.batches: dict[tuple[int, int], tuple[int, tuple[bytes, ...]]] = {}
        self.closed: set[tuple[int, int]] = set()
        """Batches that will never be stored: their partition was sealed before they came."""
        self.stored: list[tuple[str, DueMessage, int]] = []
        """(subject, message, when), in order."""

    def close(self, plan: PlanAction) -> bool:
        """Seal the partition that it goes to; False if it is stored there already."""
        name = (plan.producer_id, plan.batch_sequence)
        if name not in self.batches:
            self.closed.add(name)
        return name not in self.batches

    def store(
        self, subject: str, producer_id: int, number: int, messages: Sequence[DueMessage]
    ) -> int | None:
        """When it was stored, now or before; None if it never will be."""
        if (producer_id, number) in self.closed:
            return None
        ids = tuple(message.message_id for message in messages)
        known = self.batches.get((producer_id, number))
        if known is None:
            known = self.batches[producer_id, number] = (self.world.now, ids)
            self.stored += [(subject, message, self.world.now) for message in messages]
        assert known[1] == ids, "a number was used for other messages"
        return known[0]


class SimDispatcher:
    """In the place of `qmq.delay.dispatcher.DueDispatcher`."""

    def __init__(
        self,
        world: World,
        loop: ProcessLoop,
        plan_log: StorePlanLog,
        real_time: RealTime,
        name: str,
    ) -> None:
        self.planned = 0
        self._world = world
        self._loop = loop
        self._plan_log = plan_log
        self._real_time = real_time
        self._waiting: dict[str, deque[DueMessage]] = {}
        self._resumed: dict[str, deque[tuple[PlanAction, Sequence[DueMessage]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._producer_id = int(name.split()[1]) << 20
        self._next = 0

    @property
    def waiting(self) -> int:
        """Messages that are not planned yet."""
        return sum(map(len, self._waiting.values()))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """See DueDispatcher."""
        for message in messages:
            self._waiting.setdefault(message.subject, deque()).append(message)
            self._begin(message.subject)

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """See DueDispatcher."""
        self._resumed.setdefault(plan.subject, deque()).append((plan, messages))
        self._begin(plan.subject)

    def withdraw(self, place: SchedulePlace) -> bool:
        """See DueDispatcher."""
        for queue in self._waiting.values():
            for message in queue:
                if message.place == place:
                    queue.remove(message)
                    return True
        return False

    @property
    def set_aside(self) -> int:
        """See DueDispatcher."""
        return 0

    def stuck(self, subject: str) -> int:
        """See DueDispatcher."""
        is_stuck = self._real_time.is_away or subject in self._real_time.gone
        return len(self._waiting.get(subject, ())) if is_stuck else 0

    def troubles(self) -> list[tuple[str, int, str]]:
        """See DueDispatcher."""
        return [
            (subject, self.stuck(subject), "away")
            for subject in self._waiting
            if self.stuck(subject)
        ]

    def halt(self) -> None:
        """See DueDispatcher."""
        for task in self._tasks.values():
            task.cancel()

    async def stop(self) -> None:
        """See DueDispatcher."""
        self.halt()

    def _begin(self, subject: str) -> None:
        task = self._tasks.get(subject)
        if task is None or task.done():
            self._tasks[subject] = self._loop.create_task(self._work(subject))

    async def _work(self, subject: str) -> None:
        try:
            resumed, again = self._resumed.get(subject, deque()), list[DueMessage]()
            while resumed:
                plan, messages = resumed.popleft()
                if self._world.random.random() < 0.2:
                    self._real_time.close(plan)
                # A temporary refusal is not enough: the previous master may still send the same
                # plan.
                if not await self._send(plan, messages, may_refuse=False):
                    again += messages
            queue = self._waiting.setdefault(subject, deque())
            queue.extendleft(reversed(again))
            while queue:
                messages = [
                    queue.popleft()
                    for _ in range(min(len(queue), self._world.random.randrange(1, BATCH + 1)))
                ]
                self._next += 1
                plan = await self._plan_log.plan(
                    Draft(subject, 0, "g", self._producer_id, self._next, messages)
                )
                if not await self._send(plan, messages, may_refuse=True):
                    queue.extendleft(reversed(messages))
        except NotMaster:
            return

    async def _send(self, plan: PlanAction, messages: Sequence[Any], *, may_refuse: bool) -> bool:
        self.planned += len(messages)
        random = self._world.random
        while True:
            await asyncio.sleep(random.random() * 0.05)
            if self._real_time.is_away or plan.subject in self._real_time.gone:
                await asyncio.sleep(0.3)
                continue
            if may_refuse and random.random() < 0.1:
                self.planned -= len(messages)
                self._plan_log.void(plan)
                return False
            at = self._real_time.store(
                plan.subject, plan.producer_id, plan.batch_sequence, messages
            )
            if at is None:
                self.planned -= len(messages)
                self._plan_log.void(plan)
                return False
            may_refuse = False
            if random.random() < 0.8:
                self.planned -= len(messages)
                self._plan_log.done(plan, at)
                return True


def first_id(message: DueMessage) -> str:
    """The id of the recurring message of a run."""
    return message.headers[SCHEDULE_ID].decode()


BUCKET_MS = 60_000
YEARS_MS = 2 * 366 * 24 * 3600 * 1000
CONFIG = DelayConfig(
    load_ahead_ms=20_000,
    wheel_messages_max=60,
    slice_messages_max=12,
    waiting_messages_max=20,
    stuck_messages_max=6,
    read_messages=7,
    keep_ms=90_000,
)
"""Small, so that every limit is met."""


class Entry(NamedTuple):
    """One entry of the log: a batch's region, or actions."""

    index: int
    time_ms: int
    region: bytes | None
    actions: tuple[ScheduleAction, ...] = ()

    def apply(self, schedule: Schedule) -> None:
        """Let the schedule know."""
        if self.region is not None:
            schedule.take(self.index, self.time_ms, self.region, crc32c(self.region))
        for action in self.actions:
            schedule.act(self.index, self.time_ms, action)


class Checkpoint(NamedTuple):
    """A schedule's state, and its folder as it was then."""

    state: bytes
    folder: Path


class DelayGroup:
    """The log and the current master."""

    def __init__(
        self,
        world: World,
        folder: Path,
        real_time: RealTime,
        broken: Callable[[str, BaseException], None],
    ) -> None:
        self.world = world
        self.folder = folder
        self.real_time = real_time
        self.broken = broken
        self.log: list[Entry] = []
        self.committed = 0
        self.checkpoint: Checkpoint | None = None
        self.master: SimMaster | None = None
        self.cut_off: SimMaster | None = None
        """A master that was replaced and does not know it yet. Some callers still reach it."""
        self.lives = 0
        self.graveyard: list[Any] = []

    def elect(self) -> None:
        """A new master, from what the log has."""
        self.lives += 1
        self.committed = len(self.log)  # its barrier commits all of it
        self.master = SimMaster(self, self.lives)

    def lose(self, *, cut_off: bool) -> None:
        """The master dies, or is cut off; some of what was not committed is lost."""
        master, self.master = self.master, None
        if master is None:
            return
        del self.log[self.world.random.randrange(self.committed, len(self.log) + 1) :]
        master.is_deposed = True
        if cut_off:
            self.cut_off = master
            self.world.after(self.world.random.randrange(100, 3_000), self._bury, master)
        else:
            master.kill()

    def _bury(self, master: SimMaster) -> None:
        if self.cut_off is master:
            self.cut_off = None
        master.kill()


class SimMaster:
    """One life of a master. It stands for the broker, to which StorePlanLog writes."""

    def __init__(self, group: DelayGroup, number: int) -> None:
        self.group = group
        self.world = group.world
        self.name = f"master {number}"
        self.loop = ProcessLoop(group.world, self.name, group.broken)
        self.is_deposed = False
        self._staged: list[ScheduleAction] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_scheduled = False
        self._folder = group.folder / f"life-{number}"
        self.schedule = self._restored()
        self.engine: Engine | None = None
        self.admin = EngineAdmin(self._require_engine, "d1", YEARS_MS)
        self.loop.call_soon(self._start)

    def _restored(self) -> Schedule:
        """Restore the last checkpoint, if there is one, and replay the log."""
        found = self.group.checkpoint if self.world.random.random() < 0.7 else None
        if found is not None:
            shutil.copytree(found.folder, self._folder)
        schedule = Schedule(self._folder, Disk(), BUCKET_MS, buffer_bytes_max=4_096)
        schedule.load(None if found is None else msgspec.msgpack.decode(found.state), 1)
        for entry in self.group.log:
            if entry.index > schedule.index:
                entry.apply(schedule)
        schedule.check()
        return schedule

    def _start(self) -> None:
        def dispatcher(plan_log: Any) -> SimDispatcher:
            return SimDispatcher(self.world, self.loop, plan_log, self.group.real_time, self.name)

        self.engine = Engine(
            self.schedule, self, self, CONFIG, dispatcher, self._fatal, run=self._in_thread
        )
        self.engine.start()

    def _fatal(self, cause: BaseException) -> None:
        self.group.broken(self.name, cause)

    def _require_engine(self) -> Engine:
        if self.engine is None or not self.is_up:
            raise NotMaster("no master")
        return self.engine

    async def _in_thread(self, run: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.world.random.random() * 0.2)
        found = run()
        await asyncio.sleep(self.world.random.random() * 0.2)
        return found

    # --- the clock --------------------------------------------------------------------------------

    def time_ms(self) -> int:
        """The world's."""
        return self.world.now

    def monotonic_ms(self) -> int:
        """The same."""
        return self.world.now

    # --- the log ----------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self.loop.is_alive

    def act(self, action: ScheduleAction) -> None:
        """See Writer."""
        self._staged.append(action)
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        staged, self._staged = tuple(self._staged), []
        if staged:
            self._write(None, staged)

    def _write(self, region: bytes | None, actions: tuple[ScheduleAction, ...]) -> int:
        """Append an entry. A deposed master appends to its own log, which no other replica
        reads.
        """
        index = self.schedule.index + 1
        entry = Entry(index, self.world.now, region, actions)
        if not self.is_deposed:
            assert index == len(self.group.log) + 1, (index, len(self.group.log))
            self.group.log.append(entry)
            self.world.after(self.world.random.randrange(1, 30), self._commit, index)
        entry.apply(self.schedule)
        return index

    def _commit(self, index: int) -> None:
        if self.is_deposed or not self.is_up:
            return
        self.group.committed = max(self.group.committed, index)
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > index:
                self._waiting.append((wanted, future))
            elif not future.done():
                self.loop.call_soon(_set, future)

    def committed(self) -> Awaitable[None]:
        """See Writer."""
        if self._staged:
            self._turn()
        return self._until(self.schedule.index)

    async def _until(self, index: int) -> None:
        if not self.is_deposed and self.group.committed >= index:
            return
        future = self.loop.create_future()
        self._waiting.append((index, future))
        await future

    async def send(self, region: bytes) -> int:
        """A producer's batch; when it was stored, once that is committed."""
        now = self.world.now
        await self._until(self._write(region, ()))
        return now

    # --- checkpoints, the end ---------------------------------------------------------------------

    def take_checkpoint(self) -> None:
        """If everything written is committed, as the store demands."""
        if self.is_deposed or self._staged or self.group.committed < self.schedule.index:
            return
        plan = self.schedule.begin_checkpoint(self.schedule.index)
        plan.run()
        folder = self.group.folder / f"checkpoint-{self.world.now}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._folder, folder)
        before, self.group.checkpoint = (
            self.group.checkpoint,
            Checkpoint(msgspec.msgpack.encode(plan.state), folder),
        )
        self.schedule.end_checkpoint(plan)
        if before is not None and before.folder != folder:
            shutil.rmtree(before.folder, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL."""
        if self.is_up:
            self.group.graveyard += self.loop.kill()
            self.schedule.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
