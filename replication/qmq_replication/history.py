"""Records which epoch wrote which entries, in a few numbers for a whole log. Pure.

Epochs never fall along a log, so the log is a list of *runs*, each an epoch and the first index
that it wrote. Two logs that agree on (epoch, index) of one entry agree on everything before it
(Raft, section 5.3, log matching). The logs therefore diverge where their histories diverge, and no
search through entries is needed to find that index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from qmq.errors import InvariantBroken, check


class EpochRun(NamedTuple):
    """The entries from `first` to the next run, all written in `epoch`."""

    epoch: int
    first: int


def follow_each_other(
    runs: Sequence[EpochRun], *, after: int, last: int, epochs: tuple[int, int]
) -> bool:
    """True if `runs` can be those of the entries behind `after` up to `last`, with epochs between
    the two in `epochs`.
    """
    if not 0 <= after <= last or (not runs) != (after == last):
        return False
    lowest, highest = epochs
    begins = [EpochRun(lowest, after), *runs]
    if runs and runs[0].first != after + 1:
        return False
    steps = all(
        left.epoch <= right.epoch and left.first < right.first for left, right in pairwise(begins)
    )
    return steps and begins[-1].epoch <= highest and begins[-1].first <= last


class History:
    """A log's runs. The log holds the entries behind `start_index`, whose epoch was `start_epoch`,
    up to `last_index`.
    """

    __slots__ = ("_firsts", "last_index", "runs", "start_epoch", "start_index")

    def __init__(
        self,
        runs: Iterable[EpochRun] = (),
        last_index: int = 0,
        start_index: int = 0,
        start_epoch: int = 0,
    ) -> None:
        self.runs = [EpochRun(*each) for each in runs]
        self._firsts = [each.first for each in self.runs]
        self.last_index = last_index
        self.start_index = start_index
        self.start_epoch = start_epoch

    @property
    def last_epoch(self) -> int:
        """The epoch of the last entry."""
        return self.runs[-1].epoch if self.runs else self.start_epoch

    @property
    def last(self) -> tuple[int, int]:
        """(epoch, index) of the last entry: the greater one is ahead (Raft, section 5.4.1)."""
        return self.last_epoch, self.last_index

    def epoch_at(self, index: int) -> int | None:
        """The epoch of the entry; None if the log does not have the entry, or no longer has it."""
        if index > self.last_index or index < self.start_index:
            return None
        place = bisect_right(self._firsts, index) - 1
        return self.runs[place].epoch if place >= 0 else self.start_epoch

    def extend(self, runs: Iterable[EpochRun], last_index: int) -> None:
        """Add appended entries. Entries of the current epoch extend its run."""
        for run in runs:
            if not self.runs or self.runs[-1].epoch != run.epoch:
                check(run.epoch >= self.last_epoch, f"epochs fall: {run} behind {self.last}")
                self.runs.append(EpochRun(*run))
                self._firsts.append(run.first)
        self.last_index = last_index

    def truncate(self, index: int) -> None:
        """Remove the entries behind `index`."""
        while self.runs and self.runs[-1].first > index:
            self.runs.pop()
            self._firsts.pop()
        self.last_index = index

    def run_begin(self, index: int) -> int:
        """The first index of the run that contains `index`."""
        place = bisect_right(self._firsts, index) - 1
        return self.runs[place].first if place >= 0 else self.start_index

    def between(self, after: int, last: int) -> tuple[EpochRun, ...]:
        """The runs of the entries behind `after` up to `last`, clipped to them."""
        if last <= after:
            return ()
        place = max(bisect_right(self._firsts, after + 1) - 1, 0)
        found: list[EpochRun] = []
        for run in self.runs[place:]:
            if run.first > last:
                break
            found.append(EpochRun(run.epoch, max(run.first, after + 1)))
        return tuple(found)

    def tail(self, runs_max: int) -> History:
        """The last `runs_max` runs as a new history."""
        if len(self.runs) <= runs_max:
            return History(self.runs, self.last_index, self.start_index, self.start_epoch)
        kept, before = self.runs[-runs_max:], self.runs[-runs_max - 1]
        return History(kept, self.last_index, kept[0].first - 1, before.epoch)


def divergence(ours: History, theirs: History) -> int | None:
    """The last index at which both logs agree; None if the entries that they still hold do not
    tell.

    Where the epochs at an index differ, the log with the higher one agrees nowhere in that run: the
    other's epochs up to here are lower.
    """
    index = min(ours.last_index, theirs.last_index)
    while index >= max(ours.start_index, theirs.start_index):
        mine, other = ours.epoch_at(index), theirs.epoch_at(index)
        if mine is None or other is None:
            raise InvariantBroken(f"no epoch is known at index {index}, which both logs hold")
        if mine == other:
            return index
        index = (ours if mine > other else theirs).run_begin(index) - 1
    return None
