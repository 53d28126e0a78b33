"""The trail of one message, against the shares themselves; and its events, one by one."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_ordering.routes import LpRange
from support.forms import examples

from qmq.log.actions import (
    Begin,
    Cause,
    DeadLettered,
    Forget,
    Join,
    LaneAction,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LanePark,
    LaneRelease,
    LaneReset,
    LaneUnpark,
    Leave,
    PullAction,
    Pulled,
    Reset,
    Return,
    SettleAction,
    ShareAction,
)
from qmq.log.group_state import GroupState, ShareEvent, ShareEventKind
from qmq.log.history import (
    LaneMessageEvents,
    MessageEvents,
    MessagePlace,
    TrailEvent,
    holder_of,
    standing,
    where,
)
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import apply_to
from qmq.wire.frame_payloads import Verdict

QUEUE = ("s", 0, "g")
LANES = ("s", 1, "g")
MESSAGES = 12
CONSUMERS = ("a", "b")


# --- against the share ----------------------------------------------------------------------------


def some_action(random: Random, share: GroupState, now_ms: int) -> ShareAction:
    """One that a broker could write now."""
    consumer = random.choice(CONSUMERS)
    holder = share.holders.get(consumer)
    if holder is None or random.random() < 0.05:
        return Join(*QUEUE, consumer, "i", 1000, random.choice((-1, share.pulls, share.pulls + 2)))
    if random.random() < 0.45:
        ranges = [
            Pulled(item.first, item.count, item.attempt)
            for item in share.due(now_ms, random.randint(0, 3))
        ]
        if random.random() < 0.2:
            ranges = [Pulled(each.first_sequence, each.count, 0) for each in ranges]
        first = min(share.next_sequence + (random.random() < 0.2), MESSAGES)
        return PullAction(
            *QUEUE,
            consumer,
            (*ranges, Pulled(first, random.randint(0, min(3, MESSAGES - first)), 1)),
        )
    if random.random() < 0.85:
        settlements = []
        for _ in range(random.randint(1, 3)):
            low = random.randint(0, max(holder.next_pull, 1))
            verdict = random.choice((Verdict.ACK, Verdict.NACK, Verdict.RELEASE, Verdict.DEAD))
            delay_ms = 5 * (verdict is Verdict.NACK)
            settlements.append((low, low + random.randint(0, 3), int(verdict), delay_ms))
        return SettleAction(
            *QUEUE, consumer, now_ms, tuple(settlements), (), random.choice((0, 0, 1))
        )
    number = share.dying[0].number if share.dying else 0
    last = holder.next_pull - random.randint(1, 3)
    return random.choice(
        (
            Leave(*QUEUE, consumer, random.random() < 0.5),
            Return(*QUEUE, consumer, last),
            Reset(*QUEUE, "", random.randint(0, MESSAGES)),
            DeadLettered(*QUEUE, "", ((number, 1),)),
            Begin(*QUEUE, "", random.randint(0, MESSAGES), now_ms),
        )
    )


def begins_nothing(share: GroupState) -> bool:
    """BEGIN is the first action, and the only one of its kind."""
    return not share.next_sequence and not share.holders


@settings(max_examples=examples(60))
@given(st.randoms(use_true_random=False))
def test_a_trail_says_of_each_message_what_the_share_says(random: Random) -> None:
    share = GroupState()
    trails = [MessageEvents("g", sequence) for sequence in range(MESSAGES)]
    for now_ms in range(60):
        action = some_action(random, share, now_ms)
        if isinstance(action, Begin) and not begins_nothing(share):
            continue
        apply_to(share, action)
        for sequence, trail in enumerate(trails):
            trail.apply(action, now_ms)
            told, now = standing(share, sequence), trail.now
            if now.where is MessagePlace.DYING and told.where is MessagePlace.DONE:
                continue  # it is in the dead-letter queue: only its number says so
            assert now == told, (sequence, action)
        if random.random() < 0.1:  # a page ends, or a segment begins
            trails = [MessageEvents.from_state(each.sequence, each.to_state()) for each in trails]


@settings(max_examples=examples(30))
@given(st.randoms(use_true_random=False))
def test_the_events_of_a_share_tell_where_each_message_is(random: Random) -> None:
    share, told = GroupState(), [MessagePlace.NEW] * MESSAGES
    for now_ms in range(60):
        action = some_action(random, share, now_ms)
        if isinstance(action, Begin) and not begins_nothing(share):
            continue
        events: list[ShareEvent] = []
        apply_to(share, action, events)
        for event in events:
            for sequence in range(event.first, event.first + event.count):
                told[sequence] = AFTER.get(event.kind) or standing(share, sequence).where
        held = [MessagePlace.DONE if each is MessagePlace.DYING else each for each in told]
        assert held == [_where_or_done(share, sequence) for sequence in range(MESSAGES)], action


AFTER = {
    ShareEventKind.PULL: MessagePlace.HELD,
    ShareEventKind.DEAD: MessagePlace.DYING,
    **dict.fromkeys(
        (ShareEventKind.ACK, ShareEventKind.EXPIRED, ShareEventKind.PASSED, ShareEventKind.SKIP),
        MessagePlace.DONE,
    ),
    **dict.fromkeys(
        (ShareEventKind.NACK, ShareEventKind.RELEASE, ShareEventKind.RETURN), MessagePlace.WAITING
    ),
    **dict.fromkeys(
        (ShareEventKind.LEFT, ShareEventKind.LOST, ShareEventKind.AGAIN), MessagePlace.WAITING
    ),
}
"""Where an event leaves its messages; after a RESET only the group's new position says."""


