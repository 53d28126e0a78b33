"""Networks that drop packets, silently and where they arrive. A fault took effect when a connection
that it forbids cannot be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from system.group import CONTROL_PORT

from campaign.cluster import CLIENT_PORT, PEER_PORT, World
from campaign.values import NAMESPACES, Fault, Strikes, Striking, Struck

NEEDS = frozenset({NAMESPACES})
LASTS_S = (5.0, 9.0)
"""Longer than a master's lease, so that elections happen."""


@asynccontextmanager
async def parted(
    world: World,
    sources: Sequence[str],
    targets: Sequence[str],
    port: int,
    *,
    one_way: bool = False,
) -> Striking:
    """Targets get nothing from sources during the block, nor the other way unless `one_way`.
    Without a port nothing is tried.
    """
    await world.cut(sources, targets, one_way=one_way)
    is_cut = not port or not await world.reaches(sources[0], targets[0], port)
    arrow = "to" if one_way else "and"
    effect = f"nothing passes: {' '.join(sources)} {arrow} {' '.join(targets)}" if is_cut else ""
    try:
        yield Struck(targets=(*sources, *targets), effect=effect)
    finally:
        await world.do(world.cluster.heal)


@asynccontextmanager
async def _isolated(world: World) -> Striking:
    """The others may still elect: they reach etcd."""
    master, others = await world.others(world.a_group())
    async with parted(world, [master], others, CONTROL_PORT) as struck:
        yield struck


@asynccontextmanager
async def _mute(world: World) -> Striking:
    master, others = await world.others(world.a_group())
    async with parted(world, [master], others, CONTROL_PORT, one_way=True) as struck:
        yield struck


@asynccontextmanager
async def _unanswered(world: World) -> Striking:
    master, others = await world.others(world.a_group())
    async with parted(world, others, [master], CONTROL_PORT, one_way=True) as struck:
        yield struck


@asynccontextmanager
async def _follower(world: World) -> Striking:
    master, others = await world.others(world.a_group())
    lone = world.random.choice(others)
    rest = [master, *(name for name in others if name != lone)]
    async with parted(world, [lone], rest, CONTROL_PORT) as struck:
        yield struck


@asynccontextmanager
async def _deaf(world: World) -> Striking:
    """The master's followers and etcd hear it; no client does, nor does it hear one."""
    master = await world.master(world.a_group())
    async with parted(world, world.clients, [master], CONTROL_PORT) as struck:
        yield struck


@asynccontextmanager
async def _no_answers(world: World) -> Striking:
    """What clients sent is stored; they do not know."""
    master = await world.master(world.a_group())
    async with parted(world, [master], world.clients, 0, one_way=True) as struck:
        is_cut = not await world.reaches(world.clients[0], master, CONTROL_PORT)
        yield Struck(targets=struck.targets, effect=struck.effect if is_cut else "")


@asynccontextmanager
async def _without_etcd(world: World) -> Striking:
    master = await world.master(world.a_group())
    async with parted(world, [master], world.etcds, CLIENT_PORT) as struck:
        yield struck


@asynccontextmanager
async def _bridge(world: World) -> Striking:
    """The two followers cannot hear each other; both hear the master."""
    _, others = await world.others(world.a_group())
    async with parted(world, others[:1], others[1:], CONTROL_PORT) as struck:
        yield struck


@asynccontextmanager
async def _inside_etcd(world: World) -> Striking:
    lone = world.random.choice(world.etcds)
    rest = [name for name in world.etcds if name != lone]
    async with parted(world, [lone], rest, PEER_PORT) as struck:
        yield struck


def _fault(
    name: str, what: str, strike: Strikes, hits: str = "brokers", *, etcds: int = 1
) -> Fault:
    return Fault(
        name=f"partition-{name}",
        what=what,
        strike=strike,
        hits=frozenset({hits}),
        needs=NEEDS,
        lasts_s=LASTS_S,
        etcds=etcds,
    )


FAULTS = (
    _fault("master", "the master and its followers do not hear each other", _isolated),
    _fault("oneway", "the followers do not hear the master, which hears them", _mute),
    _fault("oneway-back", "the master does not hear its followers, which hear it", _unanswered),
    _fault("follower", "one follower and the others do not hear each other", _follower),
    _fault("bridge", "two followers do not hear each other, and both hear the master", _bridge),
    _fault("deaf", "the master and the clients do not hear each other", _deaf),
    _fault("no-answers", "clients do not hear the master, which hears them", _no_answers),
    _fault("from-etcd", "the master and etcd do not hear each other", _without_etcd),
    _fault(
        "inside-etcd",
        "a member of etcd and the others do not hear each other",
        _inside_etcd,
        "etcds",
        etcds=3,
    ),
)
