"""A route: which physical partition holds which logical partitions. Values only; `algebra` makes new ones.

Rules, checked whenever a Route is made:
* Its partitions tile [0, N): sorted by range, without gap or overlap.
* Numbers are 1 or more, below `next_number`, and each occurs once. A number is never used again in a later version.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

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
    """One version of a subject's route. Raises InvalidArgument if the rules of the module do not hold."""

    version: int
    logical_partitions: int
    next_number: int
    partitions: tuple[PhysicalPartition, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = self.partitions
        is_tiled = bool(parts) and parts[0].range.first == 0 and parts[-1].range.end == self.logical_partitions
        is_tiled = is_tiled and all(a.range.end == b.range.first for a, b in pairwise(parts)) and all(p.range.width > 0 for p in parts)
        numbers = {part.number for part in parts}
        if self.version < 1 or not is_tiled:
            raise InvalidArgument(f"the partitions of route version {self.version} do not tile [0, {self.logical_partitions}): {parts}")
        if len(numbers) < len(parts) or min(numbers) < 1 or max(numbers) >= self.next_number:
            raise InvalidArgument(f"route version {self.version} numbers its partitions {sorted(numbers)}; the next is {self.next_number}")
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
"""The value in `Change.sealed` for a partition that a fence closed: the sequence of its command message is not known yet."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change from version `to_version` - 1 to `to_version`. `id` is never used twice; a request to seal a partition contains it."""

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
    """When the change entered each phase, by the metaserver's clock. For people only: no decision depends on these times."""

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
