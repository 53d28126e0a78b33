"""Computes the lag of groups from positions and ends of queues. Pure.

A group's lag on a queue is the number of stored messages that it has not done:

    for a share        messages never delivered, plus messages delivered but not done: exact
    for a partition    all messages from the oldest one that is not done: an upper bound, because
                       lanes progress independently

A group that has begun on one partition of an ordered subject will read the others, too: an open
partition on which it has not begun counts as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isnan
from typing import Final, NamedTuple

from qmq.columns.model import QueueKey, SourceQueue

PERCENTAGES: Final = (0.0, *(each / 100 for each in range(1, 100)), 0.999, 1.0)
"""The computed quantiles: the named ones, and enough for a curve."""
NAMED: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class Position(NamedTuple):
    """The position of one group on one queue."""

    queue: QueueKey
    group: str
    time_ms: int
    done_before: int
    next_sequence: int | None
    """None for partitions of ordered subjects."""
    held: int = 0
    waiting: int = 0
    parked: int = 0
    expired: int = 0
    consumers: int = 0

    @property
    def reads_from(self) -> int:
        """The first message that was not delivered."""
        return self.done_before if self.next_sequence is None else self.next_sequence

    @property
    def came_back(self) -> int:
        """The number of delivered messages that are not done."""
        return 0 if self.next_sequence is None else self.held + self.waiting

    def lag(self, end: int, start: int = 0) -> int:
        """The number of stored messages (from `start` to `end`) that are not done."""
        return max(end - max(self.reads_from, start), 0) + self.came_back

    def lost(self, start: int) -> int:
        """The number of messages that retention deleted before their delivery to the group."""
        return max(start - self.reads_from, 0)


class GroupLag(NamedTuple):
    """The lag of a group over all queues of a subject."""

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
    """Partitions on which the group has not begun."""


def group_lags(
    positions: Iterable[Position], queues: Mapping[QueueKey, SourceQueue]
) -> list[GroupLag]:
    """The lags by subject and group, largest first. Unknown queues are ignored."""
    by_group: dict[tuple[str, str], list[Position]] = {}
    for each in positions:
        if each.queue in queues:
            by_group.setdefault((each.queue.subject, each.group), []).append(each)
    found = [_group_lag(*key, each, queues) for key, each in by_group.items()]
    return sorted(found, key=lambda each: (-each.lag, each.subject, each.group))


def _group_lag(
    subject: str, group: str, positions: list[Position], queues: Mapping[QueueKey, SourceQueue]
) -> GroupLag:
    begun = {each.queue for each in positions}
    ahead = [
        queue
        for key, queue in queues.items()
        if key.subject == subject and key.partition > 0 and key not in begun
    ]
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
    """The lost messages; none for a closed partition that is done to its end."""
    return 0 if position.reads_from >= queue.end else position.lost(min(queue.start, queue.end))


class LagStep(NamedTuple):
    """A lag from one step of the time axis to the next."""

    step: int
    value: int


def lag_series(
    steps: int,
    ends: Mapping[QueueKey, Sequence[LagStep]],
    positions: Iterable[tuple[int, Position]],
    starts: Mapping[QueueKey, int],
) -> dict[tuple[str, str], list[float]]:
    """The lag at each step by (subject, group).

    `positions` are (step, position), ascending for each queue and group; a group's lag is nan until
    the first of them. `starts` are the queues' oldest sequences.
    """
    curves = {queue: _filled(each, steps, starts.get(queue, 0)) for queue, each in ends.items()}
    tracks: dict[tuple[QueueKey, str], list[Position | None]] = {}
    for step, each in positions:
        tracks.setdefault((each.queue, each.group), [None] * steps)[
            min(max(step, 0), steps - 1)
        ] = each
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
    """One of the quantiles at PERCENTAGES."""
    return values[PERCENTAGES.index(percentage)]


def log_edges(low: float, high: float, count: int = 120) -> list[float]:
    """Values for a logarithmic axis from 1 to `high`, preceded by `low` if it is smaller."""
    first, last = max(low, 1.0), max(high, 2.0)
    found = [first * (last / first) ** (each / (count - 1)) for each in range(count)]
    return [low, *found] if low < 1 else found


def share_at(values: Sequence[float], xs: Sequence[float]) -> list[float]:
    """The share of values at or below each x,
    interpolated linearly between the quantiles at PERCENTAGES.
    """
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
