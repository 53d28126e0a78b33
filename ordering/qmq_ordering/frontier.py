"""A group's frontier: the version that the group reads in each range of logical partitions. Values only; `advance` moves the frontier.

Rules, checked whenever a Frontier is made: its pieces tile [0, N); neighbours of the same version are one piece.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from qmq.errors import InvalidArgument
from qmq_ordering.route import LpRange, PhysicalPartition


class Gate(Enum):
    """The condition under which a target of a change opens for a group."""

    STRICT = "strict"
    """A target opens when all sources of the change are finished."""
    LANES = "lanes"
    """A range of a target opens when the same range of its source is finished."""


class FrontierPiece(NamedTuple):
    """The group reads `version` in `range`."""

    range: LpRange
    version: int


class Readable(NamedTuple):
    """A range of a partition that is open for a group. `version` is the frontier's version in this range."""

    partition: PhysicalPartition
    range: LpRange
    version: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """A group's frontier. Raises InvalidArgument if its pieces break the rules of the module."""

    pieces: tuple[FrontierPiece, ...]

    def __post_init__(self) -> None:
        pieces = self.pieces
        is_tiled = bool(pieces) and pieces[0].range.first == 0 and all(a.range.end == b.range.first for a, b in pairwise(pieces))
        if not is_tiled or any(a.version == b.version for a, b in pairwise(pieces)) or any(p.range.width < 1 for p in pieces):
            raise InvalidArgument(f"a frontier's pieces tile all logical partitions, neighbours of one version joined: {pieces}")

    @property
    def version(self) -> int:
        """The group's version: the lowest version of any piece. The group has finished all older versions."""
        return min(piece.version for piece in self.pieces)

    @property
    def newest(self) -> int:
        """The highest version of any piece."""
        return max(piece.version for piece in self.pieces)

    def is_open(self, lps: LpRange, version: int) -> bool:
        """True if the group reads `version` in the whole range."""
        return any(piece.version == version and piece.range.contains(lps) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A consumer group of an ordered subject, as stored in `/qmq/routes/S/g/G`.

    `is_ready` is false while a new group is placed at the ends of its partitions (start "latest"), and during a reset: no consumer can
    attach then.
    """

    frontier: Frontier
    gate: Gate = Gate.LANES
    start: str = "earliest"
    is_ready: bool = True

    def encode(self) -> bytes:
        pieces = [[piece.range.first, piece.range.end, piece.version] for piece in self.frontier.pieces]
        found = {"frontier": pieces, "gate": self.gate.value, "start": self.start, "is_ready": self.is_ready}
        return json.dumps(found, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> GroupRecord:
        found = json.loads(data)
        frontier = Frontier(tuple(FrontierPiece(LpRange(first, end), version) for first, end, version in found["frontier"]))
        return cls(frontier, Gate(found["gate"]), found["start"], found["is_ready"])
