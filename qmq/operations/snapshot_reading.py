"""Reads a snapshot of the cluster over the public admin API, with the caller's rights. Failed questions are recorded, and the rest is read.

A snapshot costs a broker five short calls, and one call more for each ordered subject and group; brokers answer them from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from qmq.errors import QmqError, Unavailable, UnknownSubject
from qmq.operations.snapshot import (
    ClusterSnapshot,
    ConsumerGroupFacts,
    MetaserverFacts,
    SubjectFacts,
    broker_group_facts,
    dead_letter_facts,
    delay_group_facts,
    metaserver_facts,
    ordered_groups,
    pause_facts,
    subject_facts,
    unordered_groups,
)
from qmq.process.event_loop import Clock, SystemClock

if TYPE_CHECKING:
    from qmq.client.metadata.service import MetadataClient
    from qmq.proto.v1 import meta_pb2 as pb

ROUTES_AT_ONCE: Final = 8
"""The number of ordered subjects that are read at the same time."""
CLUSTER: Final = "cluster"
SUBJECTS: Final = "subjects"
GROUPS: Final = "groups"
DEAD_LETTERS: Final = "dead_letters"
PAUSES: Final = "pauses"
DELAYS: Final = "delays"
EVERYTHING: Final = frozenset({CLUSTER, SUBJECTS, GROUPS, DEAD_LETTERS, PAUSES, DELAYS})
"""The parts of a snapshot. `groups` needs `subjects`; `delays` needs `cluster`."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Gaps:
    """The questions without an answer, with the reasons."""

    silent: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    async def ask(self, question: str, asked: Awaitable[_T]) -> _T | None:
        """Ask a question; None if there is no answer."""
        try:
            return await asked
        except QmqError as failure:
            self.missing[question] = failure.message
            return None


async def read_snapshot(metadata: MetadataClient, clock: Clock | None = None, *, parts: Collection[str] = EVERYTHING) -> ClusterSnapshot:
    """Read the cluster's state; only `parts` of it, if given, and always the metaservers. Unreachable servers and refused questions raise
    nothing. If no metaserver answers, the snapshot has only the metaservers, and why they do not answer.
    """
    clock = clock or SystemClock()
    time_ms, monotonic_ms = clock.time_ms(), clock.monotonic_ms()
    metaservers = await _metaservers(metadata)
    if all(each.failure for each in metaservers):
        return ClusterSnapshot(time_ms, monotonic_ms, metaservers)
    gaps = _Gaps()

    async def when(part: str, ask: Callable[[], Awaitable[_T]]) -> _T | None:
        return await gaps.ask(part, ask()) if part in parts else None

    cluster, letters, pauses, consumption = await asyncio.gather(
        when(CLUSTER, metadata.cluster),
        when(DEAD_LETTERS, metadata.dead_letter_queues),
        when(PAUSES, metadata.pauses),
        _consumption(metadata, gaps, parts),
    )
    has_delays = cluster is not None and any(each.is_delay for each in cluster.groups)
    delays = await when(DELAYS, metadata.describe_delays) if has_delays else None
    gaps.silent.update({} if letters is None else letters.silent)
    gaps.silent.update({} if delays is None else delays.silent)
    subjects, groups = consumption
    return ClusterSnapshot(
        time_ms=time_ms,
        monotonic_ms=monotonic_ms,
        metaservers=metaservers,
        broker_groups=() if cluster is None else tuple([broker_group_facts(each) for each in cluster.groups]),
        subjects=subjects,
        groups=groups,
        dead_letters=dead_letter_facts(letters or ()),
        pauses=tuple([pause_facts(each) for each in pauses or ()]),
        delay_groups=() if delays is None else tuple([delay_group_facts(each) for each in delays.delays]),
        silent=gaps.silent,
        missing=gaps.missing,
    )


async def _metaservers(metadata: MetadataClient) -> tuple[MetaserverFacts, ...]:
    """Ask each metaserver. One that answers with an error, other than being unavailable, is up: its refusal is reported with the refused
    question.
    """
    found = []
    for address, told in (await metadata.metaservers()).items():
        if isinstance(told, QmqError):
            found.append(MetaserverFacts(address, told.message if isinstance(told, Unavailable) else ""))
        else:
            found.append(metaserver_facts(address, told))
    return tuple(found)


async def _consumption(
    metadata: MetadataClient, gaps: _Gaps, parts: Collection[str]
) -> tuple[tuple[SubjectFacts, ...], tuple[ConsumerGroupFacts, ...]]:
    """Subjects, and the groups' progress on them."""
    if SUBJECTS not in parts:
        return (), ()
    subjects = await gaps.ask(SUBJECTS, metadata.list_subjects())
    if subjects is None:
        return (), ()
    gaps.silent.update(subjects.silent)
    names = [each.settings.name for each in subjects if each.settings.order]
    routes = await _routes(metadata, gaps, names)
    starts = {(queue.subject, queue.partition, queue.broker_group): queue.start_sequence for each in subjects for queue in each.queues}
    groups: list[ConsumerGroupFacts] = []
    if GROUPS in parts:
        known = await gaps.ask(GROUPS, metadata.describe_groups()) if len(names) < len(subjects) else None
        if known is not None:
            gaps.silent.update(known.silent)
            ordered = set(names)
            groups += unordered_groups([each for each in known if each.subject not in ordered], starts)
        groups += [each for route in routes.values() for each in ordered_groups(route)]
    found = tuple([subject_facts(each, routes.get(each.settings.name)) for each in subjects])
    return found, tuple(sorted(groups, key=lambda each: (each.subject, each.group)))


async def _routes(metadata: MetadataClient, gaps: _Gaps, names: list[str]) -> dict[str, pb.DescribeRouteResponse]:
    """The routes of ordered subjects, with their groups. A subject that was deleted in between is left out."""
    turns = asyncio.Semaphore(ROUTES_AT_ONCE)
    found: dict[str, pb.DescribeRouteResponse] = {}

    async def look(name: str) -> None:
        async with turns:
            try:
                found[name] = await metadata.describe_route(name)
            except UnknownSubject:
                return
            except QmqError as failure:
                gaps.missing[f"route of {name}"] = failure.message

    await asyncio.gather(*[look(name) for name in names])
    for route in found.values():
        gaps.silent.update(dict.fromkeys(set(route.silent_groups) - gaps.silent.keys(), "it does not answer"))
    return dict(sorted(found.items()))
