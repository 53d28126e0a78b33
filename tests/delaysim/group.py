"""A model of a delay group without disks and networks between replicas: one log with a committed prefix, and masters that take over.

The real schedule, engine, plan log, wheel, loader and admin run on it. A master writes the actions of one turn as one entry, which is
committed a little later. When a master dies, the committed entries stay, and perhaps some of the others. A master that is *cut off* does
not notice and continues. Such a master commits nothing more, and sends only plans that were committed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from google_crc32c import value as crc32c
from ordersim.loop import ProcessLoop
from sim.world import World

from delaysim.real_time import RealTime, SimDispatcher
from qmq.delay.admin import EngineAdmin
from qmq.delay.config import DelayConfig
from qmq.delay.engine import Engine
from qmq.delay.schedule import Schedule
from qmq.errors import NotMaster
from qmq.log.actions import ScheduleAction
from qmq.log.disk import Disk

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

    def __init__(self, world: World, folder: Path, real_time: RealTime, broken: Callable[[str, BaseException], None]) -> None:
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

        self.engine = Engine(self.schedule, self, self, CONFIG, dispatcher, self._fatal, run=self._in_thread)
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

    # --- the clock -------------------------------------------------------------------------------------------------------

    def time_ms(self) -> int:
        """The world's."""
        return self.world.now

    def monotonic_ms(self) -> int:
        """The same."""
        return self.world.now

    # --- the log ---------------------------------------------------------------------------------------------------------

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
        """Append an entry. A deposed master appends to its own log, which no other replica reads."""
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

    # --- checkpoints, the end --------------------------------------------------------------------------------------------

    def take_checkpoint(self) -> None:
        """If everything written is committed, as the store demands."""
        if self.is_deposed or self._staged or self.group.committed < self.schedule.index:
            return
        plan = self.schedule.begin_checkpoint(self.schedule.index)
        plan.run()
        folder = self.group.folder / f"checkpoint-{self.world.now}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._folder, folder)
        before, self.group.checkpoint = self.group.checkpoint, Checkpoint(msgspec.msgpack.encode(plan.state), folder)
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
