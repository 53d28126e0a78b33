"""Hand-made snapshots: a healthy cluster with one thing changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qmq.operations.snapshot import (
    BrokerGroupFacts,
    ClusterSnapshot,
    ConsumerGroupFacts,
    DeadLetterFacts,
    DelayGroupFacts,
    GroupProgress,
    MetaserverFacts,
    ProcessFacts,
    QueueFacts,
    ReplicaFacts,
    RouteChangeFacts,
    RouteFacts,
    StorageFacts,
    SubjectFacts,
)

NOW_MS = 1_800_000_000_000
GIB = 1 << 30
PROCESS = ProcessFacts("0.1.0", certificate_left_ms=300 * 86_400_000)
STORAGE = StorageFacts(500 * GIB, 64 << 20, 3 * GIB, 0, 0)


def replica(name: str, role: str | None = "slave", **fields: Any) -> ReplicaFacts:
    known: dict[str, Any] = {
        "replica": name,
        "vote": "voter",
        "is_present": True,
        "control_address": f"{name}:20882",
        "role": role,
    }
    if role is not None:
        known |= {
            "epoch": 3,
            "last_index": 1_000,
            "time_ms": NOW_MS,
            "storage": STORAGE,
            "process": PROCESS,
        }
    if role == "master":
        known |= {"is_serving": True}
    elif role is not None:
        known |= {"lag_entries": 0, "silent_ms": 10, "in_step": True}
    return ReplicaFacts(**(known | fields))


def broker_group(name: str, *replicas: ReplicaFacts, **fields: Any) -> BrokerGroupFacts:
    members = replicas or (
        replica(f"{name}-a", "master"),
        replica(f"{name}-b"),
        replica(f"{name}-c"),
    )
    master = next((each.replica for each in members if each.role == "master"), "")
    known = {
        "broker_group": name,
        "health": "read-write" if master else "offline",
        "mode": "read-write",
        "master": master,
        "epoch": 3,
        "voters": tuple(each.replica for each in members),
        "learners": (),
        "is_delay": False,
        "replicas": members,
    }
    return BrokerGroupFacts(**(known | fields))


def group(
    subject: str = "flights", name: str = "ops", *, lag: int = 0, lag_ms: int = 0, **fields: Any
) -> ConsumerGroupFacts:
    """A consumer group on the queue of g1."""
    progress = GroupProgress(0, "g1", 1_000 - lag, lag, lag_ms)
    return ConsumerGroupFacts(
        **({"subject": subject, "group": name, "progress": (progress,), "consumers": 2} | fields)
    )


def queue(broker_group: str, stored: int = 1_000, partition: int = 0) -> QueueFacts:
    return QueueFacts(partition, broker_group, 0, stored, stored * 100, NOW_MS)


def route(*broker_groups: str, change: RouteChangeFacts | None = None) -> RouteFacts:
    return RouteFacts(1, 1024, broker_groups, len(broker_groups), change)


def delay_group(**fields: Any) -> DelayGroupFacts:
    known = {
        "pending": 10,
        "waiting": 0,
        "planned": 0,
        "lateness_p99_ms": 400,
        "horizon_ms": NOW_MS + 3_600_000,
        "time_ms": NOW_MS,
    }
    return DelayGroupFacts(**({"group": "d1", "clock_step_ms": 0} | known | fields))


def dead_letters(
    waiting: int = 3, newest_ago_ms: int = 86_400_000, **fields: Any
) -> DeadLetterFacts:
    return DeadLetterFacts(
        **({"group": "ops", "messages": waiting, "newest_ms": NOW_MS - newest_ago_ms} | fields),
        waiting=waiting,
        oldest_ago_ms=0,
    )


WELL = ClusterSnapshot(
    time_ms=NOW_MS,
    monotonic_ms=10_000,
    metaservers=(
        MetaserverFacts("meta0:20880", process=PROCESS, store_silent_ms=900),
        MetaserverFacts("meta1:20880", process=PROCESS),
    ),
    broker_groups=(broker_group("g1"), broker_group("g2"), broker_group("d1", is_delay=True)),
    subjects=(
        SubjectFacts("flights", "", ("g1", "g2"), (queue("g1"), queue("g2"))),
        SubjectFacts(
            "orders",
            "strict",
            ("g1", "g2"),
            (queue("g1", partition=1), queue("g2", partition=2)),
            route("g1", "g2"),
        ),
    ),
    groups=(group(), group("orders", "billing")),
    delay_groups=(delay_group(),),
)
"""Two broker groups, a delay group, two subjects, each with a group."""


def changed(**fields: Any) -> ClusterSnapshot:
    """A healthy cluster with this change."""
    return replace(WELL, **fields)


def earlier(snapshot: ClusterSnapshot = WELL, by_ms: int = 2_000, **fields: Any) -> ClusterSnapshot:
    """The same, so long ago."""
    return replace(
        snapshot,
        **(
            {"time_ms": snapshot.time_ms - by_ms, "monotonic_ms": snapshot.monotonic_ms - by_ms}
            | fields
        ),
    )


def with_replica(**fields: Any) -> ClusterSnapshot:
    """One slave of g1 is otherwise."""
    odd = replica("g1-c", **fields)
    return changed(
        broker_groups=(
            broker_group("g1", replica("g1-a", "master"), replica("g1-b"), odd),
            broker_group("g2"),
        )
    )
