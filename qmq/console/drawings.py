"""Draws logical partitions. Pure. A subject's route is a ring, the latest version outside, older versions inside; ranges are a strip from
the first logical partition to the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SIZE: Final = 400
"""The width and the height of the drawing; the ring's centre is in the middle."""
OUTER: Final = 190.0
RING_WIDTH: Final = 34.0
STEP: Final = 40.0
VERSIONS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class RingArc:
    """One partition in one version: an SVG path, its colour, and its label."""

    path: str
    kind: int
    version: int
    partition: int
    first: int
    end: int
    broker_group: str

    @property
    def title(self) -> str:
        return f"v{self.version} · {self.partition}: {self.first} - {self.end - 1}, {self.broker_group}"


def ring(routes: Mapping[int, Sequence[Mapping[str, Any]]], count: int, groups: Sequence[str], kinds: int) -> list[RingArc]:
    """The arcs of `routes` (partitions by version), the latest VERSIONS_MAX versions, of `count` logical partitions."""
    arcs: list[RingArc] = []
    for place, version in enumerate(sorted(routes, reverse=True)[:VERSIONS_MAX]):
        outer = OUTER - place * STEP
        for each in sorted(routes[version], key=lambda each: int(each["first"])):
            name = each["broker_group"]
            kind = groups.index(name) % kinds if name in groups else 0
            path = arc_path(each["first"] / count, each["end"] / count, outer, outer - RING_WIDTH)
            arcs.append(RingArc(path, kind, version, each["partition"], each["first"], each["end"], name))
    return arcs


def arc_path(begin: float, end: float, outer: float, inner: float) -> str:
    """An SVG path from `begin` to `end` of a turn (0 to 1, clockwise from the top) between two radii. A whole turn consists of two half
    turns.
    """
    if end - begin >= 1.0:
        return arc_path(begin, begin + 0.5, outer, inner) + " " + arc_path(begin + 0.5, begin + 0.99999, outer, inner)
    large = 1 if end - begin > 0.5 else 0
    a, b, c, d = _point(begin, outer), _point(end, outer), _point(end, inner), _point(begin, inner)
    return f"M{a} A{outer:g} {outer:g} 0 {large} 1 {b} L{c} A{inner:g} {inner:g} 0 {large} 0 {d} Z"


def _point(turn: float, radius: float) -> str:
    angle = 2 * math.pi * turn
    return f"{SIZE / 2 + radius * math.sin(angle):.2f} {SIZE / 2 - radius * math.cos(angle):.2f}"


KINDS: Final = 6
"""Colours: broker groups, or consumers, in turn."""
STRIP_WIDTH: Final = 1000
"""The width of the whole strip."""


@dataclass(frozen=True, slots=True)
class StripRange:
    """A range in a strip WIDTH wide; `kind` chooses its colour."""

    x: float
    width: float
    kind: int
    title: str


def partition_ranges(places: Sequence[Mapping[str, Any]], count: int, groups: Sequence[str]) -> list[StripRange]:
    """Partitions by their broker groups, of `count` logical partitions."""
    return [
        _drawn(each, count, _kind(each["broker_group"], groups), f"{each['partition']}: {_range(each)}, {each['broker_group']}")
        for each in sorted(places, key=lambda each: int(each["first"]))
    ]


def version_ranges(frontier: Sequence[Mapping[str, Any]], count: int, latest: int) -> list[StripRange]:
    """The ranges that a consumer group reads, of the latest version and of older ones."""
    return [_drawn(each, count, 0 if each["version"] >= latest else 1, f"{_range(each)}: v{each['version']}") for each in frontier]


def lane_ranges(lanes: Sequence[Mapping[str, Any]], count: int) -> list[StripRange]:
    """Lanes by the consumers that hold them. A lane without a consumer is a gap."""
    consumers = sorted({each["consumer"] for each in lanes if each["consumer"]})
    return [
        _drawn(each, count, _kind(each["consumer"], consumers), f"{_range(each)}: {each['consumer']}")
        for each in sorted(lanes, key=lambda each: int(each["first"]))
        if each["consumer"]
    ]


def _drawn(each: Mapping[str, Any], count: int, kind: int, title: str) -> StripRange:
    return StripRange(
        round(STRIP_WIDTH * each["first"] / count, 2), round(STRIP_WIDTH * (each["end"] - each["first"]) / count, 2), kind, title
    )


def _range(each: Mapping[str, Any]) -> str:
    return f"{each['first']} - {each['end'] - 1}"


def _kind(name: str, names: Sequence[str]) -> int:
    return names.index(name) % KINDS if name in names else 0
