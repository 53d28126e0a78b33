"""Reads a replica's data folder for information about its cluster. The replica must not run. The calls block.

replica.json     the group, its members and their secret, the highest epoch that the replica promised
delay.json       the settings of a delay group
both logs        subjects, partitions, command messages, groups and their lanes
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from qmq_coordination.broker_groups import DelaySettings
from qmq_ordering.hashing import logical_partition
from qmq_ordering.route import LpRange
from qmq_replication import replica_identity as identities
from qmq_replication.replica_identity import ReplicaIdentity

from qmq.backup.route_evidence import LP_BITS, CountEvidence
from qmq.batch import BatchView, Kind
from qmq.batch_columns import BatchFlag
from qmq.clock import SystemClock
from qmq.errors import InvalidArgument
from qmq.log.envelopes import walk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.node import bootstrap


@dataclass(slots=True)
class QueueEvidence:
    """One queue of a log; partition 0 is that of an unordered subject."""

    hull: LpRange | None = None
    sealed: tuple[int, str, int] | None = None
    lanes: list[str] = field(default_factory=list)
    """The groups that read the queue by lanes."""
    is_bent: bool = False

    def widen(self, lps: LpRange) -> None:
        self.hull = lps if self.hull is None else LpRange(min(self.hull.first, lps.first), max(self.hull.end, lps.end))


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
    """Read a replica's folder. Raises InvalidArgument if it is not a replica's folder, FolderInUse if the replica runs, LogDamaged."""
    if not (data / identities.FILE).is_file():
        raise InvalidArgument(f"{data} is no data folder of a replica: it has no {identities.FILE}")
    names = json.loads(json.loads((data / identities.FILE).read_bytes())["content"])
    identity = identities.load(data, names["group"], names["replica"])
    if identity is None:
        raise InvalidArgument(f"{data} is no data folder of a replica: its {identities.FILE} names no replica")
    path = data / bootstrap.FILE
    found = FolderEvidence(data, identity, DelaySettings.decode(path.read_bytes()) if path.exists() else None)
    if found.settings is not None:
        return found  # the messages of a delay group go by subject to the broker groups, which have the subjects
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
