"""The plan of a seed's run: it draws its own probabilities, some of them zero, so that rare faults happen together (swarm testing)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

FAULTS = (
    "kill_master",
    "pause_master",
    "failover",
    "isolate_master",
    "isolate_group",
    "isolate_group_long",
    "hide_group",
    "stall_group",
    "silence_group",
    "handover",
    "kill_broker_process",
    "disk_full",
    "etcd_cut_one",
    "etcd_cut_all",
    "lease_end",
    "kill_metaserver",
    "pause_metaserver",
    "isolate_metaserver",
    "cut_connections",
    "isolate_client",
    "kill_producer",
    "pause_producer",
    "kill_consumer",
    "pause_consumer",
    "leave_consumer",
    "join_consumer",
    "pause_consumer_long",
    "flip_gate",
    "new_group",
    "unpark",
)

OBSESSIONS = (
    ("isolate_group_long",),
    ("isolate_group_long", "cut_connections"),
    ("hide_group",),
    ("stall_group", "cut_connections", "pause_master"),
    ("failover", "pause_consumer_long"),
    ("kill_master", "etcd_cut_one"),
    ("pause_consumer_long",),
    ("kill_metaserver",),
    ("disk_full",),
    ("silence_group",),
)
"""Seeds that have little else."""

CHANGES = ("split", "merge", "move", "split_many", "merge_many", "drain")


HOLDS = 0.2
"""The fraction of plans in which connections are held."""
PARKS = 0.15
"""The fraction of plans in which many keys are parked, and given back."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities per message, request or step; mean times in milliseconds."""

    rounds: int = 2
    logical_partitions: int = 16
    partitions: int = 2
    broker_groups: int = 2
    metaservers: int = 2
    producers: int = 2
    keys: int = 5
    """Messages of each producer."""
    consumers: int = 2
    """Initial consumers of each group."""
    groups: tuple[str, ...] = ("g",)
    is_lease: bool = True
    unknown: str = "resend"
    delivery_s: float = 600.0
    on_failure: str = "block"
    gate: str = ""
    """The lease that consumers request."""
    send_every_ms: int = 400
    handler_ms: int = 40
    handler_fails: float = 0.0
    prefetch: int = 20
    concurrency: int = 4
    slow: float = 0.0
    slow_ms: int = 100
    loss: float = 0.0
    """The timeout of calls."""
    etcd_loss: float = 0.0
    etcd_late: float = 0.0
    arrow_kill: float = 0.0
    arrow_stall: float = 0.0
    aim: float = 0.0
    """How often a step of a change is struck at its weak moment."""
    fault_every_ms: int = 4_000
    change_every_ms: int = 6_000
    hold_every_ms: int = 0
    """How often connections between producers and a broker group are held; 0: never."""
    give_back_every_ms: int = 0
    """How often an operator replays or skips a parked key; 0: only as a fault. Then everything is given back in the end."""
    parked_bytes_max: int = 8 << 20
    faults: tuple[str, ...] = ()
    changes: tuple[str, ...] = CHANGES


def draw(random: Random) -> Plan:
    """A different plan for each seed."""
    is_obsessed = random.random() < 0.4
    faults = random.choice(OBSESSIONS) if is_obsessed else random.sample(FAULTS, random.randint(4, 14))
    return Plan(
        partitions=random.choice((1, 2, 3)),
        broker_groups=random.choice((2, 2, 3)),
        metaservers=random.choice((2, 2, 3)),
        producers=random.choice((1, 2, 2)),
        keys=random.choice((2, 5, 8)),
        consumers=random.choice((1, 2, 3)),
        groups=random.choice((("g",), ("g", "h"))),
        is_lease=random.random() < 0.75,
        unknown=random.choice(("resend", "resend", "resend", "fail")),
        delivery_s=random.choice((600.0, 600.0, 12.0)),
        gate=random.choice(("", "", "strict")),
        on_failure=random.choice(("block", "block", "park")),
        send_every_ms=random.choice((300, 700, 2_000)),
        handler_ms=random.choice((5, 40, 200)),
        handler_fails=random.choice((0.0, 0.0, 0.02, 0.1)),
        prefetch=random.choice((1, 6, 40)),
        concurrency=random.choice((1, 4, 16)),
        slow=random.choice((0.0, 0.0, 0.02, 0.2)),
        slow_ms=random.choice((50, 300, 2_000)),
        loss=random.choice((0.0, 0.0, 0.02, 0.15)),
        etcd_loss=random.choice((0.0, 0.0, 0.02, 0.1)),
        etcd_late=random.choice((0.0, 0.0, 0.03)),
        arrow_kill=random.choice((0.0, 0.0, 0.05, 0.2)),
        arrow_stall=random.choice((0.0, 0.0, 0.1, 0.3)),
        aim=random.choice((0.0, 0.0, 0.3, 0.7)),
        fault_every_ms=random.choice((3_000, 6_000, 12_000) if is_obsessed else (1_500, 3_000, 6_000)),
        change_every_ms=random.choice((2_000, 4_000, 10_000)),
        faults=tuple(sorted(faults)),
        changes=tuple(sorted(random.sample(CHANGES, random.randint(2, len(CHANGES))))),
    )


def with_holds(plan: Plan, random: Random) -> Plan:
    """Some plans hold connections for longer than a producer waits. They are drawn from a separate `random`, so that the other parts of the
    plan do not change.
    """
    if random.random() >= HOLDS:
        return plan
    return replace(
        plan,
        hold_every_ms=random.choice((4_000, 8_000)),
        delivery_s=random.choice((3.0, 8.0)),
        unknown=random.choice(("fail", "resend")),
        send_every_ms=300,
    )


def with_parks(plan: Plan, random: Random) -> Plan:
    """In some plans handlers fail often, many keys are parked and given back, and there may be little room. Drawn as in `with_holds`."""
    if random.random() >= PARKS:
        return plan
    return replace(
        plan,
        on_failure="park",
        keys=random.choice((2, 5)),
        send_every_ms=random.choice((300, 700)),
        handler_ms=random.choice((5, 40)),
        handler_fails=random.choice((0.1, 0.2, 0.4)),
        give_back_every_ms=random.choice((1_000, 3_000, 8_000)),
        parked_bytes_max=random.choice((300, 1_000, plan.parked_bytes_max)),
    )
