"""The brokers' answers about one group's lanes, in the form that the pure functions use. Pure. A broker that does not answer is missing
here, and its ranges count as not done: the group waits, and the lanes there stay as they were assigned. Only a broker's own `is_finished`
counts as finished, since only the broker knows what is committed and what retention deleted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from qmq_ordering.frontier import Frontier, Readable
from qmq_ordering.lane import Assignment
from qmq_ordering.route import LpRange, Route

from qmq.proto.v1 import control_pb2 as control

EVERYTHING: Final = LpRange(0, 1 << 32)
"""A range that contains every partition's range."""


def with_unwritten(
    answer: control.DescribeLanesResponse, request: control.DescribeLanesRequest, broker_group: str
) -> control.DescribeLanesResponse:
    """Add to an answer the partitions that were asked for and are missing in it: no message was ever written to them."""
    there = {each.partition for each in answer.partitions}
    for number in request.partitions:
        if number not in there:
            answer.partitions.add(subject=request.subject, partition=number, broker_group=broker_group)
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
        return [] if part is None else [each for each in part.parked if lps.first <= each.logical_partition < lps.end]

    def cuts(self, number: int) -> Sequence[LpRange]:
        """The ranges for which the broker keeps progress, and the gaps between them; together they cover the partition."""
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
        return sorted(LpRange(each.lps.first, each.lps.end) for each in progress if each.is_finished or not is_finished)

    def open_lanes(self, readable: Sequence[Readable], closed: Container[int], previous: Assignment) -> list[Readable]:
        """The lanes that may be read: the open ones without finished ranges; where the broker does not answer, the lanes as assigned
        before. `closed` are partitions with a successor. A sealed partition without a successor keeps its lanes: the successor's lanes
        follow in a moment, and their consumers must not get others meanwhile.
        """
        found: list[Readable] = []
        for each in readable:
            number = each.partition.number
            if number not in closed:
                found.append(each)
            elif self.knows(number):
                found += [each._replace(range=lps) for lps in _without(each.range, self._ranges(number, is_finished=True))]
            else:
                before = sorted(lane.range for lane, _ in previous.lanes if (lane.partition, lane.version) == (number, each.version))
                kept = [lps for lps in before if each.range.contains(lps)]
                found += [each._replace(range=lps) for lps in kept or [each.range]]
        return found

    def backlog(self, number: int, lps: LpRange) -> float:
        """The number of messages of the range that are not done, if they are spread evenly over the partition; 0 if unknown."""
        part = self._parts.get(number)
        if part is None:
            return 0.0
        ranges = {LpRange(each.lps.first, each.lps.end): each.done_before for each in part.progress}
        if not ranges:
            return float(part.next_sequence - part.start_sequence)
        return _backlog(part, ranges, lps)


def mark_passed(keys: Sequence[control.ParkedKey], frontier: Frontier, routes: Mapping[int, Route], silent: Container[str]) -> None:
    """Mark parked keys that newer messages may have overtaken: the group reads a later partition in which the key is not parked. Since
    parked keys are passed on with the route this happens only to keys parked by an older release.
    """
    places = {(each.key, each.partition) for each in keys}
    for each in keys:
        lp = each.logical_partition
        version = next((piece.version for piece in frontier.pieces if piece.range.first <= lp < piece.range.end), 0)
        later = (route.holder(lp) for number, route in routes.items() if number <= version)
        each.may_be_passed = any(
            part.number > each.partition and (each.key, part.number) not in places and part.group not in silent for part in later
        )


def _backlog(part: control.PartitionStatus, ranges: Mapping[LpRange, int], lps: LpRange) -> float:
    width = sum(each.width for each in ranges)
    shared = ((each.cut(lps).width, max(done_before, part.start_sequence)) for each, done_before in ranges.items())
    return sum(max(0, part.next_sequence - done_before) * overlap / width for overlap, done_before in shared if overlap > 0)


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
