"""The progress of one group on one partition of an ordered subject, and the holders of its lanes.
Pure: takes actions, keeps state. The state is the same on every replica and after every restart.
The counterpart of `qmq.log.group_state`, which is for unordered subjects.

Two independent lists, both by ranges of logical partitions:

    progress   tiles the partition's range. Of each range: everything before `done_before` is done,
               and so are the ranges `done` after it
    holders    the consumer that reads each range now, and its token; ranges do not overlap

A lane may have any range: progress is cut where a lane's range begins or ends, and joined again
where neighbours have reached the same point. Lanes can therefore become wider or narrower at any
time, and no lane needs another one's progress.

A verdict names sequences, and applies to the messages of the holder's range among them. Tokens are
unique and grow; after its holder's lease has ended, or an operator moved the group, a token is
invalid.

A *parked* key's messages count as done for the lane; they are remembered until they are replayed or
dropped. A replay puts only that key's logical partition back, and takes the lane from its holder,
so that its next reader begins with the oldest of them.

A key that is parked in a partition which a route change closed is parked in the next partition,
too: an *inherited* key, whose list of messages is empty at first. It is written before the group
may read the partition (docs/ORDERING.md, "Failure").

Worked example: range [0, 8), lane [0, 4) settles 0 to 9, lane [4, 8) settles 0 to 3 and 6 to 7:
progress is [0, 4) before 10, and [4, 8) before 4 with 6 to 7 done after it. When [4, 8) settles 4
to 5 and 8 to 9, both have reached 10, and are one range again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from qmq_ordering.routes import LpRange

from qmq.limits import MIB
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

FAILURES_MAX: Final = 10_000
"""The number of messages whose failures are remembered. The oldest are forgotten first, and count
as never tried.
"""


PARKED_BYTES_MAX: Final = 8 * MIB
"""The size of a group's parked keys on a partition from which on the group gets no more messages of
the partition: eight bytes for a message, and for a key its length and 64 bytes. That is a million
messages, or 80,000 keys of 36 bytes.
"""
_KEY_BYTES: Final = 64
_MESSAGE_BYTES: Final = 8
_FEW: Final = 16
"""Up to so many spans are added one by one: that moves the later ones, and walks none."""


class LaneHolder(NamedTuple):
    """The reader of a range."""

    lps: LpRange
    consumer: str
    incarnation: str
    token: int
    lease_ms: int


@dataclass(slots=True)
class LaneProgress:
    """The progress of a range. `done` are [first, end) ranges of sequences after `done_before`,
    ascending, not adjacent.
    """

    lps: LpRange
    done_before: int
    done: list[tuple[int, int]] = field(default_factory=list)

    def add(self, first: int, end: int) -> None:
        """Mark sequences `first` to `end` - 1 as done."""
        first = max(first, self.done_before)
        if end <= first:
            return
        done = self.done
        if first == self.done_before and not done:
            self.done_before = end
            return
        low = bisect_left(done, first, key=lambda each: each[1])
        high = low
        while high < len(done) and done[high][0] <= end:
            first, end = min(first, done[high][0]), max(end, done[high][1])
            high += 1
        done[low:high] = [(first, end)]
        if done[0][0] <= self.done_before:
            self.done_before = done.pop(0)[1]

    def add_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Mark the sequences of many ascending [first, end) spans as done, in one pass."""
        if len(spans) < _FEW:
            for first, end in spans:
                self.add(first, end)
            return
        self.done = _joined(sorted([(0, self.done_before), *self.done, *spans]))
        self.done_before = self.done.pop(0)[1]

    def remove(self, sequences: Sequence[int]) -> None:
        """Mark these ascending sequences as not done, in one pass."""
        if not sequences:
            return
        begin = min(sequences[0], self.done_before)
        spans = [(begin, self.done_before), *self.done]
        self.done_before, self.done = begin, []
        at = 0
        for first, end in spans:
            while at < len(sequences) and sequences[at] < end:
                if sequences[at] >= first:
                    self._keep(first, sequences[at])
                    first = sequences[at] + 1
                at += 1
            self._keep(first, end)

    def _keep(self, first: int, end: int) -> None:
        if first < end:
            self.done.append((first, end))

    def has_none_done(self, first: int, end: int) -> bool:
        """True if none of the sequences `first` to `end` - 1 is done."""
        at = bisect_left(self.done, first + 1, key=lambda each: each[1])
        return self.done_before <= first and (at == len(self.done) or self.done[at][0] >= end)

    def done_in(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges of `done` that overlap the sequences `first` to `end` - 1."""
        for at in range(
            bisect_left(self.done, first + 1, key=lambda each: each[1]), len(self.done)
        ):
            if self.done[at][0] >= end:
                return
            yield self.done[at]

    def is_done(self, sequence: int) -> bool:
        if sequence < self.done_before:
            return True
        at = bisect_left(self.done, sequence + 1, key=lambda each: each[1])
        return at < len(self.done) and self.done[at][0] <= sequence


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending [first, end) spans, with those joined that overlap or are adjacent."""
    found: list[tuple[int, int]] = []
    for first, end in spans:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


@dataclass(slots=True)
class ParkedKey:
    """The messages of a parked key, in order. The list begins empty if the key was parked in the
    previous partition.
    """

    lp: int
    sequences: list[int]

    def size(self, key: bytes) -> int:
        """The size, as `PARKED_BYTES_MAX` counts it."""
        return len(key) + _KEY_BYTES + _MESSAGE_BYTES * len(self.sequences)


class GroupLaneState:
    """One group's progress and lanes on one partition."""

    __slots__ = (
        "expired",
        "failures",
        "holders",
        "next_token",
        "parked",
        "parked_bytes",
        "progress",
    )

    def __init__(self) -> None:
        self.progress: list[LaneProgress] = []
        self.holders: list[LaneHolder] = []
        self.next_token = 1
        self.failures: dict[int, int] = {}
        self.parked: dict[bytes, ParkedKey] = {}
        self.parked_bytes = 0
        """The size of `parked`, as `PARKED_BYTES_MAX` counts it."""
        self.expired = 0
        """Messages that retention had deleted when the group began here."""

    # --- reading ----------------------------------------------------------------------------------

    def holder(self, token: int) -> LaneHolder | None:
        """The holder of a token; None if the token is invalid."""
        return next((each for each in self.holders if each.token == token), None)

    def holders_of(self, lps: LpRange) -> list[LaneHolder]:
        """The holders that overlap a range."""
        return [each for each in self.holders if each.lps.overlaps(lps)]

    def progress_of(self, lps: LpRange) -> list[LaneProgress]:
        """The progress entries that overlap a range."""
        return [each for each in self.progress if each.lps.overlaps(lps)]

    def position(self, lps: LpRange) -> int:
        """The first sequence that may have an undone message of the range."""
        return min(each.done_before for each in self.progress_of(lps))

    def done_before(self) -> int:
        """The sequence before which everything is done, in the whole partition."""
        return min(each.done_before for each in self.progress)

    def may_settle(self, token: int, ranges: Iterable[tuple[int, int]]) -> bool:
        """True if the token is valid, and no message that has one of these sequences, from the
        first to the last, is done. A message of the lane is done in all of the lane's progress.
        """
        holder = self.holder(token)
        if holder is None:
            return False
        progress = self.progress_of(holder.lps)
        return all(
            any(each.has_none_done(first, last + 1) for each in progress) for first, last in ranges
        )

    @property
    def is_full(self) -> bool:
        """True if so much is parked that nothing more is handed out until keys are
        replayed or dropped.
        """
        return self.parked_bytes >= PARKED_BYTES_MAX

    def more_bytes(self, messages: Iterable[tuple[int, bytes]]) -> int:
        """By how much messages with these keys, each with its logical partition, add to
        `parked_bytes` at most.
        """
        found = [key for _, key in messages]
        return _MESSAGE_BYTES * len(found) + sum(
            len(key) + _KEY_BYTES for key in set(found) - self.parked.keys()
        )

    def parked_in(self, lps: LpRange) -> list[bytes]:
        """The parked keys of a range."""
        return [key for key, each in self.parked.items() if lps.first <= each.lp < lps.end]

    # --- changing ---------------------------------------------------------------------------------

    def begin(self, action: LaneBegin) -> None:
        if not self.progress:
            self.progress = [LaneProgress(LpRange(action.first, action.end), action.sequence)]
            self.expired = action.expired

    def reset(self, action: LaneReset) -> None:
        self.progress = [LaneProgress(LpRange(action.first, action.end), action.sequence)]
        self.holders.clear()
        self.failures.clear()
        self.parked.clear()
        self.parked_bytes = 0

    def grant(self, action: LaneGrant) -> int:
        token, self.next_token = self.next_token, self.next_token + 1
        lps = LpRange(action.first, action.end)
        self.holders = [each for each in self.holders if not each.lps.overlaps(lps)]
        self.holders.append(
            LaneHolder(lps, action.consumer, action.incarnation, token, action.lease_ms)
        )
        return token

    def release(self, action: LaneRelease) -> None:
        self.holders = [each for each in self.holders if each.token != action.token]

    def done(self, action: LaneDone) -> int:
        holder = self.holder(action.token)
        if holder is None:
            return 0
        spans = _joined(sorted([(first, last + 1) for first, last in action.ranges]))
        for each in self._cut(holder.lps):
            each.add_spans(spans)
        if self.failures:
            ends = [end for _, end in spans]
            done = [
                at
                for at in self.failures
                if (found := bisect_right(ends, at)) < len(spans) and spans[found][0] <= at
            ]
            for at in done:
                del self.failures[at]
        self._join()
        return len(action.ranges)

    def fail(self, action: LaneFail) -> int:
        if self.holder(action.token) is None:
            return 0
        self.failures.pop(action.sequence, None)
        self.failures[action.sequence] = action.attempts
        if len(self.failures) > FAILURES_MAX:
            del self.failures[next(iter(self.failures))]
        return 1

    def park(self, action: LanePark) -> int:
        holder = self.holder(action.token)
        if holder is None or not holder.lps.first <= action.lp < holder.lps.end:
            return 0
        parked = self.parked.get(action.key) or self._new_key(action.lp, action.key)
        at = bisect_left(parked.sequences, action.sequence)
        if action.sequence not in parked.sequences[at : at + 1]:
            parked.sequences.insert(at, action.sequence)
            self.parked_bytes += _MESSAGE_BYTES
        for each in self._cut(holder.lps):
            each.add(action.sequence, action.sequence + 1)
        self.failures.pop(action.sequence, None)
        self._join()
        return 1

    def _new_key(self, lp: int, key: bytes) -> ParkedKey:
        found = self.parked[key] = ParkedKey(lp, [])
        self.parked_bytes += found.size(key)
        return found

    def _forget_key(self, key: bytes) -> ParkedKey | None:
        found = self.parked.pop(key, None)
        if found is not None:
            self.parked_bytes -= found.size(key)
        return found

    def unpark(self, action: LaneUnpark) -> int:
        parked = self._forget_key(action.key)
        if parked is None:
            return 0
        lps = LpRange(parked.lp, parked.lp + 1)
        # The current reader treats the key as parked until it attaches again.
        self.holders = [each for each in self.holders if not each.lps.overlaps(lps)]
        if action.replays and parked.sequences:
            (mine,) = self._cut(lps)
            mine.remove(parked.sequences)
            self._join()
        return len(parked.sequences)

    def inherit(self, action: LaneInherit) -> int:
        """Park exactly these keys in a range, besides those that have parked messages here. Returns
        the number of new ones.
        """
        lps = LpRange(action.first, action.end)
        named = {key for _, key in action.keys}
        for key in [
            key
            for key in self.parked_in(lps)
            if key not in named and not self.parked[key].sequences
        ]:
            self._forget_key(key)
        fresh = {key: lp for lp, key in action.keys if key not in self.parked}
        for key, lp in fresh.items():
            self._new_key(lp, key)
            # The current reader treats the key as not parked until it attaches again.
            self.holders = [
                each for each in self.holders if not each.lps.first <= lp < each.lps.end
            ]
        return len(fresh)

    def _cut(self, lps: LpRange) -> list[LaneProgress]:
        """The progress of exactly this range; entries are cut at its ends."""
        found: list[LaneProgress] = []
        pieces: list[LaneProgress] = []
        for each in self.progress:
            marks = sorted(
                {
                    each.lps.first,
                    each.lps.end,
                    *[mark for mark in lps if each.lps.first < mark < each.lps.end],
                }
            )
            parts = (
                [each]
                if len(marks) == 2
                else [
                    LaneProgress(LpRange(a, b), each.done_before, list(each.done))
                    for a, b in pairwise(marks)
                ]
            )
            pieces += parts
            found += [part for part in parts if lps.contains(part.lps)]
        self.progress = pieces
        return found

    def _join(self) -> None:
        """Join adjacent entries with the same progress."""
        if len(self.progress) < 2:
            return
        joined = [self.progress[0]]
        for each in self.progress[1:]:
            last = joined[-1]
            if (last.done_before, last.done) == (each.done_before, each.done):
                joined[-1] = LaneProgress(
                    LpRange(last.lps.first, each.lps.end), last.done_before, last.done
                )
            else:
                joined.append(each)
        self.progress = joined

    # --- keeping ----------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        """For checkpoint and snapshot."""
        return [
            [[*each.lps, each.done_before, each.done] for each in self.progress],
            [[*each.lps, *each[1:]] for each in self.holders],
            self.next_token,
            self.failures,
            {key: [each.lp, each.sequences] for key, each in self.parked.items()},
            self.expired,
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> GroupLaneState:
        """The inverse of `to_state`."""
        share = cls()
        progress, holders, share.next_token, failures, parked, share.expired = state
        share.progress = [
            LaneProgress(LpRange(first, end), before, [tuple(span) for span in done])
            for first, end, before, done in progress
        ]
        share.holders = [LaneHolder(LpRange(first, end), *rest) for first, end, *rest in holders]
        share.failures = {int(sequence): attempts for sequence, attempts in failures.items()}
        share.parked = {
            bytes(key): ParkedKey(lp, list(sequences)) for key, (lp, sequences) in parked.items()
        }
        share.parked_bytes = sum([each.size(key) for key, each in share.parked.items()])
        return share
