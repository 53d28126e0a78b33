"""`qmq backup rebuild`: the coordination store's keys from the replicas' data folders, when etcd is lost for good.

    identity    exactly: each `replica.json` has the cluster's, so clients that run continue
    groups      exactly: the members, the secret and the highest promised epoch are in each `replica.json`; an election finds the master
    subjects    from the queues in the logs; their settings from a backup, if there is one, else the defaults
    routes      from a backup that is new enough, else deduced (qmq/backup/route_evidence.py)
    consumer groups of ordered subjects    from their lanes; their progress is in the logs

All other keys (rules, quotas, retry settings, pauses) come from the backup, or are gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qmq_coordination.broker_groups import EpochClaim, group_key
from qmq_coordination.cluster_identity import CLUSTER
from qmq_coordination.coordination_store import CoordinationStore, KeyValue
from qmq_coordination.ordered_records import ROUTES, OrderedState, change_key, group_record_key, latest_key, ordered_state, route_key
from qmq_coordination.subjects import decode_subject, encode_subject, subject_key
from qmq_ordering.frontier import Frontier, FrontierPiece, GroupRecord
from qmq_ordering.hashing import LOGICAL_PARTITIONS
from qmq_ordering.route import LpRange, Route
from qmq_replication.coordinator import SECRET
from qmq_replication.replica_membership import ReplicaMembership

from qmq.backup.cluster_items import RESTORED, Items
from qmq.backup.log_evidence import FolderEvidence, QueueEvidence
from qmq.backup.new_cluster import begin, known_mark, put_items
from qmq.backup.route_evidence import CountEvidence, PartitionEvidence, deduce
from qmq.errors import InvalidArgument
from qmq.model import Order, SubjectConfig, is_dead_letters

REBUILT: Final = "rebuilt from the replicas' data"
"""Takes the place of a backup's id."""


@dataclass(frozen=True, slots=True)
class RebuiltKeys:
    """All keys, and the subjects that could not be rebuilt, with the reasons."""

    items: Items
    failed: dict[str, str]


def rebuilt_keys(folders: Iterable[FolderEvidence], backup: Mapping[str, bytes]) -> RebuiltKeys:
    """The keys that follow from the folders. Pure. `backup` has the keys of the newest backup, if there is one. Raises InvalidArgument if
    the folders contradict each other.
    """
    groups: dict[str, list[FolderEvidence]] = defaultdict(list)
    clusters: set[str] = set()
    for folder in folders:
        groups[folder.identity.group].append(folder)
        clusters |= {folder.identity.cluster} - {""}
    if len(clusters) > 1:
        raise InvalidArgument(f"the folders belong to different clusters, {', '.join(sorted(clusters))}: give only folders of one")
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
        raise InvalidArgument(f"the folders of {group} were made with different settings: give only folders of one group's replicas")
    known = [each for each in found if each.identity.membership]
    if not known:
        raise InvalidArgument(f"no folder of {group} has the group's members: give the folder of another replica")
    best = max(known, key=lambda each: ReplicaMembership.decode(each.identity.membership.encode()).version)
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
    subject: str, queues: Mapping[tuple[str, int], QueueEvidence], count: CountEvidence, items: Mapping[str, bytes], brokers: Sequence[str]
) -> Items:
    """The keys of one subject. Raises InvalidArgument if the routes cannot be deduced. Consumers read an unordered subject from all broker
    groups: a producer that runs meanwhile may know a placement that neither backup nor logs have, and send there.
    """
    key = subject_key(subject)
    config = decode_subject(_item(key, items[key])) if key in items else None
    hosts = tuple(sorted({group for group, _ in queues}))
    if all(partition == 0 for _, partition in queues):
        config = config or SubjectConfig(subject, groups=hosts)
        if not config.groups:
            return {key: encode_subject(config)}
        missing = tuple(each for each in hosts if each not in (*config.groups, *config.former_groups))
        groups = (*config.groups, *missing)
        return {key: encode_subject(replace(config, groups=groups, former_groups=tuple(each for each in brokers if each not in groups)))}
    known = ordered_state(subject, [_item(name, value) for name, value in items.items() if name.startswith(f"{ROUTES}{subject}/")])
    if config is not None and known.latest and _is_new_enough(known, queues):
        return _lane_groups(subject, known.routes, queues, known.groups)
    if config is None:
        order = Order.BEST_EFFORT if any(each.is_bent for each in queues.values()) else Order.STRICT
        config = SubjectConfig(subject, groups=hosts, order=order, logical_partitions=count.count(LOGICAL_PARTITIONS))
    evidence = {number: PartitionEvidence(number, group, each.hull, each.sealed) for (group, number), each in queues.items() if number}
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
    """Whether the backup's routes have all partitions of the logs, and the changes that closed some."""
    seals = [each.sealed for each in queues.values() if each.sealed is not None]
    changes = {(change.id, version) for version, change in known.changes.items()}
    return all(known.partition(number) is not None for _, number in queues) and all((sealed[1], sealed[2]) in changes for sealed in seals)


def _lane_groups(
    subject: str, routes: Mapping[int, Route], queues: Mapping[tuple[str, int], QueueEvidence], known: Mapping[str, GroupRecord]
) -> Items:
    """Records for groups that have lanes but no record, at the oldest version in which they have lanes."""
    first: dict[str, int] = {}
    for version, route in sorted(routes.items(), reverse=True):
        for part in route.partitions:
            queue = queues.get((part.group, part.number))
            first |= dict.fromkeys(queue.lanes if queue is not None else (), version)
    whole = LpRange(0, next(iter(routes.values())).logical_partitions)
    return {
        group_record_key(subject, group): GroupRecord(Frontier((FrontierPiece(whole, version),))).encode()
        for group, version in first.items()
        if group not in known
    }


def _item(key: str, value: bytes) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1)


async def put_rebuilt(store: CoordinationStore, rebuilt: RebuiltKeys) -> None:
    """Write the keys into an empty store; the groups last, so that no server starts with incomplete keys. A repeated call completes an
    interrupted one. Raises NotEmpty, CoordinationError.
    """
    mark = await known_mark(store, REBUILT) or await begin(store, REBUILT)
    if mark.has_keys:
        return
    founding = {key: value for key, value in rebuilt.items.items() if key.endswith("/members") and key.startswith(group_key("", "")[:-1])}
    await put_items(store, {key: value for key, value in rebuilt.items.items() if key not in founding})
    await put_items(store, founding)
    await put_items(store, {RESTORED: replace(mark, has_keys=True).encode()})
