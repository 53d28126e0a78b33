"""Deduces an ordered subject's routes from what broker groups have in their logs. Pure.

The logs say of each partition its broker group, the logical partitions of its messages and of its groups' lanes, and the version that
closed it, if one did. The rules of routes (qmq_ordering/algebra.py) give the rest:

* version 1 divides [0, N) evenly, and numbers its partitions from 1;
* version v replaces the partitions that it closed by the next numbers, within the same ranges, in the order of the ranges.

A cut between two partitions is known as exactly as the messages and lanes beside it. Where there are none on either side, any cut is as
good: there is nothing whose order it could break.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from qmq_ordering.algebra import first_route
from qmq_ordering.route import Change, ChangeKind, LpRange, Phase, PhysicalPartition, Route

from qmq.errors import InvalidArgument

LP_BITS = 32


@dataclass(frozen=True, slots=True)
class PartitionEvidence:
    """The information in the logs about one partition. `hull` is the smallest range with all logical partitions in the logs; None without
    any.
    """

    number: int
    group: str
    hull: LpRange | None = None
    sealed: tuple[int, str, int] | None = None
    """The sequence of the command message, the change's id, and the version after the change."""

    def fits(self, lps: LpRange) -> bool:
        return self.hull is None or lps.contains(self.hull)


class CountEvidence:
    """The number N of logical partitions, from keys' hashes and their logical partitions: LP = (m * N) >> 32."""

    def __init__(self) -> None:
        self.least, self.most = 1, 1 << 16

    def add(self, hashed: int, lp: int) -> None:
        """`hashed` is m of qmq_ordering/hashing.py."""
        if hashed:
            self.least = max(self.least, -(-(lp << LP_BITS) // hashed))
            self.most = min(self.most, (((lp + 1) << LP_BITS) - 1) // hashed)

    def count(self, usual: int) -> int:
        """N; if the keys allow several numbers, the usual one. Raises InvalidArgument."""
        if self.least == self.most:
            return self.least
        if self.least <= usual <= self.most:
            return usual
        raise InvalidArgument(f"its number of logical partitions is between {self.least:,} and {self.most:,}: too few keys were seen")


@dataclass(frozen=True, slots=True)
class DeducedRoutes:
    """All versions of a subject's route, and the changes between them."""

    routes: tuple[Route, ...]
    changes: tuple[Change, ...]


def deduce(count: int, found: Mapping[int, PartitionEvidence]) -> DeducedRoutes:
    """The routes that explain the logs, with N = `count`. Raises InvalidArgument if no routes do."""
    highest = max(found)
    anywhere = found[min(found)].group
    known = {number: found.get(number, PartitionEvidence(number, anywhere)) for number in range(1, highest + 1)}
    failure = InvalidArgument("no first route explains its partitions")
    for first in range(min(highest, count), 0, -1):
        try:
            return _deduce(count, known, first)
        except InvalidArgument as cause:
            failure = cause
    raise failure


def _deduce(count: int, known: Mapping[int, PartitionEvidence], first: int) -> DeducedRoutes:
    even = first_route(count, first, ["any"])
    parts = tuple(PhysicalPartition(each.number, each.range, known[each.number].group) for each in even.partitions)
    if not all(known[each.number].fits(each.range) for each in parts):
        raise InvalidArgument(f"its partitions 1 to {first} do not divide the keys evenly")
    routes, changes = [Route(1, count, first + 1, parts)], []
    last = max((each.sealed[2] for each in known.values() if each.sealed is not None), default=1)
    for version in range(2, last + 1):
        change = _change(routes[-1], known, version)
        left = [each for each in routes[-1].partitions if each.number not in change.sources]
        following = tuple(sorted([*left, *change.targets], key=lambda each: each.range))
        routes.append(Route(version, count, routes[-1].next_number + len(change.targets), following))
        changes.append(change)
    if routes[-1].next_number <= max(known):
        raise InvalidArgument(f"nothing explains its partition {routes[-1].next_number}")
    closed = [each.number for each in routes[-1].partitions if each.number in known and known[each.number].sealed is not None]
    if closed:
        raise InvalidArgument(f"its partitions {closed} are closed and have no successors")
    return DeducedRoutes(tuple(routes), tuple(changes))


def _change(route: Route, known: Mapping[int, PartitionEvidence], version: int) -> Change:
    """The change that led to a version. Its partitions are closed, so the change is published."""
    sources = [each for each in route.partitions if each.number in known and _closed_by(known[each.number], version)]
    if not sources or any(a.range.end != b.range.first for a, b in pairwise(sources)):
        raise InvalidArgument(f"no adjacent partitions were closed for version {version}")
    region = LpRange(sources[0].range.first, sources[-1].range.end)
    targets = _targets(route.next_number, region, known, most=1 if len(sources) > 1 else region.width)
    if not targets:
        targets = [PartitionEvidence(route.next_number, sources[0].group)]
    ranges = _cut(region, targets)
    kind = ChangeKind.MERGE if len(sources) > 1 else ChangeKind.SPLIT if len(targets) > 1 else ChangeKind.MOVE
    seals = {each.number: known[each.number].sealed for each in sources}
    return Change(
        next(sealed[1] for sealed in seals.values() if sealed is not None),
        kind,
        version,
        tuple(seals),
        tuple(PhysicalPartition(each.number, lps, each.group) for each, lps in zip(targets, ranges, strict=True)),
        Phase.PUBLISHED,
        {number: sealed[0] for number, sealed in seals.items() if sealed is not None},
        "rebuilt from the brokers' logs",
    )


def _closed_by(found: PartitionEvidence, version: int) -> bool:
    return found.sealed is not None and found.sealed[2] == version


def _targets(number: int, region: LpRange, known: Mapping[int, PartitionEvidence], most: int) -> list[PartitionEvidence]:
    """The next partitions that lie in a region one after another."""
    found: list[PartitionEvidence] = []
    end = region.first
    while number in known and len(found) < most:
        hull = known[number].hull
        if hull is not None and (hull.first < end or hull.end > region.end):
            break
        end = end if hull is None else hull.end
        found.append(known[number])
        number += 1
    return found


def _cut(region: LpRange, parts: list[PartitionEvidence]) -> list[LpRange]:
    """A range for each partition, in order, that contains the partition's hull. Raises InvalidArgument if the ranges do not fit."""
    found: list[LpRange] = []
    first = region.first
    for at, part in enumerate(parts):
        behind = parts[at + 1 :]
        hull_at = next((place for place, each in enumerate(behind) if each.hull is not None), None)
        limit = region.end - len(behind) if hull_at is None else behind[hull_at].hull.first - hull_at  # type: ignore[union-attr]
        end = region.end if not behind else limit if part.hull is None else part.hull.end
        if not first < end <= (limit if behind else region.end):
            raise InvalidArgument(f"its partition {part.number} has keys that do not fit into {region}")
        found.append(LpRange(first, end))
        first = end
    return found
