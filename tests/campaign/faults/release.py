"""The previous release in the middle of a run: a server goes to it and comes back, on its folder.

The previous release is built from its commit, once for a run of the campaign
(`support.wheels`). docs/UPGRADES.md says what the two releases promise beside each other.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Final

from support import wheels
from system.group import CONTROL_PORT, statuses_at

from campaign.cluster import START_S, World
from campaign.faults.victims import master, on
from campaign.machine import REASONS
from campaign.values import Fault, Striking, Struck
from qmq.rpc.network import NETWORK

HISTORY: Final = "the previous release"
NEEDS = frozenset({HISTORY})


def _no_history() -> str:
    return (
        ""
        if wheels.has_history()
        else f"the previous release: this checkout has no commit {wheels.COMMIT[:12]}"
    )


REASONS[HISTORY] = _no_history


@cache
def packages() -> Path:
    """The packages of the previous release, for PYTHONPATH."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-release-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return wheels.unpack(folder)


async def _run(world: World, release: Path | None, names: Sequence[str]) -> None:
    """Each service in turn: killed or ended, and started with another release."""
    for name in names:
        end = world.random.choice((world.cluster.stop, world.cluster.kill))
        await world.do(end, name)
        world.cluster.install(release, name)
        await world.start(name)
        await world.settled()


async def _versions(world: World, names: Sequence[str]) -> str:
    """What the replicas among them say that they run; empty if one of them is no previous one."""
    controls = {
        name: f"{world.cluster.address(name)}:{CONTROL_PORT}"
        for name in names
        if name not in world.metas
    }
    async with asyncio.timeout(START_S):
        while len(found := await statuses_at(controls, NETWORK)) < len(controls):
            await asyncio.sleep(0.1)
    versions = {name: each.process.version for name, each in found.items()}
    is_previous = all(version == wheels.VERSION for version in versions.values())
    return ", ".join(f"{name} runs {wheels.VERSION}" for name in names) if is_previous else ""


@asynccontextmanager
async def _downgraded(world: World, names: Sequence[str]) -> Striking:
    release = await asyncio.to_thread(packages)
    try:
        await _run(world, release, names)
        yield Struck(targets=tuple(names), effect=await _versions(world, names))
    finally:
        await _run(world, None, names)


async def _group(world: World) -> list[str]:
    """All replicas of a group: then one of the previous release is master, on what this release
    wrote.
    """
    names = list(world.members(world.a_group()))
    world.random.shuffle(names)
    return names


async def _everything(world: World) -> list[str]:
    names = [*world.metas, *world.brokers, *world.delays]
    world.random.shuffle(names)
    return names


FAULTS = (
    Fault(
        name="release-one",
        what="a replica goes to the previous release, and back",
        strike=on(master, _downgraded),
        needs=NEEDS,
    ),
    Fault(
        name="release-group",
        what="all replicas of a group go to the previous release one by one, and back",
        strike=on(_group, _downgraded),
        needs=NEEDS,
    ),
    Fault(
        name="release-all",
        what="all servers go to the previous release one by one, and back",
        strike=on(_everything, _downgraded),
        needs=NEEDS,
    ),
)
