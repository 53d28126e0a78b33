"""One look at a cluster: what metaservers answered at one moment, and figures of two looks. Partial where something is away or denied.

A part that could not be read is empty, and `missing` says why. Rates are of two looks at the same queues; a queue that only one of them
has, or whose numbers went back, counts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from qmq.errors import QmqError
from qmq.model import is_dead_letters

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.client.delayed_message import DelayStats
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb

_R = TypeVar("_R")

ORDERED_MAX: Final = 100
"""Ordered subjects whose groups are read: each takes a call of its own."""


@dataclass(frozen=True, slots=True)
class SubjectFigures:
    """A subject's queues together. `produced` counts all messages ever stored."""

    name: str
    order: str
    messages: int
    stored_bytes: int
    produced: int
    last_append_ms: int
    broker_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A consumer group on a subject, all queues together. `lag` counts what is not done; `lag_ms` is the age of the oldest of it."""

    subject: str
    group: str
    lag: int
    lag_ms: int
    unacked: int
    done: int
    consumers: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class OverviewFinding:
    """Something unusual: `severity` is critical, warning or notice; `command` is the next one to try."""

    severity: str
    about: str
    what: str
    why: str
    command: str


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """What was seen. `monotonic_s` is the reader's clock, `took_s` how long the look took."""

    monotonic_s: float
    took_s: float = 0.0
    subjects: tuple[SubjectFigures, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    cluster: pb.DescribeClusterResponse | None = None
    dead_letters: tuple[pb.DeadLetterQueue, ...] = ()
    delays: DelayStats | None = None
    missing: dict[str, str] = field(default_factory=dict)
    """By what could not be read: why."""
    findings: tuple[OverviewFinding, ...] = ()

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.groups)

    @property
    def lag_ms(self) -> int:
        return max((each.lag_ms for each in self.groups), default=0)

    @property
    def dead(self) -> int:
        return sum(each.waiting for each in self.dead_letters)


async def look(mq: Client, now_s: float, subject: str = "") -> ClusterLook:
    """Look at everything, or, much cheaper, at one subject and its groups."""
    loop, missing = asyncio.get_running_loop(), dict[str, str]()
    begun_s = loop.time()

    async def part(name: str, asked: Awaitable[_R]) -> _R | None:
        try:
            return await asked
        except QmqError as failure:
            missing[name] = str(failure)
            return None

    metadata = mq.metadata
    if subject:
        subjects, groups = await asyncio.gather(
            part("subjects", metadata.list_subjects(subject)), part("groups", metadata.describe_groups(subject))
        )
        cluster, dead, delays = None, None, None
    else:
        subjects, groups, cluster, dead, delays = await asyncio.gather(
            part("subjects", metadata.list_subjects()),
            part("groups", metadata.describe_groups()),
            part("cluster", metadata.cluster()),
            part("dead letters", metadata.dead_letter_queues()),
            part("delays", mq.delayed.stats()),
        )
    for found in (subjects, groups, dead, delays):
        for broker_group, reason in (found.silent if found is not None else {}).items():
            missing[f"broker group {broker_group}"] = reason
    wanted = [each for each in subjects or () if not subject or each.settings.name == subject]
    ordered = [each.settings.name for each in wanted if each.settings.order][:ORDERED_MAX]
    routes = await asyncio.gather(*[part(f"route of {each}", metadata.describe_route(each)) for each in ordered])
    figures = group_figures(each for each in groups or () if each.subject not in ordered)
    figures += [ordered_figures(route.settings.name, each) for route in routes if route is not None for each in route.groups]
    return ClusterLook(
        now_s,
        loop.time() - begun_s,
        tuple(sorted(map(subject_figures, wanted), key=lambda each: each.name)),
        tuple(sorted(figures, key=lambda each: (-each.lag_ms, -each.lag, each.subject, each.group))),
        cluster,
        tuple(dead or ()),
        delays,
        missing,
        tuple(server_findings(cluster)) if cluster is not None else (),
    )


def server_findings(cluster: pb.DescribeClusterResponse) -> Iterable[OverviewFinding]:
    """Broker groups that do not take messages, and replicas that are away."""
    for group in cluster.groups:
        name = group.broker_group
        if group.health == "offline":
            yield OverviewFinding("critical", name, "has no master", "its messages wait until it has one", "qmq cluster status")
        elif group.health != "read-write":
            yield OverviewFinding("notice", name, f"is {group.health}", "producers go elsewhere", f"qmq broker resume {name}")
        for each in group.replicas:
            if not each.is_present:
                why = "the next failure may leave no majority"
                yield OverviewFinding("warning", f"{name}/{each.replica}", "is away", why, "qmq cluster status --watch")


def subject_figures(found: pb.SubjectDescription) -> SubjectFigures:
    """Sums over the queues."""
    queues: Sequence[control.Queue] = found.queues
    return SubjectFigures(
        found.settings.name,
        found.settings.order,
        sum(each.next_sequence - each.start_sequence for each in queues),
        sum(each.stored_bytes for each in queues),
        sum(each.next_sequence for each in queues),
        max((each.last_append_ms for each in queues), default=0),
        tuple(sorted({each.broker_group for each in queues} or set(found.settings.broker_groups))),
    )


def group_figures(found: Iterable[control.Group]) -> list[GroupFigures]:
    """One for each group of each subject."""
    parts: dict[tuple[str, str], list[control.Group]] = {}
    for each in found:
        parts.setdefault((each.subject, each.group), []).append(each)
    return [_sum(subject, group, queues) for (subject, group), queues in parts.items() if not is_dead_letters(subject)]


def ordered_figures(subject: str, found: pb.OrderedGroup) -> GroupFigures:
    """A group of an ordered subject. What it holds and has done is not counted one by one."""
    lag_ms = max((each.lag_ms for each in found.partitions), default=0)
    return GroupFigures(subject, found.group, found.backlog, lag_ms, 0, 0, len(found.consumers), found.is_paused)


def _sum(subject: str, group: str, queues: Sequence[control.Group]) -> GroupFigures:
    lag = sum(each.waiting + each.unacked + each.requeued for each in queues)
    names = {consumer.name for each in queues for consumer in each.consumers}
    return GroupFigures(
        subject,
        group,
        lag,
        max(each.lag_ms for each in queues),
        sum(each.unacked for each in queues),
        sum(each.next_sequence - each.unacked - each.requeued for each in queues),
        len(names),
        any(each.is_paused for each in queues),
    )


def rate(now: Any, before: Any, seconds: float) -> float:
    """A second, between two counts; 0 if one is missing or they went back."""
    if now is None or before is None or seconds <= 0:
        return 0.0
    return float(max(now - before, 0)) / seconds


@dataclass(frozen=True, slots=True)
class LookRates:
    """Between two looks: messages a second that were stored, and that groups finished; and each subject's."""

    stored: float = 0.0
    done: float = 0.0
    by_subject: dict[str, float] = field(default_factory=dict)


def rates(now: ClusterLook, before: ClusterLook | None) -> LookRates:
    """Pure."""
    if before is None:
        return LookRates()
    seconds = now.monotonic_s - before.monotonic_s
    produced = {each.name: each.produced for each in before.subjects}
    by_subject = {each.name: rate(each.produced, produced.get(each.name), seconds) for each in now.subjects}
    finished = {(each.subject, each.group): each.done for each in before.groups}
    done = sum(rate(each.done, finished.get((each.subject, each.group)), seconds) for each in now.groups)
    return LookRates(sum(by_subject.values()), done, by_subject)
