"""Clocks of brokers jump: nothing is deleted early, and planted bugs are found.

Brokers whose clocks jump: a group of one to three replicas with real stores, real retention and the
real time of a replica, in a true time that only the simulation knows.

One machine's clock is wrong at a time. Machines are also silent, restart, reboot, and are
suspended, all together; each clock is then put right some minutes later. The operator of a group
alone confirms its clock when it is right. What must hold:

* No message is deleted on any replica before it is as old as its retention, less a small part.
* A message is always accepted.
* When all is well again, messages that are too old are deleted, on all replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from support import intake
from support.forms import FORM, some

from qmq.broker.replica_time import ReplicaTime
from qmq.broker.timekeeper import SteadyClock
from qmq.log import follower
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.merged_log import read_merged
from qmq.log.recovery import open_store
from qmq.log.retention import Before, Retention
from qmq.log.retention_time import RetentionTime
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.process.event_loop import Clock

T0, MINUTE, HOUR, DAY = 1_700_000_000_000, 60_000, 3_600_000, 86_400_000
TICK_MS = 2 * MINUTE
KEPT_MS = 6 * HOUR
SLACK_MS = 5 * MINUTE
"""Clocks that differ by less than a minute agree, and the pace of a machine's time is not exact."""
TICKS = 600
ERRORS_MS = (90_000, 10 * MINUTE, HOUR, 10 * HOUR, 3 * DAY, 30 * DAY)


class EarlyDeletion(Exception):
    """A replica has deleted a message before its time."""


class LateDeletion(Exception):
    """A replica keeps messages that are too old although all is well."""


class Config(LogConfig):
    """Segments far smaller than an operator may have them."""

    def __init__(self) -> None:
        super().__init__(retention_ms=KEPT_MS, cache_bytes=0)
        object.__setattr__(self, "segment_bytes", 3_000)


@dataclass(slots=True)
class Machine:
    """A machine with one replica. `off_ms`: how far its clock is ahead of the true time."""

    name: str
    folder: Path
    boot: int = 1
    booted_ms: int = T0 - HOUR
    off_ms: int = 0
    right_at_ms: int = 0
    silent_until_ms: int = 0
    down_until_ms: int = 0
    store: Store | None = None
    time: ReplicaTime | None = None
    retention: Retention | None = None


