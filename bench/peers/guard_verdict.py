"""Whether a tree takes more CPU time a message than the release that it is compared with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

RISE_MAX: Final = 0.10


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both trees: the least CPU time of all rounds, in microseconds a message.

    Disturbances of a round only add time, so the least is closest to the code's own time.
    """

    row: str
    base_us: float
    new_us: float

    @property
    def ratio(self) -> float:
        return self.new_us / self.base_us

    @property
    def is_slower(self) -> bool:
        return self.ratio > 1 + RISE_MAX


def compared(
    base: Mapping[str, Sequence[float]], new: Mapping[str, Sequence[float]]
) -> list[Compared]:
    """The comparison by row, without rows that only one tree has."""
    return [
        Compared(row, min(values), min(new[row]))
        for row, values in base.items()
        if new.get(row) and values and min(values) > 0
    ]
