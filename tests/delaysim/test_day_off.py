"""After an outage of a day: late messages are sent at once, oldest first, and messages that are due
now do not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from delaysim.group import DelayGroup, Entry, RealTime
from ordersim.loop import bury, own_violations
from sim.world import World

from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns

DAY_MS = 24 * 3600 * 1000
LATE = 3_000
DUE = 200


@pytest.fixture
def group(tmp_path: Path) -> Iterator[DelayGroup]:
    def broken(name: str, cause: BaseException) -> None:
        raise AssertionError(name) from cause

    world = World(1)
    found = DelayGroup(world, tmp_path, RealTime(world), broken)
    with own_violations():
        yield found
    asyncio._set_running_loop(None)
    assert found.master is not None
    bury([*found.graveyard, *found.master.loop.kill()])


def _region(subject: str, number: int, due_times_ms: list[int], first: int) -> bytes:
    columns = Columns(
        [str(first + at).encode() for at in range(len(due_times_ms))],
        [b"k"] * len(due_times_ms),
        due_times_ms=due_times_ms,
    )
    flags = BatchFlag.ORDERED if subject == "ordered" else 0
    return encode(
        subject.encode(),
        columns,
        producer_id=1,
        batch_sequence=number,
        create_time_ms=0,
        flags=flags,
    )[1]


def _sent_a_day_ago(group: DelayGroup, subject: str) -> None:
    """Late ones, spread over the day, not in the order of their due times; and some that become due
    in a new master's first seconds.
    """
    late = [(at * 7_919 % LATE) * DAY_MS // LATE for at in range(LATE)]
    due = [DAY_MS + 500 + at * 10 for at in range(DUE)]
    for number, (due_times_ms, first) in enumerate(
        ((late[: LATE // 2], 0), (late[LATE // 2 :], LATE // 2), (due, LATE))
    ):
        group.log.append(Entry(number + 1, 0, _region(subject, number, due_times_ms, first)))


def test_late_messages_go_oldest_first_and_do_not_delay_due_ones(group: DelayGroup) -> None:
    _sent_a_day_ago(group, "plain")
    group.world.now = DAY_MS
    group.elect()
    group.world.run(DAY_MS + 600_000)
    numbers = [int(message.body) for _, message, _ in group.real_time.stored]
    due_times_ms = {int(message.body): message.due_ms for _, message, _ in group.real_time.stored}
    assert sorted(numbers) == list(range(LATE + DUE))
    late = [due_times_ms[number] for number in numbers if number < LATE]
    assert late == sorted(late)
    last_due = max(at for at, number in enumerate(numbers) if number >= LATE)
    assert last_due < len(numbers) / 2, "the due ones waited for the late ones"
    assert numbers[0] < LATE
    assert any(number < LATE for number in numbers[:last_due][-20:]), (
        "the late ones waited for the due ones"
    )


def test_a_subject_that_cannot_be_delivered_holds_up_no_other(group: DelayGroup) -> None:
    group.real_time.gone = {f"gone-{number}" for number in range(5)}
    for number, subject in enumerate(sorted(group.real_time.gone)):
        group.log.append(
            Entry(
                number + 1,
                0,
                _region(subject, number, [1_000 + at for at in range(200)], 1_000 * (number + 1)),
            )
        )
    group.log.append(Entry(6, 0, _region("plain", 6, [1_500 + 10 * at for at in range(200)], 0)))
    group.elect()
    group.world.run(30_000)
    assert [subject for subject, _, _ in group.real_time.stored] == ["plain"] * 200
    group.real_time.gone.clear()
    group.world.run(120_000)
    for number in range(5):
        came = [
            int(message.body)
            for subject, message, _ in group.real_time.stored
            if subject == f"gone-{number}"
        ]
        assert came == [1_000 * (number + 1) + at for at in range(200)], (
            "all of them, in their order"
        )


def test_on_an_ordered_subject_nothing_overtakes(group: DelayGroup) -> None:
    _sent_a_day_ago(group, "ordered")
    group.world.now = DAY_MS
    group.elect()
    group.world.run(DAY_MS + 600_000)
    due_times_ms = [message.due_ms for _, message, _ in group.real_time.stored]
    assert len(due_times_ms) == LATE + DUE
    assert due_times_ms == sorted(due_times_ms)
