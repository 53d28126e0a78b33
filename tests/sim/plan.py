"""The plan of a seed's run: it draws its own probabilities, some of them zero, so that rare faults happen together (swarm testing)."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from qmq_replication.ready import Timing


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities per message, request or step; mean times between faults and between messages of producers in milliseconds."""

    voters: int = 3
    is_sync: bool = True
    """Whether an entry counts once it is synced; otherwise once it is written (`flush=async`)."""
    is_ordered: bool = True
    """Whether a link keeps the order of the messages that it delivers, as one TCP connection does."""
    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    """A second copy comes up to a minute later."""
    slow: float = 0.0
    slow_ms: int = 100
    etcd_loss: float = 0.0
    etcd_late: float = 0.0
    """A request to the coordination store is done only after its sender has given up waiting."""
    failpoint: float = 0.0
    sync_ms: int = 15
    """How long a sync takes at most."""
    aim: float = 0.0
    """How often a fault goes for the master."""
    regicide: float = 0.0
    """How often a fault hits a new master immediately. A tenth as often, a fault hits a master that has just committed."""
    fills: float = 0.0
    """How often a fault, and the end of a master, find the disks of some replicas full."""
    fault_every_ms: int = 10_000
    proposal_every_ms: int = 1_000
    read_entries: int = 8
    """Entries that one Append carries."""
    inflight: int = 24
    faults: tuple[str, ...] = ()
    minutes: int = 10
    timing: Timing = field(default_factory=Timing)


FAULTS = (
    "kill",
    "kill_all",
    "power",
    "power_all",
    "crash_loop",
    "pause",
    "wipe",
    "retention",
    "outrun",
    "amnesia",
    "isolate",
    "isolate_in",
    "isolate_out",
    "halves",
    "bridge",
    "swizzle",
    "etcd_cut",
    "etcd_all",
    "lease",
    "join",
    "leave",
    "transfer",
    "provoke",
    "usurp",
    "shrink",
    "storm",
)

WEAK_MOMENTS = ("outrun", "amnesia", "provoke", "usurp", "usurp", "shrink", "storm")
"""Faults that aim at one weak moment of the protocol; a seed that is obsessed has little else."""


def draw(random: Random, minutes: int) -> Plan:
    """A different plan for each seed."""
    is_obsessed = random.random() < 0.4
    kinds = random.sample(FAULTS, random.randint(0, 2) if is_obsessed else random.randint(4, len(FAULTS)))
    if is_obsessed:
        kinds.append(random.choice(WEAK_MOMENTS))
    inflight = random.choice((1, 4, 24))
    beside = Random()
    beside.setstate(random.getstate())  # so that the other seeds tell the same story with and without this fault
    return Plan(
        voters=random.choice((3, 5) if is_obsessed else (3, 3, 5)),
        is_sync=random.random() < 0.6,
        is_ordered=random.random() < 0.8,
        drop=random.choice((0.0, 0.0, 0.02, 0.1)),
        double=random.choice((0.0, 0.02, 0.1)),
        late=random.choice((0.0, 0.0, 0.01, 0.05)),
        slow=random.choice((0.0, 0.02, 0.2)),
        slow_ms=random.choice((100, 500, 3_000, 15_000)),
        etcd_loss=random.choice((0.0, 0.02, 0.15)),
        etcd_late=random.choice((0.0, 0.0, 0.1)),
        sync_ms=random.choice((15, 15, 2_000)),
        failpoint=random.choice((0.0, 0.0, 0.001, 0.005)),
        aim=random.choice((0.0, 0.3, 0.7)),
        regicide=random.choice((0.0, 0.0, 0.2, 0.5)),
        fills=beside.choice((0.0, 0.0, 0.0, 0.1, 0.5)),
        fault_every_ms=3_000 if is_obsessed else random.choice((1_000, 3_000, 10_000, 20_000)),
        proposal_every_ms=random.choice((400, 1_000, 3_000)),
        read_entries=random.choice((1, 8)),
        inflight=inflight,
        faults=tuple(kinds),
        minutes=minutes,
        timing=Timing(
            heartbeat_ms=800,
            suspect_ms=2_400,
            lost_ms=300,
            poll_ms=300,
            fence_ms=2_500,
            quorum_ms=3_200,
            inflight_bytes_max=inflight,
            chunk_bytes_max=8,
        ),
    )
