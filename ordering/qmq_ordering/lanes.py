"""What a group reads, and which consumer reads it. Pure.

Lanes are assigned to the consumers of a group: open ranges in, lanes out; the result does not
depend on the order of the inputs. A lane is a partition and a range of its logical partitions, read
under one version by one consumer. Let there be R open ranges (`Readable`: a partition, cut to its
open part) and C consumers.

* R >= C: ranges stay whole, and the consumers' numbers of ranges differ by one at most.
* R < C: ranges are cut. Each range gets one consumer; the others go, one by one, to the range that
  lacks most of its share. A range's share of the consumers is its share of the backlog (equal
  shares if there is no backlog). A range with n consumers is cut into n lanes of even width. A
  consumer is idle only if there are fewer logical partitions than consumers.

Lanes move only if they must. As long as all consumers are there, the open ranges are the same and
no consumer is idle, the assignment stays, however the backlogs change (only the version of a lane
follows the frontier). Otherwise new lanes are made and dealt in this order: first to the consumer
that had most of the lane in the same partition; then to the consumer that had most of its logical
partitions in another one (a split's target goes to the reader of the source); the rest to the
consumers with the fewest lanes, by name. So a consumer that joins takes lanes from those with more
than their share, one that leaves gives up only its own lanes, and a range that is cut into the same
number of lanes for the same consumers does not change.

Worked example. Partition 1 [0, 1000) is the only one; consumers x, y: 1 [0, 500) x, 1 [500, 1000)
y. It is split, and z joins:

    x and y have finished nothing   R = 1, C = 3   [0, 333) x   [333, 666) z   [666, 1000) y
    x finishes [0, 333)             R = 2, C = 3   2 [0, 333) has a backlog of 100, 1 [333, 1000) of
                                                   900: their shares are 0.3 and 2.7 consumers, so 1
                                                   and 2; no lane moves
                                                   2 [0, 333) x   1 [333, 666) z   1 [666, 1000) y
    all is finished                 R = 2, C = 3   2 [0, 500) and 3 [500, 1000), 50 and 50: shares
                                                   1.5 and 1.5; the first gets the third
                                                   2 [0, 250) x   2 [250, 500) z   3 [500, 1000) y
    z leaves                        R = 2, C = 2   2 [0, 500) x   3 [500, 1000) y

A group's *frontier* is the version that it reads in each range of logical partitions. Its pieces
tile [0, N); neighbours of the same version are one piece. `advance` moves the frontier from one
version of a route to the next, and so decides which ranges the group may read. The rule that keeps
order: a group reads version v + 1 in a range only when it has finished version v there. A range
therefore goes through the versions one at a time, however many there are and however quickly their
command messages follow each other. `finished` decides each step. It is called only for partitions
that the change to v + 1 closed: a partition of both versions stays open.

Worked example, N = 1,000. Version 1 is partition 1; version 2 splits it into 2 [0, 500) and 3 [500,
1000); version 3 moves 2 to 4.

    frontier                      gate    finished       then
    [0, 1000) v1                  strict  1 in [0, 500)  nothing moves: [500, 1000) has messages
                                                         left
    [0, 1000) v1                  lanes   1 in [0, 500)  [0, 500) v2, [500, 1000) v1: partition 2 is
                                                         open, partition 3 is not
    [0, 500) v2, [500, 1000) v1   lanes   2 in all of    [0, 500) v3, [500, 1000) v1: partition 4 is
                                          it             open

The gate may be changed at any time. From lanes to strict, ranges that are ahead stay open in their
version and wait until the others have caught up; then all ranges advance together. From strict to
lanes, each finished range advances immediately.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from qmq.errors import InvalidArgument, RouteChanged
from qmq_ordering.routes import LpRange, PhysicalPartition, Route, even_cuts, ranges_between


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
    """A range of a partition that is open for a group.
    `version` is the frontier's version in this range.
    """

    partition: PhysicalPartition
    range: LpRange
    version: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """A group's frontier. Raises InvalidArgument if its pieces break the rules of the module."""

    pieces: tuple[FrontierPiece, ...]

    def __post_init__(self) -> None:
        pieces = self.pieces
        is_tiled = (
            bool(pieces)
            and pieces[0].range.first == 0
            and all(a.range.end == b.range.first for a, b in pairwise(pieces))
        )
        if (
            not is_tiled
            or any(a.version == b.version for a, b in pairwise(pieces))
            or any(p.range.width < 1 for p in pieces)
        ):
            raise InvalidArgument(
                "a frontier's pieces tile all logical partitions, neighbours of one version "
                f"joined: {pieces}"
            )

    @property
    def version(self) -> int:
        """The group's version: the lowest version of any piece.
        The group has finished all older versions.
        """
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

    `is_ready` is false while a new group is placed at the ends of its partitions (start "latest"),
    and during a reset: no consumer can attach then.
    """

    frontier: Frontier
    gate: Gate = Gate.LANES
    start: str = "earliest"
    is_ready: bool = True

    def encode(self) -> bytes:
        pieces = [
            [piece.range.first, piece.range.end, piece.version] for piece in self.frontier.pieces
        ]
        found = {
            "frontier": pieces,
            "gate": self.gate.value,
            "start": self.start,
            "is_ready": self.is_ready,
        }
        return json.dumps(found, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> GroupRecord:
        found = json.loads(data)
        frontier = Frontier(
            tuple(
                FrontierPiece(LpRange(first, end), version)
                for first, end, version in found["frontier"]
            )
        )
        return cls(frontier, Gate(found["gate"]), found["start"], found["is_ready"])


class Lane(NamedTuple):
    """A stream that one consumer reads in order: a range of a partition's logical partitions, or
    the whole partition.
    """

    partition: int
    range: LpRange
    group: str
    """The broker group of the partition."""
    version: int
    """The version of the group's frontier in this range."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The consumer that should read each lane: a request, which brokers grant by lane leases.
    `generation` grows with every change.
    """

    generation: int = 0
    lanes: tuple[tuple[Lane, str], ...] = ()
    """Each lane with its consumer, sorted by lane."""

    def of(self, consumer: str) -> tuple[Lane, ...]:
        return tuple(lane for lane, owner in self.lanes if owner == consumer)

    def encode(self) -> bytes:
        lanes = [
            [lane.partition, lane.range.first, lane.range.end, lane.group, lane.version, who]
            for lane, who in self.lanes
        ]
        return json.dumps({"generation": self.generation, "lanes": lanes}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Assignment:
        found = json.loads(data)
        lanes = tuple(
            (Lane(number, LpRange(a, b), group, version), who)
            for number, a, b, group, version, who in found["lanes"]
        )
        return cls(found["generation"], lanes)


ProducerBase: TypeAlias = Callable[[int, LpRange], float]
"""The number of messages that wait for the group in a range of a partition (by
number); 0 if unknown.
"""

_Held: TypeAlias = dict[Lane, list[tuple[Lane, str]]]
"""Each open range as the lane that covers it, by range,
with its lanes in the previous assignment.
"""

_Claim: TypeAlias = tuple[bool, int, int, str]
"""A consumer's claim to a lane, as a sort key: not the same partition, minus the shared width, the
lane's place, the consumer.
"""


def assign(
    previous: Assignment,
    consumers: Sequence[str],
    open_lanes: Sequence[Readable],
    backlog: ProducerBase,
) -> Assignment:
    """Assign lanes to consumers by the rules of the module. Returns `previous` itself if nothing
    changes, otherwise the next generation.

    Every open range belongs to exactly one of `consumers`, unless there are none; no lane spans two
    open ranges.
    """
    living = sorted(set(consumers))
    opened = sorted(open_lanes, key=lambda each: (each.range, each.partition.number))
    held = {
        _whole(each): [pair for pair in previous.lanes if _is_part(pair[0], _whole(each))]
        for each in opened
    }
    if _fits(held, living):
        # No lane moves, but the frontier may have passed a version that did not change these lanes.
        dealt = sorted(
            (lane._replace(version=whole.version), owner)
            for whole, pairs in held.items()
            for lane, owner in pairs
        )
    else:
        lanes = _cut(held, _shares(opened, len(living), backlog)) if living else []
        dealt = sorted(zip(lanes, _deal(lanes, living, previous), strict=True))
    return (
        previous
        if tuple(dealt) == previous.lanes
        else Assignment(previous.generation + 1, tuple(dealt))
    )


# --- what has to move -----------------------------------------------------------------------------


def _fits(held: _Held, living: list[str]) -> bool:
    """True if the previous lanes cover the open ranges, belong to living consumers, and are as even
    as a new assignment would be.
    """
    if not all(_is_evenly_cut(whole.range, pairs) for whole, pairs in held.items()):
        return False
    counts = Counter(owner for pairs in held.values() for _, owner in pairs)
    if not counts.keys() <= set(living):
        return False
    if len(living) > len(held):
        return (
            counts.total() == min(len(living), sum(whole.range.width for whole in held))
            and max(counts.values(), default=1) == 1
        )
    each = [counts[name] for name in living]
    return counts.total() == len(held) and max(each, default=0) - min(each, default=0) <= 1


def _is_evenly_cut(lps: LpRange, pairs: list[tuple[Lane, str]]) -> bool:
    widths = [lane.range.width for lane, _ in pairs]
    return sum(widths) == lps.width and max(widths) - min(widths) <= 1


def _whole(opened: Readable) -> Lane:
    return Lane(opened.partition.number, opened.range, opened.partition.group, opened.version)


def _is_part(lane: Lane, whole: Lane) -> bool:
    return (lane.partition, lane.group) == (whole.partition, whole.group) and whole.range.contains(
        lane.range
    )


# --- the lanes ------------------------------------------------------------------------------------


def _cut(held: _Held, shares: list[int]) -> list[Lane]:
    """Cut the ranges into lanes. A range that already has the right number of even
    lanes keeps its cuts.
    """
    lanes = []
    for (whole, pairs), parts in zip(held.items(), shares, strict=True):
        is_cut = len(pairs) == parts and _is_evenly_cut(whole.range, pairs)
        ranges = (
            [lane.range for lane, _ in pairs]
            if is_cut
            else ranges_between(whole.range, even_cuts(whole.range, parts))
        )
        lanes += [whole._replace(range=lps) for lps in ranges]
    return lanes


def _shares(opened: list[Readable], consumers: int, backlog: ProducerBase) -> list[int]:
    """The number of consumers for each open range: one each, and the rest by largest remainder of
    the range's share of the backlog.
    """
    shares = [1] * len(opened)
    left = min(consumers, sum(each.range.width for each in opened)) - len(opened)
    if left <= 0:
        return shares
    weights = [max(0.0, backlog(each.partition.number, each.range)) for each in opened]
    total = sum(weights)
    wanted = [
        consumers * weight / total if total > 0 else consumers / len(opened) for weight in weights
    ]
    for _ in range(left):
        lacking = (i for i, each in enumerate(opened) if shares[i] < each.range.width)
        neediest = max(lacking, key=lambda i: (wanted[i] - shares[i], -i))
        shares[neediest] += 1
    return shares


# --- consumers ------------------------------------------------------------------------------------


def _deal(lanes: list[Lane], living: list[str], previous: Assignment) -> list[str]:
    """The consumer of each lane. Counts differ by one at most, and as many consumers as possible
    keep their lanes.
    """
    owners = [""] * len(lanes)
    counts = dict.fromkeys(living, 0)
    each, extra = divmod(len(lanes), len(living) or 1)
    for _, _, place, name in sorted(_claims(lanes, living, previous)):
        is_extra = counts[name] == each
        if owners[place] or counts[name] > each or (is_extra and not extra):
            continue
        owners[place], counts[name], extra = name, counts[name] + 1, extra - is_extra
    for place, owner in enumerate(owners):
        if not owner:
            owners[place] = min(living, key=lambda name: (counts[name], name))
            counts[owners[place]] += 1
    return owners


def _claims(lanes: list[Lane], living: list[str], previous: Assignment) -> list[_Claim]:
    """The claims of each consumer by lane. Lanes do not overlap, so a claim to the same partition
    is better than any other claim.
    """
    shared: Counter[tuple[bool, int, str]] = Counter()
    names = set(living)
    for held, name in previous.lanes:
        for place, lane in enumerate(lanes):
            if name in names and lane.range.overlaps(held.range):
                shared[lane.partition != held.partition, place, name] += lane.range.cut(
                    held.range
                ).width
    return [(is_other, -width, place, name) for (is_other, place, name), width in shared.items()]


Finished: TypeAlias = Callable[[int, LpRange], bool]
"""True if a group has finished a partition (by number) in a range: the partition is sealed, and all
messages of the range are done. False if that is unknown: missing progress does not count as done.
"""

Cuts: TypeAlias = Callable[[int], Sequence[LpRange]]
"""The ranges in which a group's progress in a partition is kept. They tile the partition's range;
`finished` is called for each.
"""


def first_frontier(logical_partitions: int, version: int) -> Frontier:
    """A new group's frontier: the same version everywhere."""
    return Frontier((FrontierPiece(LpRange(0, logical_partitions), version),))


