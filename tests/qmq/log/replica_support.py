"""A master's store, its slaves' stores, and the messages between them, without network and
election.

Stores whose queues tests delete or purge.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from support import ManualClock, intake
from support.steps import acknowledged, effect, waiting_effects

from qmq.limits import KIB
from qmq.log import follower
from qmq.log.actions import (
    AnyAction,
    Begin,
    Join,
    LaneBegin,
    LaneGrant,
    LanePark,
    LaneUnpark,
    Leave,
    PullAction,
    Pulled,
    Reset,
    Return,
    SettleAction,
    StepDone,
    StepPlan,
    StepVoid,
)
from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.merged_log import read_merged
from qmq.log.queue import Queue
from qmq.log.recent_writes import WriteStretch
from qmq.log.recovery import open_store
from qmq.log.step_state import STEPS_QUEUE
from qmq.log.store import StepIntake, Store
from qmq.model import STEPS
from qmq.wire.frame_payloads import Verdict

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 1 << 30


def memory() -> Path | None:
    """A folder in memory, if there is one: thousands of syncs of a real disk take long, and matter
    to no test here.
    """
    return (
        _MEMORY
        if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MEMORY_BYTES_MIN
        else None
    )


QUEUES = (("a", 0), ("b", 0), ("c", 0))
LANE = ("ordered", 1, "g")
State = dict[tuple[str, int], Any]


def small(**options: Any) -> LogConfig:
    """Segments far smaller than an operator may have them, so that everything happens at their ends
    too.
    """
    config = LogConfig(producer_expiry_ms=1 << 40, cache_bytes=0, **options)
    object.__setattr__(config, "segment_bytes", 3_000)
    object.__setattr__(config, "action_segment_bytes", 1_200)
    return config


SMALL = small()


def opened(
    folder: Path,
    config: LogConfig = SMALL,
    *,
    clock: ManualClock | None = None,
    until: int | None = None,
    disk: Disk | None = None,
) -> Store:
    return open_store(
        folder, config, clock or ManualClock(), is_replicated=True, until=until, disk=disk
    )


def state_of(store: Store) -> State:
    """The state that must be equal on all replicas: all derived state except what retention
    deleted.
    """
    return {
        (queue.id.subject, queue.id.partition): (
            queue.next_sequence,
            queue.cumulative_bytes,
            queue.last_append_ms,
            queue.producers.to_state(),
            {group: share.to_state() for group, share in queue.shares.items()},
            # A copy: the state of a lane share has its lists, which change.
            {group: deepcopy(share.to_state()) for group, share in queue.lanes.items()},
            queue.steps.to_state() if queue.steps is not None else None,
        )
        for queue in store.queues.values()
        if queue.next_sequence or queue.shares or queue.lanes
    }


def entries_of_index(store: Store) -> dict[tuple[str, int], list[Any]]:
    """The consume logs."""
    return {
        (queue.id.subject, queue.id.partition): [
            entry for _, entry in queue.index.scan(queue.index.first)
        ]
        for queue in store.queues.values()
        if queue.next_sequence or queue.shares
    }


def files(folder: Path) -> dict[str, bytes]:
    """Both logs, byte for byte."""
    return {
        f"{log}/{path.name}": path.read_bytes()
        for log in ("message", "action")
        for path in sorted((folder / log).iterdir())
    }


class History:
    """The master's state at every index; what an index that changed nothing has is what the one
    before has.
    """

    def __init__(self) -> None:
        self._indexes = [0]
        self._states: list[State] = [{}]

    def note(self, store: Store, index: int) -> None:
        """Record the state from `index` on."""
        if index <= store.index and index > self._indexes[-1]:
            self._indexes.append(index)
            self._states.append(state_of(store))

    def at(self, index: int) -> State:
        return self._states[bisect_right(self._indexes, index) - 1]

    def cut(self, index: int) -> None:
        keep = bisect_right(self._indexes, index)
        del self._indexes[keep:], self._states[keep:]


class Traffic:
    """Random requests of producers and consumers at a master, one entry at a time."""

    def __init__(self, store: Store, random: Random, history: History | None = None) -> None:
        self.store = store
        self.random = random
        self.history = history or History()
        self.number = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.6:
                self.produce()
            else:
                self.consume()
                self.write()

    def produce(self) -> None:
        queue = self.store.open_queue(*self.random.choice(QUEUES))
        self.number += 1
        again = (
            max(self.number - self.random.randrange(3), 1)
            if self.random.random() < 0.2
            else self.number
        )
        bodies = [
            bytes([65 + self.number % 26]) * self.random.randrange(200)
            for _ in range(self.random.randrange(1, 4))
        ]
        self.store.append([intake(queue, bodies, producer=self.random.randrange(3), number=again)])
        self.history.note(self.store, self.store.index)

    def produce_as_new(self, count: int) -> None:
        """Batches of so many producers that were never there before, to one queue."""
        queue = self.store.open_queue(*self.random.choice(QUEUES))
        for _ in range(count):
            self.number += 1
            self.store.append(
                [intake(queue, [b"x"], producer=1 << 40 | self.number, number=self.number)]
            )
            self.history.note(self.store, self.store.index)

    def park(self, count: int) -> None:
        """A group parks messages of an ordered subject, and keys are replayed now and then."""
        share = self.store.open_queue(*LANE[:2]).lane_share(LANE[2])
        if not share.progress:
            self.store.act(LaneBegin(*LANE, "", 0, 8, 0, 0))
        elif share.holder(share.next_token - 1) is None:
            self.store.act(LaneGrant(*LANE, "c", 0, 8, "i", 1000))
        elif self.random.random() < 0.1:
            self.store.act(
                LaneUnpark(
                    *LANE,
                    "",
                    self.random.choice(sorted(share.parked) or [b"0"]),
                    self.random.random() < 0.5,
                )
            )
        else:
            for _ in range(count):
                self.number += 1
                lp = self.random.randrange(3)
                self.store.act(
                    LanePark(*LANE, "c", share.next_token - 1, self.number, lp, b"%d" % lp)
                )
        self.write()

    def step(self) -> None:
        """A consumer settles some of what it holds by a step, which sends to a few subjects."""
        held = [
            (queue, group, name, item)
            for queue in self.store.queues.values()
            for group, share in queue.shares.items()
            for name, holder in share.holders.items()
            for item in holder.held
        ]
        if not held:
            return
        queue, group, name, item = self.random.choice(held)
        self.number += 1
        settlement = acknowledged(queue, group, name, item.pull, item.pull + item.count - 1)
        targets = self.random.sample(("x", "y", "z"), self.random.randrange(4))
        effects = tuple(
            [
                effect(each, [b"%d" % self.number] * self.random.randrange(1, 3), is_ordered=True)
                for each in targets
            ]
        )
        self.store.append_step(StepIntake(1 << 40, self.number, (settlement,), effects))
        self.history.note(self.store, self.store.index)
        self.write()

    def forward(self) -> None:
        """What a dispatcher writes about effects: a plan, or what became of one."""
        steps = self.store.open_queue(STEPS, 0).steps
        assert steps is not None
        waiting = [
            (subject, each)
            for subject in steps.targets
            for each in waiting_effects(self.store, subject)
        ]
        if waiting and self.random.random() < 0.6:
            subject, (sequence, number) = self.random.choice(waiting)
            items, plan = ((sequence, number, 1),), steps.next_plan
            self.store.act(StepPlan(*STEPS_QUEUE, plan, subject, 0, "g", 1, self.number, items))
        elif steps.plans:
            numbers = (self.random.choice(list(steps.plans)),)
            is_done = self.random.random() < 0.8
            done, void = StepDone(*STEPS_QUEUE, numbers), StepVoid(*STEPS_QUEUE, numbers)
            self.store.act(done if is_done else void)
        self.write()

    def write(self) -> None:
        first = self.store.index + 1
        self.store.write_actions()
        self.history.note(self.store, first)

    def consume(self) -> None:
        """A few actions, all of them such as a broker would do."""
        for _ in range(self.random.randrange(1, 4)):
            subject, partition = self.random.choice(QUEUES)
            where = (subject, partition, self.random.choice(("g", "h")))
            queue = self.store.open_queue(subject, partition)
            consumer = self.random.choice(("c", "d"))
            share = queue.shares.get(where[2])
            if share is None:
                self.store.act(Begin(*where, "", 0))
            elif consumer not in share.holders:
                self.store.act(Join(*where, consumer, str(self.random.random()), 1000, -1))
            else:
                self._use(where, queue.next_sequence, consumer)

    def _use(self, where: tuple[str, int, str], next_sequence: int, consumer: str) -> None:
        share = self.store.open_queue(where[0], where[1]).shares[where[2]]
        last = share.holders[consumer].next_pull
        chance = self.random.random()
        if chance < 0.5:
            ranges = [
                Pulled(item.first, item.count, item.attempt)
                for item in share.due(1 << 50, self.random.randrange(4))
            ]
            count = min(self.random.randrange(5), next_sequence - share.next_sequence)
            if count:
                ranges.append(Pulled(share.next_sequence, count, 1))
            if ranges:
                self.store.act(PullAction(*where, consumer, tuple(ranges)))
        elif chance < 0.85:
            first = max(last - self.random.randrange(8), 0)
            verdict = self.random.choice(list(Verdict))
            self.store.act(
                SettleAction(
                    *where, consumer, 7, ((first, first + self.random.randrange(4), verdict, 5),)
                )
            )
        elif chance < 0.9:
            self.store.act(Return(*where, consumer, max(last - 2, 0)))
        elif chance < 0.97:
            self.store.act(Leave(*where, consumer, True))
        else:
            self.store.act(Reset(*where, "", self.random.randrange(next_sequence + 1)))


def read_from(
    master: Store, slave: Store, bytes_max: int, *, from_files: bool
) -> WriteStretch | None:
    """What the master sends next; None if the master no longer has it."""
    place = (slave.messages.end, slave.actions.end)
    found = None if from_files else master.tail.read(place, slave.index, bytes_max)
    return found or read_merged((master.messages, master.actions), place, slave.index, bytes_max)


def feed(master: Store, slave: Store, bytes_max: int = 4096, *, from_files: bool = False) -> bool:
    """One Append; False if there was nothing to send."""
    stretch = read_from(master, slave, bytes_max, from_files=from_files)
    assert stretch is not None, "the master has that no more"
    if not stretch.runs:
        return False
    runs = follower.unpack_runs(memoryview(b"".join(follower.pack_runs(stretch.runs))))
    follower.take(slave, runs, follower.check_stretch(runs, slave.index, stretch.last))
    assert slave.index == stretch.last
    assert (slave.messages.end, slave.actions.end) == stretch.place
    return True


def feed_all(
    master: Store, slave: Store, bytes_max: int = 4096, *, from_files: bool = False
) -> None:
    while feed(master, slave, bytes_max, from_files=from_files):
        pass


def checkpoint(store: Store) -> None:
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)


def flush(store: Store) -> None:
    plan = store.begin_flush()
    plan.run()
    store.end_flush(plan)


def master_at(
    folder: Path,
    *,
    seed: int = 1,
    steps: int = 60,
    config: LogConfig = SMALL,
    clock: ManualClock | None = None,
) -> Traffic:
    """A master that has seen some traffic."""
    store = opened(folder, config, clock=clock)
    store.append_barrier(1)
    traffic = Traffic(store, Random(seed))
    traffic.run(steps)
    return traffic


def replay(store: Store) -> State:
    """The state without the help of any derived file, of a store that was closed."""
    again = opened(store.folder, store.config)
    try:
        return state_of(again)
    finally:
        again.close()


SMALL_SEGMENTS = LogConfig(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB)


def small_store(folder: Path) -> Store:
    return open_store(folder, SMALL_SEGMENTS, ManualClock())


def queue_of(store: Store, partition: int = 0) -> Queue:
    queue = store.queue("s", partition)
    assert queue is not None
    return queue


def used_store(folder: Path, partition: int, actions: tuple[AnyAction, ...] = ()) -> Store:
    """A store whose queue has 15 messages of a producer, and a group at its beginning; further
    actions are taken behind them.
    """
    store = small_store(folder)
    queue = store.open_queue("s", partition)
    for number in range(5):
        store.append([intake(queue, [b"old"] * 3, number=number)])
    store.act(Begin("s", partition, "g", "", 0))
    for action in actions:
        store.act(action)
    store.write_actions()
    return store
