"""The metrics of copies of messages: of `qmq lake follow`, and of `qmq mirror`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, rows_of

ROWS: Final = Figure(
    "qmq_lake_rows_total",
    COUNTER,
    ("subject",),
    "Messages that this process committed to the subject's tables.",
)
WAITS: Final = Figure(
    "qmq_lake_waits_total",
    COUNTER,
    ("reason",),
    "Rounds that ended early, and are tried again: the `catalog` or the `cluster` did not answer.",
)


class LakeMetrics:
    """Shows what is counted since the process began: rows by subject, and waits by reason."""

    figures: Final = (ROWS, WAITS)

    def __init__(self, rows: Mapping[str, int], waits: Mapping[str, int]) -> None:
        self._rows, self._waits = rows, waits

    def read(self) -> Iterator[Reading | None]:
        yield Reading(ROWS, [((subject,), count) for subject, count in sorted(self._rows.items())])
        yield Reading(WAITS, [((reason,), count) for reason, count in self._waits.items()])


_OF: Final = ("subject",)

LAG: Final = Figure(
    "qmq_mirror_lag_messages",
    GAUGE,
    _OF,
    "Messages of the source that were not read, counted when a pass begins and again when it ends.",
)
COPIED: Final = Figure(
    "qmq_mirror_copied_messages_total", COUNTER, _OF, "Messages that were copied to the target."
)
LEFT_OUT: Final = Figure(
    "qmq_mirror_left_out_messages_total",
    COUNTER,
    _OF,
    "Messages that came through the target and were not copied back.",
)
MOVES: Final = Figure(
    "qmq_mirror_group_moves_total",
    COUNTER,
    _OF,
    "Moves of groups in the target to the progress that they have in the source.",
)
FAILURES: Final = Figure(
    "qmq_mirror_failures_total", COUNTER, _OF, "Passes that failed; they are tried again."
)
SILENT: Final = Figure("qmq_mirror_silent_seconds", GAUGE, _OF, "Time since a pass ended well.")


class MirrorState(NamedTuple):
    """The state of one subject's mirror."""

    subject: str
    lag: int
    copied: int
    left_out: int
    moves: int
    failures: int
    silent_s: float


class MirrorMetrics:
    figures: Final = (LAG, COPIED, LEFT_OUT, MOVES, FAILURES, SILENT)

    def __init__(self, states: Callable[[], Sequence[MirrorState]]) -> None:
        self._states = states

    def read(self) -> Iterator[Reading | None]:
        found = self._states()
        names = [(each.subject,) for each in found]
        columns = zip(
            *[
                (each.lag, each.copied, each.left_out, each.moves, each.failures, each.silent_s)
                for each in found
            ],
            strict=True,
        )
        for figure, values in zip(self.figures, columns, strict=False):
            yield Reading(figure, rows_of(names, values))
