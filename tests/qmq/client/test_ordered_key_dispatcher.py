"""The next message to deliver over several lanes: blocked lanes, lanes whose lease may have ended,
lanes lost while messages are handed out.
"""

from __future__ import annotations

from qmq_ordering.routes import LpRange

from qmq.client.consuming.message import DecodedBatch
from qmq.client.consuming.ordered.keys import KeyDispatcher
from qmq.client.consuming.ordered.lane import Cell, FailurePolicy, LaneArrival, LaneCore
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope, Kind, encode
from qmq.wire.batch_columns import Columns, parse_header


class Lane:
    """A source of messages without a broker."""

    def __init__(self) -> None:
        self.core = LaneCore(FailurePolicy(retry_ms=(100,)))
        self.core.attached(0, is_resumed=False, parked=[])
        self.subject, self.broker_group, self.partition = "s", "g0", 1
        self.lps = LpRange(0, 16)
        self.is_leased = True

    def is_sure(self) -> bool:
        return self.is_leased

    def worked(self, *, is_urgent: bool) -> None:
        raise AssertionError("the dispatcher asks for nothing to be told")

    async def confirmed(self, cell: Cell) -> None:
        raise AssertionError("the dispatcher waits for nothing")


class Nobody:
    """Accepts no verdicts: the tests give them to the dispatcher."""

    def finish(self, message: OrderedMessage) -> None:
        raise AssertionError

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        raise AssertionError

    def reject(self, message: OrderedMessage) -> None:
        raise AssertionError

    def release(self, message: OrderedMessage) -> None:
        raise AssertionError


def bring(dispatcher: KeyDispatcher, lane: Lane, *keys: bytes) -> list[OrderedMessage]:
    """Deliver a message for each key to a lane, and to the dispatcher."""
    at = lane.core.position
    _, region = encode(
        b"s",
        Columns(list(keys), keys=list(keys)),
        producer_id=1,
        batch_sequence=0,
        create_time_ms=1,
    )
    view = BatchView(Envelope(Kind.DATA, ENVELOPE_BYTES + len(region), 0, at, 1, 1, 1, 0), region)
    assert parse_header(region).count == len(keys)
    arrivals = [LaneArrival(at + index, key, 1) for index, key in enumerate(keys)]
    cells = lane.core.delivered(arrivals, at + len(keys), is_end=False)
    messages = [
        OrderedMessage(Nobody(), lane, cell, DecodedBatch(view), index, 1, 1)
        for index, cell in enumerate(cells)
    ]
    dispatcher.put(messages)
    return messages


def test_a_lane_in_doubt_hands_out_nothing_and_later_everything_in_order() -> None:
    dispatcher, lane, other = KeyDispatcher(), Lane(), Lane()
    bring(dispatcher, lane, b"a", b"a", b"b")
    bring(dispatcher, other, b"c")
    lane.is_leased = False
    taken = dispatcher.take()
    assert taken is not None
    assert taken.lane is other
    assert dispatcher.take() is None
    lane.is_leased = True
    dispatcher.review(lane)
    first, second = dispatcher.take(), dispatcher.take()
    assert first is not None
    assert second is not None
    assert {(each.cell.key, each.sequence) for each in (first, second)} == {(b"a", 0), (b"b", 2)}
    assert dispatcher.take() is None
    assert dispatcher.done(first if first.cell.key == b"a" else second)
    last = dispatcher.take()
    assert last is not None
    assert (last.cell.key, last.sequence) == (b"a", 1)


def test_a_message_to_be_tried_again_waits_too_while_the_lease_may_be_over() -> None:
    dispatcher, lane = KeyDispatcher(), Lane()
    bring(dispatcher, lane, b"a")
    message = dispatcher.take()
    assert message is not None
    assert dispatcher.failed(message, 0, None)
    assert dispatcher.take() is None
    dispatcher.due(lane.core.due(100))
    lane.is_leased = False
    assert dispatcher.take() is None
    lane.is_leased = True
    again = dispatcher.take()
    assert again is not None
    assert again.attempt == 2


def test_a_key_whose_message_waits_for_another_try_is_free_when_its_lane_is_lost() -> None:
    dispatcher, lane, successor = KeyDispatcher(), Lane(), Lane()
    bring(dispatcher, lane, b"a")
    message = dispatcher.take()
    assert message is not None
    dispatcher.failed(message, 0, None)
    dispatcher.dropped(lane, lane.core.lost())
    bring(dispatcher, successor, b"a")
    again = dispatcher.take()
    assert again is not None
    assert again.lane is successor


def test_a_message_that_was_held_back_is_forgotten_with_its_lane() -> None:
    dispatcher, lane, successor = KeyDispatcher(), Lane(), Lane()
    bring(dispatcher, lane, b"a", b"a")
    lane.is_leased = False
    assert dispatcher.take() is None
    dispatcher.dropped(lane, lane.core.lost())
    bring(dispatcher, successor, b"a")
    taken = dispatcher.take()
    assert taken is not None
    assert taken.lane is successor
    assert dispatcher.take() is None
