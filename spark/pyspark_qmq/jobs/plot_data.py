"""What a plot of a report shows; `plots.py` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture with one x for all its series.

    bar: x are names, a bar each. line: x are numbers or times. histogram: x are the edges of bins, so each series is one shorter. cdf: x
    are values, ascending, and a series says which share (0 to 1) lies at or below.
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
        """Whether there is anything to draw."""
        return any(len(each) for each in self.series.values())