def _where_or_done(share: GroupState, sequence: int) -> MessagePlace:
    """The place of a message, where DYING counts as DONE: copies may differ in that."""
    where = standing(share, sequence).where
    return MessagePlace.DONE if where is MessagePlace.DYING else where


# --- events ---------------------------------------------------------------------------------------


def story(
    *actions: ShareAction, sequence: int = 5, share: GroupState | None = None
) -> list[tuple[object, ...]]:
    """(kind, consumer, attempt) of each event; the nth action is at n ms."""
    trail = MessageEvents("g", sequence, share)
    found = [
        event for number, action in enumerate(actions) for event in trail.apply(action, number)
    ]
    assert trail.last == (found[-1] if found else None)
    return [event[2:5] for event in found]


def join(consumer: str = "a", received: int = -1) -> Join:
    return Join(*QUEUE, consumer, "i", 1000, received)


def pull(consumer: str, *ranges: tuple[int, int, int]) -> PullAction:
    return PullAction(*QUEUE, consumer, tuple(Pulled(*each) for each in ranges))


def settle(
    consumer: str,
    *settlements: tuple[int, int, int, int],
    errors: tuple[tuple[int, str], ...] = (),
    cause: int = 0,
) -> SettleAction:
    return SettleAction(*QUEUE, consumer, 0, settlements, errors, cause)


def test_a_message_that_fails_is_lost_and_dies_has_a_story() -> None:
    trail = MessageEvents("g", 5)
    actions = [
        join("a"),
        join("b"),
        pull("a", (0, 10, 1)),
        settle("a", (0, 4, Verdict.ACK, 0), (5, 5, Verdict.NACK, 700)),
        pull("b", (5, 1, 2)),
        settle("b", (0, 0, Verdict.NACK, 0), cause=Cause.LOST),
        pull("a", (5, 1, 3)),
        settle("a", (10, 10, Verdict.DEAD, 0), errors=((0, "no stock"),)),
    ]
    assert [
        event for number, action in enumerate(actions) for event in trail.apply(action, number)
    ] == [
        TrailEvent(2, "g", "pull", "a", 1),
        TrailEvent(3, "g", "nack", "a", 1, 700),
        TrailEvent(4, "g", "pull", "b", 2),
        TrailEvent(5, "g", "lost", "b", 2),
        TrailEvent(6, "g", "pull", "a", 3),
        TrailEvent(7, "g", "dead", "a", 3, 0, "no stock"),
    ]
    assert trail.now.where is MessagePlace.DYING


def test_the_story_tells_why_a_message_went_back() -> None:
    begun = (join("a"), pull("a", (0, 10, 1)))
    assert story(*begun, Return(*QUEUE, "a", 2))[-1] == ("return", "a", 1)
    assert story(*begun, Return(*QUEUE, "a", 5)) == [("pull", "a", 1)]
    assert story(*begun, join("a"))[-1] == ("again", "a", 1)
    assert story(*begun, Leave(*QUEUE, "a", False))[-1] == ("left", "a", 1)
    assert story(*begun, settle("a", (0, 9, Verdict.RELEASE, 0)))[-1] == ("release", "a", 1)


