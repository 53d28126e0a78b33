"""Answers' effects on the batches on their way to one broker group of an unordered subject."""

from __future__ import annotations

from collections.abc import Callable

from qmq.client.producing.batch import Batch, SenderWindow
from qmq.client.producing.receipts import Ticket
from qmq.delivery.retries import PRODUCER
from qmq.errors import InvalidArgument, NotConnected, NotMaster, Outcome, Overloaded, QmqError
from qmq.wire.batch_columns import Columns

LOST = NotConnected("lost", outcome=Outcome.UNKNOWN)
BUSY = Overloaded("busy")


def window_with(
    *numbers: int, rest_s: Callable[[int, QmqError], float] = lambda *_: 1.0
) -> tuple[SenderWindow, list[Batch]]:
    """A window, connected, and these batches on their way."""
    window = SenderWindow(8, PRODUCER._replace(rest_s=rest_s))
    window.connected()
    batches = [
        Batch(Columns([b"x"]), 1, Ticket(), number, size=1, until=60.0) for number in numbers
    ]
    for batch in batches:
        window.send(batch)
    return window, batches


def sent(window: SenderWindow, now: float) -> list[int]:
    found = []
    while (batch := window.next(now)) is not None:
        found.append(batch.sequence)
    return found


def test_a_refused_batch_goes_back_and_the_answers_to_the_others_still_count() -> None:
    window, (first, second, third) = window_with(1, 2, 3)
    window.refused(second, 1, BUSY, 0.0)
    assert window.take_given_back() == [second]
    assert window.acknowledged(first, 0.0)
    assert window.acknowledged(third, 0.0)
    assert not window.flight
    assert not window.has_room(1, 0.5), "it rests"
    assert window.has_room(1, 1.0)


def test_batches_with_unknown_outcome_are_resent_in_the_order_of_numbers() -> None:
    window, (first, second, third, _) = window_with(1, 2, 3, 4)
    window.refused(third, 1, LOST, 0.0)
    window.refused(second, 1, LOST, 0.0)
    assert window.has_retries
    window.disconnected(LOST)
    window.connected()
    assert sent(window, 0.0) == [1], "one goes ahead"
    assert window.acknowledged(first, 0.0)
    assert sent(window, 0.0) == [2, 3, 4]
    assert window.take_given_back() == []


def test_a_late_refusal_gives_nothing_back_while_another_try_is_under_way() -> None:
    window, (batch,) = window_with(1)
    window.disconnected(NotMaster("another one is"))
    window.connected()
    assert sent(window, 0.0) == [1]
    window.refused(batch, 1, NotMaster("not I"), 0.0)
    assert window.on_way == [batch]
    window.refused(batch, 2, BUSY, 0.0)
    assert window.take_given_back() == [batch]


def test_a_doubtful_batch_never_goes_back_and_fails_as_unknown_at_its_timeout() -> None:
    window, (batch,) = window_with(1)
    window.disconnected(NotMaster("another one is"))
    window.expire(59.0)
    assert window.take_failed() == []
    window.expire(60.0)
    ((failed, failure),) = window.take_failed()
    assert (failed, failure.outcome) == (batch, Outcome.UNKNOWN)
    assert not window.acknowledged(batch, 61.0), "it was decided"


def test_batches_refused_together_count_as_one_refusal() -> None:
    rests: list[int] = []

    def rest(refusals: int, _: object) -> float:
        rests.append(refusals)
        return 1.0

    window, batches = window_with(0, 1, 2, 3, 4, rest_s=rest)
    for batch in batches:
        window.refused(batch, 1, BUSY, 0.0)
    assert rests == [1]
    assert window.take_given_back() == batches


def test_a_batch_at_fault_fails_alone() -> None:
    window, (first, second) = window_with(1, 2)
    window.refused(first, 1, InvalidArgument("no"), 0.0)
    assert [batch for batch, _ in window.take_failed()] == [first]
    assert window.on_way == [second]
    assert window.has_room(1, 0.0), "nothing is wrong with the group"
