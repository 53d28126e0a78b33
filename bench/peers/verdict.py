"""What a row says: rates, CPU times, latencies, and what was lost or came twice. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rows import Row

Figures = dict[str, float]

RATE: Final = "messages/s"
P50: Final = "p50, ms"
P99: Final = "p99, ms"


@dataclass(frozen=True, slots=True)
class Compared:
    """What arrived beside what was acknowledged."""

    count: int
    lost: int
    twice: int


def compare(wanted: Sequence[int], got: Sequence[Sequence[int]]) -> Compared:
    """By number in the ring: how often it was acknowledged,
    and how often it arrived at each consumer.
    """
    arrived = [sum(each) for each in zip(*got, strict=True)]
    pairs = list(zip(wanted, arrived, strict=True))
    return Compared(
        sum(wanted),
        sum(max(want - had, 0) for want, had in pairs),
        sum(max(had - want, 0) for want, had in pairs),
    )


def figures_of(
    reports: Sequence[Mapping[str, Any]], server_s: float, row: Row, found: Compared
) -> Figures:
    """The figures of one run. `reports`: those of the clients that the row measures; `server_s`:
    the server's CPU time meanwhile.
    """
    count = max(found.count, 1)
    figures = {
        RATE: found.count / max(*(each["seconds"] for each in reports), 1e-9),
        "server, us": 1e6 * server_s / count,
        "clients, us": 1e6 * sum(each["cpu_s"] for each in reports) / count,
        "lost": found.lost,
        "twice": found.twice,
    }
    if row.producer == "paced":
        slowest = max(reports, key=lambda each: each["latency_ms"].get("p50", 0))
        figures |= {f"{name}, ms": value for name, value in slowest["latency_ms"].items()}
    return figures


def summary(runs: Sequence[Figures]) -> dict[str, tuple[float, float, float]]:
    """By figure: median, least and most of the runs."""
    return {
        name: (statistics.median(values), min(values), max(values))
        for name in runs[0]
        for values in [[each[name] for each in runs]]
    }


def said_first(figures: Mapping[str, object]) -> list[str]:
    """What a short table says of a row: median and p99 where the rate is given, else the rate, else
    all.
    """
    if P50 in figures:
        return [each for each in (P50, P99) if each in figures]
    return [RATE] if RATE in figures else list(figures)


def times_as_good(
    figure: str,
    ours: Mapping[str, tuple[float, float, float]],
    theirs: Mapping[str, tuple[float, float, float]],
) -> float:
    """By medians. More is better of a rate, less of a time and of memory."""
    if figure == RATE:
        return ours[figure][0] / max(theirs[figure][0], 1e-9)
    return theirs[figure][0] / max(ours[figure][0], 1e-9)


def ratio(
    ours: Mapping[str, tuple[float, float, float]], theirs: Mapping[str, tuple[float, float, float]]
) -> float:
    """How many times as good the first is:
    by rate, or by median latency where the rate is given.
    """
    return times_as_good(P50 if P50 in ours and P50 in theirs else RATE, ours, theirs)
