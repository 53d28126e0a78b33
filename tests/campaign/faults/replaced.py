"""Other disks: an empty one, and an older copy of a replica's own.

Both are dangerous with an election: a replica that forgot what it stored and promised must not
help to elect a master that lacks it. So the master dies as well, every other time, before the
replica starts, and comes back when the fault ends.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from campaign.cluster import World
from campaign.values import Fault, Striking, Struck

WORK_S: Final = (2.0, 5.0)
"""How long a replica goes on after its disk was copied."""


def move_away(world: World, name: str) -> Path:
    """A dead replica gets an empty folder, as an operator gives it one. Returns where the old one
    is.
    """
    data = world.data(name)
    for number in range(1_000_000):
        away = world.folder / "away" / f"{name}-{number}"
        if not away.exists():
            break
    away.mkdir(parents=True)
    for path in data.iterdir():  # the folder itself may be a file system's
        if path.name != "lost+found":
            shutil.move(path, away / path.name)
    return away


def size_of(folder: Path) -> int:
    """Bytes in all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@asynccontextmanager
async def restarted(world: World, name: str, effect: str) -> Striking:
    """The replica, which is dead and has another disk, starts during the block, with or without a
    master; at its end all run.
    """
    group, _, _ = name.partition("-")
    absent: Sequence[str] = ()
    if world.random.random() < 0.5:
        absent = [await world.master(group)]
        await world.do(world.cluster.kill, *absent)
    try:
        await world.do(world.cluster.start, name, wait=False)
        yield Struck(targets=(name, *absent), effect=effect)
    finally:
        await world.start(name, *absent)


async def _victim(world: World) -> str:
    return world.random.choice(world.brokers)


@asynccontextmanager
async def _empty(world: World) -> Striking:
    name = await _victim(world)
    await world.do(world.cluster.kill, name)
    await world.master(name.partition("-")[0])
    away = await asyncio.to_thread(move_away, world, name)
    effect = f"{name} lost {size_of(away):,} bytes"
    async with restarted(world, name, effect) as struck:
        yield struck


@asynccontextmanager
async def _old(world: World) -> Striking:
    name = await _victim(world)
    await world.do(world.cluster.kill, name)
    data, copy = world.data(name), world.folder / "copy" / name
    shutil.rmtree(copy, ignore_errors=True)
    try:
        await asyncio.to_thread(shutil.copytree, data, copy)
    finally:
        await world.start(name)
    await world.settled()
    await asyncio.sleep(world.random.uniform(*WORK_S))
    await world.do(world.cluster.kill, name)
    await world.master(name.partition("-")[0])
    away = await asyncio.to_thread(move_away, world, name)
    await asyncio.to_thread(shutil.copytree, copy, data, dirs_exist_ok=True)
    gone = size_of(away) - size_of(copy)
    effect = f"{name} has a copy that is {gone:,} bytes shorter" if gone else ""
    async with restarted(world, name, effect) as struck:
        yield struck


FAULTS = (
    Fault(name="disk-empty", what="a replica gets an empty disk", strike=_empty),
    Fault(name="disk-old", what="an older copy of a replica's disk is put back", strike=_old),
)
