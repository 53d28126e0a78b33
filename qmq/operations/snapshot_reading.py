"""Reads a snapshot of the cluster over the public admin API, with the caller's rights. Failed
questions are recorded, and the rest is read.

A snapshot costs a broker five short calls, and one call more for each ordered subject and group;
brokers answer them from memory.

Two snapshots give *rates* of stored and consumed messages.

The stored messages are the difference of the queues' next sequences; the consumed ones are the
difference of the groups' progress. If a value is not known in both snapshots, because a broker
group was silent in one, or the subject was created again, it counts as zero. A queue that is new
since the first snapshot counts from zero, and a new group counts from the second snapshot on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from qmq.errors import QmqError, Unavailable, UnknownSubject
from qmq.operations.snapshot import (
    ClusterSnapshot,
    ConsumerGroupFacts,
    MetaserverFacts,
    ReaderFacts,
    SubjectFacts,
    broker_group_facts,
    dead_letter_facts,
    delay_group_facts,
    metaserver_facts,
    ordered_groups,
    pause_facts,
    reader_facts,
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


async def read_snapshot(
    metadata: MetadataClient, clock: Clock | None = None, *, parts: Collection[str] = EVERYTHING
) -> ClusterSnapshot:
    """Read the cluster's state; only `parts` of it, if given, and always the metaservers.
    Unreachable servers and refused questions raise nothing. If no metaserver answers, the snapshot
    has only the metaservers, and why they do not answer.
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
    subjects, groups, readers = consumption
    return ClusterSnapshot(
        time_ms=time_ms,
        monotonic_ms=monotonic_ms,
        metaservers=metaservers,
        broker_groups=()
        if cluster is None
        else tuple([broker_group_facts(each) for each in cluster.groups]),
        subjects=subjects,
        groups=groups,
        readers=readers,
        dead_letters=dead_letter_facts(letters or ()),
        pauses=tuple([pause_facts(each) for each in pauses or ()]),
        delay_groups=()
        if delays is None
        else tuple([delay_group_facts(each) for each in delays.delays]),
        silent=gaps.silent,
        missing=gaps.missing,
    )


async def _metaservers(metadata: MetadataClient) -> tuple[MetaserverFacts, ...]:
    """Ask each metaserver. One that answers with an error, other than being unavailable, is up: its
    refusal is reported with the refused question.
    """
    found = []
    for address, told in (await metadata.metaservers()).items():
        if isinstance(told, QmqError):
            found.append(
                MetaserverFacts(address, told.message if isinstance(told, Unavailable) else "")
            )
        else:
            found.append(metaserver_facts(address, told))
    return tuple(found)


async def _consumption(
    metadata: MetadataClient, gaps: _Gaps, parts: Collection[str]
) -> tuple[tuple[SubjectFacts, ...], tuple[ConsumerGroupFacts, ...], tuple[ReaderFacts, ...]]:
    """Subjects, and the progress of groups and readers on them."""
    if SUBJECTS not in parts:
        return (), (), ()
    subjects = await gaps.ask(SUBJECTS, metadata.list_subjects())
    if subjects is None:
        return (), (), ()
    gaps.silent.update(subjects.silent)
    names = [each.settings.name for each in subjects if each.settings.order]
    routes = await _routes(metadata, gaps, names)
    starts = {
        (queue.subject, queue.partition, queue.broker_group): queue.start_sequence
        for each in subjects
        for queue in each.queues
    }
    groups: list[ConsumerGroupFacts] = []
    readers: tuple[ReaderFacts, ...] = ()
    if GROUPS in parts:
        known = await gaps.ask(GROUPS, metadata.describe_groups()) if subjects else None
        if known is not None:
            gaps.silent.update(known.silent)
            readers = reader_facts(known.readers)
            ordered = set(names)
            groups += unordered_groups(
                [each for each in known if each.subject not in ordered], starts
            )
        groups += [each for route in routes.values() for each in ordered_groups(route)]
    found = tuple([subject_facts(each, routes.get(each.settings.name)) for each in subjects])
    return found, tuple(sorted(groups, key=lambda each: (each.subject, each.group))), readers


async def _routes(
    metadata: MetadataClient, gaps: _Gaps, names: list[str]
) -> dict[str, pb.DescribeRouteResponse]:
    """The routes of ordered subjects, with their groups. A subject that was deleted in between is
    left out.
    """
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
        gaps.silent.update(
            dict.fromkeys(set(route.silent_groups) - gaps.silent.keys(), "it does not answer")
        )
    return dict(sorted(found.items()))


_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SubjectRate:
    """One subject: messages a second in, and out to all groups together; the largest lag of its
    groups. Rates are None without an earlier snapshot.
    """

    subject: str
    in_per_s: float | None
    out_per_s: float | None
    lag_messages: int
    lag_ms: int
    groups: int
    stored_messages: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRate:
    """One consumer group: messages a second that it finished."""

    subject: str
    group: str
    out_per_s: float | None
    lag_messages: int
    lag_ms: int
    consumers: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class ReaderRate:
    """One reader without a group: messages a second that it committed, by its reports."""

    subject: str
    reader: str
    out_per_s: float
    lag_messages: int
    lag_ms: int
    committed_ms_ago: int
    seen_ms_ago: int
    is_silent: bool
    lost_messages: int
    is_near_loss: bool


@dataclass(frozen=True, slots=True)
class BrokerGroupRate:
    """One broker group: messages a second that producers stored there.
    A delay group has no rate.
    """

    broker_group: str
    health: str
    master: str
    in_per_s: float | None
    out_per_s: float | None
    replicas: int
    answering: int
    stored_bytes: int
    disk_free_bytes: int | None
    """Free disk space of the replica that has the least."""


