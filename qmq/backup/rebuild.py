"""`qmq backup rebuild`: the coordination store's keys from the replicas' data folders, when etcd is
lost for good.

    identity    exactly: each `replica.json` has the cluster's, so clients that run continue
    groups      exactly: the members, the secret and the highest promised epoch are in each
                `replica.json`; an election finds the master
    subjects    from the queues in the logs; their settings from a backup, if there is one, else the
                defaults
    routes      from a backup that is new enough, else deduced
    consumer groups of ordered subjects
                from their lanes; their progress is in the logs

All other keys (rules, quotas, retry settings, pauses) come from the backup, or are gone.

An ordered subject's routes are deduced from what broker groups have in their logs. The logs say of
each partition its broker group, the logical partitions of its messages and of its groups' lanes,
and the version that closed it, if one did. The rules of routes (qmq_ordering/changes.py) give the
rest:

* version 1 divides [0, N) evenly, and numbers its partitions from 1;
* version v replaces the partitions that it closed by the next numbers, within the same ranges, in
  the order of the ranges.

A cut between two partitions is known as exactly as the messages and lanes beside it. Where there
are none on either side, any cut is as good: there is nothing whose order it could break.

A replica's data folder is read while the replica does not run. The calls block.

    replica.json     the group, its members and their secret, the highest epoch that the replica
                     promised
    delay.json       the settings of a delay group
    both logs        subjects, partitions, command messages, groups and their lanes
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from qmq_coordination.broker_groups import CLUSTER, DelaySettings, EpochClaim, group_key
from qmq_coordination.coordination_store import CoordinationStore, KeyValue
from qmq_coordination.ordered_records import (
    ROUTES,
    OrderedState,
    change_key,
    group_record_key,
    latest_key,
    ordered_state,
    route_key,
)
from qmq_coordination.subjects import decode_subject, encode_subject, subject_key
from qmq_ordering.changes import first_route
from qmq_ordering.hashing import LOGICAL_PARTITIONS, logical_partition
from qmq_ordering.lanes import Frontier, FrontierPiece, GroupRecord
from qmq_ordering.routes import Change, ChangeKind, LpRange, Phase, PhysicalPartition, Route
from qmq_replication import identity as identities
from qmq_replication.coordinator import SECRET
from qmq_replication.identity import ReplicaIdentity
from qmq_replication.membership import ReplicaMembership

from qmq.backup.manifest import RESTORED, Items
from qmq.backup.restore import begin, known_mark, put_items
from qmq.errors import InvalidArgument
from qmq.log.envelopes import walk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import Order, SubjectConfig, is_dead_letters
from qmq.node import process
from qmq.process.event_loop import SystemClock
from qmq.wire.batch import BatchView, Kind
from qmq.wire.batch_columns import BatchFlag

LP_BITS = 32


@dataclass(frozen=True, slots=True)
class PartitionEvidence:
    """The information in the logs about one partition. `hull` is the smallest range with all
    logical partitions in the logs; None without any.
    """

    number: int
    group: str
    hull: LpRange | None = None
    sealed: tuple[int, str, int] | None = None
    """The sequence of the command message, the change's id, and the version after the change."""

    def fits(self, lps: LpRange) -> bool:
        return self.hull is None or lps.contains(self.hull)


