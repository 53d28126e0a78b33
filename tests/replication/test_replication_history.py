"""History against a list of epochs, and divergence against a search entry by entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from qmq_replication.history import EpochRun, History, divergence
from sim.world import kept_from


def history_of(epochs: list[int], start_index: int = 0, start_epoch: int = 0) -> History:
    """A history built one entry at a time."""
    history = History((), start_index, start_index, start_epoch)
    for index, epoch in enumerate(epochs, start_index + 1):
        history.extend((EpochRun(epoch, index),), index)
    return history


class HistoryIsAList(RuleBasedStateMachine):
    """`epochs[i]` is the epoch of the entry at `start + 1 + i`."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.start, self.start_epoch = 0, 0
        self.history = History()

    @initialize(start=st.integers(0, 50), epoch=st.integers(0, 3))
    def begin(self, start: int, epoch: int) -> None:
        self.start, self.start_epoch = start, epoch if start else 0
        self.history = History((), start, start, self.start_epoch)

    @property
    def last(self) -> int:
        return self.start + len(self.epochs)

    @rule(count=st.integers(1, 5), newer=st.integers(0, 2))
    def extend(self, count: int, newer: int) -> None:
        epoch = max(self.history.last_epoch + newer, 1)
        self.history.extend((EpochRun(epoch, self.last + 1),), self.last + count)
        self.epochs += [epoch] * count

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(self.start, self.last))
        self.history.truncate(index)
        del self.epochs[index - self.start :]

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def delete_before(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(1, self.last + 1))
        self.history = kept_from(self.history, index)
        gone = index - 1 - self.start
        if gone > 0:
            self.start_epoch = self.epochs[gone - 1]
            del self.epochs[:gone]
            self.start += gone

    @invariant()
    def agrees(self) -> None:
        assert self.history.last == (
            self.epochs[-1] if self.epochs else self.start_epoch,
            self.last,
        )
        for index in range(self.start - 1, self.last + 2):
            place = index - self.start - 1
            expected = (
                self.epochs[place]
                if 0 <= place < len(self.epochs)
                else self.start_epoch
                if place == -1
                else None
            )
            assert self.history.epoch_at(index) == expected, index

    @invariant()
    def pieces_put_together_are_the_whole(self) -> None:
        middle = (self.start + self.last) // 2
        built = History((), self.start, self.start, self.start_epoch)
        built.extend(self.history.between(self.start, middle), middle)
        built.extend(self.history.between(middle, self.last), self.last)
        assert [built.epoch_at(index) for index in range(self.start, self.last + 1)] == [
            self.start_epoch,
            *self.epochs,
        ]

    @invariant()
    def a_tail_is_the_same_log_from_later_on(self) -> None:
        tail = self.history.tail(2)
        assert len(tail.runs) <= 2
        for index in range(tail.start_index, self.last + 1):
            assert tail.epoch_at(index) == self.history.epoch_at(index)


TestHistoryIsAList = HistoryIsAList.TestCase


@st.composite
def two_logs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two logs as Raft makes them: equal up to some index, and from there on never an entry of one
    epoch at one index in both.

    A run of an epoch comes from one master, so where both hold an epoch behind the fork, one has
    the beginning of what the other has; such entries are in both logs, and the fork lies behind
    them. So the tails share no epoch.
    """
    shared = sorted(draw(st.lists(st.integers(1, 4), max_size=8)))
    above = shared[-1] if shared else 1
    left_epochs = draw(st.sets(st.integers(above, above + 6)))
    left = (
        sorted(draw(st.lists(st.sampled_from(sorted(left_epochs)), max_size=6)))
        if left_epochs
        else []
    )
    right_epochs = [each for each in range(above + 1, above + 7) if each not in left]
    right = (
        sorted(draw(st.lists(st.sampled_from(right_epochs), max_size=6))) if right_epochs else []
    )
    return shared + left, shared + right


def slow_divergence(ours: list[int], theirs: list[int], first: int) -> int | None:
    """The last index at which both agree, entry by entry; None below `first`."""
    agreed = 0
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if mine != other:
            break
        agreed = index
    return agreed if agreed >= first else None


@given(two_logs(), st.integers(0, 12), st.integers(0, 12))
def test_divergence_is_where_a_search_entry_by_entry_finds_it(
    logs: tuple[list[int], list[int]], gone_here: int, gone_there: int
) -> None:
    ours, theirs = logs
    here = kept_from(history_of(ours), min(gone_here, len(ours)) + 1)
    there = kept_from(history_of(theirs), min(gone_there, len(theirs)) + 1)
    expected = slow_divergence(ours, theirs, max(here.start_index, there.start_index))
    assert divergence(here, there) == expected
    assert divergence(there, here) == expected


@given(two_logs(), st.integers(1, 3))
def test_with_only_a_tail_of_runs_divergence_is_found_or_known_to_be_unknown(
    logs: tuple[list[int], list[int]], runs: int
) -> None:
    ours, theirs = history_of(logs[0]), history_of(logs[1]).tail(runs)
    assert divergence(ours, theirs) == slow_divergence(*logs, theirs.start_index)
