"""A consumer's reports about its lane, against a simple broker that keeps a set of settled
sequences.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.forms import examples

from qmq.client.consuming.ordered.lane import (
    Cell,
    FailurePolicy,
    LaneArrival,
    LaneCore,
    LaneRequest,
    LaneState,
)
from qmq.errors import InvalidArgument, ProtocolViolation
from qmq.wire.frame_payloads import LaneSettlement, LaneVerdict

DONE, FAILED, PARKED = LaneVerdict.DONE, LaneVerdict.FAILED, LaneVerdict.PARKED


def core(policy: FailurePolicy | None = None, position: int = 0) -> LaneCore:
    made = LaneCore(policy or FailurePolicy())
    made.attached(position, is_resumed=False, parked=[])
    return made


def arrive(
    lane: LaneCore, following: int, *sequences: int, key: bytes = b"", is_end: bool = False
) -> list[Cell]:
    return lane.delivered(
        [LaneArrival(each, key or str(each).encode(), 1) for each in sequences],
        following,
        is_end=is_end,
    )


def said(request: LaneRequest | None) -> list[tuple[int, int, int, int]]:
    return [] if request is None else [tuple(each) for each in request.settlements]  # type: ignore[misc]


def finish(lane: LaneCore, *cells: Cell) -> None:
    for cell in cells:
        assert lane.begin(cell)
        assert lane.done(cell)


def test_a_failed_message_blocks_its_lane_until_it_succeeds() -> None:
    lane = core(FailurePolicy(retry_ms=(100, 300)))
    bad, good = arrive(lane, 2, 0, 1)
    lane.begin(bad)
    assert lane.failed(bad, now_ms=1_000)
    assert lane.is_blocked
    assert said(lane.take()) == [(0, 0, FAILED, 1)]
    assert lane.due(1_099) == []
    assert lane.next_due_ms() == 1_100
    assert lane.due(1_100) == [bad]
    assert lane.is_blocked
    assert bad.attempt == 2
    lane.begin(bad)
    lane.failed(bad, now_ms=2_000)
    assert lane.next_due_ms() == 2_300
    assert lane.due(2_300) == [bad]
    lane.begin(bad)
    lane.done(bad)
    assert not lane.is_blocked
    assert good.state is LaneState.WAITING


def test_the_attempt_continues_from_what_the_broker_knows() -> None:
    lane = core()
    (cell,) = lane.delivered([LaneArrival(0, b"k", 4)], 1, is_end=False)
    lane.begin(cell)
    lane.failed(cell, now_ms=0)
    assert cell.due_ms == 30_000
    assert said(lane.take()) == [(0, 0, FAILED, 4)]


def test_only_the_key_waits_before_it_is_parked() -> None:
    lane = core(FailurePolicy("park", attempts_max=2))
    bad, _ = arrive(lane, 2, 0, 1)
    lane.begin(bad)
    lane.failed(bad, now_ms=0)
    assert bad.state is LaneState.FAILED
    assert not lane.is_blocked


def test_keys_that_the_broker_parked_are_parked_and_replayed_ones_are_not() -> None:
    lane = core(FailurePolicy("park"))
    lane.attached(0, is_resumed=False, parked=[b"a"])
    (cell,) = arrive(lane, 1, 0, key=b"a")
    assert cell.state is LaneState.PARKED
    request = lane.take()
    lane.attached(1, is_resumed=True, parked=[])
    (again,) = arrive(lane, 2, 1, key=b"a")
    assert again.state is LaneState.PARKED, "the first one may not have reached the broker yet"
    request = lane.take()
    assert said(request) == [(0, 0, PARKED, 0), (1, 1, PARKED, 0)]
    assert request is not None
    lane.settled(request)
    lane.attached(2, is_resumed=True, parked=[])
    assert arrive(lane, 3, 2, key=b"a")[0].state is LaneState.WAITING


def test_a_request_is_cut_where_it_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.client.consuming.ordered.lane.SETTLEMENTS_MAX", 2)
    lane = core()
    cells = arrive(lane, 8, *range(8))
    finish(lane, *cells[1::2])
    told: list[tuple[int, int, int, int]] = []
    while (request := lane.take()) is not None:
        assert len(request.settlements) <= 2
        told += said(request)
        lane.settled(request)
    assert [first for first, *_ in told] == [1, 3, 5, 7]


def test_messages_finished_out_of_order_are_reported_as_ranges() -> None:
    lane = core()
    cells = arrive(lane, 9, *range(9))
    finish(lane, cells[7], cells[2], cells[0], cells[1], cells[6])
    assert not lane.is_answered
    request = lane.take()
    assert said(request) == [(0, 2, DONE, 0), (6, 7, DONE, 0)]
    lane.detached()
    finish(lane, cells[3])
    again = lane.take()
    assert said(again) == [(0, 3, DONE, 0), (6, 7, DONE, 0)]
    assert again is not None
    assert sorted(cell.sequence for cell in lane.settled(again)) == [0, 1, 2, 3, 6, 7]
    lane.check()


@pytest.mark.parametrize("sequences", [(3, 3), (4, 3), (-1,), (9,)])
def test_an_answer_that_cannot_be_is_refused(sequences: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation):
        arrive(core(), 9, *sequences)


def test_an_answer_that_leads_back_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        arrive(core(position=5), 4)


@pytest.mark.parametrize(
    "policy", [{"on_failure": "skip"}, {"attempts_max": 0}, {"retry_ms": ()}, {"retry_ms": (-1,)}]
)
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        FailurePolicy(**policy)  # type: ignore[arg-type]


KEYS = [None, None, b"a", b"b", b"c"]


class Play:
    """A lane, its handlers, and a broker that is a list of messages and a set of what is done;
    answers get lost.
    """

    policy = FailurePolicy("park", attempts_max=3, retry_ms=(10, 20))

    def __init__(self) -> None:
        self.keys: list[bytes | None] = []
        """Of every sequence: the key, None for a message of another lane."""
        self.is_sealed = False
        self.stored: set[int] = set()
        """The sequences that the broker counts as done, as far as this lane is concerned."""
        self.parked: dict[bytes, list[int]] = {}
        self.failures: dict[int, int] = {}
        self.counted: set[int] = set()
        """What handlers finished, under a token that holds."""
        self.cells: list[Cell] = []
        self.request: LaneRequest | None = None
        self.now_ms = 0
        self.is_released = False
        self.lane = LaneCore(self.policy)
        self.attach(is_resumed=False)

    # --- the broker -------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return len(self.keys) + self.is_sealed

    def is_open(self, sequence: int) -> bool:
        return (
            sequence < len(self.keys)
            and self.keys[sequence] is not None
            and sequence not in self.stored
        )

    def attach(self, *, is_resumed: bool) -> None:
        position = next(
            (each for each in range(self.length) if each not in self.stored), self.length
        )
        lost = self.lane.attached(position, is_resumed=is_resumed, parked=self.parked)
        self.request = None
        if not is_resumed:
            self.counted = set(self.stored)
            assert all(cell.state is LaneState.VOID for cell in lost)

    def store(self, settlements: list[LaneSettlement]) -> None:
        for first, last, verdict, argument in settlements:
            open_ = {each for each in range(first, last + 1) if self.is_open(each)}
            if verdict == FAILED:
                assert open_ == {first}, "only an unfinished message is reported as failed"
                assert argument >= self.failures.get(first, 0), (
                    "failures are reported in their order"
                )
                self.failures[first] = argument
                continue
            if verdict == PARKED:
                key = self.keys[first]
                assert key in self.lane.parked
                if open_:
                    self.parked.setdefault(key, []).append(first)
            else:
                assert open_ <= self.counted, "a message was settled that nobody finished"
            self.stored.update(range(first, last + 1))

    def pull(self, room: int, *, is_lost: bool) -> None:
        if self.is_released:
            return
        at = self.lane.position
        found: list[LaneArrival] = []
        while at < self.length and len(found) < room:
            if self.is_open(at):
                found.append(
                    LaneArrival(at, self.keys[at] or b"", 1 + self.failures.get(at, 0), size=at % 5)
                )
            at += 1
        if not is_lost:
            self.deliver(found, at, is_end=self.is_sealed and at == self.length)

    def deliver(self, found: list[LaneArrival], following: int, *, is_end: bool) -> None:
        self.cells += self.lane.delivered(found, following, is_end=is_end)

    def send(self) -> None:
        if self.request is None:
            self.request = self.lane.take()
            assert self.request is None or self.request.pieces

    def arrive(self, what: str) -> None:
        """A request reaches the broker or is lost; and so does its answer."""
        if self.request is None:
            return
        if what != "lost":
            self.store(self.request.settlements)
        if what == "answered":
            over = self.lane.settled(self.request)
            assert all(self.messages_of(cell) <= self.stored for cell in over)
            self.request = None
        else:
            self.attach(is_resumed=True)

    def lose(self) -> None:
        if not self.is_released:
            self.attach(is_resumed=False)

    def unpark(self) -> None:
        """An operator gives a key back: the broker takes the lane from its holder."""
        if self.parked and not self.is_released:
            self.stored -= set(self.parked.pop(min(self.parked)))
            self.attach(is_resumed=False)

    # --- handlers ---------------------------------------------------------------------------------

    def ready(self) -> list[Cell]:
        """The waiting cells that are first of their key, and whose key is not in work."""
        busy = {
            cell.key for cell in self.cells if cell.state in (LaneState.WORKING, LaneState.FAILED)
        }
        firsts: dict[bytes, Cell] = {}
        for cell in self.cells:
            if cell.state is LaneState.WAITING and cell.key not in busy:
                firsts.setdefault(cell.key, cell)
        return list(firsts.values())

    def working(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.state is LaneState.WORKING]

    def conclude(self, cell: Cell, how: str) -> None:
        if how == "done":
            assert self.lane.done(cell)
            self.counted |= self.messages_of(cell)
        elif how == "failed":
            assert self.lane.failed(cell, self.now_ms)
        else:
            assert self.lane.put_back(cell)

    def messages_of(self, cell: Cell) -> set[int]:
        return {cell.sequence}

    def speak_too_late(self) -> None:
        for cell in self.cells:
            if cell.state in (LaneState.VOID, LaneState.SETTLED, LaneState.DONE, LaneState.PARKED):
                assert not self.lane.done(cell)
                assert not self.lane.failed(cell, self.now_ms)
                assert not self.lane.begin(cell)

    def wait(self, step: int) -> None:
        self.now_ms += step
        self.lane.due(self.now_ms)

    def release(self) -> None:
        self.lane.release()
        self.is_released = True

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        self.lane.check()
        if self.lane.is_finished:
            assert self.is_sealed
            assert self.stored == set(range(self.length))

    def finish(self) -> None:
        """Finish the lane: with a healed cluster and willing handlers everything is covered, the
        command message too.
        """
        if self.is_released:
            self.is_released = False
            self.lane = LaneCore(FailurePolicy("block"))
            self.cells = []
            self.attach(is_resumed=False)
        self.is_sealed = True
        self.pull(1 << 30, is_lost=False)
        for _ in range(4):
            self.wait(1_000_000)
            for cell in [*self.working(), *self.cells]:
                if cell.state is LaneState.WORKING or self.lane.begin(cell):
                    self.conclude(cell, "done")
            self.attach(is_resumed=True)
            while (request := self.lane.take()) is not None:
                self.store(request.settlements)
                self.lane.settled(request)
        assert self.lane.is_finished
        self.check()


class BulkPlay(Play):
    """The same for bulk reading: cells are runs, of which one slice is handed out at a time, and
    messages of parked keys.
    """

    policy = FailurePolicy(retry_ms=(10, 20))

    def __init__(self) -> None:
        self.members: dict[Cell, set[int]] = {}
        super().__init__()
        self.parked = {b"c": []}
        self.attach(is_resumed=False)

    def deliver(self, found: list[LaneArrival], following: int, *, is_end: bool) -> None:
        runs: list[list[LaneArrival]] = []
        for each in found:
            last = runs[-1][-1] if runs else None
            is_alone = (
                each.key in self.parked
                or last is None
                or last.key in self.parked
                or last.attempt != each.attempt
            )
            if is_alone or len(runs[-1]) > 3:
                runs.append([])
            runs[-1].append(each)
        arrivals = [
            LaneArrival(
                b.sequence,
                a.key if a.key in self.parked else b"",
                a.attempt,
                b.sequence - a.sequence,
                len(run),
                7,
            )
            for run in runs
            for a, b in [(run[0], run[-1])]
        ]
        made = self.lane.delivered(arrivals, following, is_end=is_end)
        self.cells += made
        self.members |= {
            cell: {each.sequence for each in run} for cell, run in zip(made, runs, strict=False)
        }

    def messages_of(self, cell: Cell) -> set[int]:
        return self.members[cell]

    def ready(self) -> list[Cell]:
        """The first that is open, if no other run is handed out."""
        open_ = [
            cell
            for cell in self.cells
            if cell.state in (LaneState.WAITING, LaneState.WORKING, LaneState.FAILED)
        ]
        first = min(open_, key=lambda cell: cell.sequence, default=None)
        is_free = all(cell.state is LaneState.WAITING for cell in open_)
        return [first] if first is not None and is_free else []

    def split(self, count: int) -> None:
        for cell in self.ready():
            if count < cell.count:
                members = sorted(self.members[cell])
                rest = self.lane.split(cell, members[count - 1], members[count], count)
                self.members[cell], self.members[rest] = set(members[:count]), set(members[count:])
                self.cells.append(rest)

    def check(self) -> None:
        super().check()
        for cell in self.cells:
            members = self.members[cell]
            assert (cell.head, cell.sequence, cell.count) == (
                min(members),
                max(members),
                len(members),
            )


class LaneMachine(RuleBasedStateMachine):
    """Hypothesis plays, and shrinks what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play()

    @initialize(keys=st.lists(st.sampled_from(KEYS), min_size=4, max_size=30))
    def begin_with(self, keys: list[bytes | None]) -> None:
        self.play.keys += keys

    @precondition(lambda self: not self.play.is_sealed)
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6), is_last=st.booleans())
    def append(self, keys: list[bytes | None], is_last: bool) -> None:
        self.play.keys += keys
        self.play.is_sealed = is_last

    @rule(room=st.integers(1, 9), is_lost=st.booleans())
    def pull(self, room: int, is_lost: bool) -> None:
        self.play.pull(room, is_lost=is_lost)

    @rule(what=st.sampled_from(["", "answered", "answered", "answer lost", "lost"]))
    def settle(self, what: str) -> None:
        self.play.send()
        if what:
            self.play.arrive(what)

    @rule(data=st.data(), count=st.integers(1, 4))
    def begin(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if ready := self.play.ready():
                assert self.play.lane.begin(data.draw(st.sampled_from(ready)))

    @rule(
        data=st.data(),
        ends=st.lists(
            st.sampled_from(["done", "done", "failed", "cut off"]), min_size=1, max_size=4
        ),
    )
    def end_work(self, data: st.DataObject, ends: list[str]) -> None:
        for how in ends:
            if working := self.play.working():
                self.play.conclude(data.draw(st.sampled_from(working)), how)

    @rule(step=st.integers(1, 30))
    def wait(self, step: int) -> None:
        self.play.wait(step)

    @rule(what=st.sampled_from(["resumed", "resumed", "resumed", "lost", "unparked", "released"]))
    def trouble(self, what: str) -> None:
        if what == "resumed":
            self.play.attach(is_resumed=True)
        elif what == "lost":
            self.play.lose()
        elif what == "unparked":
            self.play.unpark()
        else:
            self.play.release()

    @rule()
    def speak_too_late(self) -> None:
        self.play.speak_too_late()

    @invariant()
    def is_sound(self) -> None:
        self.play.check()

    def teardown(self) -> None:
        self.play.finish()


class BulkLaneMachine(LaneMachine):
    """The same with runs, which are split."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = self.play = BulkPlay()

    @rule(count=st.integers(1, 4))
    def split(self, count: int) -> None:
        self.bulk.split(count)


LaneMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None
)
BulkLaneMachine.TestCase.settings = LaneMachine.TestCase.settings
TestLaneMachine = LaneMachine.TestCase
TestBulkLaneMachine = BulkLaneMachine.TestCase


@pytest.mark.parametrize("kind", [Play, BulkPlay])
@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_walk_settles_exactly_the_finished_messages(
    seed: int, kind: type[Play]
) -> None:
    """The same play, longer than a state machine reaches: a random walk that mostly works, and
    sometimes loses.
    """
    chance, play = random.Random(seed), kind()
    for _ in range(600):
        what = chance.choices(range(9), weights=[20, 30, 60, 60, 50, 20, 8, 1, 2])[0]
        if what == 0:
            play.keys += chance.choices(KEYS, k=chance.randint(1, 6))
        elif what == 1:
            play.pull(chance.randint(1, 9), is_lost=chance.random() < 0.2)
        elif what == 2 and (ready := play.ready()):
            assert play.lane.begin(chance.choice(ready))
        elif what == 3 and (working := play.working()):
            play.conclude(
                chance.choice(working),
                chance.choices(["done", "failed", "cut off"], weights=[6, 4, 1])[0],
            )
        elif what == 4:
            play.send()
            play.arrive(
                chance.choices(["", "answered", "answer lost", "lost"], weights=[3, 6, 1, 1])[0]
            )
        elif what == 5:
            play.wait(chance.randint(1, 30))
            if isinstance(play, BulkPlay):
                play.split(chance.randint(1, 4))
        elif what == 6:
            play.attach(is_resumed=True)
        elif what == 7:
            play.lose()
        elif what == 8:
            play.unpark()
            play.speak_too_late()
        play.check()
    assert play.failures
    play.finish()


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_settlements_in_any_order_tile_what_was_pulled(data: st.DataObject) -> None:
    """Every sequence is settled exactly once, in any order of finishing and any grouping of
    verdicts.
    """
    length = data.draw(st.integers(1, 40))
    mine = data.draw(st.sets(st.integers(0, length - 1)))
    lane = core()
    cells = arrive(lane, length, *sorted(mine), is_end=True)
    told: list[int] = []
    for cell in data.draw(st.permutations(cells)):
        finish(lane, cell)
        if data.draw(st.booleans()) and (request := lane.take()) is not None:
            told += [
                each for first, last, *_ in request.settlements for each in range(first, last + 1)
            ]
            lane.settled(request)
    while (request := lane.take()) is not None:
        told += [each for first, last, *_ in request.settlements for each in range(first, last + 1)]
        lane.settled(request)
    assert sorted(told) == list(range(length))
    assert lane.is_finished
