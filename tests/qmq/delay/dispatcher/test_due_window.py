"""Answers' effects on the batches of a window: each line of the table of outcomes."""

from __future__ import annotations

import itertools

import pytest
from fake_brokers import due

from qmq.delay.due_window import WINDOW, DueBatch, DueWindow
from qmq.delay.plan_log import Draft
from qmq.delivery.retries import DELAY_SERVER
from qmq.errors import (
    DiskFull,
    MessageTooLarge,
    NotConnected,
    NotMaster,
    OrderMismatch,
    Outcome,
    OutOfSequence,
    Overloaded,
    QmqError,
    RouteChanged,
    UnknownSubject,
)
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

HERE = Produced(0, 9)
LOST = NotConnected("lost", outcome=Outcome.UNKNOWN)


class Driven:
    """A window and its driver."""

    def __init__(self, *, is_ordered: bool = True) -> None:
        self.window = DueWindow(
            "g",
            1 if is_ordered else 0,
            is_ordered=is_ordered,
            rules=DELAY_SERVER._replace(backoff_s=lambda *_: 1.0),
        )
        self.now = 0.0
        self._ids, self._numbers, self._plans = (
            itertools.count(7),
            itertools.count(),
            itertools.count(1),
        )
        self.window.connected()

    def admit(self, count: int = 1, *, is_planned: bool = True) -> list[DueBatch]:
        found = []
        for _ in range(count):
            number = (
                self.window.number(lambda: next(self._ids))
                if self.window.is_ordered
                else (5, next(self._numbers))
            )
            batch = DueBatch(Draft("s", self.window.partition, "g", *number, [due(1)]), size=10)
            self.window.flight.append(batch)
            if is_planned:
                self.plan(batch)
            found.append(batch)
        return found

    def plan(self, batch: DueBatch) -> None:
        self.window.planned(batch, PlanAction(next(self._plans), *batch.draft[:5], ()))

    def resumed(self, producer_id: int, number: int) -> DueBatch:
        draft = Draft("s", self.window.partition, "g", producer_id, number, [due(1)])
        batch = DueBatch(
            draft, PlanAction(next(self._plans), *draft[:5], ()), size=10, is_uncertain=True
        )
        self.window.flight.append(batch)
        return batch

    def sent(self) -> list[DueBatch]:
        found = []
        while (batch := self.window.next(self.now)) is not None:
            found.append(batch)
        return found

    def answer(self, batch: DueBatch, answer: Produced | QmqError) -> None:
        if isinstance(answer, QmqError):
            self.window.refused(batch, batch.attempts, answer, self.now)
        else:
            self.window.stored(batch, answer, self.now)

    @property
    def done(self) -> list[DueBatch]:
        return [batch for batch, _ in self.window.take_done()]


def test_messages_leave_only_after_their_plan_and_in_order() -> None:
    it = Driven()
    first, second = it.admit(2, is_planned=False)
    it.plan(second)
    assert it.sent() == []
    it.plan(first)
    assert it.sent() == [first, second]
    it.answer(first, HERE)
    it.answer(second, HERE)
    assert it.done == [first, second]


def test_no_more_than_a_window_is_planned_for_one_destination() -> None:
    it = Driven()
    while it.window.may_admit(it.now):
        it.admit()
    assert len(it.window.flight) == WINDOW
    it.window.disconnected(LOST)
    assert not it.window.may_admit(it.now)


@pytest.mark.parametrize(
    "failure", [Overloaded("x"), DiskFull("x"), NotMaster("x"), UnknownSubject("x"), LOST]
)
def test_what_may_be_taken_later_is_sent_again_in_order_one_ahead(failure: QmqError) -> None:
    it = Driven()
    first, second, third = it.admit(3)
    it.sent()
    it.answer(first, failure)
    it.answer(second, OutOfSequence("x"))
    it.answer(third, OutOfSequence("x"))
    assert it.sent() == []
    it.now += 1.0
    assert it.sent() == [first]
    it.answer(first, HERE)
    assert it.sent() == [second, third]
    assert it.window.take_void() == []


def test_a_balanced_window_releases_only_what_is_certainly_not_stored() -> None:
    it = Driven(is_ordered=False)
    refused, lost, pending, never = it.admit(4)
    it.window.next(0.0)
    it.window.next(0.0)
    it.window.next(0.0)
    it.answer(lost, LOST)
    it.answer(refused, Overloaded("x"))
    it.window.release()
    assert it.window.take_void() == [refused, never]
    assert it.window.flight == [lost, pending]
    it.now += 1.0
    assert it.sent() == [lost]
    it.answer(lost, Overloaded("x"))
    it.window.release()
    assert it.window.take_void() == []


def test_a_batch_at_fault_is_void_alone_or_in_an_order_with_all_behind_it() -> None:
    plain = Driven(is_ordered=False)
    a, b, c = plain.admit(3)
    plain.sent()
    plain.answer(b, MessageTooLarge("x"))
    assert plain.window.take_void() == [b]
    assert plain.window.flight == [a, c]
    it = Driven()
    first, second, third = it.admit(3)
    it.sent()
    (fourth,) = it.admit(is_planned=False)
    it.answer(second, MessageTooLarge("x"))
    it.answer(third, OutOfSequence("x"))
    assert not it.window.may_admit(it.now)
    it.answer(first, HERE)
    assert it.window.take_void() == [], "the last of them is not planned yet"
    it.plan(fourth)
    assert it.window.take_void() == [second, third, fourth]
    assert second.fault is not None
    assert third.fault is None
    (fifth,) = it.admit()
    assert (fifth.draft.batch_sequence, fifth.producer_id != first.producer_id) == (0, True)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_batch_that_may_be_stored_is_never_void_whatever_is_wrong_with_it(
    is_ordered: bool,
) -> None:
    it = Driven(is_ordered=is_ordered)
    batch = it.resumed(3, 4)
    for failure in (MessageTooLarge("x"), OrderMismatch("x"), Overloaded("x"), RouteChanged("x")):
        assert it.sent() == [batch]
        it.answer(batch, failure)
        it.now += 1.0
    it.window.release()
    assert it.window.take_void() == []
    assert it.sent() == [batch]


def test_batches_before_a_stored_batch_of_the_same_producer_are_stored() -> None:
    it = Driven()
    first, second = it.admit(2)
    it.sent()
    it.answer(first, LOST)
    it.answer(second, HERE)
    assert it.done == [first, second]


def test_a_sent_batch_is_void_or_lost_when_the_broker_forgot_its_producer() -> None:
    it = Driven()
    (batch,) = it.admit()
    it.sent()
    it.answer(batch, OutOfSequence("x"))
    assert it.window.take_void() == [batch]
    assert not batch.is_lost
    again = it.resumed(3, 4)
    it.now += 1.0
    assert it.sent() == [again]
    it.answer(again, OutOfSequence("x"))
    assert it.window.take_void() == [again]
    assert again.is_lost


def test_a_silent_window_can_be_used_again_when_nothing_is_on_its_way() -> None:
    it = Driven(is_ordered=False)
    (batch,) = it.admit()
    it.sent()
    it.window.stalled()
    assert not it.window.may_admit(it.now)
    it.answer(batch, Overloaded("x"))
    it.window.release()
    assert it.window.may_admit(it.now + 1.0)
