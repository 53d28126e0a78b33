"""Power cuts: each replica has an ext4 file system, which is shut down under load without
its journal being written; then the processes die, and start on what was synced.

The processes stop a moment before, so that the machines of a cut lose power at one time. A machine
that starts again has another boot id; this machine does not, so the id that each replica remembers
is changed. With slow disks (`broken_disk`), much more is written and not synced.

**A disk that lies** says that it synced, and did not. When it loses power, flushed bytes are
missing, which a replica may find at its start. If it refuses to start, an operator moves its folder
away, as its error says, and it copies everything from the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster_runner.errors import ClusterError
from qmq_replication import identity as identities

from campaign.cluster import World
from campaign.faults.disk import DISK_MIB, NEEDS, SETTINGS
from campaign.faults.replaced import behind, move_away
from campaign.faults.victims import follower, master, on, replicas
from campaign.programs import now_ms
from campaign.values import DURABILITIES, PRELOAD, Durability, Fault, Strikes, Striking, Struck
from qmq.errors import LogDamaged
from qmq.log.disk import Disk

SLOW_NEEDS: Final = NEEDS | {PRELOAD}
SYNC_DELAY_MS: Final = 150
SLOWED_MIN: Final = 3
"""Slow syncs of each replica before a cut."""
SLOWED_S: Final = 10.0
STALL_MS: Final = 60_000
STALL_S: Final = (0.3, 0.8)
"""How long before a cut no sync ends. A sync that is only slow takes with it what was written
meanwhile, and three replicas sync at three times: hardly a message is on none of their disks.
"""
LIES_S: Final = (1.5, 4.0)


@asynccontextmanager
async def cut(world: World, names: Sequence[str]) -> Striking:
    """These machines lose power, and start again when the block ends."""
    disks = [world.disks[name] for name in names]
    await world.do(world.cluster.pause, *names)
    before = sum(disk.size_bytes() for disk in disks)
    for disk in disks:
        disk.cut()
    await world.do(world.cluster.kill, *names)
    for disk in disks:
        await world.do(disk.unmount)
        await world.do(disk.mount_again)
    for name in names:
        boot_again(world.data(name))
    gone = before - sum(disk.size_bytes() for disk in disks)
    try:
        yield Struck(targets=tuple(names), effect=f"cut; files are {gone:,} bytes shorter")
    finally:
        await world.start(*names)


def boot_again(data: Path) -> None:
    """The machine has started: it has another boot id than the one in replica.json."""
    group, _, _ = data.name.partition("-")
    with suppress(LogDamaged):  # the replica will say so itself
        found = identities.load(data, group, data.name)
        if found is not None and found.boot != identities.CLEAN:
            replace(found, boot="before the cut").save(Disk(), data)


@asynccontextmanager
async def slowed(world: World, names: Sequence[str]) -> AsyncIterator[tuple[int, dict[str, int]]]:
    """Syncs of these replicas are slow from now on, until the test ends, and in the block, where
    the power is cut, none ends. Gives how many were slow, and since when none ends.
    """
    disks = [world.broken[name] for name in names]
    before = [disk.count("syncs_slowed") for disk in disks]
    for disk in disks:
        disk.set(sync_delay_ms=SYNC_DELAY_MS)
    with suppress(TimeoutError):
        async with asyncio.timeout(SLOWED_S):
            while any(
                disk.count("syncs_slowed") < least + SLOWED_MIN
                for disk, least in zip(disks, before, strict=True)
            ):
                await asyncio.sleep(0.02)
    count = sum(disk.count("syncs_slowed") for disk in disks) - sum(before)
    for disk in disks:
        disk.set(sync_delay_ms=STALL_MS)
    since = {"unsynced_ns": time.monotonic_ns(), "unsynced_ms": now_ms()}
    await asyncio.sleep(world.random.uniform(*STALL_S))
    try:
        yield count, since
    finally:
        for disk in disks:
            disk.set(sync_delay_ms=SYNC_DELAY_MS)


@asynccontextmanager
async def _cut_slow(world: World, names: Sequence[str]) -> Striking:
    async with AsyncExitStack() as stack:
        async with slowed(world, names) as (count, since):
            struck = await stack.enter_async_context(cut(world, names))
        effect = f"{count} slow syncs; {struck.effect}" if count else ""
        yield Struck(targets=struck.targets, effect=effect, **since)


@asynccontextmanager
async def _behind(world: World) -> Striking:
    """The machine of a follower loses power; what its slow disk lacks, one other replica has."""

    async def change(_: str, name: str) -> str:
        disk = world.disks[name]
        async with slowed(world, [name]) as (count, _since):
            before = disk.size_bytes()
            disk.cut()
            await world.do(world.cluster.kill, name)
        await world.do(disk.unmount)
        await world.do(disk.mount_again)
        boot_again(world.data(name))
        gone = before - disk.size_bytes()
        return f"{count} slow syncs; cut; files are {gone:,} bytes shorter" if count else ""

    async with behind(world, change) as struck:
        yield struck


@asynccontextmanager
async def _lied(world: World, names: Sequence[str]) -> Striking:
    (name,) = names
    disk = world.broken[name]
    before = disk.count("syncs_lied")
    disk.set(sync_lies=1)
    try:
        await asyncio.sleep(world.random.uniform(*LIES_S))
        lies, is_cut = disk.count("syncs_lied") - before, False
        try:
            async with cut(world, [name]) as struck:
                is_cut = True
                disk.set(sync_lies=0)
                effect = f"{lies} lies; {struck.effect}" if lies else ""
                yield Struck(targets=struck.targets, effect=effect)
        except ClusterError:  # it refuses to start, and says why in its log
            if not is_cut or world.state(name) != "dead":
                raise
            move_away(world, name)
            await world.start(name)
    finally:
        disk.set(sync_lies=0)


def _fault(
    name: str,
    what: str,
    strike: Strikes,
    lasts_s: tuple[float, float],
    *,
    needs: frozenset[str] = NEEDS,
    durabilities: tuple[Durability, ...] = ("async",),
    is_of_all: bool = False,
) -> Fault:
    """`is_of_all`: what no disk has is lost, so the durability decides."""
    return Fault(
        name=f"power-{name}",
        what=what,
        strike=strike,
        needs=needs,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        durabilities=DURABILITIES if is_of_all else durabilities,
        loses_sends=frozenset({"async"} if is_of_all else ()),
        loses_acks=frozenset({"async", "flushed"} if is_of_all else ()),
        lasts_s=lasts_s,
    )


FAULTS = (
    _fault("master", "the master's machine loses power", on(master, cut), (1.0, 4.0)),
    _fault("follower", "a follower's machine loses power", on(follower, cut), (1.0, 4.0)),
    _fault(
        "all",
        "all brokers' machines lose power at one time",
        on(replicas, cut),
        (0.5, 2.0),
        is_of_all=True,
    ),
    _fault(
        "all-slow",
        "all brokers' machines, whose disks are slow, lose power at one time",
        on(replicas, _cut_slow),
        (0.5, 2.0),
        needs=SLOW_NEEDS,
        is_of_all=True,
    ),
    _fault(
        "behind",
        "a follower's machine loses power while another is behind, and the master dies",
        _behind,
        (2.0, 4.0),
        needs=SLOW_NEEDS,
    ),
    _fault(
        "lied-master",
        "the master's disk lies about syncs, and loses power",
        on(master, _lied),
        (2.0, 4.0),
        needs=SLOW_NEEDS,
        durabilities=("async", "sync"),
    ),
    _fault(
        "lied-follower",
        "a follower's disk lies about syncs, and loses power",
        on(follower, _lied),
        (1.0, 4.0),
        needs=SLOW_NEEDS,
        durabilities=("async", "sync"),
    ),
)
