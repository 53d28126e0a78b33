"""The schedule as a projection of the store: after flushes, crashes and truncation it equals what
the logs say.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from schedule_support import SECOND, START, contents, delayed, plan
from support import ManualClock
from support.retention import begin_retention, end_retention

from qmq.delay.batches import SchedulePlace
from qmq.delay.schedule import Schedule
from qmq.errors import LogDamaged
from qmq.log import follower
from qmq.log.actions import Cancel, Close, PlanDone, PlanVoid, Postpone, Recur
from qmq.log.checkpoint import begin_checkpoint, close_store, end_checkpoint
from qmq.log.disk import Disk
from qmq.log.log_config import Flush, LogConfig
from qmq.log.merged_log import read_merged
from qmq.log.recovery import open_store
from qmq.log.store import Intake, Store
from qmq.model import SubjectConfig
from qmq.wire.batch_columns import parse_header

BUCKET = START // SECOND


def small(flush: Flush = Flush.ASYNC) -> LogConfig:
    """Segments far smaller than an operator may have them."""
    config = LogConfig(flush=flush, retention_ms=1_000)
    object.__setattr__(config, "segment_bytes", 3_000)
    object.__setattr__(config, "action_segment_bytes", 1_500)
    return config


class DelayStore:
    """A store, its schedule, and traffic by chance such as a delay group has it."""

    def __init__(
        self, folder: Path, *, is_replicated: bool = False, config: LogConfig | None = None
    ) -> None:
        self.folder = folder
        self.clock = ManualClock(START - 60_000)
        self.schedule = Schedule(folder / "schedule", Disk(), SECOND, buffer_bytes_max=1_000)
        self.store = open_store(
            folder,
            config or small(),
            self.clock,
            is_replicated=is_replicated,
            projection=self.schedule,
        )
        self.number = 0

    def produce(self, random: Random) -> None:
        self.number += 1
        due_times_ms = [
            START + random.randrange(5 * SECOND) for _ in range(random.choice([1, 1, 3, 6]))
        ]
        region, crc = delayed(due_times_ms, number=self.number)
        self.store.append(
            [Intake(self.store.open_queue("orders", 0), region, crc, parse_header(region), 0)]
        )

    def act(self, random: Random) -> None:
        """An entry of one or several actions, all of them such as a master would do."""
        schedule = self.schedule
        every = [
            SchedulePlace(info.bucket, each)
            for info in schedule.buckets()
            for each in range(info.messages)
        ]
        pending = [place for place in every if schedule.state_of(place) == "pending"]
        chance = random.random()
        if pending and chance < 0.5:
            chosen = random.sample(pending, min(len(pending), random.randrange(1, 4)))
            self.store.act(
                plan(schedule.next_plan, *[(each.bucket, [each.ordinal]) for each in chosen])
            )
            if chance < 0.1:
                self.store.act(Recur(*chosen[0], START + random.randrange(5 * SECOND)))
        elif schedule.plans and chance < 0.8:
            number = random.choice(list(schedule.plans))
            self.store.act((PlanDone if chance < 0.7 else PlanVoid)((number,)))
        elif pending and chance < 0.95:
            place = random.choice(pending)
            self.store.act(
                Cancel(*place)
                if chance < 0.9
                else Postpone(*place, START + random.randrange(5 * SECOND))
            )
        else:
            for place in [each for each in pending if each.bucket < BUCKET + 1]:
                self.store.act(Cancel(*place))
            self.store.act(Close(BUCKET + 1))
        self.store.write_actions()

    def traffic(self, random: Random, steps: int) -> None:
        for _ in range(steps):
            self.clock.now_ms += random.choice([0, 0, 5, 300])
            self.produce(random) if random.random() < 0.5 else self.act(random)
            if random.random() < 0.1:
                checkpoint(self.store)


def checkpoint(store: Store) -> None:
    taken = begin_checkpoint(store)
    taken.run()
    end_checkpoint(store, taken)


def known(schedule: Schedule) -> Any:
    """Everything but what depends on when files were flushed and deleted."""
    schedule.check()
    states = [schedule.settled(info.bucket).tolist() for info in schedule.buckets()]
    return (
        schedule.index,
        schedule.closed_before,
        dict(schedule.plans),
        schedule.next_plan,
        schedule.buckets(),
        states,
        list(schedule.scan("")),
    )


def replayed(
    folder: Path,
    where: Path,
    *,
    is_replicated: bool = False,
    keeps_checkpoints: bool = False,
    until: int | None = None,
) -> Any:
    """Open a copy of the folder, as a crash leaves it. Returns (state, files)."""
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(folder, where)
    if not keeps_checkpoints:
        shutil.rmtree(where / "checkpoint", ignore_errors=True)
    schedule = Schedule(where / "schedule", Disk(), SECOND)
    store = open_store(
        where, small(), ManualClock(), is_replicated=is_replicated, projection=schedule, until=until
    )
    found = known(schedule), contents(schedule)
    store.close()
    return found


@pytest.mark.parametrize("flush", list(Flush))
@pytest.mark.parametrize("seed", range(6))
def test_after_a_crash_at_any_moment_the_schedule_is_as_it_was(
    tmp_path: Path, seed: int, flush: Flush
) -> None:
    random = Random(seed)
    group = DelayStore(tmp_path / "a", config=small(flush))
    for _ in range(6):
        group.traffic(random, 12)
        before = known(group.schedule)
        with_checkpoint = replayed(group.folder, tmp_path / "b", keeps_checkpoints=True)
        assert with_checkpoint == replayed(group.folder, tmp_path / "b")
        assert with_checkpoint[0] == before
    close_store(group.store)
    again = DelayStore(tmp_path / "a")
    assert (known(again.schedule), contents(again.schedule)) == with_checkpoint
    again.store.close()


def test_an_older_checkpoint_opens_to_the_same_though_buckets_were_closed_since(
    tmp_path: Path,
) -> None:
    random = Random(3)
    group = DelayStore(tmp_path / "a")
    group.traffic(random, 30)
    checkpoint(group.store)
    for info in group.schedule.buckets():
        for ordinal in range(info.messages):
            group.store.act(Cancel(info.bucket, ordinal))
    group.store.act(PlanDone(tuple(group.schedule.plans)))
    group.store.act(Close(BUCKET + 3))
    group.store.write_actions()
    checkpoint(group.store)
    assert group.schedule.closed_before == BUCKET + 3
    before = known(group.schedule)
    group.store.close()
    newest = max((tmp_path / "a" / "checkpoint").iterdir())
    newest.write_bytes(b"damaged")
    assert replayed(tmp_path / "a", tmp_path / "b", keeps_checkpoints=True)[0] == before


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_schedule_that_its_log_does_not_have_survives_damaged_checkpoints(
    tmp_path: Path, damaged: int, is_replicated: bool
) -> None:
    """Retention has deleted entries of messages that are still pending: without a checkpoint only
    the schedule's files have them.
    """
    random, folder = Random(3), tmp_path / "a"
    group = DelayStore(folder, is_replicated=is_replicated)
    if is_replicated:
        group.store.append_barrier(1)
    for _ in range(2):
        group.traffic(random, 60)
        group.store.commit(group.store.index)
        group.clock.now_ms += 2_000
        files = begin_retention(group.store, SubjectConfig)
        checkpoint(group.store)
        end_retention(files)
    assert group.store.messages.start > 0
    before, held = known(group.schedule), contents(group.schedule)
    group.store.close()
    shutil.copytree(folder / "checkpoint", tmp_path / "copy")
    files_before = {path.name: path.read_bytes() for path in (folder / "schedule").iterdir()}
    for path in sorted((folder / "checkpoint").iterdir())[-damaged:]:
        path.write_bytes(b"damaged")
    with pytest.raises(LogDamaged, match="restore the checkpoint folder from a copy"):
        DelayStore(folder, is_replicated=is_replicated)
    assert {
        path.name: path.read_bytes() for path in (folder / "schedule").iterdir()
    } == files_before
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(tmp_path / "copy", folder / "checkpoint")
    again = DelayStore(folder, is_replicated=is_replicated)
    assert (known(again.schedule), contents(again.schedule)) == (before, held)
    again.store.close()


def feed(master: Store, slave: Store, bytes_max: int) -> bool:
    """One Append; False if there was nothing to send."""
    where = (slave.messages.end, slave.actions.end)
    stretch = master.tail.read(where, slave.index, bytes_max) or read_merged(
        (master.messages, master.actions), where, slave.index, bytes_max
    )
    assert stretch is not None
    if stretch.runs:
        runs = follower.unpack_runs(memoryview(b"".join(follower.pack_runs(stretch.runs))))
        follower.take(slave, runs, follower.check_stretch(runs, slave.index, stretch.last))
    return bool(stretch.runs)


@pytest.mark.parametrize("seed", range(4))
def test_a_slave_has_the_masters_bytes_once_it_commits_and_nothing_before(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    master = DelayStore(tmp_path / "m", is_replicated=True)
    slave = DelayStore(tmp_path / "s", is_replicated=True)
    master.store.append_barrier(1)
    for _ in range(5):
        master.traffic(random, 15)
        before = known(slave.schedule)
        while feed(master.store, slave.store, random.choice([1, 700, 9_000])):
            assert known(slave.schedule) == before
        assert slave.store.pending
        slave.store.commit(random.randrange(slave.store.committed_index, slave.store.index + 1))
        checkpoint(slave.store)
        assert replayed(
            slave.folder, tmp_path / "copy", is_replicated=True, keeps_checkpoints=True
        )[0] == known(master.schedule)
        slave.store.commit(slave.store.index)
        assert known(slave.schedule) == known(master.schedule)
    assert contents(slave.schedule) == contents(master.schedule)
    slave.store.close()
    master.store.close()


def test_uncommitted_writes_of_a_deposed_master_leave_no_trace(tmp_path: Path) -> None:
    random = Random(1)
    master = DelayStore(tmp_path / "m", is_replicated=True)
    master.store.append_barrier(1)
    master.traffic(random, 40)
    checkpoint(master.store)
    index, before = master.store.index, known(master.schedule)
    for _ in range(40):
        master.produce(random)
        master.act(random)
    files = replayed(
        tmp_path / "m", tmp_path / "copy", is_replicated=True, keeps_checkpoints=True, until=index
    )
    assert files[0] == before
    master.store.close()
    schedule = Schedule(tmp_path / "m" / "schedule", Disk(), SECOND)
    store = open_store(
        tmp_path / "m", small(), ManualClock(), is_replicated=True, projection=schedule, until=index
    )
    assert (known(schedule), contents(schedule)) == files
    store.close()


def test_without_a_checkpoint_retention_leaves_an_incomplete_schedule(tmp_path: Path) -> None:
    group = DelayStore(tmp_path / "a")
    for _ in range(60):
        group.produce(Random(5))
    before = known(group.schedule)
    group.clock.now_ms += 10_000
    old = begin_retention(group.store, lambda name: SubjectConfig(name))
    checkpoint(group.store)
    checkpoint(group.store)
    assert old.dropped
    end_retention(old)
    group.store.close()
    assert replayed(tmp_path / "a", tmp_path / "b", keeps_checkpoints=True)[0] == before
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    again = DelayStore(tmp_path / "a")
    assert not again.schedule.is_whole
    again.store.close()


def test_a_checkpoint_covers_trailing_entries_that_do_not_concern_the_schedule(
    tmp_path: Path,
) -> None:
    group = DelayStore(tmp_path / "m", is_replicated=True)
    group.store.append_barrier(1)
    group.produce(Random(1))
    group.store.append_barrier(2)
    taken = begin_checkpoint(group.store)
    assert taken.checkpoint.projection.index == taken.checkpoint.index == 3
    assert group.schedule.index == 2
    group.store.close()