@dataclass(frozen=True, slots=True)
class ClusterRates:
    """The rates of a cluster between two snapshots. `over_ms` is the time between them; 0 without
    an earlier one.
    """

    time_ms: int
    over_ms: int
    in_per_s: float | None
    out_per_s: float | None
    subjects: tuple[SubjectRate, ...]
    groups: tuple[GroupRate, ...]
    broker_groups: tuple[BrokerGroupRate, ...]
    readers: tuple[ReaderRate, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The JSON value."""
        return asdict(self)


class _Place(NamedTuple):
    """A queue, or a group on a queue."""

    subject: str
    partition: int
    broker_group: str
    group: str = ""


def rates(previous: ClusterSnapshot | None, now: ClusterSnapshot) -> ClusterRates:
    """The rates between two snapshots of the same cluster; without the first one, current values
    and no rates.
    """
    over_ms = 0 if previous is None else max(now.monotonic_ms - previous.monotonic_ms, 0)
    known = previous if over_ms else None
    stored = _growth(_stored(known) if known else {}, _stored(now), known)
    done = _growth(_done(known) if known else {}, _done(now), known)

    def rate(count: int) -> float | None:
        return None if known is None else count * 1000 / over_ms

    came, went = (
        _sums(stored, lambda place: place.subject),
        _sums(done, lambda place: place.subject),
    )
    went_by_group = _sums(done, lambda place: (place.subject, place.group))
    groups = tuple(
        [
            GroupRate(
                each.subject,
                each.group,
                rate(went_by_group.get((each.subject, each.group), 0)),
                each.lag_messages,
                each.lag_ms,
                each.consumers,
                each.is_paused,
            )
            for each in now.groups
        ]
    )
    by_subject: dict[str, list[GroupRate]] = {}
    for each in groups:
        by_subject.setdefault(each.subject, []).append(each)
    subjects = []
    for subject in now.subjects:
        readers = by_subject.get(subject.subject, [])
        subjects.append(
            SubjectRate(
                subject.subject,
                rate(came.get(subject.subject, 0)),
                rate(went.get(subject.subject, 0)),
                max((each.lag_messages for each in readers), default=0),
                max((each.lag_ms for each in readers), default=0),
                len(readers),
                subject.stored_messages,
                subject.stored_bytes,
            )
        )
    return ClusterRates(
        time_ms=now.time_ms,
        over_ms=over_ms,
        in_per_s=rate(sum(stored.values())),
        out_per_s=rate(sum(done.values())),
        subjects=tuple(subjects),
        groups=groups,
        broker_groups=_broker_groups(now, rate, stored, done),
        readers=tuple(
            [
                ReaderRate(
                    each.subject,
                    each.reader,
                    each.messages_per_s,
                    each.lag_messages,
                    each.lag_ms,
                    each.committed_ms_ago,
                    each.seen_ms_ago,
                    each.is_silent,
                    each.lost_messages,
                    each.is_near_loss,
                )
                for each in now.readers
            ]
        ),
    )


def _broker_groups(
    now: ClusterSnapshot,
    rate: Callable[[int], float | None],
    stored: Mapping[_Place, int],
    done: Mapping[_Place, int],
) -> tuple[BrokerGroupRate, ...]:
    came, went = (
        _sums(stored, lambda place: place.broker_group),
        _sums(done, lambda place: place.broker_group),
    )
    size_bytes: dict[str, int] = {}
    for queue in (queue for subject in now.subjects for queue in subject.queues):
        size_bytes[queue.broker_group] = size_bytes.get(queue.broker_group, 0) + queue.stored_bytes
    found = []
    for each in now.broker_groups:
        name, free = (
            each.broker_group,
            [one.storage.disk_free_bytes for one in each.replicas if one.storage is not None],
        )
        found.append(
            BrokerGroupRate(
                name,
                each.health,
                each.master,
                None if each.is_delay else rate(came.get(name, 0)),
                None if each.is_delay else rate(went.get(name, 0)),
                len(each.replicas),
                sum(one.role is not None for one in each.replicas),
                size_bytes.get(name, 0),
                min(free, default=None),
            )
        )
    return tuple(found)


def _stored(snapshot: ClusterSnapshot) -> dict[_Place, int]:
    return {
        _Place(subject.subject, queue.partition, queue.broker_group): queue.next_sequence
        for subject in snapshot.subjects
        for queue in subject.queues
    }


def _done(snapshot: ClusterSnapshot) -> dict[_Place, int]:
    found: dict[_Place, int] = {}
    for group in snapshot.groups:
        for each in group.progress:
            place = _Place(group.subject, each.partition, each.broker_group, group.group)
            found[place] = (
                found.get(place, 0) + each.done_messages
            )  # a broadcast group counts once, with all its consumers
    return found


def _growth(
    before: Mapping[_Place, int], after: Mapping[_Place, int], previous: ClusterSnapshot | None
) -> dict[_Place, int]:
    if previous is None:
        return {}
    is_whole = not previous.missing
    found = {}
    for place, count in after.items():
        if place in before:
            found[place] = max(count - before[place], 0)
        elif is_whole and place.broker_group not in previous.silent:
            # a group that began after the first snapshot is not counted, because its start is not
            # known
            found[place] = 0 if place.group else count
    return found


def _sums(grown: Mapping[_Place, int], key: Callable[[_Place], _K]) -> dict[_K, int]:
    found: dict[_K, int] = {}
    for place, count in grown.items():
        found[key(place)] = found.get(key(place), 0) + count
    return found
