"""The metrics of `qmq lake follow`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from qmq.metrics.figures import COUNTER, Figure, Reading

ROWS: Final = Figure("qmq_lake_rows_total", COUNTER, ("subject",), "Messages that this process committed to the subject's tables.")
WAITS: Final = Figure(
    "qmq_lake_waits_total",
    COUNTER,
    ("reason",),
    "Rounds that ended early, and are tried again: the `catalog` or the `cluster` did not answer.",
)


class LakeCounts(Protocol):
    """The work since the process began."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows by subject."""
        ...

    @property
    def waits(self) -> Mapping[str, int]:
        """Waits by reason."""
        ...


class LakeMetrics:
    figures: Final = (ROWS, WAITS)

    def __init__(self, counts: LakeCounts) -> None:
        self._counts = counts

    def read(self) -> Iterator[Reading | None]:
        yield Reading(ROWS, [((subject,), count) for subject, count in sorted(self._counts.rows.items())])
        yield Reading(WAITS, [((reason,), count) for reason, count in self._counts.waits.items()])
