"""The data of a plot in a report; `plots.py` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with one x axis for all series.

    bar: x has names, one per bar. line: x has numbers or times. histogram: x has the edges of bins, so each series is one shorter. cdf: x
    has ascending values, and a series has the share (0 to 1) at or below each.
    """

    title: str
    kind: Literal["bar", "line", "histogram", "cdf"]
    x: Sequence[Any]
    series: Mapping[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        expected = max(len(self.x) - 1, 0) if self.kind == "histogram" else len(self.x)
        assert all(len(each) == expected for each in self.series.values()), f"plot {self.title!r}: series and x do not fit"

    @property
    def has_values(self) -> bool:
        """Whether there are values to draw."""
        return any(len(each) for each in self.series.values())
