"""One look at a cluster, or at one subject, as pages show it: a snapshot, the findings in it, and rates between two looks. A part that
could not be read is empty, and `missing` says why. Rates compare two looks at the same queues; a queue that is only in one of them, or
whose numbers went back, counts as 0.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qmq.errors import QmqError
from qmq.operations.cluster_snapshot import ClusterSnapshot, ConsumerGroupFacts, SubjectFacts
from qmq.operations.finding import Finding, Severity
from qmq.operations.findings import findings, folded, worst
from qmq.operations.snapshot_parsing import ordered_groups, subject_facts, unordered_groups
from qmq.operations.snapshot_reading import read_snapshot

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
    """The result of one look. `monotonic_s` is the reader's clock, `took_s` how long the look took. The groups with the largest lag come
    first.
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
    missing = {f"broker group {name}": why for name, why in snapshot.silent.items()} | dict(snapshot.missing)
    missing |= {f"metaserver {each.address}": each.failure for each in snapshot.metaservers if each.failure}
    found = folded(findings(snapshot, before.snapshot if before is not None else None))
    return ClusterLook(now_s, loop.time() - begun_s, snapshot, _figures(snapshot.subjects), _behind_first(snapshot.groups), missing, found)


async def look_at_subject(mq: Client, subject: str, now_s: float) -> ClusterLook:
    """Look at one subject and its groups. The cost does not depend on the number of other subjects."""
    loop, metadata, missing = asyncio.get_running_loop(), mq.metadata, dict[str, str]()
    begun_s = loop.time()
    groups: list[ConsumerGroupFacts] = []
    subjects: list[SubjectFacts] = []
    try:
        found = await metadata.find_subject(subject)
        if found is not None:
            missing |= {f"broker group {name}": why for name, why in found.silent.items()}
            route = await metadata.describe_route(subject) if found.settings.order else None
            subjects.append(subject_facts(found.description, route))
            if route is not None:
                groups += ordered_groups(route)
            else:
                told = await metadata.describe_groups(subject)
                queues = found.description.queues
                groups += unordered_groups(told, {(subject, each.partition, each.broker_group): each.start_sequence for each in queues})
    except QmqError as failure:
        missing["groups" if subjects else "subjects"] = str(failure)
    snapshot = ClusterSnapshot(0, 0, subjects=tuple(subjects), groups=tuple(groups))
    return ClusterLook(now_s, loop.time() - begun_s, snapshot, _figures(snapshot.subjects), _behind_first(snapshot.groups), missing)


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
    return tuple(sorted(found, key=lambda each: (-each.lag_ms, -each.lag_messages, each.subject, each.group)))


@dataclass(frozen=True, slots=True)
class LookRates:
    """Messages a second between two looks: stored, and finished by groups; for the cluster and for each subject."""

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
    by_subject = {each.name: rate(each.produced, produced.get(each.name), seconds) for each in now.subjects}
    finished = _done(before)
    done = sum(rate(count, finished.get(key), seconds) for key, count in _done(now).items())
    return LookRates(sum(by_subject.values()), done, by_subject)


def _done(found: ClusterLook) -> dict[tuple[str, str, int, str], int]:
    return {
        (group.subject, group.group, each.partition, each.broker_group): each.done_messages
        for group in found.groups
        for each in group.progress
    }
