"""A round of a consumer group of an ordered subject: it advances the group's frontier, and assigns
the lanes to consumers.

    1. read the assignment, then the group's record, then the routes
    2. ask the brokers whether the partitions before the frontier are finished
    3. pass parked keys on to the partitions that follow
    4. move the frontier one step by compare-and-swap; repeat from 2 while the frontier moves
    5. assign the open lanes to live consumers by compare-and-swap

Any metaserver may run rounds at any time. The swap compares with the record that was read before
the brokers were asked, so an answer counts only for the frontier that was asked about: after a
reset in between, the swap fails. If an answer of the store is lost, the next round reads the
outcome.

A key that is parked in a partition which the group leaves is parked in the following partitions
*before* the swap opens them, so no newer message of the key is delivered. A partition whose broker
cannot be reached does not open. If the swap fails, the next round passes the keys on again, and may
find fewer of them.

This module awaits only the store, the brokers, and the clock and timers that it is given, so that
the simulator can run it.

The brokers' answers about one group's lanes get the form that the pure functions use. A broker that
does not answer is missing there, and its ranges count as not done: the group waits, and the lanes
there stay as they were assigned. Only a broker's own `is_finished` counts as finished, since only
the broker knows what is committed and what retention deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from qmq_coordination.coordination_store import KeyValue, Put, absent, unchanged
from qmq_coordination.ordered_records import MemberRecord, assignment_key, member_key
from qmq_ordering.lanes import (
    Assignment,
    Frontier,
    GroupRecord,
    Readable,
    advance,
    assign,
    left_behind,
    partitions_to_ask,
    readable,
)
from qmq_ordering.routes import LpRange, PhysicalPartition, Route

from qmq.errors import CoordinationUnknown, QmqError
from qmq.meta.calls import PartitionMasters
from qmq.meta.ordered.changes import Arrow, nowhere
from qmq.meta.ordered.groups import Records
from qmq.proto.v1 import control_pb2 as control
from qmq.wire.parked_pages import by_ranges

EVERYTHING: Final = LpRange(0, 1 << 32)
"""A range that contains every partition's range."""


def with_unwritten(
    answer: control.DescribeLanesResponse, request: control.DescribeLanesRequest, broker_group: str
) -> control.DescribeLanesResponse:
    """Add to an answer the partitions that were asked for and are missing in it: no message was
    ever written to them.
    """
    there = {each.partition for each in answer.partitions}
    for number in request.partitions:
        if number not in there:
            answer.partitions.add(
                subject=request.subject, partition=number, broker_group=broker_group
            )
    return answer


