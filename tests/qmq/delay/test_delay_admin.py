"""The admin: lists in pages that miss nothing, ids of runs; cancelling and moving are simulated
(tests/delaysim).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.delay.admin import BEGINNING, EngineAdmin, Listing, ListMark
from qmq.delay.batches import DueMessage, SchedulePlace, check_due
from qmq.errors import DelayTooLong, InvalidArgument, NotMaster
from qmq.log.actions import Postpone
from qmq.model import SCHEDULE_ID
from qmq.wire.batch_columns import BatchFlag


def _message(
    number: int,
    due_ms: int,
    subject: str = "a",
    flags: int = 0,
    headers: dict[str, bytes] | None = None,
) -> DueMessage:
    return DueMessage(
        SchedulePlace(0, number),
        due_ms,
        subject,
        b"",
        b"",
        (),
        headers or {},
        0,
        number.to_bytes(16, "big"),
        flags,
        7,
    )


def _admin(messages: list[DueMessage]) -> EngineAdmin:
    def scan(subject: str, from_ms: int, to_ms: int, *, flags: int) -> Iterator[DueMessage]:
        assert subject == ""
        found = [each for each in messages if from_ms <= each.due_ms < (to_ms or 1 << 62)]
        yield from sorted(found, key=lambda each: (each.due_ms, each.place))

    engine: Any = SimpleNamespace(
        schedule=SimpleNamespace(scan=scan), writer=SimpleNamespace(committed=_nothing)
    )
    return EngineAdmin(lambda: engine, "d1", 1_000)


async def _nothing() -> None: ...


async def _all(admin: EngineAdmin, subject: str, most: int) -> list[DueMessage]:
    found: list[DueMessage] = []
    after: ListMark | None = BEGINNING
    while after is not None:
        page, behind = await admin.listed(Listing(subject, 0, 0, after, most))
        assert len(page) <= most
        assert behind is None or behind > after, "it continues"
        found += page
        after = behind
    return found


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from("ab")), max_size=40),
    st.integers(1, 5),
    st.sampled_from(("", "a", "b")),
)
async def test_pages_together_are_the_list(
    items: list[tuple[int, str]], most: int, subject: str
) -> None:
    # ordinals and ids are in opposite orders: what is due at one time is listed by id
    messages = [_message(len(items) - at, due_ms, name) for at, (due_ms, name) in enumerate(items)]
    admin = _admin(messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qmq.delay.admin.LOOK_MAX", 4)
        found = await _all(admin, subject, most)
    wanted = [each for each in messages if subject in ("", each.subject)]
    assert found == sorted(wanted, key=lambda each: (each.due_ms, str(admin.id_of(each))))


async def test_too_many_due_at_one_time_are_refused_instead_of_holding_up_deliveries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qmq.delay.admin.SAME_MAX", 5)
    with pytest.raises(InvalidArgument, match="due at 3 ms"):
        await _admin([_message(number, 3) for number in range(9)]).listed(
            Listing("", 0, 0, BEGINNING, 2)
        )


def test_a_run_is_known_by_the_id_of_its_recurring_message() -> None:
    first = bytes(15) + b"\x09"
    run = _message(5, 3, flags=BatchFlag.RECURRING, headers={SCHEDULE_ID: first.hex().encode()})
    forged = _message(6, 3, headers={SCHEDULE_ID: first.hex().encode()})
    admin = _admin([])
    assert admin.id_of(run).message_id.to_bytes() == first
    assert admin.id_of(forged).message_id.to_bytes() == forged.message_id


@pytest.mark.parametrize(("due_ms", "error"), [(-1, InvalidArgument), (3_002, DelayTooLong)])
def test_a_due_time_beyond_reach_is_refused(due_ms: int, error: type[Exception]) -> None:
    check_due(3_000, 2_000, 1_000)
    with pytest.raises(error):
        check_due(due_ms, 2_000, 1_000)


async def test_a_committed_move_is_answered_while_mastership_is_handed_over() -> None:
    message = _message(5, 3)
    acted: list[Any] = []
    masters: list[Any] = []

    async def committed() -> None:
        masters.clear()  # the hand-over began between the write and its commit

    def engine() -> Any:
        if not masters:
            raise NotMaster("handed over")
        return masters[0]

    schedule = SimpleNamespace(
        find=lambda _: message.place, state_of=lambda _: "pending", read=lambda _: [message]
    )
    plan_log = SimpleNamespace(leaving=set(), in_dispatch=set())
    writer = SimpleNamespace(act=acted.append, committed=committed)
    clock = SimpleNamespace(time_ms=lambda: 0)
    masters.append(
        SimpleNamespace(schedule=schedule, plan_log=plan_log, writer=writer, clock=clock)
    )
    admin = EngineAdmin(engine, "d1", 1_000)
    moved = await admin.move(admin.id_of(message), 900)
    assert (moved.due_ms, moved.message_id, admin.moved) == (900, message.message_id, 1)
    assert acted == [Postpone(*message.place, 900)]