class CountEvidence:
    """The number N of logical partitions, from keys' hashes and their logical partitions: LP = (m *
    N) >> 32.
    """

    def __init__(self) -> None:
        self.least, self.most = 1, 1 << 16

    def add(self, hashed: int, lp: int) -> None:
        """`hashed` is m of qmq_ordering/hashing.py."""
        if hashed:
            self.least = max(self.least, -(-(lp << LP_BITS) // hashed))
            self.most = min(self.most, (((lp + 1) << LP_BITS) - 1) // hashed)

    def count(self, usual: int) -> int:
        """N; if the keys allow several numbers, the usual one. Raises InvalidArgument."""
        if self.least == self.most:
            return self.least
        if self.least <= usual <= self.most:
            return usual
        raise InvalidArgument(
            f"its number of logical partitions is between {self.least:,} and {self.most:,}: "
            "too few keys were seen"
        )


@dataclass(frozen=True, slots=True)
class DeducedRoutes:
    """All versions of a subject's route, and the changes between them."""

    routes: tuple[Route, ...]
    changes: tuple[Change, ...]


def deduce(count: int, found: Mapping[int, PartitionEvidence]) -> DeducedRoutes:
    """The routes that explain the logs, with N = `count`.
    Raises InvalidArgument if no routes do.
    """
    highest = max(found)
    anywhere = found[min(found)].group
    known = {
        number: found.get(number, PartitionEvidence(number, anywhere))
        for number in range(1, highest + 1)
    }
    failure = InvalidArgument("no first route explains its partitions")
    for first in range(min(highest, count), 0, -1):
        try:
            return _deduce(count, known, first)
        except InvalidArgument as cause:
            failure = cause
    raise failure


def _deduce(count: int, known: Mapping[int, PartitionEvidence], first: int) -> DeducedRoutes:
    even = first_route(count, first, ["any"])
    parts = tuple(
        PhysicalPartition(each.number, each.range, known[each.number].group)
        for each in even.partitions
    )
    if not all(known[each.number].fits(each.range) for each in parts):
        raise InvalidArgument(f"its partitions 1 to {first} do not divide the keys evenly")
    routes, changes = [Route(1, count, first + 1, parts)], []
    last = max((each.sealed[2] for each in known.values() if each.sealed is not None), default=1)
    for version in range(2, last + 1):
        change = _change(routes[-1], known, version)
        left = [each for each in routes[-1].partitions if each.number not in change.sources]
        following = tuple(sorted([*left, *change.targets], key=lambda each: each.range))
        routes.append(
            Route(version, count, routes[-1].next_number + len(change.targets), following)
        )
        changes.append(change)
    if routes[-1].next_number <= max(known):
        raise InvalidArgument(f"nothing explains its partition {routes[-1].next_number}")
    closed = [
        each.number
        for each in routes[-1].partitions
        if each.number in known and known[each.number].sealed is not None
    ]
    if closed:
        raise InvalidArgument(f"its partitions {closed} are closed and have no successors")
    return DeducedRoutes(tuple(routes), tuple(changes))


def _change(route: Route, known: Mapping[int, PartitionEvidence], version: int) -> Change:
    """The change that led to a version. Its partitions are closed, so the change is published."""
    sources = [
        each
        for each in route.partitions
        if each.number in known and _closed_by(known[each.number], version)
    ]
    if not sources or any(a.range.end != b.range.first for a, b in pairwise(sources)):
        raise InvalidArgument(f"no adjacent partitions were closed for version {version}")
    region = LpRange(sources[0].range.first, sources[-1].range.end)
    targets = _targets(
        route.next_number, region, known, most=1 if len(sources) > 1 else region.width
    )
    if not targets:
        targets = [PartitionEvidence(route.next_number, sources[0].group)]
    ranges = _cut(region, targets)
    kind = (
        ChangeKind.MERGE
        if len(sources) > 1
        else ChangeKind.SPLIT
        if len(targets) > 1
        else ChangeKind.MOVE
    )
    seals = {each.number: known[each.number].sealed for each in sources}
    return Change(
        next(sealed[1] for sealed in seals.values() if sealed is not None),
        kind,
        version,
        tuple(seals),
        tuple(
            PhysicalPartition(each.number, lps, each.group)
            for each, lps in zip(targets, ranges, strict=True)
        ),
        Phase.PUBLISHED,
        {number: sealed[0] for number, sealed in seals.items() if sealed is not None},
        "rebuilt from the brokers' logs",
    )


def _closed_by(found: PartitionEvidence, version: int) -> bool:
    return found.sealed is not None and found.sealed[2] == version


def _targets(
    number: int, region: LpRange, known: Mapping[int, PartitionEvidence], most: int
) -> list[PartitionEvidence]:
    """The next partitions that lie in a region one after another."""
    found: list[PartitionEvidence] = []
    end = region.first
    while number in known and len(found) < most:
        hull = known[number].hull
        if hull is not None and (hull.first < end or hull.end > region.end):
            break
        end = end if hull is None else hull.end
        found.append(known[number])
        number += 1
    return found


def _cut(region: LpRange, parts: list[PartitionEvidence]) -> list[LpRange]:
    """A range for each partition, in order, that contains the partition's hull. Raises
    InvalidArgument if the ranges do not fit.
    """
    found: list[LpRange] = []
    first = region.first
    for at, part in enumerate(parts):
        behind = parts[at + 1 :]
        hull_at = next((place for place, each in enumerate(behind) if each.hull is not None), None)
        limit = (
            region.end - len(behind) if hull_at is None else behind[hull_at].hull.first - hull_at  # type: ignore[union-attr]
        )
        end = region.end if not behind else limit if part.hull is None else part.hull.end
        if not first < end <= (limit if behind else region.end):
            raise InvalidArgument(
                f"its partition {part.number} has keys that do not fit into {region}"
            )
        found.append(LpRange(first, end))
        first = end
    return found


@dataclass(slots=True)
class QueueEvidence:
    """One queue of a log; partition 0 is that of an unordered subject."""

    hull: LpRange | None = None
    sealed: tuple[int, str, int] | None = None
    lanes: list[str] = field(default_factory=list)
    """The groups that read the queue by lanes."""
    is_bent: bool = False

    def widen(self, lps: LpRange) -> None:
        self.hull = (
            lps
            if self.hull is None
            else LpRange(min(self.hull.first, lps.first), max(self.hull.end, lps.end))
        )


@dataclass(slots=True)
class FolderEvidence:
    """A replica's folder."""

    data: Path
    identity: ReplicaIdentity
    settings: DelaySettings | None
    epoch: int = 0
    index: int = 0
    queues: dict[tuple[str, int], QueueEvidence] = field(default_factory=dict)
    counts: dict[str, CountEvidence] = field(default_factory=lambda: defaultdict(CountEvidence))


def look_into(data: Path) -> FolderEvidence:
    """Read a replica's folder. Raises InvalidArgument if it is not a replica's folder, FolderInUse
    if the replica runs, LogDamaged.
    """
    if not (data / identities.FILE).is_file():
        raise InvalidArgument(f"{data} is no data folder of a replica: it has no {identities.FILE}")
    names = json.loads(json.loads((data / identities.FILE).read_bytes())["content"])
    identity = identities.load(data, names["group"], names["replica"])
    if identity is None:
        raise InvalidArgument(
            f"{data} is no data folder of a replica: its {identities.FILE} names no replica"
        )
    path = data / process.FILE
    found = FolderEvidence(
        data, identity, DelaySettings.decode(path.read_bytes()) if path.exists() else None
    )
    if found.settings is not None:
        # the messages of a delay group go by subject to the broker groups, which have the subjects
        return found
    store = open_store(data / "broker", LogConfig(), SystemClock(), is_replicated=True)
    try:
        found.epoch, found.index = store.epoch, store.index
        _look_at_queues(store, found)
        _look_at_messages(store, found)
    finally:
        store.close()
    return found


def _look_at_queues(store: Store, found: FolderEvidence) -> None:
    for queue in store.queues.values():
        if queue.is_blank:
            continue  # of a deleted subject
        seen = found.queues.setdefault((queue.id.subject, queue.id.partition), QueueEvidence())
        if queue.sealed is not None:
            seen.sealed = (queue.sealed.sequence, queue.sealed.change_id, queue.sealed.to_version)
        for group, lanes in queue.lanes.items():
            seen.lanes.append(group)
            for progress in lanes.progress:
                seen.widen(progress.lps)


def _look_at_messages(store: Store, found: FolderEvidence) -> None:
    for entry in walk(store.messages, store.messages.local_start):
        if entry.envelope.kind != Kind.DATA:
            continue
        batch = BatchView(entry.envelope, entry.region)
        seen = found.queues.get((batch.subject, batch.header.partition))
        if seen is None or not batch.header.partition:
            continue
        if batch.header.flags & BatchFlag.BENT:
            seen.is_bent = True
            continue
        for key, lp in zip(batch.keys() or (), batch.logical_partitions() or (), strict=False):
            found.counts[batch.subject].add(logical_partition(key, 1 << LP_BITS), lp)
            seen.widen(LpRange(lp, lp + 1))


REBUILT: Final = "rebuilt from the replicas' data"
"""Takes the place of a backup's id."""


@dataclass(frozen=True, slots=True)
class RebuiltKeys:
    """All keys, and the subjects that could not be rebuilt, with the reasons."""

    items: Items
    failed: dict[str, str]


def rebuilt_keys(folders: Iterable[FolderEvidence], backup: Mapping[str, bytes]) -> RebuiltKeys:
    """The keys that follow from the folders. Pure. `backup` has the keys of the newest backup, if
    there is one. Raises InvalidArgument if the folders contradict each other.
    """
    groups: dict[str, list[FolderEvidence]] = defaultdict(list)
    clusters: set[str] = set()
    for folder in folders:
        groups[folder.identity.group].append(folder)
        clusters |= {folder.identity.cluster} - {""}
    if len(clusters) > 1:
        raise InvalidArgument(
            f"the folders belong to different clusters, {', '.join(sorted(clusters))}: give "
            "only folders of one"
        )
    items = dict(backup)
    if clusters:
        items[CLUSTER] = clusters.pop().encode()
    brokers = sorted(group for group, found in groups.items() if found[0].settings is None)
    for group, found in groups.items():
        items |= _group_keys(group, found)
    seen: dict[str, dict[tuple[str, int], QueueEvidence]] = defaultdict(dict)
    counts: dict[str, CountEvidence] = defaultdict(CountEvidence)
    for group, found in groups.items():
        best = max(found, key=lambda each: (each.epoch, each.index))
        for (subject, partition), queue in best.queues.items():
            seen[subject][group, partition] = queue
        for subject, count in best.counts.items():
            counts[subject].least = max(counts[subject].least, count.least)
            counts[subject].most = min(counts[subject].most, count.most)
    failed: dict[str, str] = {}
    for subject, queues in sorted(seen.items()):
        if is_dead_letters(subject):
            continue
        try:
            items |= _subject_keys(subject, queues, counts[subject], items, brokers)
        except InvalidArgument as cause:
            failed[subject] = cause.message
    return RebuiltKeys(items, failed)


def _group_keys(group: str, found: list[FolderEvidence]) -> Items:
    if len({each.settings for each in found}) > 1:
        raise InvalidArgument(
            f"the folders of {group} were made with different settings: give only folders of "
            "one group's replicas"
        )
    known = [each for each in found if each.identity.membership]
    if not known:
        raise InvalidArgument(
            f"no folder of {group} has the group's members: give the folder of another replica"
        )
    best = max(
        known, key=lambda each: ReplicaMembership.decode(each.identity.membership.encode()).version
    )
    epoch = max(max(each.epoch, each.identity.promised) for each in found)
    keys = {
        group_key(group, "members"): best.identity.membership.encode(),
        group_key(group, "epoch"): EpochClaim(epoch, best.identity.replica, REBUILT).encode(),
    }
    if best.identity.secret:
        keys[group_key(group, SECRET)] = best.identity.secret.encode()
    if best.settings is not None:
        keys[group_key(group, "delay")] = best.settings.encode()
    return keys


def _subject_keys(
    subject: str,
    queues: Mapping[tuple[str, int], QueueEvidence],
    count: CountEvidence,
    items: Mapping[str, bytes],
    brokers: Sequence[str],
) -> Items:
    """The keys of one subject. Raises InvalidArgument if the routes cannot be deduced. Consumers
    read an unordered subject from all broker groups: a producer that runs meanwhile may know a
    placement that neither backup nor logs have, and send there.
    """
    key = subject_key(subject)
    config = decode_subject(_item(key, items[key])) if key in items else None
    hosts = tuple(sorted({group for group, _ in queues}))
    if all(partition == 0 for _, partition in queues):
        config = config or SubjectConfig(subject, groups=hosts)
        if not config.groups:
            return {key: encode_subject(config)}
        missing = tuple(
            each for each in hosts if each not in (*config.groups, *config.former_groups)
        )
        groups = (*config.groups, *missing)
        return {
            key: encode_subject(
                replace(
                    config,
                    groups=groups,
                    former_groups=tuple(each for each in brokers if each not in groups),
                )
            )
        }
    known = ordered_state(
        subject,
        [
            _item(name, value)
            for name, value in items.items()
            if name.startswith(f"{ROUTES}{subject}/")
        ],
    )
    if config is not None and known.latest and _is_new_enough(known, queues):
        return _lane_groups(subject, known.routes, queues, known.groups)
    if config is None:
        order = Order.BEST_EFFORT if any(each.is_bent for each in queues.values()) else Order.STRICT
        config = SubjectConfig(
            subject, groups=hosts, order=order, logical_partitions=count.count(LOGICAL_PARTITIONS)
        )
    evidence = {
        number: PartitionEvidence(number, group, each.hull, each.sealed)
        for (group, number), each in queues.items()
        if number
    }
    deduced = deduce(config.logical_partitions, evidence)
    routes = {each.version: each for each in deduced.routes}
    return {
        key: encode_subject(config),
        latest_key(subject): str(deduced.routes[-1].version).encode(),
        **{route_key(subject, version): route.encode() for version, route in routes.items()},
        **{change_key(subject, each.to_version): each.encode() for each in deduced.changes},
        **_lane_groups(subject, routes, queues, known.groups),
    }


def _is_new_enough(known: OrderedState, queues: Mapping[tuple[str, int], QueueEvidence]) -> bool:
    """Whether the backup's routes have all partitions of the logs,
    and the changes that closed some.
    """
    seals = [each.sealed for each in queues.values() if each.sealed is not None]
    changes = {(change.id, version) for version, change in known.changes.items()}
    return all(known.partition(number) is not None for _, number in queues) and all(
        (sealed[1], sealed[2]) in changes for sealed in seals
    )


def _lane_groups(
    subject: str,
    routes: Mapping[int, Route],
    queues: Mapping[tuple[str, int], QueueEvidence],
    known: Mapping[str, GroupRecord],
) -> Items:
    """Records for groups that have lanes but no record,
    at the oldest version in which they have lanes.
    """
    first: dict[str, int] = {}
    for version, route in sorted(routes.items(), reverse=True):
        for part in route.partitions:
            queue = queues.get((part.group, part.number))
            first |= dict.fromkeys(queue.lanes if queue is not None else (), version)
    whole = LpRange(0, next(iter(routes.values())).logical_partitions)
    return {
        group_record_key(subject, group): GroupRecord(
            Frontier((FrontierPiece(whole, version),))
        ).encode()
        for group, version in first.items()
        if group not in known
    }


def _item(key: str, value: bytes) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1)


async def put_rebuilt(store: CoordinationStore, rebuilt: RebuiltKeys) -> None:
    """Write the keys into an empty store; the groups last, so that no server starts with incomplete
    keys. A repeated call completes an interrupted one. Raises NotEmpty, CoordinationError.
    """
    mark = await known_mark(store, REBUILT) or await begin(store, REBUILT)
    if mark.has_keys:
        return
    founding = {
        key: value
        for key, value in rebuilt.items.items()
        if key.endswith("/members") and key.startswith(group_key("", "")[:-1])
    }
    await put_items(
        store, {key: value for key, value in rebuilt.items.items() if key not in founding}
    )
    await put_items(store, founding)
    await put_items(store, {RESTORED: replace(mark, has_keys=True).encode()})
