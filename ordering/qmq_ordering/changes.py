"""Changes of routes: the phases of a change as one table, and the routes that result. Pure.

A change is a record in the coordination store, and any metaserver continues a record that another
one left unfinished. `step` returns the changed record; its caller compares and puts. A step that
the table does not have is a bug in the program, so `step` asserts.

Routes are made from routes: the first one, split, merge and move, and the application of a change
to its route. A change is computed for one route and names the version that follows; `next_route`
applies the change to that route only. New partitions get their numbers from `route.next_number` on,
and no number is used twice. The range and the broker group of a partition with a given number
therefore never change.

Worked example, N = 1,000:

    first_route(1000, 2, ["a", "b"])           version 1:  1 [0, 500) a   2 [500, 1000) b
    split(route, 2, [600], groups=["b", "c"])  version 2:  1 [0, 500) a   3 [500, 600) b
                                                           4 [600, 1000) c
    merge(route, [3, 1])                       version 3:  5 [0, 600) a   4 [600, 1000) c
    move(route, 4, "a")                        version 4:  5 [0, 600) a   6 [600, 1000) a
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Final, TypeAlias

from qmq.errors import InvalidArgument, RouteConflict, UnknownPartition
from qmq.model import check_name
from qmq_ordering.routes import (
    FENCED,
    Change,
    ChangeKind,
    LpRange,
    Phase,
    PhysicalPartition,
    Route,
    cut_by_load,
    even_cuts,
    ranges_between,
)


class PhaseEvent(Enum):
    """An event of a change."""

    SOURCE_SEALED = "a source is closed"
    """The master reported the sequence of the command message, or a fence was put (FENCED)."""
    ALL_SEALED = "all are closed"
    PUBLISHED = "the next version is the latest"
    EVERY_GROUP_ADVANCED = "every group has it"


_SEALED: Final = PhaseEvent.SOURCE_SEALED

TRANSITIONS: Final[Mapping[tuple[Phase, PhaseEvent], Phase]] = {
    (Phase.PREPARED, _SEALED): Phase.PREPARED,
    (Phase.PREPARED, PhaseEvent.ALL_SEALED): Phase.SEALED,
    (Phase.SEALED, PhaseEvent.PUBLISHED): Phase.PUBLISHED,
    (Phase.PUBLISHED, PhaseEvent.EVERY_GROUP_ADVANCED): Phase.DONE,
    # A fenced broker group is back, and reports the sequence of its command message.
    (Phase.SEALED, _SEALED): Phase.SEALED,
    (Phase.PUBLISHED, _SEALED): Phase.PUBLISHED,
    (Phase.DONE, _SEALED): Phase.DONE,
}
"""The phase after each step. docs/ORDERING.md says of each step what is compared and put, and the
state after a crash before or after it.
"""


def step(
    change: Change,
    event: PhaseEvent,
    *,
    number: int | None = None,
    sequence: int | None = None,
    now_ms: int | None = None,
) -> Change:
    """The change after an event; SOURCE_SEALED needs `number` and `sequence`. `now_ms`, if given,
    is recorded for a new phase.

    A repeated event changes nothing. Raises AssertionError for an event that the phase does not
    have.
    """
    following = TRANSITIONS.get((change.phase, event))
    assert following is not None, (
        f"change {change.id} is {change.phase.value}: {event.value!r} cannot happen now"
    )
    if event is PhaseEvent.SOURCE_SEALED:
        return _with_sealed(change, number, sequence)
    open_still = [source for source in change.sources if source not in change.sealed]
    assert not open_still, (
        f"change {change.id} is {change.phase.value}: {event.value!r}, and its sources "
        f"{open_still} are not closed"
    )
    times_ms = change.times_ms if now_ms is None else {**change.times_ms, following.value: now_ms}
    return replace(change, phase=following, times_ms=times_ms)


def _with_sealed(change: Change, number: int | None, sequence: int | None) -> Change:
    assert number in change.sources, (
        f"change {change.id} closes {list(change.sources)}, not partition {number}"
    )
    assert sequence is not None, (
        f"change {change.id}: partition {number} is closed, but at which sequence?"
    )
    assert sequence >= FENCED, (
        f"change {change.id}: partition {number} cannot be closed at {sequence}"
    )
    known = change.sealed.get(number)
    if known is None:
        assert change.phase is Phase.PREPARED, (
            f"change {change.id} is {change.phase.value}, and partition {number} was never closed"
        )
    elif sequence in (known, FENCED):
        return change
    else:
        assert known == FENCED, (
            f"change {change.id}: partition {number} was closed at {known}, and now at "
            f"{sequence}: two command messages"
        )
    return replace(change, sealed={**change.sealed, number: sequence})


__all__ = ["cut_by_load", "first_route", "merge", "move", "next_route", "split"]

_Parts: TypeAlias = tuple[PhysicalPartition, ...]


def first_route(logical_partitions: int, partitions: int, groups: Sequence[str]) -> Route:
    """Version 1: even ranges, numbered from 1, dealt to the broker groups in turn.

    Raises InvalidArgument if there are fewer than one partition, more than logical ones, or no
    broker group.
    """
    if not 1 <= partitions <= logical_partitions:
        raise InvalidArgument(
            f"{logical_partitions} logical partitions can be divided among 1 to "
            f"{logical_partitions} partitions, not {partitions}"
        )
    if not groups:
        raise InvalidArgument("a route needs at least one broker group: name one")
    whole = LpRange(0, logical_partitions)
    ranges = ranges_between(whole, even_cuts(whole, partitions))
    return Route(
        1,
        logical_partitions,
        partitions + 1,
        _numbered(1, ranges, [groups[i % len(groups)] for i in range(partitions)]),
    )


def split(
    route: Route,
    number: int,
    at: Sequence[int],
    *,
    change_id: str,
    groups: Sequence[str] = (),
    reason: str = "",
) -> Change:
    """Cut a partition at one or more logical partitions: each of `at` is the first of a new part.

    `at` ascends strictly inside the partition's range; `groups` names a broker group for each part,
    or is empty: all stay. Raises UnknownPartition, InvalidArgument.
    """
    source = _source(route, number)
    inside = [source.range.first, *at, source.range.end]
    if not at:
        raise InvalidArgument(
            f"say where to cut partition {number} {source.range}; to replace the whole "
            "partition, move it to its own group"
        )
    if any(a >= b for a, b in pairwise(inside)):
        raise InvalidArgument(
            f"partition {number} holds {source.range}: cut points ascend and lie strictly "
            f"inside, not {list(at)}"
        )
    if groups and len(groups) != len(at) + 1:
        raise InvalidArgument(
            f"{len(at)} cuts make {len(at) + 1} parts: name a broker group for each, or "
            f"none, not {len(groups)}"
        )
    targets = _numbered(
        route.next_number,
        ranges_between(source.range, at),
        groups or [source.group] * (len(at) + 1),
    )
    return _change(route, ChangeKind.SPLIT, (source,), targets, change_id, reason)


def merge(
    route: Route, numbers: Sequence[int], *, change_id: str, group: str = "", reason: str = ""
) -> Change:
    """Merge two or more adjacent partitions, in any order, into one on broker group `group`
    (default: the group of the lowest range).

    Raises UnknownPartition, InvalidArgument.
    """
    if len(set(numbers)) < max(2, len(numbers)):
        raise InvalidArgument(
            f"name two or more different partitions to merge, not {list(numbers)}"
        )
    sources = tuple(
        sorted((_source(route, number) for number in numbers), key=lambda part: part.range)
    )
    for left, right in pairwise(sources):
        if left.range.end != right.range.first:
            raise InvalidArgument(
                f"partitions {left.number} {left.range} and {right.number} {right.range} are not "
                "adjacent: name the partitions between them too"
            )
    lps = LpRange(sources[0].range.first, sources[-1].range.end)
    targets = _numbered(route.next_number, [lps], [group or sources[0].group])
    return _change(route, ChangeKind.MERGE, sources, targets, change_id, reason)


def move(route: Route, number: int, group: str, *, change_id: str, reason: str = "") -> Change:
    """Close a partition and open a new one for the same range on a broker group.

    The group may be the partition's present one: this replaces a queue that has a fence or damage,
    or whose log retention should delete as a whole. Raises UnknownPartition, InvalidName.
    """
    source = _source(route, number)
    return _change(
        route,
        ChangeKind.MOVE,
        (source,),
        _numbered(route.next_number, [source.range], [group]),
        change_id,
        reason,
    )


def next_route(route: Route, change: Change) -> Route:
    """The route that a change leads to.

    Raises RouteConflict if the change was made for another route: another version, sources that do
    not exist, targets that do not cover exactly the ranges of the sources, or a number that was
    used before.
    """
    if change.to_version != route.version + 1:
        raise _conflict(
            change,
            f"leads to version {change.to_version}, and version {route.version} is the latest",
        )
    sources = [part for part in route.partitions if part.number in change.sources]
    if len(sources) < max(1, len(change.sources)):
        raise _conflict(
            change,
            (
                f"closes {list(change.sources)}, and version {route.version} has only "
                f"{[part.number for part in sources]}"
            ),
        )
    targets = sorted(change.targets, key=lambda part: part.range)
    closed, opened = _span(sources), _span(targets)
    if closed is None or closed != opened:
        raise _conflict(
            change,
            (
                f"closes {_ranges(sources)} and opens {_ranges(targets)}: they must be the same, "
                "in one piece"
            ),
        )
    numbers = {part.number for part in targets}
    if len(numbers) < len(targets) or min(numbers) < route.next_number:
        raise _conflict(
            change,
            (
                f"opens {sorted(part.number for part in targets)}, and new numbers begin at "
                f"{route.next_number}"
            ),
        )
    kept = [part for part in route.partitions if part.number not in change.sources]
    partitions = tuple(sorted([*kept, *targets], key=lambda part: part.range))
    return Route(change.to_version, route.logical_partitions, max(numbers) + 1, partitions)


def _source(route: Route, number: int) -> PhysicalPartition:
    found = route.partition(number)
    if found is not None:
        return found
    here = [part.number for part in route.partitions]
    fate = (
        "was closed by an earlier change" if 0 < number < route.next_number else "was never there"
    )
    raise UnknownPartition(
        f"partition {number} {fate}: version {route.version} of the route has {here}"
    )


def _numbered(
    first: int, ranges: Iterable[LpRange], groups: Sequence[str]
) -> tuple[PhysicalPartition, ...]:
    pairs = zip(ranges, groups, strict=True)
    return tuple(
        PhysicalPartition(first + i, lps, check_name("broker group", group))
        for i, (lps, group) in enumerate(pairs)
    )


def _change(
    route: Route, kind: ChangeKind, sources: _Parts, targets: _Parts, change_id: str, reason: str
) -> Change:
    if not change_id:
        raise InvalidArgument("a change needs an id that is unique for ever")
    return Change(
        change_id,
        kind,
        route.version + 1,
        tuple(part.number for part in sources),
        targets,
        reason=reason,
    )


def _span(parts: Sequence[PhysicalPartition]) -> LpRange | None:
    """The union of the ranges of partitions, sorted by range; None if it has gaps, or is empty."""
    is_whole = (
        bool(parts)
        and all(a.range.end == b.range.first for a, b in pairwise(parts))
        and all(p.range.width > 0 for p in parts)
    )
    return LpRange(parts[0].range.first, parts[-1].range.end) if is_whole else None


def _ranges(parts: Sequence[PhysicalPartition]) -> str:
    return " ".join(str(part.range) for part in parts) or "nothing"


def _conflict(change: Change, why: str) -> RouteConflict:
    return RouteConflict(
        f"change {change.id} {why}; read the latest route and plan the change again"
    )