class GroupLaneProgress:
    """The answers by partition. `add` takes one."""

    def __init__(self) -> None:
        self._parts: dict[int, control.PartitionStatus] = {}

    def add(self, answer: control.DescribeLanesResponse) -> None:
        """Add an answer."""
        self._parts.update({each.partition: each for each in answer.partitions})

    def forget(self, number: int) -> None:
        """Drop the known progress of a partition, so that its broker is asked again."""
        self._parts.pop(number, None)

    def knows(self, number: int) -> bool:
        """True if the partition's broker group answered."""
        return number in self._parts

    def is_finished(self, number: int, lps: LpRange) -> bool:
        """True if the broker reports that the whole range is finished."""
        at = lps.first
        for each in self._ranges(number, is_finished=True):
            if each.first <= at < each.end:
                at = each.end
        return at >= lps.end

    def parked(self, number: int, lps: LpRange) -> list[control.ParkedKey]:
        """The group's parked keys in a range, from the answer of the partition's broker group."""
        part = self._parts.get(number)
        return (
            []
            if part is None
            else [each for each in part.parked if lps.first <= each.logical_partition < lps.end]
        )

    def cuts(self, number: int) -> Sequence[LpRange]:
        """The ranges for which the broker keeps progress, and the gaps between them; together they
        cover the partition.
        """
        found: list[LpRange] = []
        at = EVERYTHING.first
        for each in self._ranges(number):
            if each.first > at:
                found.append(LpRange(at, each.first))
            found.append(each)
            at = each.end
        return [*found, LpRange(at, EVERYTHING.end)]

    def _ranges(self, number: int, *, is_finished: bool = False) -> list[LpRange]:
        part = self._parts.get(number)
        progress: Iterable[control.LaneProgress] = () if part is None else part.progress
        return sorted(
            LpRange(each.lps.first, each.lps.end)
            for each in progress
            if each.is_finished or not is_finished
        )

    def open_lanes(
        self, readable: Sequence[Readable], closed: Container[int], previous: Assignment
    ) -> list[Readable]:
        """The lanes that may be read: the open ones without finished ranges; where the broker does
        not answer, the lanes as assigned before. `closed` are partitions with a successor. A sealed
        partition without a successor keeps its lanes: the successor's lanes follow in a moment, and
        their consumers must not get others meanwhile.
        """
        found: list[Readable] = []
        for each in readable:
            number = each.partition.number
            if number not in closed:
                found.append(each)
            elif self.knows(number):
                found += [
                    each._replace(range=lps)
                    for lps in _without(each.range, self._ranges(number, is_finished=True))
                ]
            else:
                before = sorted(
                    lane.range
                    for lane, _ in previous.lanes
                    if (lane.partition, lane.version) == (number, each.version)
                )
                kept = [lps for lps in before if each.range.contains(lps)]
                found += [each._replace(range=lps) for lps in kept or [each.range]]
        return found

    def backlog(self, number: int, lps: LpRange) -> float:
        """The number of messages of the range that are not done, if they are spread evenly over the
        partition; 0 if unknown.
        """
        part = self._parts.get(number)
        if part is None:
            return 0.0
        ranges = {LpRange(each.lps.first, each.lps.end): each.done_before for each in part.progress}
        if not ranges:
            return float(part.next_sequence - part.start_sequence)
        return _backlog(part, ranges, lps)


def mark_passed(
    keys: Sequence[control.ParkedKey],
    frontier: Frontier,
    routes: Mapping[int, Route],
    silent: Container[str],
) -> None:
    """Mark parked keys that newer messages may have overtaken: the group reads a later partition in
    which the key is not parked. Since parked keys are passed on with the route this happens only to
    keys parked by an older release.
    """
    places = {(each.key, each.partition) for each in keys}
    for each in keys:
        lp = each.logical_partition
        version = next(
            (
                piece.version
                for piece in frontier.pieces
                if piece.range.first <= lp < piece.range.end
            ),
            0,
        )
        later = (route.holder(lp) for number, route in routes.items() if number <= version)
        each.may_be_passed = any(
            part.number > each.partition
            and (each.key, part.number) not in places
            and part.group not in silent
            for part in later
        )


def _backlog(part: control.PartitionStatus, ranges: Mapping[LpRange, int], lps: LpRange) -> float:
    width = sum(each.width for each in ranges)
    shared = (
        (each.cut(lps).width, max(done_before, part.start_sequence))
        for each, done_before in ranges.items()
    )
    return sum(
        max(0, part.next_sequence - done_before) * overlap / width
        for overlap, done_before in shared
        if overlap > 0
    )


def _without(lps: LpRange, taken: Sequence[LpRange]) -> list[LpRange]:
    """The parts of a range outside another one."""
    left, at = [], lps.first
    for each in taken:
        if each.overlaps(lps):
            if each.first > at:
                left.append(LpRange(at, each.first))
            at = max(at, each.end)
    if at < lps.end:
        left.append(LpRange(at, lps.end))
    return left


_T = TypeVar("_T")
log = logging.getLogger("qmq.meta")


Gather = Callable[[Iterable[Awaitable[Any]]], Awaitable[list[Any]]]
"""Awaits several calls and returns the results, in order: in production at the same time, in the
simulator one by one.
"""


