"""Processes of Spark that die: a driver with all that it started, or an executor or a task's
process, whose tasks Spark repeats. Who started them starts them again.

Most kills come when the driver has committed a micro-batch since its start, the others at any time
of its start. `in work` in a strike's effect names the queries that died between the beginning of a
micro-batch and its commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from system.spark_parts import DRIVER, EXECUTOR, TASK, is_alive, kill_tree, spark_parts

from campaign.cluster import World, kind_of
from campaign.faults.kill import killed
from campaign.spark_driver import CHECKPOINTS
from campaign.values import Fault, Striking, Struck

STARTED: Final = 0.25
"""The share of kills that may come while the driver starts."""
PROGRESS_S: Final = 120.0
FOUND_S: Final = 30.0
LOOK_S: Final = 0.1
HITS: Final = frozenset({"drivers"})


def in_work(folder: Path) -> list[str]:
    """The queries with a micro-batch that is planned and not committed."""
    return [
        query.name
        for query in sorted((folder / "spark" / CHECKPOINTS).glob("*/"))
        if (query / "offsets").is_dir() and _newest(query, "offsets") > _newest(query, "commits")
    ]


def committed(folder: Path) -> int:
    """Micro-batches of all queries."""
    queries = (folder / "spark" / CHECKPOINTS).glob("*/")
    return sum(_newest(query, "commits") + 1 for query in queries)


def _newest(query: Path, what: str) -> int:
    names = [each.name for each in (query / what).glob("[0-9]*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _pid(world: World, name: str) -> int:
    return next(each.pid for each in world.cluster.status() if each.service == name)


async def _found(world: World, name: str, kinds: Sequence[str]) -> tuple[str, int]:
    """The kind and the id of a process, waited for; an empty kind if there is none."""
    end_s = time.monotonic() + FOUND_S
    while time.monotonic() < end_s:
        parts = spark_parts(_pid(world, name))
        known = [kind for kind in kinds if parts.get(kind)]
        if known:
            kind = world.random.choice(known)
            return kind, world.random.choice(parts[kind])
        await asyncio.sleep(LOOK_S)
    return "", 0


async def _gone(pid: int) -> bool:
    for _ in range(50):
        if not is_alive(pid):
            return True
        await asyncio.sleep(LOOK_S)
    return False


@asynccontextmanager
async def _dead(world: World, kinds: Sequence[str], kill: Callable[[int], object]) -> Striking:
    drivers = [name for name in world.clients if kind_of(name) == "drivers"]
    name = world.random.choice(drivers)
    before = committed(world.folder)
    kind, pid = await _found(world, name, kinds)
    effect = ""
    if kind:
        kill(pid)
        working = in_work(world.folder)
        if await _gone(pid):
            at = f", in work: {', '.join(working)}" if working else ""
            effect = f"dead: {kind} of {name}{at}"
    try:
        yield Struck(targets=(name,), effect=effect)
    finally:
        if world.random.random() >= STARTED:
            await _progress(world, before)


async def _progress(world: World, before: int) -> None:
    end_s = time.monotonic() + PROGRESS_S
    while committed(world.folder) <= before and time.monotonic() < end_s:
        await asyncio.sleep(LOOK_S)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _driver(world: World) -> AbstractAsyncContextManager[Struck]:
    return _dead(world, (DRIVER,), kill_tree)


def _executor(world: World) -> AbstractAsyncContextManager[Struck]:
    return _dead(world, (EXECUTOR, TASK), _kill)


@asynccontextmanager
async def _broker(world: World) -> Striking:
    """One, a master, or a whole group."""
    group = world.a_group()
    names = world.random.choice(
        [[world.random.choice(world.brokers)], [await world.master(group)], world.members(group)]
    )
    async with killed(world, names) as struck:
        yield struck


KINDS: Final = {
    "kill-driver": (0.35, _driver),
    "kill-executor": (0.4, _executor),
    "kill-broker": (0.25, _broker),
}
"""Of `kill-any`: how often, and what."""


@asynccontextmanager
async def _any(world: World) -> Striking:
    shares = [share for share, _ in KINDS.values()]
    (name,) = world.random.choices(list(KINDS), shares)
    working = in_work(world.folder)
    async with KINDS[name][1](world) as struck:
        effect = f"{name}: {struck.effect}" if struck.effect else ""
        if effect and name == "kill-broker" and working:
            effect = f"{effect}, in work: {', '.join(working)}"
        yield Struck(targets=struck.targets, effect=effect)


FAULTS = (
    Fault(
        name="kill-driver",
        what="a driver of Spark dies, with what it started",
        strike=_driver,
        hits=HITS,
        lasts_s=(0.0, 1.0),
    ),
    Fault(
        name="kill-executor",
        what="an executor of Spark, or the process of a task, dies",
        strike=_executor,
        hits=HITS,
        lasts_s=(0.0, 1.0),
    ),
    Fault(
        name="kill-any",
        what="a driver, an executor or a task's process, or brokers die",
        strike=_any,
        hits=HITS,
        lasts_s=(0.0, 1.0),
    ),
)