def readable(frontier: Frontier, routes: Mapping[int, Route]) -> tuple[Readable, ...]:
    """The partitions that are open for the group, by range: each partition of a piece's version,
    cut to the piece.

    A partition that several versions have may come more than once, once for each piece. Raises
    RouteChanged if a version is not known.
    """
    return tuple(
        Readable(part, part.range.cut(piece.range), piece.version)
        for piece in frontier.pieces
        for part in _route(routes, piece.version).overlapping(piece.range)
    )


def partitions_to_ask(frontier: Frontier, routes: Mapping[int, Route], latest: int) -> set[int]:
    """The partitions whose progress decides the next step. After the step, call this again with the
    new frontier.
    """
    behind = (piece for piece in frontier.pieces if piece.version < latest)
    return {part.number for piece in behind for part in _closed_in(piece, routes)}


def advance(
    frontier: Frontier,
    gate: Gate,
    routes: Mapping[int, Route],
    latest: int,
    finished: Finished,
    cuts: Cuts | None = None,
) -> Frontier:
    """Make one step: each range moves by one version or stays. Returns the same frontier if nothing
    can move.

    strict: all ranges at the lowest version move when every partition that the next change closed
    is finished there. lanes: each range moves when it is finished, as finely as `cuts` says
    (default: each partition as a whole, within its piece). Raises RouteChanged if a version up to
    `latest` is not known.
    """
    if gate is Gate.STRICT:
        return _advance_together(frontier, routes, latest, finished)
    moved = [
        each
        for piece in frontier.pieces
        for each in _advance_piece(piece, routes, latest, finished, cuts)
    ]
    return Frontier(_joined(moved))