async def one_by_one(asked: Iterable[Awaitable[_T]]) -> list[_T]:
    return [await each for each in asked]


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The result of a round."""

    version: int = 0
    """The group's version; 0 if there is no such group."""
    steps: int = 0
    """The number of the frontier's moves."""
    is_assigned: bool = False
    """True if the lanes were assigned again."""
    is_lost: bool = False
    """Another metaserver changed the same key, or an answer of the store was lost: run a round
    again, after a random pause.
    """
    is_ready: bool = True
    """True if the group may be read; see `GroupRecord`."""
    silent: frozenset[str] = frozenset()
    """Broker groups that did not answer."""


class GroupRounds:
    def __init__(
        self,
        records: Records,
        lanes: PartitionMasters,
        *,
        arrow: Arrow = nowhere,
        gather: Gather = one_by_one,
    ) -> None:
        self._records = records
        self._store = records.store
        self._lanes = lanes
        self._arrow = arrow
        self._gather = gather

    async def round(self, subject: str, group: str) -> RoundOutcome:
        """Run one round. Raises CoordinationError."""
        # The assignment is read first: another writer from now on knows at least what is read
        # below, and our swap will fail.
        assigned = await self._store.get(assignment_key(subject, group))
        found = await self._records.find(subject, group)
        if found is None:
            return RoundOutcome()
        item, record = found
        if not record.is_ready:
            return RoundOutcome(record.frontier.version, is_ready=False)
        current = _Round(subject, group, item, record, await self._records.latest(subject))
        is_lost = not await self._advance(current)
        is_assigned = False
        if not is_lost:
            is_assigned, is_lost = await self._assign(current, assigned)
        return RoundOutcome(
            current.record.frontier.version,
            current.steps,
            is_assigned,
            is_lost,
            silent=frozenset(current.silent),
        )

    # --- the frontier -----------------------------------------------------------------------------

    async def _advance(self, current: _Round) -> bool:
        """Advance step by step, until the frontier does not move. False if the swap was lost."""
        while True:
            await self._learn(current)
            after = current.following()
            if after == current.record.frontier:
                return True
            if not await self._hand_on(current, after):
                continue
            record = GroupRecord(after, current.record.gate, current.record.start)
            await self._arrow("before advance")
            item = await self._records.swap(current.item, record)
            await self._arrow("behind advance")
            if item is None:
                return False
            current.item, current.record, current.steps = item, record, current.steps + 1

    async def _hand_on(self, current: _Round, after: Frontier) -> bool:
        """Park the keys of a partition also in its successors, before the frontier moves there.
        False if a broker group did not answer: the frontier waits there.
        """
        await self._arrow("before inherit")
        requests = current.inheritances(after)
        done: list[bool] = await self._gather([self._inherit(each, current) for each in requests])
        current.waiting |= {
            each.source for each, is_done in zip(requests, done, strict=True) if not is_done
        }
        await self._arrow("behind inherit")
        return all(done)

    async def _inherit(self, inheritance: _Inheritance, current: _Round) -> bool:
        target, lps = inheritance.target, inheritance.lps
        request = control.InheritParkedRequest(
            subject=current.subject,
            group=current.group,
            partition=target.number,
            lps=control.LpRange(first=lps.first, end=lps.end),
            keys=inheritance.keys,
            record_revision=current.item.mod_revision,
        )
        try:
            await self._lanes.inherit_parked(target.group, request)
        except QmqError as failure:
            log.warning(
                "recording the parked keys of group %s of %s in partition %d failed: %s",
                current.group,
                current.subject,
                target.number,
                failure,
            )
            return False
        current.progress.forget(target.number)
        return True

    async def _learn(self, current: _Round) -> None:
        """Ask the brokers for the progress that decides the next step, and for the open lanes."""
        frontier = current.record.frontier
        # A step needs one version beyond the open ones only; a group that is far behind must not
        # read all versions in between.
        newest = max(frontier.newest, min(current.latest, frontier.newest + 1))
        current.routes = await self._records.routes(
            current.subject, frontier.version, newest, current.routes
        )
        parts = {
            part.number: part for route in current.routes.values() for part in route.partitions
        }
        numbers = partitions_to_ask(frontier, current.routes, current.latest)
        numbers |= {each.partition.number for each in readable(frontier, current.routes)}
        await self._ask(current, [parts[number] for number in sorted(numbers)])

    async def _ask(self, current: _Round, parts: Iterable[PhysicalPartition]) -> None:
        wanted: dict[str, list[int]] = {}
        for part in parts:
            if not current.progress.knows(part.number) and part.group not in current.silent:
                wanted.setdefault(part.group, []).append(part.number)
        asked = [self._describe(current, name, numbers) for name, numbers in wanted.items()]
        for name, answer in zip(wanted, await self._gather(asked), strict=True):
            if answer is None:
                current.silent.add(name)
            else:
                current.progress.add(answer)

    async def _describe(
        self, current: _Round, name: str, numbers: list[int]
    ) -> control.DescribeLanesResponse | None:
        """Ask a broker for its progress. None if the broker does not answer, so that no range there
        counts as finished.
        """
        request = control.DescribeLanesRequest(
            subject=current.subject, partitions=numbers, group=current.group, with_parked=True
        )
        try:
            return with_unwritten(await self._lanes.describe_lanes(name, request), request, name)
        except QmqError:
            return None

    # --- the assignment ---------------------------------------------------------------------------

    async def _assign(self, current: _Round, item: KeyValue | None) -> tuple[bool, bool]:
        """Assign the lanes. Returns two booleans: the assignment changed, and the swap was lost."""
        prefix = member_key(current.subject, current.group, "")
        members = [
            MemberRecord.decode(each.value).consumer
            for each in (await self._store.list(prefix)).items
        ]
        previous = Assignment() if item is None else Assignment.decode(item.value)
        closed = partitions_to_ask(current.record.frontier, current.routes, current.latest)
        lanes = current.progress.open_lanes(
            readable(current.record.frontier, current.routes), closed, previous
        )
        after = assign(previous, members, lanes, current.progress.backlog)
        if after == previous:
            return False, False
        key = assignment_key(current.subject, current.group)
        await self._arrow("before assign")
        try:
            done = await self._store.txn(
                [absent(key) if item is None else unchanged(item)], [Put(key, after.encode())]
            )
        except CoordinationUnknown:
            return False, True
        await self._arrow("behind assign")
        return done.succeeded, not done.succeeded


