"""Ranges of logical partitions as a strip, drawn from the first logical partition to the last. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

KINDS: Final = 6
"""Colours: broker groups, or consumers, in turn."""
WIDTH: Final = 1000
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
    return StripRange(round(WIDTH * each["first"] / count, 2), round(WIDTH * (each["end"] - each["first"]) / count, 2), kind, title)


def _range(each: Mapping[str, Any]) -> str:
    return f"{each['first']} - {each['end'] - 1}"


def _kind(name: str, names: Sequence[str]) -> int:
    return names.index(name) % KINDS if name in names else 0