@dataclass(slots=True)
class Clocks:
    """One group under one seed."""

    seed: int
    folder: Path
    time_class: type[ReplicaTime] = ReplicaTime
    now_ms: int = T0
    stored_ms: list[int] = field(default_factory=list)
    """The true time at which each message was stored, by sequence."""
    machines: dict[str, Machine] = field(default_factory=dict)
    master: str = "a"
    random: Random = field(default_factory=Random)

    def run(self) -> None:
        """Raises EarlyDeletion, LateDeletion."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self.random.seed(self.seed)
        count = self.random.choice((1, 2, 3, 3))
        for name in "abc"[:count]:
            self.machines[name] = Machine(name, self.folder / name)
        for machine in self.machines.values():
            self._start(machine)
        self._store_of(self.master).append_barrier(1)
        try:
            for _ in range(TICKS):
                self._trouble()
                await self._tick()
            for machine in self.machines.values():
                machine.off_ms = machine.right_at_ms = machine.silent_until_ms = (
                    machine.down_until_ms
                ) = 0
            for _ in range(4 * KEPT_MS // TICK_MS):
                await self._tick()
            if count > 1:
                self._require_deleted()
        finally:
            for machine in self.machines.values():
                self._stop(machine)

    async def _tick(self) -> None:
        self.now_ms += TICK_MS
        for machine in self.machines.values():
            if machine.right_at_ms and self.now_ms >= machine.right_at_ms:
                machine.off_ms = machine.right_at_ms = 0
            if machine.store is None and self.now_ms >= machine.down_until_ms:
                self._start(machine)
        for machine in self._running():
            assert machine.time is not None
            await machine.time.check()
        self._confirm()
        self._send()
        for machine in self._running():
            self._retain(machine)

    # --- replicas ---------------------------------------------------------------------------------

    def _running(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.store is not None]

    def _store_of(self, name: str) -> Store:
        store = self.machines[name].store
        assert store is not None
        return store

    def _start(self, machine: Machine) -> None:
        clock = SteadyClock(
            lambda: self.now_ms + machine.off_ms, lambda: self.now_ms - machine.booted_ms
        )
        machine.store = store = open_store(
            machine.folder, Config(), self.stamp_clock(machine, clock), is_replicated=True
        )
        machine.time = self.time_class(
            clock,
            machine.folder,
            Disk(),
            f"{machine.name}{machine.boot}",
            addresses=lambda: [each for each in self.machines if each != machine.name],
            voters=lambda: len(self.machines),
            ports=self,
        )
        machine.time.begin(store.last_time_ms)
        machine.retention = Retention(store, self.before(machine))

    def _stop(self, machine: Machine) -> None:
        if machine.store is not None:
            machine.store.begin_flush().run()
            machine.store.close()
            machine.store = machine.time = None

    async def ask(self, name: str) -> int:
        machine = self.machines[name]
        if machine.store is None or self.now_ms < machine.silent_until_ms:
            raise ConnectionRefusedError(name)
        return self.now_ms + machine.off_ms

    async def keep_only(self, names: Iterable[str]) -> None:
        """There are no connections."""

    def _send(self) -> None:
        """A message reaches the master and all other replicas that run, if they are a majority."""
        running = {machine.name for machine in self._running()}
        if len(running) <= len(self.machines) // 2:
            return
        if self.master not in running or self.random.random() < 0.01:
            self.master = max(
                running, key=lambda name: (self._store_of(name).index, self.random.random())
            )
            self._store_of(self.master).append_barrier(self._store_of(self.master).epoch + 1)
        master = self._store_of(self.master)
        if self.random.random() < 0.5:
            number = len(self.stored_ms)
            found = master.append([intake(master.open_queue("s", 0), [bytes(700)], number=number)])
            assert found[0].base_sequence == number
            self.stored_ms.append(self.now_ms)
        for name in running - {self.master}:
            self._feed(master, self._store_of(name))
        for name in running:
            self._store_of(name).commit(master.index)

    def _feed(self, master: Store, slave: Store) -> None:
        while slave.index < master.index:
            place = (slave.messages.end, slave.actions.end)
            stretch = master.tail.read(place, slave.index, 1 << 20) or read_merged(
                (master.messages, master.actions), place, slave.index, 1 << 20
            )
            if stretch is None:
                raise EarlyDeletion(
                    "the master has deleted what a slave lacks that was away for an hour"
                )
            runs = follower.unpack_runs(b"".join(follower.pack_runs(stretch.runs)))
            follower.take(slave, runs, follower.check_stretch(runs, slave.index, stretch.last))

    # --- retention --------------------------------------------------------------------------------

    def _retain(self, machine: Machine) -> None:
        store, retention = machine.store, machine.retention
        assert store is not None
        assert retention is not None
        for _ in retention.steps(SubjectConfig):
            pass
        queue = store.queue("s", 0)
        if queue is not None and queue.start_sequence:
            newest = self.stored_ms[queue.start_sequence - 1]
            if self.now_ms - newest < KEPT_MS * 98 // 100 - SLACK_MS:
                age = (self.now_ms - newest) // MINUTE
                raise EarlyDeletion(
                    f"seed {self.seed}: {machine.name} has deleted a message that is {age} "
                    "minutes old"
                )

    def before(self, machine: Machine) -> Before:
        """By what retention counts."""
        assert machine.time is not None
        return machine.time.before_ms

    def stamp_clock(self, machine: Machine, clock: Clock) -> Clock:
        """By what entries are stamped."""
        return clock

    def _require_deleted(self) -> None:
        oldest = self.now_ms - KEPT_MS - 2 * SLACK_MS
        expected = sum(stored < oldest for stored in self.stored_ms)
        for machine in self._running():
            queue = self._store_of(machine.name).queue("s", 0)
            assert queue is not None
            if queue.start_sequence < expected:
                raise LateDeletion(
                    f"seed {self.seed}: {machine.name} keeps messages from "
                    f"{queue.start_sequence}, not from {expected}"
                )

    # --- trouble ----------------------------------------------------------------------------------

    def _trouble(self) -> None:
        random, machine = self.random, self.random.choice(list(self.machines.values()))
        if random.random() < 0.02 and not any(each.off_ms for each in self.machines.values()):
            machine.off_ms = random.choice(ERRORS_MS) * random.choice((1, -1))
            machine.right_at_ms = self.now_ms + random.randint(1, 300) * MINUTE
        if random.random() < 0.02:
            machine.silent_until_ms = self.now_ms + random.randint(1, 30) * MINUTE
        if random.random() < 0.01 and machine.store is not None:
            self._stop(machine)
            machine.down_until_ms = self.now_ms + random.randint(0, 60) * MINUTE
            if random.random() < 0.5:
                machine.boot, machine.booted_ms = machine.boot + 1, machine.down_until_ms
        if random.random() < 0.003:
            self._suspend(random.randint(1, 600) * MINUTE)

    def _suspend(self, ms: int) -> None:
        """All machines are suspended; their clocks are put right some minutes after they go on."""
        self.now_ms += ms
        for machine in self.machines.values():
            machine.booted_ms += ms
            machine.off_ms -= ms
            machine.right_at_ms = self.now_ms + self.random.randint(0, 20) * MINUTE

    def _confirm(self) -> None:
        """Retention that does not follow is confirmed by an operator, who looks whether the clock
        is right.
        """
        for machine in self._running():
            assert machine.time is not None
            if (
                machine.off_ms == 0
                and machine.time.status().retention_behind_ms > HOUR
                and self.random.random() < 0.05
            ):
                machine.time.confirm(self.now_ms)


SEEDS = {"gate": 6, "ci": 12, "all": 400}[FORM]
"""So many, from 1 on."""
SEEDS_OF_BUGS = 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class RetentionByOneClock(Clocks):
    def before(self, machine: Machine) -> Before:
        return lambda age_ms: self.now_ms + machine.off_ms - age_ms


class RetentionByTheLogsTime(Clocks):
    def before(self, machine: Machine) -> Before:
        before = super().before(machine)
        return lambda age_ms: max(
            before(age_ms), machine.store.last_time_ms - age_ms if machine.store is not None else 0
        )


class WallClock:
    """Follows every jump of a machine's clock."""

    def __init__(self, clocks: Clocks, machine: Machine) -> None:
        self._clocks, self._machine = clocks, machine

    def time_ms(self) -> int:
        return self._clocks.now_ms + self._machine.off_ms

    def monotonic_ms(self) -> int:
        return self._clocks.now_ms


