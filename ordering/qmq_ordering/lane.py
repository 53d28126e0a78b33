"""A lane in an assignment: a partition and a range of its logical partitions, read under one version by one consumer. Values only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from qmq_ordering.route import LpRange


class Lane(NamedTuple):
    """A stream that one consumer reads in order: a range of a partition's logical partitions, or the whole partition."""

    partition: int
    range: LpRange
    group: str
    """The broker group of the partition."""
    version: int
    """The version of the group's frontier in this range."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The consumer that should read each lane: a request, which brokers grant by lane leases. `generation` grows with every change."""

    generation: int = 0
    lanes: tuple[tuple[Lane, str], ...] = ()
    """Each lane with its consumer, sorted by lane."""

    def of(self, consumer: str) -> tuple[Lane, ...]:
        return tuple(lane for lane, owner in self.lanes if owner == consumer)

    def encode(self) -> bytes:
        lanes = [[lane.partition, lane.range.first, lane.range.end, lane.group, lane.version, who] for lane, who in self.lanes]
        return json.dumps({"generation": self.generation, "lanes": lanes}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Assignment:
        found = json.loads(data)
        lanes = tuple((Lane(number, LpRange(a, b), group, version), who) for number, a, b, group, version, who in found["lanes"])
        return cls(found["generation"], lanes)
