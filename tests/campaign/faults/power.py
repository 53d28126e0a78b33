"""Power cuts: each replica has an ext4 file system, which is shut down under load without
its journal being written; then the processes die, and start on what was synced.

The processes stop a moment before, so that the machines of a cut lose power at one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.values import DURABILITIES, LOOPS, Fault, Striking, Struck

NEEDS = frozenset({LOOPS})
DISK_MIB = 256
SETTINGS = {"QMQ_DISK_FREE_MIB": "16", "QMQ_SEGMENT_MIB": "16"}


@asynccontextmanager
async def _cut(world: World, names: Sequence[str]) -> Striking:
    disks = [world.disks[name] for name in names]
    await world.do(world.cluster.pause, *names)
    before = sum(disk.size_bytes() for disk in disks)
    for disk in disks:
        disk.cut()
    await world.do(world.cluster.kill, *names)
    for disk in disks:
        await world.do(disk.unmount)
        await world.do(disk.mount_again)
    gone = before - sum(disk.size_bytes() for disk in disks)
    try:
        yield Struck(targets=tuple(names), effect=f"cut; files are {gone:,} bytes shorter")
    finally:
        await world.start(*names)


@asynccontextmanager
async def _master(world: World) -> Striking:
    async with _cut(world, [await world.master(world.a_group())]) as struck:
        yield struck


@asynccontextmanager
async def _follower(world: World) -> Striking:
    group = world.a_group()
    master = await world.master(group)
    lone = world.random.choice([name for name in world.members(group) if name != master])
    async with _cut(world, [lone]) as struck:
        yield struck


@asynccontextmanager
async def _all(world: World) -> Striking:
    async with _cut(world, world.brokers) as struck:
        yield struck


FAULTS = (
    Fault(
        name="power-master",
        what="the master's machine loses power",
        strike=_master,
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        durabilities=DURABILITIES,
        lasts_s=(1.0, 4.0),
    ),
    Fault(
        name="power-follower",
        what="a follower's machine loses power",
        strike=_follower,
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        durabilities=DURABILITIES,
        lasts_s=(1.0, 4.0),
    ),
    Fault(
        name="power-all",
        what="all brokers' machines lose power at one time",
        strike=_all,
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        durabilities=DURABILITIES,
        loses_sends=frozenset({"async"}),
        loses_acks=frozenset({"async", "flushed"}),
        lasts_s=(0.5, 2.0),
    ),
)
