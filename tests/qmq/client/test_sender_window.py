"""Answers' effects on the batches on their way to one broker group of an unordered subject."""

from __future__ import annotations

from collections.abc import Callable

from qmq.client.producing.batch import Batch, SenderWindow
from qmq.client.producing.receipts import Ticket
from qmq.delivery.retries import PRODUCER
from qmq.errors import NotConnected, Outcome, Overloaded, QmqError
from qmq.wire.batch_columns import Columns

LOST = NotConnected("lost", outcome=Outcome.UNKNOWN)
BUSY = Overloaded("busy")


def window_with(
    *numbers: int, backoff_s: Callable[[int, QmqError], float] = lambda *_: 1.0
) -> tuple[SenderWindow, list[Batch]]:
    """A window, connected, and these batches on their way."""
    window = SenderWindow(8, PRODUCER._replace(backoff_s=backoff_s))
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
    assert window.take_requeued() == []


def test_batches_refused_together_count_as_one_refusal() -> None:
    rests: list[int] = []

    def rest(refusals: int, _: object) -> float:
        rests.append(refusals)
        return 1.0

    window, batches = window_with(0, 1, 2, 3, 4, backoff_s=rest)
    for batch in batches:
        window.refused(batch, 1, BUSY, 0.0)
    assert rests == [1]
    assert window.take_requeued() == batches