class StampsByOneClock(Clocks):
    def stamp_clock(self, machine: Machine, clock: Clock) -> Clock:
        return WallClock(self, machine)


class AgreesWithItself(ReplicaTime):
    def _is_agreed(self, _: object) -> bool:
        return True


class NeverDoubts(ReplicaTime):
    def _note_leap(self, _: object, retention: RetentionTime) -> None:
        retention.doubts = []


BUGS: dict[str, tuple[type[Clocks], type[ReplicaTime]]] = {
    "retention counts by one machine's clock": (RetentionByOneClock, ReplicaTime),
    "retention counts by the log's newest time, which one master stamped": (
        RetentionByTheLogsTime,
        ReplicaTime,
    ),
    "entries are stamped by one machine's clock": (StampsByOneClock, ReplicaTime),
    "one machine is enough to agree": (Clocks, AgreesWithItself),
    "entries stamped before a leap count as certain": (Clocks, NeverDoubts),
}


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_no_jump_of_a_clock_deletes_a_message_early(seed: int, tmp_path: Path) -> None:
    Clocks(seed, tmp_path).run()


@pytest.mark.parametrize("bug", some(BUGS))
def test_a_bug_that_trusts_one_clock_is_found(bug: str, tmp_path: Path) -> None:
    clocks_class, time_class = BUGS[bug]
    for seed in range(1, SEEDS_OF_BUGS + 1):
        try:
            clocks_class(seed, tmp_path / str(seed), time_class).run()
        except (EarlyDeletion, LateDeletion):
            return
    pytest.fail(f"{SEEDS_OF_BUGS} seeds did not find it")
