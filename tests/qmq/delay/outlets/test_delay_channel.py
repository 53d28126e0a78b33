"""What an answer means for the parcels of a channel: line by line of its table."""

from __future__ import annotations

import itertools

import pytest
from memory_ledger import due

from qmq.delay.interfaces import Draft
from qmq.delay.outlets.channel import WINDOW, Channel
from qmq.delay.outlets.parcel import Parcel
from qmq.delivery.retries import PAUSE_S_MAX, pause_s
from qmq.delivery.window import ASK_S
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
    """A channel, and who drives it."""

    def __init__(self, *, is_ordered: bool = True) -> None:
        self.channel = Channel("g", 1 if is_ordered else 0, is_ordered=is_ordered, rest=lambda *_: 1.0)
        self.now = 0.0
        self._ids, self._numbers, self._plans = itertools.count(7), itertools.count(), itertools.count(1)
        self.channel.connected()

    def admit(self, count: int = 1, *, is_planned: bool = True) -> list[Parcel]:
        found = []
        for _ in range(count):
            number = self.channel.number(lambda: next(self._ids)) if self.channel.is_ordered else (5, next(self._numbers))
            parcel = Parcel(Draft("s", self.channel.partition, "g", *number, [due(1)]), size=10)
            self.channel.admit(parcel)
            if is_planned:
                self.plan(parcel)
            found.append(parcel)
        return found

    def plan(self, parcel: Parcel) -> None:
        self.channel.planned(parcel, PlanAction(next(self._plans), *parcel.draft[:5], ()))

    def resumed(self, producer_id: int, number: int) -> Parcel:
        draft = Draft("s", self.channel.partition, "g", producer_id, number, [due(1)])
        parcel = Parcel(draft, PlanAction(next(self._plans), *draft[:5], ()), size=10, is_uncertain=True)
        self.channel.admit(parcel)
        return parcel

    def sent(self) -> list[Parcel]:
        found = []
        while (parcel := self.channel.next(self.now)) is not None:
            found.append(parcel)
        return found

    def answer(self, parcel: Parcel, answer: Produced | QmqError) -> None:
        if isinstance(answer, QmqError):
            self.channel.refused(parcel, parcel.attempts, answer, self.now)
        else:
            self.channel.stored(parcel, answer, self.now)

    @property
    def done(self) -> list[Parcel]:
        return [parcel for parcel, _ in self.channel.take_done()]


def test_nothing_leaves_before_it_is_planned_and_nothing_overtakes() -> None:
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
    while it.channel.may_admit(it.now):
        it.admit()
    assert len(it.channel.flight) == WINDOW
    it.channel.disconnected(LOST)
    assert not it.channel.may_admit(it.now)


@pytest.mark.parametrize("failure", [Overloaded("x"), DiskFull("x"), NotMaster("x"), UnknownSubject("x"), LOST])
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
    assert it.channel.take_void() == []


def test_of_an_unordered_subject_what_is_certainly_not_stored_can_be_released_and_what_may_be_stays() -> None:
    it = Driven(is_ordered=False)
    refused, lost, pending, never = it.admit(4)
    it.channel.next(0.0)
    it.channel.next(0.0)
    it.channel.next(0.0)
    it.answer(lost, LOST)
    it.answer(refused, Overloaded("x"))
    it.channel.release()
    assert it.channel.take_void() == [refused, never]
    assert it.channel.flight == [lost, pending]
    it.now += 1.0
    assert it.sent() == [lost]
    it.answer(lost, Overloaded("x"))
    it.channel.release()
    assert it.channel.take_void() == []


