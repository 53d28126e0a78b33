"""The lanes of one group on one partition, against a dumb model: for every (logical partition,
sequence) whether it is done.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from qmq_ordering.routes import LpRange
from support.forms import examples
from support.invariants import check_lanes

from qmq.log.actions import (
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LaneInherit,
    LanePark,
    LaneRelease,
    LaneReset,
    LaneUnpark,
)
from qmq.log.lane_state import GroupLaneState, LaneProgress
from qmq.log.queue import apply_to

WIDTH, LENGTH = 8, 12
NAMES = ("s", 1, "g", "c")


class LaneMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.share = GroupLaneState()
        apply_to(self.share, LaneBegin(*NAMES, 0, WIDTH, 0, 0))
        self.done: set[tuple[int, int]] = set()
        self.holders: dict[int, tuple[int, int]] = {}
        self.parked: dict[bytes, tuple[int, list[int]]] = {}

    @rule(first=st.integers(0, WIDTH - 1), width=st.integers(1, WIDTH))
    def grant(self, first: int, width: int) -> None:
        end = min(first + width, WIDTH)
        for token, (a, b) in list(self.holders.items()):
            if a < end and first < b:
                apply_to(self.share, LaneRelease(*NAMES, token))
                del self.holders[token]
        token = apply_to(self.share, LaneGrant(*NAMES, first, end, "i", 1000))
        assert token not in self.holders
        self.holders[token] = (first, end)

    @rule(
        token=st.integers(1, 30),
        spans=st.lists(
            st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 5)), min_size=1, max_size=3
        ),
    )
    def settle(self, token: int, spans: list[tuple[int, int]]) -> None:
        ranges = tuple((first, min(first + n, LENGTH) - 1) for first, n in spans)
        counted = apply_to(self.share, LaneDone(*NAMES, token, ranges))
        assert bool(counted) == (token in self.holders)
        if token in self.holders:
            for lp in range(*self.holders[token]):
                for first, last in ranges:
                    self.done |= {(lp, at) for at in range(first, last + 1)}

    @rule(token=st.integers(1, 30))
    def release(self, token: int) -> None:
        apply_to(self.share, LaneRelease(*NAMES, token))
        self.holders.pop(token, None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.holders)))
        first, end = self.holders[token]
        lp = data.draw(st.integers(first, end - 1))
        key = b"k%d" % lp
        _, sequences = self.parked.get(key, (lp, []))
        candidates = [
            at
            for at in range(LENGTH)
            if at > max(sequences, default=-1) and (lp, at) not in self.done
        ]
        if candidates:
            at = candidates[0]
            assert apply_to(self.share, LanePark(*NAMES, token, at, lp, key)) == 1
            self.parked.setdefault(key, (lp, []))[1].append(at)
            for each in range(first, end):
                self.done.add((each, at))

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), replays=st.booleans())
    def unpark(self, data: st.DataObject, replays: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.parked)))
        lp, sequences = self.parked.pop(key)
        assert apply_to(self.share, LaneUnpark("s", 1, "g", "", key, replays)) == len(sequences)
        self.holders = {token: (a, b) for token, (a, b) in self.holders.items() if not a <= lp < b}
        if replays:
            self.done -= {(lp, at) for at in sequences}

    @rule(
        first=st.integers(0, WIDTH - 1),
        width=st.integers(1, WIDTH),
        lps=st.sets(st.integers(0, WIDTH - 1)),
    )
    def inherit(self, first: int, width: int, lps: set[int]) -> None:
        end = min(first + width, WIDTH)
        keys = {b"k%d" % lp: lp for lp in lps if first <= lp < end}
        fresh = keys.keys() - self.parked.keys()
        action = LaneInherit(
            "s", 1, "g", "", first, end, tuple((lp, key) for key, lp in keys.items())
        )
        assert apply_to(self.share, action) == len(fresh)
        for key in [
            key
            for key, (lp, at) in self.parked.items()
            if first <= lp < end and not at and key not in keys
        ]:
            del self.parked[key]
        for key in fresh:
            self.parked[key] = (keys[key], [])
            self.holders = {
                token: (a, b) for token, (a, b) in self.holders.items() if not a <= keys[key] < b
            }

    @rule()
    def restart(self) -> None:
        self.share = GroupLaneState.from_state(
            msgspec.msgpack.decode(msgspec.msgpack.encode(self.share.to_state()), strict=False)
        )

    @invariant()
    def is_what_the_model_says(self) -> None:
        check_lanes(self.share)
        for part in self.share.progress:
            for lp in range(*part.lps):
                for at in range(LENGTH):
                    assert part.is_done(at) == ((lp, at) in self.done), (part, lp, at)
        assert {each.token: tuple(each.lps) for each in self.share.holders} == self.holders
        assert {
            key: (each.lp, each.sequences) for key, each in self.share.parked.items()
        } == self.parked


LaneMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
test_lanes_agree_with_the_model = LaneMachine.TestCase


def test_a_void_token_settles_fails_and_parks_nothing() -> None:
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, 0, 8, 0, 0))
    zombie = apply_to(share, LaneGrant(*NAMES, 0, 8, "i", 1000))
    apply_to(share, LaneRelease(*NAMES, zombie))
    before = share.to_state()
    assert apply_to(share, LaneDone(*NAMES, zombie, ((0, 5),))) == 0
    assert apply_to(share, LaneFail(*NAMES, zombie, 3, 1)) == 0
    assert apply_to(share, LanePark(*NAMES, zombie, 3, 1, b"k")) == 0
    assert share.to_state() == before


def test_tokens_grow_and_are_never_given_twice() -> None:
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, 0, 8, 0, 0))
    tokens = [apply_to(share, LaneGrant(*NAMES, 0, 8, "i", 1000)) for _ in range(3)]
    apply_to(share, LaneReset(*NAMES, 0, 8, 0))
    tokens.append(apply_to(share, LaneGrant(*NAMES, 0, 8, "i", 1000)))
    assert tokens == sorted(set(tokens))


def test_a_group_that_began_is_not_begun_again_elsewhere() -> None:
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, 0, 8, 5, 0))
    apply_to(share, LaneBegin(*NAMES, 0, 8, 0, 0))
    assert share.done_before() == 5


def test_neighbours_that_come_to_the_same_point_are_one_again() -> None:
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, 0, 8, 0, 0))
    left = apply_to(share, LaneGrant(*NAMES, 0, 4, "i", 1000))
    right = apply_to(share, LaneGrant(*NAMES, 4, 8, "i", 1000))
    apply_to(share, LaneDone(*NAMES, left, ((0, 9),)))
    apply_to(share, LaneDone(*NAMES, right, ((0, 3), (6, 7))))
    assert share.progress == [
        LaneProgress(LpRange(0, 4), 10),
        LaneProgress(LpRange(4, 8), 4, [(6, 8)]),
    ]
    apply_to(share, LaneDone(*NAMES, right, ((4, 5), (8, 9))))
    assert share.progress == [LaneProgress(LpRange(0, 8), 10)]


def test_parking_a_parked_key_again_counts_once() -> None:
    """A consumer parks the key again when the answer was lost."""
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, 0, 8, 0, 0))
    token = apply_to(share, LaneGrant(*NAMES, 0, 8, "i", 1000))
    for at in (5, 9, 5, 9):
        apply_to(share, LanePark(*NAMES, token, at, 3, b"k"))
    assert share.parked[b"k"].sequences == [5, 9]


def test_a_range_between_finished_ranges_has_no_finished_sequence() -> None:
    part = LaneProgress(LpRange(0, 8), 4, [(6, 8), (12, 14)])
    spans = [(4, 6), (8, 12), (14, 99)]
    assert all(part.has_none_done(*each) for each in spans)
    assert not any(
        part.has_none_done(first - 1, end) or part.has_none_done(first, end + 1)
        for first, end in spans[:2]
    )
    assert not part.has_none_done(0, 4)
    assert not part.has_none_done(13, 20)
