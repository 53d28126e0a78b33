"""Processes that die: SIGKILL, and a new start when the fault ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.values import Fault, Strikes, Striking, Struck


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


def _one(world: World) -> list[str]:
    return [world.random.choice(world.brokers)]


def _all(world: World) -> list[str]:
    return world.brokers


def _meta(world: World) -> list[str]:
    return [world.random.choice(world.metas)]


def _client(world: World) -> list[str]:
    return [world.random.choice(world.clients)]


def _kill(choose: object) -> Strikes:
    assert callable(choose)
    return lambda world: killed(world, choose(world))


@asynccontextmanager
async def _master(world: World) -> Striking:
    async with killed(world, [await world.master(world.a_group())]) as struck:
        yield struck


@asynccontextmanager
async def _delay_master(world: World) -> Striking:
    async with killed(world, [await world.master("d1")]) as struck:
        yield struck


@asynccontextmanager
async def _pair(world: World) -> Striking:
    """The master and a follower: what is left is no majority."""
    group = world.a_group()
    master = await world.master(group)
    other = world.random.choice([name for name in world.members(group) if name != master])
    async with killed(world, [master, other]) as struck:
        yield struck


FAULTS = (
    Fault(name="none", what="nothing happens", strike=_nothing, hits=frozenset()),
    Fault(name="kill-one", what="a replica dies", strike=_kill(_one)),
    Fault(name="kill-master", what="a master dies", strike=_master),
    Fault(name="kill-pair", what="a master and one of its followers die", strike=_pair),
    Fault(name="kill-all", what="all replicas die at once", strike=_kill(_all)),
    Fault(
        name="kill-meta",
        what="a metaserver dies",
        strike=_kill(_meta),
        hits=frozenset({"metas"}),
    ),
    Fault(
        name="kill-client",
        what="a producer or a consumer dies",
        strike=_kill(_client),
        hits=frozenset({"clients"}),
        lasts_s=(0.5, 3.0),
    ),
    Fault(
        name="kill-delay-master",
        what="the delay group's master dies",
        strike=_delay_master,
        hits=frozenset({"delays"}),
    ),
)
