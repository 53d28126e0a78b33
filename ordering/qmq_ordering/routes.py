"""A route: which physical partition holds which logical partitions. Values only;
qmq_ordering/changes.py makes new ones. Pure.

Rules, checked whenever a Route is made:
* Its partitions tile [0, N): sorted by range, without gap or overlap.
* Numbers are 1 or more, below `next_number`, and each occurs once. A number is never used again in
  a later version.

`cut_by_load` cuts a range so that its parts have equal loads. The cuts make the heaviest part as
light as possible. Among such cuts, each part is as near as possible to an equal share of the
remaining load; a tie goes to the more even width. One hot logical partition therefore becomes a
separate part if there are enough parts:

    load  1 1 100 1 1 in 3 parts    → 1 1 | 100 | 1 1      (2 parts do not help: the hot one is in
                                                           either half)
    load  0 0 0 0 0 0 in 2 parts    → 0 0 0 | 0 0 0

The lightest possible maximum is found by bisection (a bound is possible if filling parts up to it
from the left needs no more parts than there are). Filling from the left gives the latest position
of each cut under that bound, filling from the right the earliest.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from math import frexp, isfinite, ldexp
from typing import Any, Final, NamedTuple

from qmq.errors import InvalidArgument


class LpRange(NamedTuple):
    """Logical partitions `first` to `end` - 1."""

    first: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.first

    def overlaps(self, other: LpRange) -> bool:
        """True if the ranges have a logical partition in common."""
        return self.first < other.end and other.first < self.end

    def contains(self, other: LpRange) -> bool:
        """True if all of `other` lies in this range."""
        return self.first <= other.first and other.end <= self.end

    def cut(self, other: LpRange) -> LpRange:
        """The intersection of the ranges; empty (end <= first) if they do not overlap."""
        return LpRange(max(self.first, other.first), min(self.end, other.end))

    def __str__(self) -> str:
        return f"[{self.first}, {self.end})"


class PhysicalPartition(NamedTuple):
    """A queue that holds a range of logical partitions, on one broker group for all its life."""

    number: int
    range: LpRange
    group: str

    def to_json(self) -> list[Any]:
        """`[number, first, end, group]`."""
        return [self.number, self.range.first, self.range.end, self.group]

    @classmethod
    def of_json(cls, found: list[Any]) -> PhysicalPartition:
        return cls(found[0], LpRange(found[1], found[2]), found[3])


@dataclass(frozen=True, slots=True)
class Route:
    """One version of a subject's route.
    Raises InvalidArgument if the rules of the module do not hold.
    """

    version: int
    logical_partitions: int
    next_number: int
    partitions: tuple[PhysicalPartition, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = self.partitions
        is_tiled = (
            bool(parts)
            and parts[0].range.first == 0
            and parts[-1].range.end == self.logical_partitions
        )
        is_tiled = (
            is_tiled
            and all(a.range.end == b.range.first for a, b in pairwise(parts))
            and all(p.range.width > 0 for p in parts)
        )
        numbers = {part.number for part in parts}
        if self.version < 1 or not is_tiled:
            raise InvalidArgument(
                f"the partitions of route version {self.version} do not tile [0, "
                f"{self.logical_partitions}): {parts}"
            )
        if len(numbers) < len(parts) or min(numbers) < 1 or max(numbers) >= self.next_number:
            raise InvalidArgument(
                f"route version {self.version} numbers its partitions {sorted(numbers)}; the "
                f"next is {self.next_number}"
            )
        object.__setattr__(self, "_ends", tuple(part.range.end for part in parts))

    def holder(self, lp: int) -> PhysicalPartition:
        """The partition that holds a logical partition."""
        return self.partitions[bisect_right(self._ends, lp)]

    def partition(self, number: int) -> PhysicalPartition | None:
        """The partition with that number; None if this version has none."""
        return next((part for part in self.partitions if part.number == number), None)

    def overlapping(self, lps: LpRange) -> list[PhysicalPartition]:
        """The partitions that overlap a range, in order."""
        return [part for part in self.partitions if part.range.overlaps(lps)]

    def encode(self) -> bytes:
        found = {
            "version": self.version,
            "logical_partitions": self.logical_partitions,
            "next_number": self.next_number,
            "partitions": [part.to_json() for part in self.partitions],
        }
        return json.dumps(found, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Route:
        found = json.loads(data)
        parts = tuple(PhysicalPartition.of_json(each) for each in found["partitions"])
        return cls(found["version"], found["logical_partitions"], found["next_number"], parts)


class ChangeKind(Enum):
    """The kind of a change."""

    SPLIT = "split"
    MERGE = "merge"
    MOVE = "move"


class Phase(Enum):
    """The phase of a change. `qmq_ordering.changes` has the table of all transitions."""

    PREPARED = "prepared"
    SEALED = "sealed"
    PUBLISHED = "published"
    DONE = "done"


FENCED = -1
"""The value in `Change.sealed` for a partition that a fence closed: the sequence of its command
message is not known yet.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """The change from version `to_version` - 1 to `to_version`. `id` is never used twice; a request
    to seal a partition contains it.
    """

    id: str
    kind: ChangeKind
    to_version: int
    sources: tuple[int, ...]
    targets: tuple[PhysicalPartition, ...]
    phase: Phase = Phase.PREPARED
    sealed: Mapping[int, int] = field(default_factory=dict)
    """The sequence of the command message, or FENCED, for each closed source."""
    reason: str = ""
    """The principal that requested the change, and the reason, for `qmq route history`."""
    times_ms: Mapping[str, int] = field(default_factory=dict)
    """When the change entered each phase, by the metaserver's clock. For people only: no decision
    depends on these times.
    """

    def encode(self) -> bytes:
        found = {
            "id": self.id,
            "kind": self.kind.value,
            "to_version": self.to_version,
            "sources": list(self.sources),
            "targets": [part.to_json() for part in self.targets],
            "phase": self.phase.value,
            "sealed": {str(number): sequence for number, sequence in self.sealed.items()},
            "reason": self.reason,
            "times_ms": dict(self.times_ms),
        }
        return json.dumps(found, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Change:
        found = json.loads(data)
        return cls(
            found["id"],
            ChangeKind(found["kind"]),
            found["to_version"],
            tuple(found["sources"]),
            tuple(PhysicalPartition.of_json(each) for each in found["targets"]),
            Phase(found["phase"]),
            {int(number): sequence for number, sequence in found["sealed"].items()},
            found["reason"],
            found["times_ms"],
        )


_BITS: Final = 40
"""Loads are scaled to integers of this many bits, so that sums are exact in any order."""


def even_cuts(lps: LpRange, parts: int) -> list[int]:
    """Cut a range into `parts` parts whose widths differ by at most one. Raises InvalidArgument if
    the range is too narrow.
    """
    if not 1 <= parts <= lps.width:
        raise InvalidArgument(
            f"{lps} has {lps.width} logical partitions and cannot be cut into {parts} parts: "
            f"ask for 1 to {lps.width}"
        )
    return [lps.first + lps.width * each // parts for each in range(1, parts)]


def ranges_between(lps: LpRange, at: Sequence[int]) -> list[LpRange]:
    """The parts of a range between cut points."""
    return [LpRange(a, b) for a, b in pairwise([lps.first, *at, lps.end])]


def cut_by_load(lps: LpRange, load: Sequence[float], parts: int) -> list[int]:
    """The cut points by the rules of the module. `load[i]` is the load of logical partition
    `lps.first + i`, in any unit.

    Each part is at least one logical partition wide. Raises InvalidArgument if the range has no
    room for the parts, or if the loads are not one finite number of 0 or more for each logical
    partition.
    """
    cuts = even_cuts(lps, parts)
    if len(load) != lps.width or not all(isfinite(each) and each >= 0 for each in load):
        raise InvalidArgument(
            f"{lps} needs {lps.width} loads, finite and 0 or more; {len(load)} were given"
        )
    highest = max(load)
    if highest == 0 or parts == 1:
        return cuts
    exponent = _BITS - frexp(highest)[1]
    sums = [0, *accumulate(round(ldexp(each, exponent)) for each in load)]
    return [lps.first + cut for cut in _cuts(sums, parts, _lightest_maximum(sums, parts))]


def _lightest_maximum(sums: list[int], parts: int) -> int:
    """The smallest bound that needs no more than `parts` parts; `sums[i]` is the load before
    logical partition i.
    """
    low, high = max(b - a for a, b in pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _parts_needed(sums, middle) <= parts else (middle + 1, high)
    return low


def _parts_needed(sums: list[int], bound: int) -> int:
    at, needed = 0, 0
    while at < len(sums) - 1:
        at, needed = bisect_right(sums, sums[at] + bound) - 1, needed + 1
    return needed


def _cuts(sums: list[int], parts: int, bound: int) -> list[int]:
    width = len(sums) - 1
    earliest = [width] * (parts + 1)
    for i in range(parts - 1, 0, -1):
        earliest[i] = bisect_left(sums, sums[earliest[i + 1]] - bound)
    cuts, before = [], 0
    for i in range(1, parts):
        latest = min(width - (parts - i), bisect_right(sums, sums[before] + bound) - 1)
        before = _nearest_to_share(
            sums, before, max(earliest[i], before + 1), latest, parts - i + 1
        )
        cuts.append(before)
    return cuts


def _nearest_to_share(sums: list[int], before: int, earliest: int, latest: int, parts: int) -> int:
    """The cut in [earliest, latest] that gives the part behind `before` its equal share of the load
    that remains for `parts` parts.
    """
    share = (
        sums[before] * (parts - 1) + sums[-1]
    )  # multiplied by `parts`, so that all numbers are integers
    even = before * (parts - 1) + len(sums) - 1
    at = bisect_left(sums, -(-share // parts), earliest, latest + 1)
    # Cuts with the same load before them are equally good by load: the most even width wins.
    near = {
        _within(sums, sums[min(max(each, earliest), latest)], earliest, latest, even // parts)
        for each in (at - 1, at)
    }
    near |= {_within(sums, sums[each], earliest, latest, even // parts + 1) for each in near}
    return min(
        near, key=lambda each: (abs(sums[each] * parts - share), abs(each * parts - even), each)
    )


def _within(sums: list[int], value: int, earliest: int, latest: int, wanted: int) -> int:
    """The place nearest to `wanted` in [earliest,
    latest] with exactly the load `value` before it.
    """
    first = bisect_left(sums, value, earliest, latest + 1)
    last = bisect_right(sums, value, earliest, latest + 1) - 1
    return min(max(wanted, first), last)
