"""The rates of stored and consumed messages, from two snapshots. Pure.

The stored messages are the difference of the queues' next sequences; the consumed ones are the difference of the groups' progress. If a
value is not known in both snapshots, because a broker group was silent in one, or the subject was created again, it counts as zero. A queue
that is new since the first snapshot counts from zero, and a new group counts from the second snapshot on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from qmq.operations.snapshot import ClusterSnapshot

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SubjectRate:
    """One subject: messages a second in, and out to all groups together; the largest lag of its groups. Rates are None without an earlier
    snapshot.
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
class BrokerGroupRate:
    """One broker group: messages a second that producers stored there. A delay group has no rate."""

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
    """The rates of a cluster between two snapshots. `over_ms` is the time between them; 0 without an earlier one."""

    time_ms: int
    over_ms: int
    in_per_s: float | None
    out_per_s: float | None
    subjects: tuple[SubjectRate, ...]
    groups: tuple[GroupRate, ...]
    broker_groups: tuple[BrokerGroupRate, ...]

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
    """The rates between two snapshots of the same cluster; without the first one, current values and no rates."""
    over_ms = 0 if previous is None else max(now.monotonic_ms - previous.monotonic_ms, 0)
    known = previous if over_ms else None
    stored = _growth(_stored(known) if known else {}, _stored(now), known)
    done = _growth(_done(known) if known else {}, _done(now), known)

    def rate(count: int) -> float | None:
        return None if known is None else count * 1000 / over_ms

    came, went = _sums(stored, lambda place: place.subject), _sums(done, lambda place: place.subject)
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
    )


def _broker_groups(
    now: ClusterSnapshot, rate: Callable[[int], float | None], stored: Mapping[_Place, int], done: Mapping[_Place, int]
) -> tuple[BrokerGroupRate, ...]:
    came, went = _sums(stored, lambda place: place.broker_group), _sums(done, lambda place: place.broker_group)
    size_bytes: dict[str, int] = {}
    for queue in (queue for subject in now.subjects for queue in subject.queues):
        size_bytes[queue.broker_group] = size_bytes.get(queue.broker_group, 0) + queue.stored_bytes
    found = []
    for each in now.broker_groups:
        name, free = each.broker_group, [one.storage.disk_free_bytes for one in each.replicas if one.storage is not None]
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
            found[place] = found.get(place, 0) + each.done_messages  # a broadcast group counts once, with all its consumers
    return found


def _growth(before: Mapping[_Place, int], after: Mapping[_Place, int], previous: ClusterSnapshot | None) -> dict[_Place, int]:
    if previous is None:
        return {}
    is_whole = not previous.missing
    found = {}
    for place, count in after.items():
        if place in before:
            found[place] = max(count - before[place], 0)
        elif is_whole and place.broker_group not in previous.silent:
            # a group that began after the first snapshot is not counted, because its start is not known
            found[place] = 0 if place.group else count
    return found


def _sums(grown: Mapping[_Place, int], key: Callable[[_Place], _K]) -> dict[_K, int]:
    found: dict[_K, int] = {}
    for place, count in grown.items():
        found[key(place)] = found.get(key(place), 0) + count
    return found
