"""The next message to deliver over several lanes: in sequence or by key, blocked lanes, lanes whose
lease may have ended, lanes lost while messages are handed out.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_ordering.routes import LpRange
from support.forms import examples

from qmq.client.consuming.message import DecodedBatch
from qmq.client.consuming.ordered.keys import KeyDispatcher
from qmq.client.consuming.ordered.lane import Cell, FailurePolicy, LaneArrival, LaneCore
from qmq.client.consuming.ordered.message import LaneRun, OrderedMessage
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope, Kind, encode
from qmq.wire.batch_columns import Columns, parse_header

NOW_MS = 1_000


class Lane:
    """A source of messages without a broker."""

    def __init__(self, policy: FailurePolicy | None = None) -> None:
        self.core = LaneCore(policy or FailurePolicy(retry_ms=(100,)))
        self.core.attached(0, is_resumed=False, parked=[])
        self.subject, self.broker_group, self.partition = "s", "g0", 1
        self.lps = LpRange(0, 16)
        self.sure_until_s = 0.0
        self.is_leased = True

    def is_sure(self) -> bool:
        return self.is_leased

    def worked(self, *, is_urgent: bool) -> None: ...

    async def confirmed(self, cell: Cell) -> None:
        raise AssertionError("the dispatcher waits for nothing")


class Consumer:
    """Gives the verdicts to a dispatcher, and reads runs in sequence."""

    def __init__(self) -> None:
        self.dispatcher = KeyDispatcher()
        self._later: list[Callable[[], None]] = []

    def at_end(self, call: Callable[[], None], /) -> None:
        self._later.append(call)

    def end_round(self) -> None:
        later, self._later = self._later, []
        for each in later:
            each()

    def finish(self, run: LaneRun, sequence: int) -> None:
        self.dispatcher.done(run, sequence)

    def finish_range(self, run: LaneRun, last: int) -> None:
        self.dispatcher.done_through(run, last)

    def fail(self, run: LaneRun, sequence: int, pause_ms: int | None) -> None:
        self.dispatcher.failed(run, sequence, NOW_MS, pause_ms)

    def reject(self, run: LaneRun, sequence: int) -> None:
        self.dispatcher.rejected(run, sequence)

    def release(self, run: LaneRun, sequence: int) -> None:
        self.dispatcher.put_back(run, sequence)

    # --- what it does -----------------------------------------------------------------------------

    def bring(self, lane: Lane, *keys: bytes, gap_after: int = 0) -> None:
        """Deliver a message for each key to a lane, with a stranger's message after the first
        `gap_after`.
        """
        at = lane.core.position
        every = [*keys[:gap_after], b"stranger", *keys[gap_after:]] if gap_after else list(keys)
        _, region = encode(
            b"s", Columns(every, keys=every), producer_id=1, batch_sequence=0, create_time_ms=1
        )
        view = BatchView(
            Envelope(Kind.DATA, ENVELOPE_BYTES + len(region), 0, at, 1, 1, 1, 0), region
        )
        assert parse_header(region).count == len(every)
        indices = (
            [each for each in range(len(every)) if each != gap_after]
            if gap_after
            else range(len(every))
        )
        arrival = LaneArrival(
            at + indices[-1], None, 1, indices[-1] - indices[0], len(indices), 8 * len(indices)
        )
        (cell,) = lane.core.delivered([arrival], at + len(every), is_end=False)
        run = LaneRun(self, lane, cell, DecodedBatch(view), indices, 1, 1)
        self.dispatcher.put(lane, [run])

    def take(self) -> OrderedMessage:
        found = self.dispatcher.take()
        assert found is not None
        return found

    def follow(self) -> OrderedMessage | None:
        """The next message for a task that has finished the one before it."""
        run = self.dispatcher.in_sequence
        if run is not None and run.count:
            message = OrderedMessage(run, run.batch, run.offset, run.attempt, run.pull)
            run.offset, run.pull, run.count = run.offset + 1, run.pull + 1, run.count - 1
            return message
        return self.dispatcher.take(in_sequence=True)


def test_a_lane_in_doubt_hands_out_nothing_and_later_everything_in_order() -> None:
    consumer, lane, other = Consumer(), Lane(), Lane()
    consumer.bring(lane, b"a", b"a", b"b")
    consumer.bring(other, b"c")
    lane.is_leased = False
    assert consumer.take().lane is other
    assert consumer.dispatcher.take() is None
    lane.is_leased = True
    consumer.dispatcher.review(lane)
    first, second = consumer.take(), consumer.take()
    assert {(each.key, each.sequence) for each in (first, second)} == {("a", 0), ("b", 2)}
    assert consumer.dispatcher.take() is None
    (first if first.key == "a" else second).ack_later()
    last = consumer.take()
    assert (last.key, last.sequence) == ("a", 1)


def test_a_message_to_be_tried_again_waits_too_while_the_lease_may_be_over() -> None:
    consumer, lane = Consumer(), Lane()
    consumer.bring(lane, b"a")
    consumer.take().fail()
    assert consumer.dispatcher.take() is None
    consumer.dispatcher.due(lane.core.due(NOW_MS + 100))
    lane.is_leased = False
    assert consumer.dispatcher.take() is None
    lane.is_leased = True
    assert consumer.take().attempt == 2


def test_a_key_whose_message_waits_for_another_try_is_free_when_its_lane_is_lost() -> None:
    consumer, lane, successor = Consumer(), Lane(), Lane()
    consumer.bring(lane, b"a")
    consumer.take().fail()
    consumer.dispatcher.dropped(lane, lane.core.lost())
    consumer.bring(successor, b"a")
    assert consumer.take().lane is successor


def test_a_message_that_was_held_back_is_forgotten_with_its_lane() -> None:
    consumer, lane, successor = Consumer(), Lane(), Lane()
    consumer.bring(lane, b"b", b"a", b"a")
    assert consumer.take().key == "b"
    lane.is_leased = False
    assert consumer.dispatcher.take() is None
    consumer.dispatcher.dropped(lane, lane.core.lost())
    consumer.bring(successor, b"a")
    assert consumer.take().lane is successor
    assert consumer.dispatcher.take() is None


def test_messages_in_sequence_are_settled_as_ranges() -> None:
    consumer, lane = Consumer(), Lane()
    consumer.bring(lane, b"a", b"b", b"a", b"c")
    for sequence in range(3):
        message = consumer.follow()
        assert message is not None
        assert message.sequence == sequence
        message.ack_later()
    consumer.end_round()
    request = lane.core.take()
    assert request is not None
    assert [(each.first, each.last) for each in request.settlements] == [(0, 2)]
    assert lane.core.open == 1
    lane.core.check()


def test_a_second_message_at_a_time_ends_the_sequence_and_waits_for_its_key() -> None:
    consumer, lane = Consumer(), Lane()
    consumer.bring(lane, b"a", b"a", b"b")
    first = consumer.follow()
    assert first is not None
    assert consumer.take().key == "b"
    assert consumer.dispatcher.take() is None
    first.ack_later()
    assert consumer.take().sequence == 1


def test_a_failure_in_sequence_blocks_the_lane_or_its_key() -> None:
    blocked, by_key = (
        Lane(FailurePolicy(on_failure, retry_ms=(100,))) for on_failure in ("block", "park")
    )
    consumer = Consumer()
    consumer.bring(blocked, b"a", b"b")
    first = consumer.follow()
    assert first is not None
    first.fail()
    assert consumer.follow() is None
    consumer.bring(by_key, b"c", b"c", b"d")
    second = consumer.follow()
    assert second is not None
    second.fail()
    third = consumer.follow()
    assert third is not None
    assert third.key == "d"
    assert consumer.follow() is None


def test_a_message_in_sequence_outlives_its_lane_and_then_frees_its_key() -> None:
    consumer, lane, successor = Consumer(), Lane(), Lane()
    consumer.bring(lane, b"a", b"b")
    message = consumer.follow()
    assert message is not None
    consumer.dispatcher.end_sequence()
    lost = lane.core.lost()
    assert [
        (cell.sequence, cell.is_seen) for cell in sorted(lost, key=lambda each: each.first)
    ] == [
        (0, True),
        (1, False),
    ]
    consumer.dispatcher.dropped(lane, lost)
    consumer.bring(successor, b"a")
    assert consumer.follow() is None
    message.ack_later()
    following = consumer.follow()
    assert following is not None
    assert following.lane is successor


def test_a_verdict_that_comes_again_or_too_late_changes_nothing() -> None:
    consumer, lane = Consumer(), Lane()
    consumer.bring(lane, b"a", b"b", b"c")
    first = consumer.follow()
    assert first is not None
    first.ack_later()
    second = consumer.follow()
    assert second is not None
    first.is_settled = False  # as an automatic acknowledgement leaves it
    first.fail()
    second.ack_later()
    third = consumer.take()
    assert (third.sequence, third.attempt) == (2, 1)
    assert lane.core.open == 1
    lane.core.check()


KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=6)
ACTS = [
    *("bring", "gap", "follow", "follow", "take", "ack", "ack", "fail", "reject", "release"),
    *("doubt", "due", "lose", "round"),
]
STEPS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3), KEYS), max_size=60)


@given(steps=STEPS, on_failure=st.sampled_from(["block", "park"]))
@settings(max_examples=examples(400), deadline=None)
def test_each_key_is_worked_on_in_order_and_nothing_is_lost(
    steps: list[tuple[str, int, list[bytes]]], on_failure: str
) -> None:
    consumer = Consumer()
    lanes = [Lane(FailurePolicy(on_failure, 2, (100,))) for _ in range(2)]
    held: list[tuple[Lane, OrderedMessage]] = []
    done: dict[int, set[int]] = {0: set(), 1: set()}
    brought: dict[int, dict[int, bytes]] = {0: {}, 1: {}}

    def got(message: OrderedMessage | None) -> None:
        if message is None:
            return
        which = next(number for number, lane in enumerate(lanes) if message.lane is lane)
        key = message.key_bytes
        assert brought[which][message.sequence] == key
        assert all(each.key_bytes != key for _, each in held), "two messages of a key at once"
        earlier = {
            sequence
            for sequence, other in brought[which].items()
            if other == key and sequence < message.sequence
        }
        parked = key in lanes[which].core.parked
        assert earlier <= done[which] or parked, "a message overtook one of its key"
        assert message.sequence not in done[which]
        assert lanes[which].is_leased
        held.append((lanes[which], message))

    for what, number, keys in steps:
        lane = lanes[number % 2]
        if what in ("bring", "gap"):
            at = lane.core.position
            gap = number if what == "gap" and 0 < number < len(keys) else 0
            consumer.bring(lane, *keys, gap_after=gap)
            for place, key in enumerate(keys):
                brought[number % 2][at + place + (gap > 0 and place >= gap)] = key
        elif what == "follow":
            got(consumer.dispatcher.take() if held else consumer.follow())
        elif what == "take":
            got(consumer.dispatcher.take())
        elif what in ("ack", "fail", "reject", "release") and held:
            of, message = held.pop(number % len(held))
            which = 0 if of is lanes[0] else 1
            if what == "ack":
                message.ack_later()
                done[which].add(message.sequence)
            elif what == "fail":
                message.fail()
            elif what == "reject":
                message.reject()
            else:
                message.release()
        elif what == "doubt":
            lane.is_leased = not lane.is_leased
            if not lane.is_leased:
                consumer.dispatcher.end_sequence()
            consumer.dispatcher.review(lane)
        elif what == "due":
            for each in lanes:
                consumer.dispatcher.due(each.core.due(NOW_MS + 1_000))
        elif what == "lose":
            consumer.dispatcher.end_sequence()
            consumer.dispatcher.dropped(lane, lane.core.lost())
            lane.core.attached(1_000, is_resumed=False, parked=[])
            brought[number % 2], done[number % 2] = {}, set()
            held = [(of, message) for of, message in held if of is not lane]
        elif what == "round":
            consumer.end_round()
        for each in lanes:
            each.core.check()
