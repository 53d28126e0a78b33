"""Batches that fall into many buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedule_support import SECOND, START, checkpoint, delayed, messages_of, opened, places

from qmq.delay.batches import SchedulePlace
from qmq.delay.schedule import Schedule, restore
from qmq.errors import LogDamaged

DUES = [START + at * SECOND for at in range(1_000)]


def filled(folder: Path, batches: int) -> Schedule:
    """A schedule with one message a batch in each of a thousand buckets."""
    schedule = opened(folder)
    for number in range(batches):
        schedule.take(number + 1, START, *delayed(DUES, number=number))
    return schedule


def test_a_thousand_buckets_cost_one_file(tmp_path: Path) -> None:
    schedule = filled(tmp_path, 3)
    state = checkpoint(schedule)
    assert [path.suffix for path in tmp_path.iterdir()] == [".run"]
    assert state.version == 2
    schedule.close()
    again = opened(tmp_path, state)
    assert [(each.messages, each.pending) for each in again.buckets()] == [(3, 3)] * 1_000
    where = [SchedulePlace(DUES[700] // SECOND, ordinal) for ordinal in range(3)]
    assert [each.message_id for each in again.read(places(where))] == [
        messages_of(DUES, number)[700].message_id for number in range(3)
    ]
    again.close()


def test_few_messages_leave_a_state_that_release_0_2_reads(tmp_path: Path) -> None:
    schedule = filled(tmp_path, 1)
    state = checkpoint(schedule)
    assert state.version == 1
    assert not list(tmp_path.glob("*.run"))
    schedule.close()


def test_a_run_is_deleted_when_all_of_it_is_filed(tmp_path: Path) -> None:
    schedule = filled(tmp_path, 3)
    checkpoint(schedule)
    while schedule.file_near(DUES[-1]):
        pass
    states = [checkpoint(schedule) for _ in range(3)]
    assert [each.version for each in states] == [1, 1, 1]
    assert not list(tmp_path.glob("*.run"))
    assert restore(SECOND, states[-1]).runs == b""
    schedule.close()


def test_damage_of_a_run_costs_only_the_messages_that_it_hit(tmp_path: Path) -> None:
    schedule = filled(tmp_path, 3)
    state = checkpoint(schedule)
    schedule.close()
    (run,) = tmp_path.glob("*.run")
    data = bytearray(run.read_bytes())
    data[20] ^= 1
    run.write_bytes(data)
    again = opened(tmp_path, state)
    assert len(again.read(places([SchedulePlace(DUES[999] // SECOND, 2)]))) == 1
    with pytest.raises(LogDamaged):
        again.read(places([SchedulePlace(DUES[0] // SECOND, 0)]))
    again.take(4, START, *delayed(DUES[:1], number=3))
    place = SchedulePlace(DUES[0] // SECOND, 3)
    assert again.read(places([place]))[0].message_id == messages_of(DUES, 3)[0].message_id
    again.close()
