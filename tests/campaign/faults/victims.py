"""Whom a fault strikes. No fault itself.

on(master, killed)      a strike: choose, then do it to those that were chosen
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from campaign.cluster import World
from campaign.values import Strikes, Striking, Struck

Choose: TypeAlias = Callable[[World], Awaitable[list[str]]]
Hit: TypeAlias = Callable[[World, Sequence[str]], AbstractAsyncContextManager[Struck]]
"""Does something to services during the block."""


def on(choose: Choose, hit: Hit) -> Strikes:
    """A strike at those that are chosen when it begins."""

    @asynccontextmanager
    async def strike(world: World) -> Striking:
        async with hit(world, await choose(world)) as struck:
            yield struck

    return strike


async def master(world: World) -> list[str]:
    """A broker group's."""
    return [await world.master(world.a_group())]


async def follower(world: World) -> list[str]:
    """One of a broker group's."""
    _, others = await world.others(world.a_group())
    return [world.random.choice(others)]


async def pair(world: World) -> list[str]:
    """A master and one of its followers: what is left is no majority."""
    leader, others = await world.others(world.a_group())
    return [leader, world.random.choice(others)]


async def replica(world: World) -> list[str]:
    """Any of a broker group."""
    return [world.random.choice(world.brokers)]


async def brokers(world: World) -> list[str]:
    """All replicas of broker groups."""
    return world.brokers


async def replicas(world: World) -> list[str]:
    """All replicas, those of delay groups too."""
    return [*world.brokers, *world.delays]


async def delay_master(world: World) -> list[str]:
    """The delay group's."""
    return [await world.master("d1")]


async def meta(world: World) -> list[str]:
    """A metaserver."""
    return [world.random.choice(world.metas)]


async def etcd(world: World) -> list[str]:
    """A member of etcd."""
    return [world.random.choice(world.etcds)]


async def client(world: World) -> list[str]:
    """A client of any role."""
    return [world.random.choice(world.clients)]
