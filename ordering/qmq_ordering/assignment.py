"""Assigns lanes to the consumers of a group: takes open ranges, returns lanes. Pure; the result does not depend on the order of the inputs.

Let there be R open ranges (`Readable`: a partition, cut to its open part) and C consumers.

* R >= C: ranges stay whole, and the consumers' numbers of ranges differ by one at most.
* R < C: ranges are cut. Each range gets one consumer; the others go, one by one, to the range that lacks most of its share. A range's share
  of the consumers is its share of the backlog (equal shares if there is no backlog). A range with n consumers is cut into n lanes of even
  width. A consumer is idle only if there are fewer logical partitions than consumers.

Lanes move only if they must. As long as all consumers are there, the open ranges are the same and no consumer is idle, the assignment
stays, however the backlogs change (only the version of a lane follows the frontier). Otherwise new lanes are made and dealt in this order:
first to the consumer that had most of the lane in the same partition; then to the consumer that had most of its logical partitions in
another one (a split's target goes to the reader of the source); the rest to the consumers with the fewest lanes, by name. So a consumer
that joins takes lanes from those with more than their share, one that leaves gives up only its own lanes, and a range that is cut into the
same number of lanes for the same consumers does not change.

Worked example. Partition 1 [0, 1000) is the only one; consumers x, y: 1 [0, 500) x, 1 [500, 1000) y. It is split, and z joins:

    x and y have finished nothing   R = 1, C = 3   [0, 333) x   [333, 666) z   [666, 1000) y
    x finishes [0, 333)             R = 2, C = 3   2 [0, 333) has a backlog of 100, 1 [333, 1000) of 900: their shares are 0.3 and 2.7
                                                   consumers, so 1 and 2: 2 [0, 333) x   1 [333, 666) z   1 [666, 1000) y; no lane moves
    all is finished                 R = 2, C = 3   2 [0, 500) and 3 [500, 1000), 50 and 50: shares 1.5 and 1.5; the first gets the third
                                                   2 [0, 250) x   2 [250, 500) z   3 [500, 1000) y
    z leaves                        R = 2, C = 2   2 [0, 500) x   3 [500, 1000) y
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qmq_ordering.frontier import Readable
from qmq_ordering.lane import Assignment, Lane
from qmq_ordering.range_cuts import even_cuts, ranges_between
from qmq_ordering.route import LpRange

Backlog: TypeAlias = Callable[[int, LpRange], float]
"""The number of messages that wait for the group in a range of a partition (by number); 0 if unknown."""

_Held: TypeAlias = dict[Lane, list[tuple[Lane, str]]]
"""Each open range as the lane that covers it, by range, with its lanes in the previous assignment."""

_Claim: TypeAlias = tuple[bool, int, int, str]
"""A consumer's claim to a lane, as a sort key: not the same partition, minus the shared width, the lane's place, the consumer."""


def assign(previous: Assignment, consumers: Sequence[str], open_lanes: Sequence[Readable], backlog: Backlog) -> Assignment:
    """Assign lanes to consumers by the rules of the module. Returns `previous` itself if nothing changes, otherwise the next generation.

    Every open range belongs to exactly one of `consumers`, unless there are none; no lane spans two open ranges.
    """
    living = sorted(set(consumers))
    opened = sorted(open_lanes, key=lambda each: (each.range, each.partition.number))
    held = {_whole(each): [pair for pair in previous.lanes if _is_part(pair[0], _whole(each))] for each in opened}
    if _fits(held, living):
        # No lane moves, but the frontier may have passed a version that did not change these lanes.
        dealt = sorted((lane._replace(version=whole.version), owner) for whole, pairs in held.items() for lane, owner in pairs)
    else:
        lanes = _cut(held, _shares(opened, len(living), backlog)) if living else []
        dealt = sorted(zip(lanes, _deal(lanes, living, previous), strict=True))
    return previous if tuple(dealt) == previous.lanes else Assignment(previous.generation + 1, tuple(dealt))


# --- what has to move ------------------------------------------------------------------------------------------------------


def _fits(held: _Held, living: list[str]) -> bool:
    """True if the previous lanes cover the open ranges, belong to living consumers, and are as even as a new assignment would be."""
    if not all(_is_evenly_cut(whole.range, pairs) for whole, pairs in held.items()):
        return False
    counts = Counter(owner for pairs in held.values() for _, owner in pairs)
    if not counts.keys() <= set(living):
        return False
    if len(living) > len(held):
        return counts.total() == min(len(living), sum(whole.range.width for whole in held)) and max(counts.values(), default=1) == 1
    each = [counts[name] for name in living]
    return counts.total() == len(held) and max(each, default=0) - min(each, default=0) <= 1


def _is_evenly_cut(lps: LpRange, pairs: list[tuple[Lane, str]]) -> bool:
    widths = [lane.range.width for lane, _ in pairs]
    return sum(widths) == lps.width and max(widths) - min(widths) <= 1


def _whole(opened: Readable) -> Lane:
    return Lane(opened.partition.number, opened.range, opened.partition.group, opened.version)


def _is_part(lane: Lane, whole: Lane) -> bool:
    return (lane.partition, lane.group) == (whole.partition, whole.group) and whole.range.contains(lane.range)


# --- the lanes -------------------------------------------------------------------------------------------------------------


def _cut(held: _Held, shares: list[int]) -> list[Lane]:
    """Cut the ranges into lanes. A range that already has the right number of even lanes keeps its cuts."""
    lanes = []
    for (whole, pairs), parts in zip(held.items(), shares, strict=True):
        is_cut = len(pairs) == parts and _is_evenly_cut(whole.range, pairs)
        ranges = [lane.range for lane, _ in pairs] if is_cut else ranges_between(whole.range, even_cuts(whole.range, parts))
        lanes += [whole._replace(range=lps) for lps in ranges]
    return lanes


def _shares(opened: list[Readable], consumers: int, backlog: Backlog) -> list[int]:
    """The number of consumers for each open range: one each, and the rest by largest remainder of the range's share of the backlog."""
    shares = [1] * len(opened)
    left = min(consumers, sum(each.range.width for each in opened)) - len(opened)
    if left <= 0:
        return shares
    weights = [max(0.0, backlog(each.partition.number, each.range)) for each in opened]
    total = sum(weights)
    wanted = [consumers * weight / total if total > 0 else consumers / len(opened) for weight in weights]
    for _ in range(left):
        lacking = (i for i, each in enumerate(opened) if shares[i] < each.range.width)
        neediest = max(lacking, key=lambda i: (wanted[i] - shares[i], -i))
        shares[neediest] += 1
    return shares


# --- consumers --------------------------------------------------------------------------------------------------------------


def _deal(lanes: list[Lane], living: list[str], previous: Assignment) -> list[str]:
    """The consumer of each lane. Counts differ by one at most, and as many consumers as possible keep their lanes."""
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
    """The claims of each consumer by lane. Lanes do not overlap, so a claim to the same partition is better than any other claim."""
    shared: Counter[tuple[bool, int, str]] = Counter()
    names = set(living)
    for held, name in previous.lanes:
        for place, lane in enumerate(lanes):
            if name in names and lane.range.overlaps(held.range):
                shared[lane.partition != held.partition, place, name] += lane.range.cut(held.range).width
    return [(is_other, -width, place, name) for (is_other, place, name), width in shared.items()]
