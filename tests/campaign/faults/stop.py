"""Processes that stand still: SIGSTOP, and SIGCONT when the fault ends. Connections stay open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
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


@asynccontextmanager
async def _master(world: World) -> Striking:
    async with stopped(world, [await world.master(world.a_group())]) as struck:
        yield struck


@asynccontextmanager
async def _one(world: World) -> Striking:
    async with stopped(world, [world.random.choice(world.brokers)]) as struck:
        yield struck


@asynccontextmanager
async def _all(world: World) -> Striking:
    async with stopped(world, world.brokers) as struck:
        yield struck


@asynccontextmanager
async def _client(world: World) -> Striking:
    async with stopped(world, [world.random.choice(world.clients)]) as struck:
        yield struck


@asynccontextmanager
async def _delay_master(world: World) -> Striking:
    async with stopped(world, [await world.master("d1")]) as struck:
        yield struck


FAULTS = (
    Fault(name="stop-master", what="a master stands still", strike=_master, lasts_s=LONG_S),
    Fault(name="stop-one", what="a replica stands still", strike=_one),
    Fault(name="stop-all", what="all replicas stand still", strike=_all),
    Fault(
        name="stop-client",
        what="a client stands still for longer than its lease",
        strike=_client,
        hits=frozenset({"clients"}),
        lasts_s=LONG_S,
    ),
    Fault(
        name="stop-delay-master",
        what="the delay group's master stands still",
        strike=_delay_master,
        hits=frozenset({"delays"}),
        lasts_s=LONG_S,
    ),
)