def test_a_parcel_at_fault_is_void_alone_or_with_all_behind_it_where_there_is_an_order() -> None:
    plain = Driven(is_ordered=False)
    a, b, c = plain.admit(3)
    plain.sent()
    plain.answer(b, MessageTooLarge("x"))
    assert plain.channel.take_void() == [b]
    assert plain.channel.flight == [a, c]
    it = Driven()
    first, second, third = it.admit(3)
    it.sent()
    (fourth,) = it.admit(is_planned=False)
    it.answer(second, MessageTooLarge("x"))
    it.answer(third, OutOfSequence("x"))
    assert not it.channel.may_admit(it.now)
    it.answer(first, HERE)
    assert it.channel.take_void() == [], "the last of them is not planned yet"
    it.plan(fourth)
    assert it.channel.take_void() == [second, third, fourth]
    assert second.fault is not None
    assert third.fault is None
    (fifth,) = it.admit()
    assert (fifth.draft.batch_sequence, fifth.producer_id != first.producer_id) == (0, True)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_parcel_that_may_be_stored_is_never_void_whatever_is_wrong_with_it(is_ordered: bool) -> None:
    it = Driven(is_ordered=is_ordered)
    parcel = it.resumed(3, 4)
    for failure in (MessageTooLarge("x"), OrderMismatch("x"), Overloaded("x"), RouteChanged("x")):
        assert it.sent() == [parcel]
        it.answer(parcel, failure)
        it.now += 1.0
    it.channel.release()
    assert it.channel.take_void() == []
    assert it.sent() == [parcel]


def test_parcels_of_another_producer_id_wait_until_the_former_are_decided() -> None:
    it = Driven()
    old, older = it.resumed(3, 4), it.resumed(3, 5)
    other = it.resumed(4, 0)
    assert not it.channel.may_admit(it.now)
    assert it.sent() == [old, older]
    it.answer(old, HERE)
    it.answer(older, HERE)
    assert it.sent() == [other]
    it.answer(other, HERE)
    assert it.channel.may_admit(it.now)


def test_what_is_before_a_stored_parcel_of_its_producer_is_stored_too() -> None:
    it = Driven()
    first, second = it.admit(2)
    it.sent()
    it.answer(first, LOST)
    it.answer(second, HERE)
    assert it.done == [first, second]


def test_a_broker_that_forgot_the_producer_makes_a_sent_parcel_void_and_one_that_may_be_stored_lost() -> None:
    it = Driven()
    (parcel,) = it.admit()
    it.sent()
    it.answer(parcel, OutOfSequence("x"))
    assert it.channel.take_void() == [parcel]
    assert not parcel.is_lost
    again = it.resumed(3, 4)
    it.now += 1.0
    assert it.sent() == [again]
    it.answer(again, OutOfSequence("x"))
    assert it.channel.take_void() == [again]
    assert again.is_lost


def test_a_sealed_partition_settles_when_the_first_undecided_parcel_is_certainly_not_there() -> None:
    it = Driven()
    first, second, third = it.admit(3)
    it.sent()
    it.answer(first, HERE)
    it.answer(second, LOST)
    it.answer(third, RouteChanged("x"))
    assert it.channel.take_void() == []
    it.channel.leave(it.now, is_fenced=False)
    assert not it.channel.is_settled
    assert it.sent()[0] is second
    it.answer(second, RouteChanged("x"))
    assert it.channel.is_settled
    it.channel.settle()
    assert it.channel.take_void() == [second, third]


def test_a_fenced_partition_is_asked_for_a_while_and_given_up_and_what_may_be_there_is_lost() -> None:
    it = Driven()
    maybe, never = it.admit(2)
    assert it.channel.next(it.now) is maybe
    it.channel.disconnected(LOST)
    it.answer(maybe, LOST)
    it.channel.leave(it.now, is_fenced=True)
    assert it.channel.wake_at(it.now) == ASK_S
    it.channel.tick(ASK_S / 2)
    assert not it.channel.is_settled
    it.channel.tick(ASK_S)
    assert it.channel.is_settled
    it.channel.settle()
    assert it.channel.take_void() == [maybe, never]
    assert (maybe.is_lost, never.is_lost) == (True, False)


def test_a_channel_that_was_silent_can_be_used_again_when_nothing_is_under_way() -> None:
    it = Driven(is_ordered=False)
    (parcel,) = it.admit()
    it.sent()
    it.channel.stalled()
    assert not it.channel.may_admit(it.now)
    it.answer(parcel, Overloaded("x"))
    it.channel.release()
    assert it.channel.may_admit(it.now + 1.0)


def test_pauses_rise_to_half_a_minute_where_somebody_has_to_do_something() -> None:
    assert max(pause_s(number, UnknownSubject("x")) for number in range(50)) <= PAUSE_S_MAX
    assert pause_s(20, UnknownSubject("x")) > PAUSE_S_MAX / 2
    assert max(pause_s(number, Overloaded("x")) for number in range(1, 50)) < 2
