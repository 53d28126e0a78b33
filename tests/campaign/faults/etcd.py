"""etcd's members: one that dies, and a majority that is away."""

from __future__ import annotations

from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.faults.kill import killed
from campaign.faults.stop import stopped
from campaign.faults.victims import etcd, on
from campaign.values import Fault, Striking, Struck

HITS = frozenset({"etcds"})


@asynccontextmanager
async def _no_quorum(world: World) -> Striking:
    async with stopped(world, world.random.sample(world.etcds, 2)) as struck:
        left = next(name for name in world.etcds if name not in struck.targets)
        reason = await world.do(world.cluster.health, left)
        yield Struck(targets=struck.targets, effect=f"{left}: {reason[:200]}" if reason else "")


FAULTS = (
    Fault(
        name="etcd-kill-one",
        what="a member of etcd dies",
        strike=on(etcd, killed),
        hits=HITS,
        etcds=3,
    ),
    Fault(
        name="etcd-no-quorum",
        what="two of three members of etcd stand still",
        strike=_no_quorum,
        hits=HITS,
        etcds=3,
        lasts_s=(6.0, 10.0),
    ),
)
