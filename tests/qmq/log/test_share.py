"""A group's share of a queue, against a model that keeps one record a message; and its promises one
by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import check_group

from qmq.log.actions import (
    Begin,
    DeadLettered,
    Join,
    Leave,
    PullAction,
    Pulled,
    Reset,
    Return,
    SettleAction,
)
from qmq.log.group_state import Dying, GroupState, Requeued, Settled
from qmq.log.queue import apply_to
from qmq.wire.frame_payloads import Verdict

WHERE = ("s", 0, "g")


def pull(share: GroupState, consumer: str, *ranges: tuple[int, int, int]) -> None:
    apply_to(share, PullAction(*WHERE, consumer, tuple(Pulled(*each) for each in ranges)))


def settle(
    share: GroupState, consumer: str, *settlements: tuple[int, int, int, int], now_ms: int = 0
) -> Settled:
    return apply_to(share, SettleAction(*WHERE, consumer, now_ms, settlements))


def joined(*consumers: str) -> GroupState:
    share = GroupState()
    for each in consumers:
        apply_to(share, Join(*WHERE, each, "i", 1000, -1))
    return share


def test_a_late_verdict_from_before_a_lost_lease_settles_nothing() -> None:
    share = joined("a")
    pull(share, "a", (0, 10, 1))
    apply_to(share, Leave(*WHERE, "a", True))
    apply_to(share, Join(*WHERE, "a", "i", 1000, 9))
    pull(share, "a", (0, 10, 2))
    assert settle(share, "a", (0, 9, Verdict.ACK, 0)) == (0, 10)
    assert share.unacked() == 10


def test_a_reconnected_consumer_gets_again_what_never_reached_it() -> None:
    share = joined("a")
    pull(share, "a", (0, 4, 1))
    pull(share, "a", (4, 4, 1))
    apply_to(share, Return(*WHERE, "a", 3))
    assert share.due(0, 100) == [Requeued(0, 4, 4, 1)]
    assert settle(share, "a", (0, 3, Verdict.ACK, 0)) == (4, 0)


def test_a_reset_voids_everything_that_was_handed_out() -> None:
    share = joined("a")
    pull(share, "a", (0, 10, 1))
    settle(share, "a", (0, 0, Verdict.NACK, 0))
    apply_to(share, Reset(*WHERE, "", 5))
    assert (share.next_sequence, share.requeued, share.unacked()) == (5, [], 0)
    assert settle(share, "a", (1, 9, Verdict.ACK, 0)) == (0, 9)


def test_dead_messages_are_numbered_and_not_done_before_their_copy_is_recorded() -> None:
    share = joined("a")
    pull(share, "a", (0, 10, 1))
    apply_to(
        share,
        SettleAction(
            *WHERE,
            "a",
            5,
            ((0, 1, Verdict.ACK, 0), (6, 7, Verdict.DEAD, 0), (3, 3, Verdict.DEAD, 0)),
            ((1, "boom"),),
        ),
    )
    assert share.dying == [Dying(0, 6, 2, 1, 5, "boom", "a"), Dying(2, 3, 1, 1, 5, "", "a")]
    apply_to(share, Leave(*WHERE, "a", True))
    apply_to(share, DeadLettered(*WHERE, "", ((1, 1),)))
    assert [(item.number, item.first, item.count) for item in share.dying] == [(0, 6, 1), (2, 3, 1)]
    assert share.settled_before() == 2
    apply_to(share, DeadLettered(*WHERE, "", ((0, 3),)))
    assert (share.dying, share.deaths) == ([], 3)


def test_a_share_stored_by_an_older_release_has_no_dying_messages() -> None:
    share = joined("a")
    pull(share, "a", (0, 3, 1))
    old = share.to_state()[:5]
    loaded = GroupState.from_state(old)
    check_group(loaded)
    assert (loaded.deaths, loaded.dying, loaded.unacked()) == (0, [], 3)


@dataclass
class Copy:
    """One message in the model."""

    state: str = "new"
    holder: str = ""
    pull: int = -1
    attempt: int = 1
    due_ms: int = 0
    number: int = -1


class ShareMachine(RuleBasedStateMachine):
    """The share against the model, through every action, and through being kept and loaded."""

    consumers = ("a", "b", "c")

    @initialize()
    def begin(self) -> None:
        self.share = GroupState()
        apply_to(self.share, Begin(*WHERE, "", 0))
        self.model = [Copy() for _ in range(200)]
        self.now_ms = self.deaths = 0
        self.incarnation = 0

    def held(self, consumer: str) -> list[Copy]:
        return [each for each in self.model if each.state == "held" and each.holder == consumer]

    def put_back(self, consumer: str) -> None:
        for each in self.held(consumer):
            each.state, each.attempt, each.due_ms = "requeued", each.attempt + 1, 0

    @rule(consumer=st.sampled_from(consumers))
    def join(self, consumer: str) -> None:
        self.incarnation += 1
        self.put_back(consumer)
        apply_to(self.share, Join(*WHERE, consumer, str(self.incarnation), 1000, -1))

    @rule(consumer=st.sampled_from(consumers))
    def leave(self, consumer: str) -> None:
        self.put_back(consumer)
        apply_to(self.share, Leave(*WHERE, consumer, True))

    @precondition(lambda self: self.share.holders)
    @rule(data=st.data(), new=st.integers(0, 9), again=st.integers(0, 9))
    def pull(self, data: st.DataObject, new: int, again: int) -> None:
        consumer = data.draw(st.sampled_from(sorted(self.share.holders)))
        ranges = [
            Pulled(item.first, item.count, item.attempt)
            for item in self.share.due(self.now_ms, again)
        ]
        begin = self.share.next_sequence
        new = min(new, 200 - begin)
        if new:
            ranges.append(Pulled(begin, new, 1))
        if not ranges:
            return
        number = self.share.holders[consumer].next_pull
        for each in ranges:
            for sequence in range(each.first_sequence, each.first_sequence + each.count):
                copy = self.model[sequence]
                assert copy.state in ("new", "requeued")
                assert copy.attempt == each.attempt
                assert copy.due_ms <= self.now_ms
                copy.state, copy.holder, copy.pull = "held", consumer, number
                number += 1
        apply_to(self.share, PullAction(*WHERE, consumer, tuple(ranges)))

    @rule(
        consumer=st.sampled_from(consumers),
        first=st.integers(0, 60),
        length=st.integers(1, 15),
        verdict=st.sampled_from(list(Verdict)),
    )
    def settle(self, consumer: str, first: int, length: int, verdict: Verdict) -> None:
        last = first + length - 1
        mine = [each for each in self.held(consumer) if first <= each.pull <= last]
        for each in mine:
            if verdict is Verdict.ACK:
                each.state = "done"
            elif verdict is Verdict.DEAD:
                each.state = "dying"
            else:
                each.state = "requeued"
                each.attempt += verdict is Verdict.NACK
                each.due_ms = self.now_ms + 50 if verdict is Verdict.NACK else 0
        if verdict is Verdict.DEAD:
            for number, each in enumerate(sorted(mine, key=lambda each: each.pull), self.deaths):
                each.number = number
            self.deaths += len(mine)
        done = settle(self.share, consumer, (first, last, verdict, 50), now_ms=self.now_ms)
        assert done == (len(mine), length - len(mine))

    @rule(number=st.integers(0, 30), count=st.integers(1, 8))
    def bury(self, number: int, count: int) -> None:
        for each in self.model:
            if each.state == "dying" and number <= each.number < number + count:
                each.state = "done"
        apply_to(self.share, DeadLettered(*WHERE, "", ((number, count),)))

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def keep_and_load(self) -> None:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.share.to_state()))
        self.share = GroupState.from_state(state)

    @invariant()
    def agrees(self) -> None:
        check_group(self.share)
        states = [each.state for each in self.model]
        assert self.share.unacked() == states.count("held")
        assert self.share.waiting_again() == states.count("requeued")
        assert self.share.deaths == self.deaths
        dying = sorted(
            (item.first + at, item.number + at)
            for item in self.share.dying
            for at in range(item.count)
        )
        assert dying == [
            (at, each.number) for at, each in enumerate(self.model) if each.state == "dying"
        ]
        assert self.share.settled_before() == next(
            (at for at, state in enumerate(states) if state != "done"), 200
        )
        again = sorted(
            (item.due_ms, item.first + at, item.attempt)
            for item in self.share.requeued
            for at in range(item.count)
        )
        assert again == sorted(
            (each.due_ms, at, each.attempt)
            for at, each in enumerate(self.model)
            if each.state == "requeued"
        )


TestShare = ShareMachine.TestCase
