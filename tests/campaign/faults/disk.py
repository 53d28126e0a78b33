"""Disks without a free block. The file system is the replica's own; another program takes all."""

from __future__ import annotations

from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.values import LOOPS, Fault, Striking, Struck

NEEDS = frozenset({LOOPS})
DISK_MIB = 256
SETTINGS = {"QMQ_DISK_FREE_MIB": "16", "QMQ_SEGMENT_MIB": "16"}


@asynccontextmanager
async def _full(world: World, name: str) -> Striking:
    disk = world.disks[name]
    await world.do(disk.fill)
    left = disk.free_bytes()
    try:
        yield Struck(targets=(name,), effect=f"{name} has {left} free bytes" if not left else "")
    finally:
        disk.make_room()


@asynccontextmanager
async def _master(world: World) -> Striking:
    async with _full(world, await world.master(world.a_group())) as struck:
        yield struck


@asynccontextmanager
async def _follower(world: World) -> Striking:
    group = world.a_group()
    master = await world.master(group)
    others = [name for name in world.members(group) if name != master]
    async with _full(world, world.random.choice(others)) as struck:
        yield struck


FAULTS = (
    Fault(
        name="disk-full-master",
        what="another program takes the last byte of the master's disk",
        strike=_master,
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        lasts_s=(5.0, 9.0),
    ),
    Fault(
        name="disk-full-follower",
        what="another program takes the last byte of a follower's disk",
        strike=_follower,
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        lasts_s=(5.0, 9.0),
    ),
)
