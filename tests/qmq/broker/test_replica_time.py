"""The time of a replica: whose word it follows, what retention counts by, and what a restart, a
reboot and an operator change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq.broker.replica_time import ReplicaTime
from qmq.broker.timekeeper import SteadyClock
from qmq.errors import InvalidArgument
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.retention import AGE, Before, DeletedMessages, DeletionReport, Retention
from qmq.log.store import Store
from qmq.model import Partition, QueueId, SubjectConfig
from qmq.process.event_loop import Clock

T0, HOUR, DAY = 1_700_000_000_000, 3_600_000, 86_400_000


class Machines:
    """True time, and the clocks of a machine `me` and of the others, which may be wrong."""

    def __init__(self, folder: Path, *, others: int = 2, voters: int | None = None) -> None:
        self.folder = folder
        self.now_ms, self.booted_ms, self.boot = T0, T0 - 5000, "boot-1"
        self.off = dict.fromkeys(["me", *[f"other{number}:1" for number in range(others)]], 0)
        self.silent: set[str] = set()
        self.voters = others + 1 if voters is None else voters
        self.time = self.start(0)

    def start(self, log_ms: int) -> ReplicaTime:
        """Start the process: without its memory, with its files."""
        clock = SteadyClock(
            lambda: self.now_ms + self.off["me"], lambda: self.now_ms - self.booted_ms
        )
        others = [name for name in self.off if name != "me"]
        self.time = ReplicaTime(
            clock,
            self.folder,
            Disk(),
            self.boot,
            addresses=lambda: others,
            voters=lambda: self.voters,
            ports=self,
        )
        self.time.begin(log_ms)
        return self.time

    def reboot(self, log_ms: int, *, off_ms: int = 0) -> None:
        """The machine was off for a time."""
        self.now_ms += off_ms
        self.boot, self.booted_ms = self.boot + "+", self.now_ms
        self.start(log_ms)

    async def ask(self, address: str) -> int:
        if address in self.silent:
            raise ConnectionRefusedError(address)
        return self.now_ms + self.off[address]

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """There are no connections."""

    async def run(self, ms: int, every_ms: int = 1000) -> None:
        for _ in range(ms // every_ms):
            self.now_ms += every_ms
            await self.time.check()

    @property
    def stamp_off(self) -> int:
        """How far the time that stamps entries is ahead of the true time."""
        return self.time.clock.time_ms() - self.now_ms

    @property
    def retention_off(self) -> int:
        return self.time.retention_ms() - self.now_ms


async def test_a_jump_of_one_machines_clock_moves_nothing_that_others_deny(tmp_path: Path) -> None:
    for jump in (30 * DAY, -30 * DAY):
        group = Machines(tmp_path)
        await group.run(60_000)
        group.off["me"] = jump
        await group.run(10 * 60_000)
        assert (group.stamp_off, group.retention_off) == (0, 0)
        assert group.time.status().step_ms == jump


async def test_a_jump_is_not_followed_while_no_other_machine_answers(tmp_path: Path) -> None:
    group = Machines(tmp_path)
    await group.run(60_000)
    group.silent = set(group.off)
    group.off["me"] = 30 * DAY
    await group.run(10 * 60_000)
    assert (group.stamp_off, group.retention_off) == (0, 0)


async def test_a_replica_that_starts_with_a_wrong_clock_gets_the_others_time(
    tmp_path: Path,
) -> None:
    for jump in (30 * DAY, -30 * DAY):
        group = Machines(tmp_path / str(jump))
        (tmp_path / str(jump)).mkdir()
        group.off["me"] = jump
        group.start(T0 - HOUR)
        assert (
            group.stamp_off == group.retention_off == -HOUR
            if jump > 0
            else group.retention_off <= -HOUR
        )
        await group.run(3000)
        assert abs(group.stamp_off) <= 2
        assert abs(group.retention_off) <= 2


async def test_of_two_machines_that_disagree_neither_moves_the_time(tmp_path: Path) -> None:
    for jump in (30 * DAY, -30 * DAY):
        for wrong in ("me", "other0:1"):
            group = Machines(tmp_path, others=1)
            await group.run(60_000)
            group.off[wrong] = jump
            await group.run(10 * 60_000)
            assert (group.stamp_off, group.retention_off) == (0, 0)


async def test_of_two_machines_a_restarted_one_continues_the_logs_time(tmp_path: Path) -> None:
    group = Machines(tmp_path, others=1)
    await group.run(60_000)
    group.off["me"] = 30 * DAY
    group.silent = set(group.off)
    await group.time.stop()
    group.start(group.now_ms)
    await group.run(60_000)
    assert (group.stamp_off, group.retention_off) == (0, 0)


async def test_a_suspended_cluster_whose_clocks_agree_afterwards_goes_on(tmp_path: Path) -> None:
    group = Machines(tmp_path)
    await group.run(60_000)
    group.now_ms += 10 * HOUR  # no machine's CLOCK_BOOTTIME ran
    group.booted_ms += 10 * HOUR
    assert (group.stamp_off, group.retention_off) == (-10 * HOUR, -10 * HOUR)
    await group.run(3000)
    assert (group.stamp_off, group.retention_off) == (0, 0)


async def test_when_all_clocks_leap_by_weeks_retention_keeps_its_pace(tmp_path: Path) -> None:
    group = Machines(tmp_path)
    await group.run(60_000)
    group.off = dict.fromkeys(group.off, 30 * DAY)
    await group.run(HOUR)
    assert 0 <= group.retention_off <= HOUR // 1000
    assert group.time.status().retention_behind_ms >= 29 * DAY


async def test_a_group_alone_keeps_retentions_pace_until_an_operator_confirms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Machines(tmp_path, others=0)
    await alone.run(60_000)
    alone.off["me"] = 30 * DAY
    with caplog.at_level(logging.WARNING, "qmq.broker"):
        await alone.run(HOUR)
    assert alone.stamp_off == 30 * DAY
    assert 0 <= alone.retention_off <= HOUR // 1000
    assert [record for record in caplog.records if "confirm-clock" in record.getMessage()]
    with pytest.raises(InvalidArgument):
        alone.time.confirm(alone.now_ms)
    alone.time.confirm(alone.now_ms + 30 * DAY)
    assert alone.retention_off == 30 * DAY
    assert alone.time.status().retention_behind_ms == 0
    alone.start(alone.now_ms)
    assert alone.retention_off == 30 * DAY


async def test_a_group_alone_continues_over_a_restart_of_the_process(tmp_path: Path) -> None:
    alone = Machines(tmp_path, others=0)
    await alone.run(120_000)
    await alone.time.stop()
    alone.off["me"] = 30 * DAY
    alone.now_ms += 5 * HOUR
    alone.start(alone.now_ms + 30 * DAY)
    assert alone.retention_off == 0


async def test_a_group_alone_does_not_know_how_long_its_machine_was_off(tmp_path: Path) -> None:
    alone = Machines(tmp_path, others=0)
    await alone.run(120_000)
    await alone.time.stop()
    alone.reboot(alone.now_ms, off_ms=10 * DAY)
    await alone.run(60_000)
    assert alone.stamp_off == 0
    assert -10 * DAY <= alone.retention_off <= -10 * DAY + 100
    alone.time.confirm(alone.now_ms)
    assert alone.retention_off == 0


async def test_small_corrections_of_the_clock_are_followed_without_an_operator(
    tmp_path: Path,
) -> None:
    alone = Machines(tmp_path, others=0)
    await alone.run(60_000)
    alone.off["me"] = 3000
    await alone.run(2 * HOUR)
    assert alone.retention_off == 3000


async def test_a_clock_behind_keeps_messages_longer(tmp_path: Path) -> None:
    alone = Machines(tmp_path, others=0)
    await alone.run(60_000)
    alone.off["me"] = -DAY
    await alone.run(120_000)
    assert alone.retention_off == -DAY


async def test_without_a_saved_time_retention_begins_at_the_logs_last_entry(tmp_path: Path) -> None:
    alone = Machines(tmp_path, others=0)
    alone.start(T0 - 3 * DAY)
    assert alone.retention_off == -3 * DAY


async def test_a_damaged_file_of_the_time_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "retention-time.json").write_text("{")
    alone = Machines(tmp_path, others=0)
    with caplog.at_level(logging.WARNING, "qmq.broker"):
        alone.start(T0 - HOUR)
    assert alone.retention_off == -HOUR
    assert "retention-time.json" in caplog.text


def filled(folder: Path, clock: Clock, count: int) -> Store:
    store = open_store(folder, LogConfig(segment_bytes=64 * 1024, retention_ms=7 * DAY), clock)
    queue = store.open_queue("s", 0)
    for number in range(count):
        store.append([intake(queue, [bytes(4000)], number=number)])
    return store


def first_kept(store: Store, before: Before | None = None) -> int:
    for _ in Retention(store, before).steps(SubjectConfig):
        pass
    queue = store.queue("s", 0)
    assert queue is not None
    return queue.start_sequence


async def test_a_jump_of_the_masters_clock_deletes_nothing_and_stamps_nothing(
    tmp_path: Path,
) -> None:
    group = Machines(tmp_path)
    await group.run(60_000)
    store = filled(tmp_path / "store", group.time.clock, 50)
    group.off["me"] = 30 * DAY
    await group.run(60_000)
    store.append([intake(store.open_queue("s", 0), [b"later"], number=50)])
    assert store.last_time_ms == group.now_ms
    assert first_kept(store, group.time.before_ms) == 0
    store.close()


def test_an_entry_from_the_future_makes_no_other_message_old(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    store = filled(tmp_path, clock, 50)
    clock.now_ms = T0 + 30 * DAY
    store.append([intake(store.open_queue("s", 0), [b"from the future"], number=50)])
    clock.now_ms = T0 + HOUR
    assert first_kept(store) == 0
    store.close()


def test_retention_says_what_it_deletes_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(T0)
    store = filled(tmp_path, clock, 50)
    clock.now_ms = T0 + 8 * DAY
    store.append([intake(store.open_queue("s", 0), [b"new"], number=50)])
    first_kept(store)
    assert [record.getMessage() for record in caplog.records if record.name == "qmq.retention"] == [
        "retention deleted messages 0 to 49 of s/0, stored 2023-11-14T22:13:20+00:00 to "
        "2023-11-14T22:13:20+00:00: "
        "older than its retention, which ends 2023-11-15T22:13:20+00:00"
    ]
    store.close()


def test_a_queue_that_loses_messages_all_the_time_is_reported_every_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report, queue = DeletionReport(), QueueId("s", Partition(0))
    for at_ms in range(0, 2 * HOUR + 1, HOUR // 2):
        report.note(
            DeletedMessages(queue, at_ms, at_ms + HOUR // 2, T0 + at_ms, T0 + at_ms + 1, T0, AGE)
        )
        report.log_due(at_ms)
    report.note(DeletedMessages(queue, 7, 8, T0, T0, T0, AGE))
    report.log_all()
    found = [
        record.getMessage().split(" of ")[0]
        for record in caplog.records
        if record.name == "qmq.retention"
    ]
    half = HOUR // 2
    assert found == [
        f"retention deleted messages {first} to {end - 1}"
        for first, end in ((0, half), (half, 3 * half), (3 * half, 5 * half), (7, 8))
    ]
