"""Cuts a range so that its parts have equal loads. Pure.

The cuts make the heaviest part as light as possible. Among such cuts, each part is as near as possible to an equal share of the remaining
load; a tie goes to the more even width. One hot logical partition therefore becomes a separate part if there are enough parts:

    load  1 1 100 1 1 in 3 parts    → 1 1 | 100 | 1 1      (2 parts do not help: the hot one is in either half)
    load  0 0 0 0 0 0 in 2 parts    → 0 0 0 | 0 0 0

The lightest possible maximum is found by bisection (a bound is possible if filling parts up to it from the left needs no more parts than
there are). Filling from the left gives the latest position of each cut under that bound, filling from the right the earliest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import frexp, isfinite, ldexp
from typing import Final

from qmq.errors import InvalidArgument
from qmq_ordering.routes import LpRange

_BITS: Final = 40
"""Loads are scaled to integers of this many bits, so that sums are exact in any order."""


def even_cuts(lps: LpRange, parts: int) -> list[int]:
    """Cut a range into `parts` parts whose widths differ by at most one. Raises InvalidArgument if the range is too narrow."""
    if not 1 <= parts <= lps.width:
        raise InvalidArgument(f"{lps} has {lps.width} logical partitions and cannot be cut into {parts} parts: ask for 1 to {lps.width}")
    return [lps.first + lps.width * each // parts for each in range(1, parts)]


def ranges_between(lps: LpRange, at: Sequence[int]) -> list[LpRange]:
    """The parts of a range between cut points."""
    return [LpRange(a, b) for a, b in pairwise([lps.first, *at, lps.end])]


def cut_by_load(lps: LpRange, load: Sequence[float], parts: int) -> list[int]:
    """The cut points by the rules of the module. `load[i]` is the load of logical partition `lps.first + i`, in any unit.

    Each part is at least one logical partition wide. Raises InvalidArgument if the range has no room for the parts, or if the loads are
    not one finite number of 0 or more for each logical partition.
    """
    cuts = even_cuts(lps, parts)
    if len(load) != lps.width or not all(isfinite(each) and each >= 0 for each in load):
        raise InvalidArgument(f"{lps} needs {lps.width} loads, finite and 0 or more; {len(load)} were given")
    highest = max(load)
    if highest == 0 or parts == 1:
        return cuts
    exponent = _BITS - frexp(highest)[1]
    sums = [0, *accumulate(round(ldexp(each, exponent)) for each in load)]
    return [lps.first + cut for cut in _cuts(sums, parts, _lightest_maximum(sums, parts))]


def _lightest_maximum(sums: list[int], parts: int) -> int:
    """The smallest bound that needs no more than `parts` parts; `sums[i]` is the load before logical partition i."""
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
        before = _nearest_to_share(sums, before, max(earliest[i], before + 1), latest, parts - i + 1)
        cuts.append(before)
    return cuts


def _nearest_to_share(sums: list[int], before: int, earliest: int, latest: int, parts: int) -> int:
    """The cut in [earliest, latest] that gives the part behind `before` its equal share of the load that remains for `parts` parts."""
    share = sums[before] * (parts - 1) + sums[-1]  # multiplied by `parts`, so that all numbers are integers
    even = before * (parts - 1) + len(sums) - 1
    at = bisect_left(sums, -(-share // parts), earliest, latest + 1)
    # Cuts with the same load before them are equally good by load: the most even width wins.
    near = {_within(sums, sums[min(max(each, earliest), latest)], earliest, latest, even // parts) for each in (at - 1, at)}
    near |= {_within(sums, sums[each], earliest, latest, even // parts + 1) for each in near}
    return min(near, key=lambda each: (abs(sums[each] * parts - share), abs(each * parts - even), each))


def _within(sums: list[int], value: int, earliest: int, latest: int, wanted: int) -> int:
    """The place nearest to `wanted` in [earliest, latest] with exactly the load `value` before it."""
    first = bisect_left(sums, value, earliest, latest + 1)
    last = bisect_right(sums, value, earliest, latest + 1) - 1
    return min(max(wanted, first), last)
