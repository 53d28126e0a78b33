"""Figures, and the sources that read them from the state of a process. Pure, without imports from
QMQ: clients use this module, too.

    Figure      name, kind, labels, meaning: a row of docs/reference/metrics.md
    Reading     a figure with its current values, one row for each set of labels
    Source      reads some figures of one thing: a broker, a client
    Readiness   the answer to /readyz
    Durations   the durations of repeated operations: the only figure that is counted here, not read

Rules:
* Working code counts with plain integers, once for each request or batch, and does not know this
  module; a source reads these counts. So a figure costs nothing until it is read.
* `FigureSource.read` yields `None` after it has worked for a while, so that the caller can let
  other tasks run (endpoint.py).
* Names follow Prometheus: base units, `_total` for what only grows. Labels are few, and never name
  a consumer or a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the buckets for durations from a tenth of a millisecond to ten seconds."""
SLICE: Final = 200
"""After this many rows, reading and writing let other tasks run: a millisecond or two."""


class Figure(NamedTuple):
    """A figure. `meaning` is one sentence, for the page and for docs/reference/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Histogram(NamedTuple):
    """The number of values in each bucket, and the sum of all values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    """One count for each bound, and one for larger values; not cumulative."""
    sum: float


Value = float | Histogram
Row = tuple[tuple[str, ...], Value]
"""A row: the labels' values, and the value."""


class Reading(NamedTuple):
    """A figure and its values."""

    figure: Figure
    rows: Sequence[Row]


def rows_of(labels: Sequence[tuple[str, ...]], values: Iterable[Value]) -> list[Row]:
    """Labels and values, side by side."""
    return list(zip(labels, values, strict=True))


class FigureSource(Protocol):
    @property
    def figures(self) -> Sequence[Figure]:
        """All figures that the source may give."""
        ...

    def read(self) -> Iterator[Reading | None]:
        """The current values, each figure once. After a `None`, other tasks may run, and the values
        may change.
        """
        ...


class Durations:
    """Counts durations in buckets, in seconds. One writer."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def note(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self.sum)


def one(figure: Figure, value: Value, *labels: str) -> Reading:
    """A figure with a single value."""
    return Reading(figure, [(labels, value)])


class Readiness(NamedTuple):
    """The readiness of a process, and a line with the reason."""

    is_ready: bool
    says: str