def test_the_story_tells_why_an_unworked_message_is_done() -> None:
    assert story(Begin(*QUEUE, "", 6, 1)) == [("skip", "", 0)]
    assert story(join("a"), pull("a", (0, 5, 1), (8, 0, 1))) == [("passed", "", 0)]
    assert story(
        join("a"),
        pull("a", (0, 10, 1)),
        settle("a", (0, 9, Verdict.NACK, 0)),
        pull("a", (0, 10, 0)),
    )[-1] == ("expired", "", 0)
    assert story(join("a"), pull("a", (0, 10, 1)), Reset(*QUEUE, "", 8))[-1] == ("reset", "a", 0)
    assert story(join("a"), Reset(*QUEUE, "", 3)) == []


def test_a_group_that_is_forgotten_starts_over() -> None:
    assert story(
        join("a"), pull("a", (0, 10, 1)), Forget(*QUEUE, ""), join("a"), pull("a", (5, 1, 1))
    ) == [("pull", "a", 1), ("forget", "", 0), ("pull", "a", 1)]


def test_a_trail_continues_from_a_snapshot() -> None:
    share = GroupState()
    for action in (join("a"), join("b"), pull("b", (0, 3, 1)), pull("a", (3, 4, 1))):
        apply_to(share, action)
    assert story(
        settle("b", (2, 2, Verdict.ACK, 0)), settle("a", (2, 2, Verdict.ACK, 0)), share=share
    ) == [("ack", "a", 1)]
    apply_to(share, settle("a", (2, 2, Verdict.DEAD, 0), errors=((0, "boom"),)))
    dying = MessageEvents("g", 5, share)
    assert (dying.now.where, dying.last) == (
        MessagePlace.DYING,
        TrailEvent(0, "g", "dead", "a", 1, 0, "boom"),
    )
    assert MessageEvents("g", 2, share).now.where is MessagePlace.HELD
    assert MessageEvents("g", 7, share).now.where is MessagePlace.NEW


# --- lanes ----------------------------------------------------------------------------------------


def lane_story(
    *actions: LaneAction, lp: int = 3
) -> tuple[list[tuple[object, ...]], LaneMessageEvents]:
    trail = LaneMessageEvents("g", 5, lp)
    found = []
    for number, action in enumerate(actions):
        found += [event[2:5] for event in trail.apply(action, number)]
        trail = LaneMessageEvents.from_state(5, trail.to_state())
    return found, trail


BEGUN = (
    LaneBegin(*LANES, "", 0, 8, 0, 0),
    LaneGrant(*LANES, "a", 0, 4, "i", 1000),
    LaneGrant(*LANES, "b", 4, 8, "i", 1000),
)


def test_a_message_of_a_lane_is_settled_by_the_lanes_holder() -> None:
    token = GroupLaneState().next_token
    events, trail = lane_story(
        *BEGUN, LaneDone(*LANES, "b", token + 1, ((0, 9),)), LaneDone(*LANES, "a", token, ((4, 6),))
    )
    assert events == [("grant", "a", 0), ("done", "a", 0)]
    assert (where(trail.share, 5, 3), where(trail.share, 5, 7), where(trail.share, 3, 3)) == (
        MessagePlace.DONE,
        MessagePlace.DONE,
        MessagePlace.NEW,
    )
    holder = holder_of(trail.share, 3)
    assert holder is not None
    assert (holder.consumer, holder.lps) == ("a", LpRange(0, 4))


def test_failures_parking_and_replays_are_reported() -> None:
    token = GroupLaneState().next_token
    events, trail = lane_story(
        *BEGUN,
        LaneFail(*LANES, "a", token, 4, 1),
        LaneFail(*LANES, "a", token, 5, 1),
        LanePark(*LANES, "a", token, 5, 3, b"k"),
    )
    assert events == [("grant", "a", 0), ("nack", "a", 1), ("park", "a", 0)]
    assert where(trail.share, 5, 3) is MessagePlace.WAITING
    for replays, kind, after in (
        (True, "replay", MessagePlace.NEW),
        (False, "drop", MessagePlace.DONE),
    ):
        copy = LaneMessageEvents.from_state(5, trail.to_state())
        assert [event.kind for event in copy.apply(LaneUnpark(*LANES, "", b"k", replays), 9)] == [
            kind
        ]
        assert where(copy.share, 5, 3) is after


def test_a_released_or_moved_lane_is_reported_only_if_something_changes() -> None:
    token = GroupLaneState().next_token
    assert lane_story(*BEGUN, LaneRelease(*LANES, "a", token))[0] == [("grant", "a", 0)]
    assert lane_story(*BEGUN, LaneReset(*LANES, "", 0, 8, 6))[0][-1] == ("reset", "", 0)
    assert lane_story(LaneBegin(*LANES, "", 0, 8, 6, 0))[0] == [("skip", "", 0)]
