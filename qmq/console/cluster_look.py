"""One look at a cluster, or at one subject, as pages show it: a snapshot, the findings in it, and
rates between two looks. A part that could not be read is empty, and `missing` says why. Rates
compare two looks at the same queues; a queue that is only in one of them, or whose numbers went
back, counts as 0.

The last looks are kept for all pages of one caller:

* Nothing is read in the background: a page that asks gets the last state, or a new one if that is
  too old. A closed page costs nothing.
* The next read starts no sooner than RESTS times the duration of the last one, so open pages use
  less than a hundredth of the cluster's time. At least REST_S lies between two, at most REST_S_MAX.
* Pages that ask at the same time share one read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from qmq.errors import QmqError
from qmq.operations.findings import findings
from qmq.operations.snapshot import (
    ClusterSnapshot,
    ConsumerGroupFacts,
    ReaderFacts,
    SubjectFacts,
    ordered_groups,
    reader_facts,
    subject_facts,
    unordered_groups,
)
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import Finding, Severity, folded, worst

if TYPE_CHECKING:
    from qmq.client.client import Client


@dataclass(frozen=True, slots=True)
class SubjectFigures:
    """The sums over a subject's queues. `produced` counts all messages ever stored."""

    name: str
    order: str
    messages: int
    stored_bytes: int
    produced: int
    last_append_ms: int
    broker_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """The result of one look. `monotonic_s` is the reader's clock, `took_s` how long the look took.
    The groups with the largest lag come first.
    """

    monotonic_s: float
    took_s: float = 0.0
    snapshot: ClusterSnapshot = field(default_factory=lambda: ClusterSnapshot(0, 0))
    subjects: tuple[SubjectFigures, ...] = ()
    groups: tuple[ConsumerGroupFacts, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """The reason for each part that could not be read."""
    findings: tuple[Finding, ...] = ()

    @property
    def is_well(self) -> bool:
        """True if nothing is worse than a notice, and everything could be read."""
        return not self.missing and (worst(self.findings) or Severity.NOTICE) <= Severity.NOTICE

    @property
    def readers(self) -> list[ReaderFacts]:
        """The readers without a group; those with the largest lag come first."""
        return sorted(
            self.snapshot.readers,
            key=lambda each: (-each.lag_ms, -each.lag_messages, each.subject, each.reader),
        )

    @property
    def lag(self) -> int:
        return sum(each.lag_messages for each in self.groups)

    @property
    def lag_ms(self) -> int:
        return max((each.lag_ms for each in self.groups), default=0)

    @property
    def dead(self) -> int:
        return sum(each.waiting for each in self.snapshot.dead_letters)

    @property
    def delayed(self) -> int:
        return sum(each.pending for each in self.snapshot.delay_groups)


async def look_at_cluster(mq: Client, now_s: float, before: ClusterLook | None) -> ClusterLook:
    """Look at the whole cluster. `before` is the last look, if there was one."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    snapshot = await read_snapshot(mq.metadata)
    missing = {f"broker group {name}": why for name, why in snapshot.silent.items()} | dict(
        snapshot.missing
    )
    missing |= {
        f"metaserver {each.address}": each.failure for each in snapshot.metaservers if each.failure
    }
    found = folded(findings(snapshot, before.snapshot if before is not None else None))
    return ClusterLook(
        now_s,
        loop.time() - begun_s,
        snapshot,
        _figures(snapshot.subjects),
        _behind_first(snapshot.groups),
        missing,
        found,
    )


async def look_at_subject(mq: Client, subject: str, now_s: float) -> ClusterLook:
    """Look at one subject and its groups.
    The cost does not depend on the number of other subjects.
    """
    loop, metadata, missing = asyncio.get_running_loop(), mq.metadata, dict[str, str]()
    begun_s = loop.time()
    groups: list[ConsumerGroupFacts] = []
    subjects: list[SubjectFacts] = []
    readers: tuple[ReaderFacts, ...] = ()
    try:
        found = await metadata.find_subject(subject)
        if found is not None:
            missing |= {f"broker group {name}": why for name, why in found.silent.items()}
            route = await metadata.describe_route(subject) if found.settings.order else None
            subjects.append(subject_facts(found.description, route))
            if route is not None:
                groups += ordered_groups(route)
            told = await metadata.describe_groups(subject)
            readers = reader_facts(told.readers)
            if route is None:
                queues = found.description.queues
                groups += unordered_groups(
                    told,
                    {
                        (subject, each.partition, each.broker_group): each.start_sequence
                        for each in queues
                    },
                )
    except QmqError as failure:
        missing["groups" if subjects else "subjects"] = str(failure)
    snapshot = ClusterSnapshot(
        0, 0, subjects=tuple(subjects), groups=tuple(groups), readers=readers
    )
    return ClusterLook(
        now_s,
        loop.time() - begun_s,
        snapshot,
        _figures(snapshot.subjects),
        _behind_first(snapshot.groups),
        missing,
    )


def _figures(found: tuple[SubjectFacts, ...]) -> tuple[SubjectFigures, ...]:
    return tuple(sorted(map(subject_figures, found), key=lambda each: each.name))


def subject_figures(found: SubjectFacts) -> SubjectFigures:
    """Sum up a subject's queues."""
    return SubjectFigures(
        found.subject,
        found.order,
        found.stored_messages,
        found.stored_bytes,
        sum(each.next_sequence for each in found.queues),
        max((each.last_append_ms for each in found.queues), default=0),
        tuple(sorted({each.broker_group for each in found.queues} or set(found.broker_groups))),
    )


def _behind_first(found: tuple[ConsumerGroupFacts, ...]) -> tuple[ConsumerGroupFacts, ...]:
    return tuple(
        sorted(found, key=lambda each: (-each.lag_ms, -each.lag_messages, each.subject, each.group))
    )


@dataclass(frozen=True, slots=True)
class LookRates:
    """Messages a second between two looks: stored, and finished by groups; for the cluster and for
    each subject.
    """

    stored: float = 0.0
    done: float = 0.0
    by_subject: dict[str, float] = field(default_factory=dict)


def rate(now: int, before: int | None, seconds: float) -> float:
    """The rate per second between two counts; 0 if the earlier count is missing or larger."""
    return max(now - before, 0) / seconds if before is not None and seconds > 0 else 0.0


def rates(now: ClusterLook, before: ClusterLook | None) -> LookRates:
    """The rates between two looks. Pure."""
    if before is None:
        return LookRates()
    seconds = now.monotonic_s - before.monotonic_s
    produced = {each.name: each.produced for each in before.subjects}
    by_subject = {
        each.name: rate(each.produced, produced.get(each.name), seconds) for each in now.subjects
    }
    finished = _done(before)
    done = sum(rate(count, finished.get(key), seconds) for key, count in _done(now).items())
    return LookRates(sum(by_subject.values()), done, by_subject)


def _done(found: ClusterLook) -> dict[tuple[str, str, int, str], int]:
    return {
        (group.subject, group.group, each.partition, each.broker_group): each.done_messages
        for group in found.groups
        for each in group.progress
    }


RESTS: Final = 100
REST_S: Final = 2.0
REST_S_MAX: Final = 60.0
POINTS_MAX: Final = 900


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The values of one look that curves show."""

    time_s: float
    """Seconds since 1970."""
    stored: float
    done: float
    lag: int
    lag_s: float


class ClusterWatch:
    """Looks at the cluster on request, if the last look is too old. `wall_s` is the time of day,
    `monotonic_s` measures the pauses.
    """

    def __init__(
        self,
        look: Callable[[float, ClusterLook | None], Awaitable[ClusterLook]],
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self._look, self._monotonic_s, self._wall_s = look, monotonic_s, wall_s
        self._last: ClusterLook | None = None
        self._before: ClusterLook | None = None
        self._under_way: asyncio.Task[ClusterLook] | None = None
        self.asked_s = monotonic_s()
        """When a page last asked."""
        self.points: deque[CurvePoint] = deque(maxlen=POINTS_MAX)

    @property
    def rates(self) -> LookRates:
        """The rates between the last two looks."""
        return LookRates() if self._last is None else rates(self._last, self._before)

    @property
    def last(self) -> ClusterLook | None:
        """The last look, however old; None before the first."""
        return self._last

    async def latest(self) -> ClusterLook:
        """The last look, or a new one if the last look is older than the rules allow."""
        self.asked_s = self._monotonic_s()
        if self._last is not None and self.asked_s < self._last.monotonic_s + rest_s(
            self._last.took_s
        ):
            return self._last
        if self._under_way is None:
            self._under_way = asyncio.create_task(self._take())
        return await asyncio.shield(self._under_way)

    async def _take(self) -> ClusterLook:
        try:
            found = await self._look(self._monotonic_s(), self._last)
        finally:
            self._under_way = None
        self._before, self._last = self._last, found
        seen = self.rates
        self.points.append(
            CurvePoint(self._wall_s(), seen.stored, seen.done, found.lag, found.lag_ms / 1000)
        )
        return found


def rest_s(took_s: float) -> float:
    """How long a look stays valid, from its duration."""
    return min(max(REST_S, RESTS * took_s), REST_S_MAX)
