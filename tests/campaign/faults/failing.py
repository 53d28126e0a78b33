"""Disks that are slow, and disks whose calls fail (EIO). The calls fail in the replica's process
(`broken_disk`); the file system itself is whole.

    slow-disk-*     each sync takes 400 ms more, each write 5 ms
    fsync-fails-*   syncs fail until the process has ended; with a disk that works it starts again
    write-fails-*   writes fail, likewise
    read-fails-*    some blocks of the message log cannot be read until they are written again; the
                    replica starts again while they cannot, so that its recovery meets them
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from history.events import Recorder

from campaign.broken_disk import BLOCK_BYTES
from campaign.checkers.storage import FailedCall
from campaign.cluster import World
from campaign.faults.victims import Choose, follower, master, on, replicas
from campaign.values import PRELOAD, Fault, Striking, Struck

NEEDS: Final = frozenset({PRELOAD})
SLOW_SYNC_MS: Final = 400
SLOW_WRITE_MS: Final = 5
SEEN_S: Final = 20.0
ENDED_S: Final = 15.0
"""How long a process may live after a sync of it failed: it ends at once, on a busy machine."""
ENDS_S: Final = 2.0
BLOCKS: Final = 8


async def _until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for a condition. Returns its last value."""
    for _ in range(int(within_s / 0.05)):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return condition()


@asynccontextmanager
async def _slow(world: World, names: Sequence[str]) -> Striking:
    disks = [world.broken[name] for name in names]
    before = [disk.count("syncs_slowed") for disk in disks]
    for disk in disks:
        disk.set(sync_delay_ms=SLOW_SYNC_MS, write_delay_ms=SLOW_WRITE_MS)
    try:
        is_seen = await _until(
            lambda: all(
                disk.count("syncs_slowed") > old for disk, old in zip(disks, before, strict=True)
            ),
            SEEN_S,
        )
        effect = f"slow syncs of {', '.join(names)}" if is_seen else ""
        yield Struck(targets=tuple(names), effect=effect)
    finally:
        for disk in disks:
            disk.work()


@asynccontextmanager
async def _failing(
    world: World, names: Sequence[str], *, setting: str, count: str, call: str
) -> Striking:
    """Calls fail until the process ends, which is written down. It starts when the block ends."""
    (name,) = names
    disk = world.broken[name]
    before = disk.count(count)
    disk.set(**{setting: errno.EIO})
    try:
        is_met = await _until(lambda: disk.count(count) > before, SEEN_S)
        has_ended = await _until(lambda: world.state(name) == "dead", ENDED_S if is_met else 0.0)
        failures = disk.count(count) - before
        if is_met:
            _record(world, name, call, failures)
        said = _last_line(world.cluster.log(name)) if has_ended else "runs on"
        effect = f"{failures} calls failed, and {name}: {said}" if is_met else ""
        yield Struck(targets=(name,), effect=effect)
    finally:
        disk.work()
        if world.state(name) != "dead":  # it did not notice; a new life proves what it stored
            await world.do(world.cluster.kill, name)
        await world.start(name)


def _record(world: World, name: str, call: str, times: int) -> None:
    status = world.cluster.exit_status(name)
    with Recorder(world.folder / "histories" / "disks.jsonl") as recorder:
        recorder.record(FailedCall(process=name, type="ok", call=call, times=times, status=status))


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "silent"


@asynccontextmanager
async def _unreadable(world: World, names: Sequence[str]) -> Striking:
    (name,) = names
    disk = world.broken[name]
    before = disk.count("reads_failed")
    await world.do(world.cluster.kill, name)
    segments = sorted(world.data(name).glob("broker/message/*.log"))
    path = world.random.choice([each for each in segments if each.stat().st_size])
    count = max(path.stat().st_size // BLOCK_BYTES, 1)  # the last block is still written to
    blocks = world.random.sample(range(count), min(BLOCKS, count))
    disk.spoil(path, blocks)
    try:
        await world.do(world.cluster.start, name, wait=False)
        await _until(lambda: disk.count("reads_failed") > before, SEEN_S)
        failed = disk.count("reads_failed") - before
        if failed:
            await asyncio.sleep(ENDS_S)
            _record(world, name, "read", failed)
        effect = f"{failed} reads of {name} failed, of blocks {sorted(blocks)} of {path.name}"
        yield Struck(targets=(name,), effect=effect if failed else "")
    finally:
        disk.work()
        if world.state(name) == "dead":
            await world.start(name)


PLACES: Final[dict[str, tuple[str, Choose]]] = {
    "master": ("the master's disk", master),
    "follower": ("a follower's disk", follower),
}
FAILURES: Final = {
    "fsync-fails": ("syncs fail", "sync_errno", "syncs_failed", "sync"),
    "write-fails": ("writes fail", "write_errno", "writes_failed", "write"),
}

FAULTS = (
    *(
        Fault(
            name=f"slow-disk-{place}",
            what=f"{whose} is slow",
            strike=on(choose, _slow),
            needs=NEEDS,
            durabilities=("async", "flushed") if place == "all" else ("async",),
            lasts_s=(4.0, 8.0),
        )
        for place, (whose, choose) in {**PLACES, "all": ("every disk", replicas)}.items()
    ),
    *(
        Fault(
            name=f"{name}-{place}",
            what=f"{what} on {whose}",
            strike=on(choose, partial(_failing, setting=setting, count=count, call=call)),
            needs=NEEDS,
            lasts_s=(2.0, 5.0),
            checkers=("failed_call_stops",),
        )
        for name, (what, setting, count, call) in FAILURES.items()
        for place, (whose, choose) in PLACES.items()
    ),
    *(
        Fault(
            name=f"read-fails-{place}",
            what=f"blocks of the message log on {whose} cannot be read",
            strike=on(choose, _unreadable),
            needs=NEEDS,
            lasts_s=(2.0, 5.0),
            checkers=("unreadable_goes_on",),
        )
        for place, (whose, choose) in PLACES.items()
    ),
)
