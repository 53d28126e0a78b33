"""Processes that stand still: SIGSTOP, and SIGCONT when the fault ends. Connections stay open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.faults.victims import brokers, client, delay_master, master, on, replica
from campaign.values import Fault, Striking, Struck

LONG_S = (6.0, 9.0)
"""Longer than a master's lease and the consumers' leases."""


@asynccontextmanager
async def stopped(world: World, names: Sequence[str]) -> Striking:
    """These services stand still during the block."""
    await world.do(world.cluster.pause, *names)
    still = [name for name in names if world.state(name) == "paused"]
    try:
        yield Struck(targets=tuple(names), effect=f"stopped: {', '.join(still)}" if still else "")
    finally:
        await world.do(world.cluster.resume, *names)


FAULTS = (
    Fault(
        name="stop-master", what="a master stands still", strike=on(master, stopped), lasts_s=LONG_S
    ),
    Fault(name="stop-one", what="a replica stands still", strike=on(replica, stopped)),
    Fault(name="stop-all", what="all replicas stand still", strike=on(brokers, stopped)),
    Fault(
        name="stop-client",
        what="a client stands still for longer than its lease",
        strike=on(client, stopped),
        hits=frozenset({"clients"}),
        lasts_s=LONG_S,
    ),
    Fault(
        name="stop-delay-master",
        what="the delay group's master stands still",
        strike=on(delay_master, stopped),
        hits=frozenset({"delays"}),
        lasts_s=LONG_S,
    ),
)
