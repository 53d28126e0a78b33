"""Processes that die: SIGKILL, and a new start when the fault ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.faults.victims import brokers, client, delay_master, master, meta, on, pair, replica
from campaign.values import Fault, Striking, Struck


@asynccontextmanager
async def _nothing(world: World) -> Striking:
    yield Struck(targets=(), effect="no fault, as meant")


@asynccontextmanager
async def killed(world: World, names: Sequence[str]) -> Striking:
    """These services are dead during the block."""
    await world.do(world.cluster.kill, *names)
    dead = [name for name in names if world.state(name) == "dead"]
    try:
        yield Struck(targets=tuple(names), effect=f"dead: {', '.join(dead)}" if dead else "")
    finally:
        await world.start(*names)


FAULTS = (
    Fault(name="none", what="nothing happens", strike=_nothing, hits=frozenset()),
    Fault(name="kill-one", what="a replica dies", strike=on(replica, killed)),
    Fault(name="kill-master", what="a master dies", strike=on(master, killed)),
    Fault(name="kill-pair", what="a master and one of its followers die", strike=on(pair, killed)),
    Fault(name="kill-all", what="all replicas die at once", strike=on(brokers, killed)),
    Fault(
        name="kill-meta",
        what="a metaserver dies",
        strike=on(meta, killed),
        hits=frozenset({"metas"}),
    ),
    Fault(
        name="kill-client",
        what="a producer or a consumer dies",
        strike=on(client, killed),
        hits=frozenset({"clients"}),
        lasts_s=(0.5, 3.0),
    ),
    Fault(
        name="kill-delay-master",
        what="the delay group's master dies",
        strike=on(delay_master, killed),
        hits=frozenset({"delays"}),
    ),
)
