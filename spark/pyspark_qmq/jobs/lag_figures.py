"""How far groups are behind: from positions and ends to figures. Pure.

A group's lag on a queue is what it has not done of the messages that are kept:

    of a share         what was never handed out, and what was and is not done: exact
    of a partition     everything from the oldest message that is not done: the most it can be, since lanes go their own ways

A group that has begun on one of an ordered subject's partitions will read the others, too: one that is not closed, and where it has not
begun, lies before it, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isnan
from typing import Final, NamedTuple

from pyspark_qmq.source_model import QueueKey, SourceQueue

PERCENTAGES: Final = (0.0, *(each / 100 for each in range(1, 100)), 0.999, 1.0)
"""Of which quantiles are asked: the named ones, and enough for a curve."""
NAMED: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class Position(NamedTuple):
    """How far one group is on one queue."""

    queue: QueueKey
    group: str
    time_ms: int
    done_before: int
    next_sequence: int | None
    """None on partitions of ordered subjects."""
    held: int = 0
    waiting: int = 0
    parked: int = 0
    expired: int = 0
    consumers: int = 0

    @property
    def reads_from(self) -> int:
        """Where what was not handed out begins."""
        return self.done_before if self.next_sequence is None else self.next_sequence

    @property
    def came_back(self) -> int:
        """Of what was handed out, what is not done."""
        return 0 if self.next_sequence is None else self.held + self.waiting

    def lag(self, end: int, start: int = 0) -> int:
        """Messages before `end` and kept (from `start` on) that are not done."""
        return max(end - max(self.reads_from, start), 0) + self.came_back

    def lost(self, start: int) -> int:
        """Messages that retention took before the group was handed them."""
        return max(start - self.reads_from, 0)


class GroupLag(NamedTuple):
    """How far a group is behind, over all queues of a subject."""

    subject: str
    group: str
    lag: int
    lost: int
    held: int
    waiting: int
    parked: int
    expired: int
    consumers: int
    not_begun: int
    """Partitions where it has not begun."""


def group_lags(positions: Iterable[Position], queues: Mapping[QueueKey, SourceQueue]) -> list[GroupLag]:
    """By subject and group, the furthest behind first. Queues that are not named are passed over."""
    by_group: dict[tuple[str, str], list[Position]] = {}
    for each in positions:
        if each.queue in queues:
            by_group.setdefault((each.queue.subject, each.group), []).append(each)
    found = [_group_lag(*key, each, queues) for key, each in by_group.items()]
    return sorted(found, key=lambda each: (-each.lag, each.subject, each.group))


def _group_lag(subject: str, group: str, positions: list[Position], queues: Mapping[QueueKey, SourceQueue]) -> GroupLag:
    begun = {each.queue for each in positions}
    ahead = [queue for key, queue in queues.items() if key.subject == subject and key.partition > 0 and key not in begun]
    new = [queue for queue in ahead if not queue.is_sealed]
    behind = sum(each.lag(queues[each.queue].end, queues[each.queue].start) for each in positions)
    return GroupLag(
        subject,
        group,
        lag=behind + sum(each.end - each.start for each in new),
        lost=sum(_lost(each, queues[each.queue]) for each in positions),
        held=sum(each.held for each in positions),
        waiting=sum(each.waiting for each in positions),
        parked=sum(each.parked for each in positions),
        expired=sum(each.expired for each in positions),
        consumers=max(each.consumers for each in positions),
        not_begun=len(new),
    )


def _lost(position: Position, queue: SourceQueue) -> int:
    """Of a closed partition that is done up to its end nothing is lost, whatever retention takes."""
    return 0 if position.reads_from >= queue.end else position.lost(min(queue.start, queue.end))


class LagStep(NamedTuple):
    """A value from a step of the time axis on, until the next one."""

    step: int
    value: int


def lag_series(
    steps: int, ends: Mapping[QueueKey, Sequence[LagStep]], positions: Iterable[tuple[int, Position]], starts: Mapping[QueueKey, int]
) -> dict[tuple[str, str], list[float]]:
    """By (subject, group) the lag at each step.

    `positions` are (step, position), ascending for each queue and group; a group's lag is nan until the first of them. `starts` are the
    queues' oldest sequences.
    """
    curves = {queue: _filled(each, steps, starts.get(queue, 0)) for queue, each in ends.items()}
    tracks: dict[tuple[QueueKey, str], list[Position | None]] = {}
    for step, each in positions:
        tracks.setdefault((each.queue, each.group), [None] * steps)[min(max(step, 0), steps - 1)] = each
    found: dict[tuple[str, str], list[float]] = {}
    for (queue, group), track in tracks.items():
        total = found.setdefault((queue.subject, group), [float("nan")] * steps)
        curve = curves.get(queue, [starts.get(queue, 0)] * steps)
        now: Position | None = None
        for step, known in enumerate(track):
            now = known or now
            if now is not None:
                total[step] = (0.0 if isnan(total[step]) else total[step]) + now.lag(curve[step])
    return found


def _filled(changes: Sequence[LagStep], steps: int, before: int) -> list[int]:
    values: list[int] = []
    following = iter(sorted(changes))
    change = next(following, None)
    now = before
    for step in range(steps):
        while change is not None and change.step <= step:
            now = max(now, change.value)
            change = next(following, None)
        values.append(now)
    return values


def quantile(values: Sequence[float], percentage: float) -> float:
    """One of the quantiles that were asked for by PERCENTAGES."""
    return values[PERCENTAGES.index(percentage)]


def log_edges(low: float, high: float, count: int = 120) -> list[float]:
    """Values for a curve's axis from 1 to `high`, evenly spread on a logarithmic scale; before them `low`, if it is less."""
    first, last = max(low, 1.0), max(high, 2.0)
    found = [first * (last / first) ** (each / (count - 1)) for each in range(count)]
    return [low, *found] if low < 1 else found


def share_at(values: Sequence[float], xs: Sequence[float]) -> list[float]:
    """Which share lies at or below each x, by quantiles at PERCENTAGES: between two of them, in a straight line."""
    return [_share(values, x) for x in xs]


def _share(values: Sequence[float], x: float) -> float:
    if x < values[0]:
        return 0.0
    share, below, at = 0.0, -inf, 0.0
    for percentage, value in zip(PERCENTAGES, values, strict=True):
        if value <= x:
            share, below, at = percentage, value, percentage
        else:
            return share + (percentage - at) * (x - below) / (value - below)
    return share