def left_behind(
    before: Frontier, after: Frontier, routes: Mapping[int, Route]
) -> Iterator[tuple[PhysicalPartition, LpRange, int]]:
    """The closed partitions that the group leaves in a step of `advance`, each with the range and
    the version that it leaves there.
    """
    for piece in before.pieces:
        for moved in after.pieces:
            lps = piece.range.cut(moved.range)
            if lps.width > 0 and moved.version > piece.version:
                for part in _closed_in(FrontierPiece(lps, piece.version), routes):
                    yield part, part.range.cut(lps), piece.version


def _advance_together(
    frontier: Frontier, routes: Mapping[int, Route], latest: int, finished: Finished
) -> Frontier:
    lowest = frontier.version
    pieces = [piece for piece in frontier.pieces if piece.version == lowest]
    if lowest >= latest or not all(
        finished(part.number, part.range.cut(p.range))
        for p in pieces
        for part in _closed_in(p, routes)
    ):
        return frontier
    return Frontier(
        _joined(
            [
                FrontierPiece(p.range, lowest + 1) if p.version == lowest else p
                for p in frontier.pieces
            ]
        )
    )


def _advance_piece(
    piece: FrontierPiece,
    routes: Mapping[int, Route],
    latest: int,
    finished: Finished,
    cuts: Cuts | None,
) -> list[FrontierPiece]:
    if piece.version >= latest:
        return [piece]
    closed = {part.number for part in _closed_in(piece, routes)}
    moved = []
    for part in _route(routes, piece.version).overlapping(piece.range):
        is_asked = part.number in closed
        for lps in cuts(part.number) if is_asked and cuts is not None else [part.range]:
            here = lps.cut(part.range).cut(piece.range)
            if here.width > 0:
                moved.append(
                    FrontierPiece(
                        here, piece.version + (not is_asked or finished(part.number, here))
                    )
                )
    return moved


def _closed_in(piece: FrontierPiece, routes: Mapping[int, Route]) -> list[PhysicalPartition]:
    """The piece's partitions that the change to the next version closed."""
    after = {part.number for part in _route(routes, piece.version + 1).partitions}
    return [
        part
        for part in _route(routes, piece.version).overlapping(piece.range)
        if part.number not in after
    ]


def _joined(pieces: Sequence[FrontierPiece]) -> tuple[FrontierPiece, ...]:
    """Join neighbouring pieces of the same version."""
    joined: list[FrontierPiece] = []
    for piece in pieces:
        if joined and joined[-1].version == piece.version:
            joined[-1] = FrontierPiece(
                LpRange(joined[-1].range.first, piece.range.end), piece.version
            )
        else:
            joined.append(piece)
    return tuple(joined)


def _route(routes: Mapping[int, Route], version: int) -> Route:
    found = routes.get(version)
    if found is None:
        raise RouteChanged(
            f"version {version} of the route is not known here yet: list the routes, then try again"
        )
    return found
