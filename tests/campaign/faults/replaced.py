"""Other disks: an empty one, and an older copy of a replica's own.

Both are dangerous with an election: a replica that forgot what it stored and promised must not
help to elect a master that lacks it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from campaign.cluster import World
from campaign.values import Fault, Striking, Struck

WORK_S: Final = (2.0, 4.0)
"""How long senders go on before the change."""
HARD: Final = 0.7


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
async def behind(world: World, change: Callable[[str, str], Awaitable[str]]) -> Striking:
    """A follower gets another disk while only two replicas have the newest messages: it and the
    master. In most strikes the third replica was away when they were acknowledged, and the master
    dies as well: then those two that start must wait for it.

    `change` gets the master and the follower, and changes the follower, which it leaves dead. It
    returns what was seen.
    """
    master, others = await world.others(world.a_group())
    name, third = world.random.sample(others, 2)
    is_alone = world.random.random() < HARD
    absent: list[str] = []
    try:
        if is_alone:
            await world.do(world.cluster.kill, third)
            absent.append(third)
            await asyncio.sleep(world.random.uniform(*WORK_S))
        effect = await change(master, name)
        if is_alone:
            await world.do(world.cluster.kill, master)
            absent.append(master)
        await world.do(world.cluster.start, *[name, *absent[:1]], wait=False)
        yield Struck(targets=(name, *absent), effect=effect)
    finally:
        await world.start(name, *absent)


@asynccontextmanager
async def _empty(world: World) -> Striking:
    async def change(_: str, name: str) -> str:
        await world.do(world.cluster.kill, name)
        away = await asyncio.to_thread(move_away, world, name)
        return f"{name} lost {size_of(away):,} bytes"

    async with behind(world, change) as struck:
        yield struck


@asynccontextmanager
async def _old(world: World) -> Striking:
    async def change(_: str, name: str) -> str:
        copy = world.folder / "copy" / name
        shutil.rmtree(copy, ignore_errors=True)
        await world.do(world.cluster.kill, name)
        await asyncio.to_thread(shutil.copytree, world.data(name), copy)
        await world.start(name)
        await asyncio.sleep(world.random.uniform(*WORK_S))
        await world.do(world.cluster.kill, name)
        away = await asyncio.to_thread(move_away, world, name)
        await asyncio.to_thread(shutil.copytree, copy, world.data(name), dirs_exist_ok=True)
        gone = size_of(away) - size_of(copy)
        return f"{name} has a copy that is {gone:,} bytes shorter" if gone else ""

    async with behind(world, change) as struck:
        yield struck


FAULTS = (
    Fault(name="disk-empty", what="a replica gets an empty disk", strike=_empty),
    Fault(name="disk-old", what="an older copy of a replica's disk is put back", strike=_old),
)
