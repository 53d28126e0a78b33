"""What a figure is, and how the state that it is about is read. Pure, and imports nothing: clients use it too.

    Figure      name, kind, labels, meaning: a row of the table in docs/METRICS.md
    Reading     a figure with its values as they are now, one row for each set of labels
    Source      reads some figures of one thing: a broker, a client
    Durations   how long something took, again and again: the only figure that is kept, not read

Rules:
* Who works counts with plain integers, once a request or a batch, and knows nothing of this; who is asked reads them. So a figure costs
  nothing until somebody looks.
* `FigureSource.read` gives `None` where it has worked for a while: whoever has others waiting lets them go first (exposition.py).
* Names follow Prometheus: base units, `_total` for what only grows. Labels are few, and never name a consumer or a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the bins of what takes between a tenth of a millisecond and ten seconds."""
SLICE: Final = 200
"""After so many rows whoever reads or writes them lets others work: a millisecond or two."""


class Figure(NamedTuple):
    """A figure. `meaning` is one sentence, for the page and for the table."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Histogram(NamedTuple):
    """How many were at most as much as each bound, and beyond the last one; their sum."""

    bounds: Sequence[float]
    counts: Sequence[int]
    """One for each bound, and one more; not cumulative."""
    sum: float


Value = float | Histogram
Row = tuple[tuple[str, ...], Value]
"""(the labels' values, the value)."""


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
        """All that it may ever give."""
        ...

    def read(self) -> Iterator[Reading | None]:
        """The values now, each figure once. `None`: others may work meanwhile, and what is read may change."""
        ...


class Durations:
    """How long something took, in seconds, in bins. One writer."""

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
