"""Moves a group from one version of a route to the next, and decides which ranges the group may read at each moment. Pure.

The rule that keeps order: a group reads version v + 1 in a range only when it has finished version v there. A range therefore goes through
the versions one at a time, however many there are and however quickly their command messages follow each other. `finished` decides each
step. It is called only for partitions that the change to v + 1 closed: a partition of both versions stays open.

Worked example, N = 1,000. Version 1 is partition 1; version 2 splits it into 2 [0, 500) and 3 [500, 1000); version 3 moves 2 to 4.

    frontier       gate    finished                       then
    [0, 1000) v1   strict  1 in [0, 500)                  nothing moves: [500, 1000) has messages left
    [0, 1000) v1   lanes   1 in [0, 500)                  [0, 500) v2, [500, 1000) v1: partition 2 is open, partition 3 is not
    [0, 500) v2, [500, 1000) v1   lanes   2 in all of it  [0, 500) v3, [500, 1000) v1: partition 4 is open

The gate may be changed at any time. From lanes to strict, ranges that are ahead stay open in their version and wait until the others have
caught up; then all ranges advance together. From strict to lanes, each finished range advances immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from qmq.errors import RouteChanged
from qmq_ordering.frontier import Frontier, FrontierPiece, Gate, Readable
from qmq_ordering.route import LpRange, PhysicalPartition, Route

Finished: TypeAlias = Callable[[int, LpRange], bool]
"""True if a group has finished a partition (by number) in a range: the partition is sealed, and all messages of the range are done. False
if that is unknown: missing progress does not count as done."""

Cuts: TypeAlias = Callable[[int], Sequence[LpRange]]
"""The ranges in which a group's progress in a partition is kept. They tile the partition's range; `finished` is called for each."""


def first_frontier(logical_partitions: int, version: int) -> Frontier:
    """A new group's frontier: the same version everywhere."""
    return Frontier((FrontierPiece(LpRange(0, logical_partitions), version),))


def readable(frontier: Frontier, routes: Mapping[int, Route]) -> tuple[Readable, ...]:
    """The partitions that are open for the group, by range: each partition of a piece's version, cut to the piece.

    A partition that several versions have may come more than once, once for each piece. Raises RouteChanged if a version is not known.
    """
    return tuple(
        Readable(part, part.range.cut(piece.range), piece.version)
        for piece in frontier.pieces
        for part in _route(routes, piece.version).overlapping(piece.range)
    )


def partitions_to_ask(frontier: Frontier, routes: Mapping[int, Route], latest: int) -> set[int]:
    """The partitions whose progress decides the next step. After the step, call this again with the new frontier."""
    behind = (piece for piece in frontier.pieces if piece.version < latest)
    return {part.number for piece in behind for part in _closed_in(piece, routes)}


def advance(
    frontier: Frontier, gate: Gate, routes: Mapping[int, Route], latest: int, finished: Finished, cuts: Cuts | None = None
) -> Frontier:
    """Make one step: each range moves by one version or stays. Returns the same frontier if nothing can move.

    strict: all ranges at the lowest version move when every partition that the next change closed is finished there.
    lanes: each range moves when it is finished, as finely as `cuts` says (default: each partition as a whole, within its piece).
    Raises RouteChanged if a version up to `latest` is not known.
    """
    if gate is Gate.STRICT:
        return _advance_together(frontier, routes, latest, finished)
    moved = [each for piece in frontier.pieces for each in _advance_piece(piece, routes, latest, finished, cuts)]
    return Frontier(_joined(moved))


def advance_fully(
    frontier: Frontier, gate: Gate, routes: Mapping[int, Route], latest: int, finished: Finished, cuts: Cuts | None = None
) -> list[Frontier]:
    """Make all possible steps. Returns the frontier after each step; empty if nothing moves."""
    steps = [frontier]
    while (following := advance(steps[-1], gate, routes, latest, finished, cuts)) != steps[-1]:
        steps.append(following)
    return steps[1:]


def left_behind(before: Frontier, after: Frontier, routes: Mapping[int, Route]) -> Iterator[tuple[PhysicalPartition, LpRange, int]]:
    """The closed partitions that the group leaves in a step of `advance`, each with the range and the version that it leaves there."""
    for piece in before.pieces:
        for moved in after.pieces:
            lps = piece.range.cut(moved.range)
            if lps.width > 0 and moved.version > piece.version:
                for part in _closed_in(FrontierPiece(lps, piece.version), routes):
                    yield part, part.range.cut(lps), piece.version


def _advance_together(frontier: Frontier, routes: Mapping[int, Route], latest: int, finished: Finished) -> Frontier:
    lowest = frontier.version
    pieces = [piece for piece in frontier.pieces if piece.version == lowest]
    if lowest >= latest or not all(finished(part.number, part.range.cut(p.range)) for p in pieces for part in _closed_in(p, routes)):
        return frontier
    return Frontier(_joined([FrontierPiece(p.range, lowest + 1) if p.version == lowest else p for p in frontier.pieces]))


def _advance_piece(
    piece: FrontierPiece, routes: Mapping[int, Route], latest: int, finished: Finished, cuts: Cuts | None
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
                moved.append(FrontierPiece(here, piece.version + (not is_asked or finished(part.number, here))))
    return moved


def _closed_in(piece: FrontierPiece, routes: Mapping[int, Route]) -> list[PhysicalPartition]:
    """The piece's partitions that the change to the next version closed."""
    after = {part.number for part in _route(routes, piece.version + 1).partitions}
    return [part for part in _route(routes, piece.version).overlapping(piece.range) if part.number not in after]


def _joined(pieces: Sequence[FrontierPiece]) -> tuple[FrontierPiece, ...]:
    """Join neighbouring pieces of the same version."""
    joined: list[FrontierPiece] = []
    for piece in pieces:
        if joined and joined[-1].version == piece.version:
            joined[-1] = FrontierPiece(LpRange(joined[-1].range.first, piece.range.end), piece.version)
        else:
            joined.append(piece)
    return tuple(joined)


def _route(routes: Mapping[int, Route], version: int) -> Route:
    found = routes.get(version)
    if found is None:
        raise RouteChanged(f"version {version} of the route is not known here yet: list the routes, then try again")
    return found