class _Inheritance(NamedTuple):
    """Keys that are parked in partition `source` and lie in the range of a successor."""

    source: int
    target: PhysicalPartition
    lps: LpRange
    keys: list[control.ParkedKey]


class _Round:
    """The answers that a round gathered."""

    def __init__(
        self, subject: str, group: str, item: KeyValue, record: GroupRecord, latest: int
    ) -> None:
        self.subject = subject
        self.group = group
        self.item = item
        self.record = record
        self.latest = latest
        self.routes: dict[int, Route] = {}
        self.progress = GroupLaneProgress()
        self.silent: set[str] = set()
        self.waiting: set[int] = set()
        """The partitions that the group does not leave in this round, because a successor's broker
        group did not answer. That broker group must first know the parked keys.
        """
        self.steps = 0

    def following(self) -> Frontier:
        """The frontier after one step; the same if no range can move."""
        record, progress = self.record, self.progress
        return advance(
            record.frontier, record.gate, self.routes, self.latest, self._is_left, progress.cuts
        )

    def _is_left(self, number: int, lps: LpRange) -> bool:
        return number not in self.waiting and self.progress.is_finished(number, lps)

    def inheritances(self, after: Frontier) -> list[_Inheritance]:
        """The parked keys to pass on to new partitions before the frontier becomes `after`."""
        found = []
        for source, lps, version in left_behind(self.record.frontier, after, self.routes):
            for target in self.routes[version + 1].overlapping(lps):
                mine = lps.cut(target.range)
                keys = self.progress.parked(source.number, mine)
                if keys:
                    found += [
                        _Inheritance(source.number, target, *each) for each in by_ranges(mine, keys)
                    ]
        return found
