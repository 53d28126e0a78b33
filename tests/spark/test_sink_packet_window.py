"""Batches on their way to one queue: sent in order, asked about at the same queue, and given up
with an unknown outcome.
"""

from __future__ import annotations

import numpy as np
import pytest
from pyspark_qmq.sink.packets import Done, Load, Packet, PacketWindow
from pyspark_qmq.sink.row_identity import RowTarget

from qmq.delivery.retries import ORDERED_SINK, SINK
from qmq.errors import (
    DeadlineExceeded,
    MessageTooLarge,
    NotConnected,
    NumberTaken,
    Outcome,
    OutOfSequence,
    Overloaded,
    QmqError,
    ReadOnly,
    RightLapsed,
    RouteChanged,
)

PARTITION = RowTarget("s", 4, "g1")


def window_of(to: RowTarget = PARTITION, packets: int = 5, window: int = 3) -> PacketWindow:
    rules = ORDERED_SINK if to.partition else SINK
    found = PacketWindow(
        to, retry_s=60, number=10, window=window, rules=rules._replace(backoff_s=lambda *_: 1.0)
    )
    for at in range(packets):
        found.put(Load(at, np.array([at]), 1), 0.0)
    return found


def sent(found: PacketWindow, now: float = 0.0) -> list[Packet]:
    packets = []
    while (packet := found.next(now)) is not None:
        packets.append(packet)
    return packets


def test_packets_leave_in_order_with_consecutive_numbers_and_no_more_than_the_window() -> None:
    found = window_of()
    assert [packet.number for packet in sent(found)] == [10, 11, 12]
    found.answered(found.flight[0], 1, None, 0.0)
    assert [packet.number for packet in sent(found)] == [13]


@pytest.mark.parametrize(
    "failure", [Overloaded("x"), RightLapsed("x"), RouteChanged("x"), OutOfSequence("x")]
)
def test_packets_behind_a_refused_packet_are_sent_again_behind_it(failure: QmqError) -> None:
    found = window_of()
    first, second, third = sent(found)
    found.answered(first, 1, None, 0.0)
    found.answered(second, 1, failure, 0.0)
    found.answered(third, 1, OutOfSequence("behind it"), 0.0)
    assert sent(found, 0.5) == []
    if isinstance(failure, OutOfSequence):
        assert found.wants_look
    else:
        assert sent(found, 1.0) == [second]
    assert found.wants_route == isinstance(failure, RouteChanged)


def test_a_number_that_another_attempt_took_has_the_queue_looked_at_again() -> None:
    found = window_of(packets=1, window=1)
    (first,) = sent(found)
    found.answered(first, 1, NumberTaken("other content"), 0.0)
    assert found.wants_look


def test_rows_whose_number_is_taken_are_given_back_where_numbers_have_gaps() -> None:
    found, failure = (
        window_of(RowTarget("s", 0, "g1"), packets=2, window=2),
        NumberTaken("other content"),
    )
    first, second = sent(found)
    found.answered(first, 1, failure, 0.0)
    assert found.take_disputed() == [(first.load, failure)]
    assert found.take_disputed() == []
    found.answered(second, 1, None, 0.0)
    assert not found.flight


def test_a_broken_connection_has_all_that_was_not_answered_asked_again() -> None:
    found = window_of()
    packets = sent(found)
    found.answered(packets[1], 1, None, 0.0)
    found.broken(NotConnected("gone"), 0.0)
    assert sent(found, 1.0) == [packets[0]]
    found.answered(packets[0], 2, None, 1.0)
    assert sent(found, 1.0) == [packets[2], *found.flight[1:]]


def test_an_answer_to_an_earlier_try_does_not_stop_the_later_one() -> None:
    found = window_of()
    first, *_ = sent(found)
    found.answered(first, 1, Overloaded("x"), 0.0)
    assert sent(found, 1.0) == [first]
    found.answered(first, 1, Overloaded("late"), 1.0)
    assert found.answered(first, 2, None, 1.0) == 1


def test_errors_in_the_rows_themselves_are_raised() -> None:
    found = window_of()
    first, *_ = sent(found)
    with pytest.raises(MessageTooLarge):
        found.answered(first, 1, MessageTooLarge("x"), 0.0)


def test_a_drained_group_gives_packets_back_singly_and_a_partition_never() -> None:
    drained = window_of(RowTarget("s", 0, "g1"))
    first, second, _ = sent(drained)
    drained.answered(first, 1, ReadOnly("x"), 0.0)
    drained.answered(second, 1, None, 0.0)
    assert drained.take_refused() == [first.load]
    assert len(drained.flight) == 3
    ordered = window_of()
    first, *_ = sent(ordered)
    ordered.answered(first, 1, ReadOnly("x"), 0.0)
    assert ordered.take_refused() == []


def test_after_a_number_conflict_stored_packets_are_found_and_not_sent_again() -> None:
    found = window_of(packets=3)
    first, second, third = sent(found)
    found.answered(first, 1, OutOfSequence("x"), 0.0)
    assert not found.wants_look
    found.answered(second, 1, OutOfSequence("x"), 0.0)
    found.answered(third, 1, OutOfSequence("x"), 0.0)
    assert found.wants_look
    done = Done()
    done.add(np.array([0]), np.zeros(1, np.uint64), frozenset())
    assert found.looked(42, done, 0.0) == 1
    assert [packet.number for packet in found.flight] == [42, 43]


def test_a_task_without_progress_fails_with_an_unknown_outcome() -> None:
    found = window_of()
    packets = sent(found)
    found.answered(packets[0], 1, None, 30.0)
    found.check(89.0)
    with pytest.raises(DeadlineExceeded, match="no answer") as silent:
        found.check(90.0)
    assert silent.value.outcome is Outcome.UNKNOWN
    found.broken(NotConnected("gone"), 31.0)
    with pytest.raises(NotConnected, match="gone"):
        found.check(90.0)
