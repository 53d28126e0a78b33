"""Bits that flip in a replica's files, one kind of file at a time: on one replica, or on two of
three, at places of their own. Nobody is told.

The bytes of logs change while the replica runs, so that readers and the scrubber meet them; when
the fault ends, the replica dies and starts again, so that its recovery meets them as well. What the
product does with each kind is in docs/reference/damage.md: the group serves on, nothing that it
answers is wrong, and nothing is lost. A replica that refuses to start, since its own promises are
damaged, gets the file back if two are damaged (a majority may not forget what it promised), and an
empty disk if it is the only one.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from cluster_runner.errors import ClusterError

from campaign.cluster import World
from campaign.faults.replaced import move_away
from campaign.values import Fault, Striking, Struck

KINDS: Final = {
    "messages": ("a message log", "broker/message/*.log"),
    "actions": ("an action log", "broker/action/*.log"),
    "consume": ("a consume log", "broker/consume/*.idx"),
    "checkpoint": ("a checkpoint", "broker/checkpoint/*.qmc"),
    "mark": ("a commit mark", "broker/committed.qmm"),
    "state": ("a replica's state", "replica.json"),
    "time": ("retention's time", "**/retention-time.json"),
}
"""Pulls and settlements of consumers are entries of the action log."""
REPLICAS: Final = {"one": 1, "two": 2}
FLIPS: Final = 3
READ_ALL_ALONG: Final = frozenset({"messages", "actions", "consume"})
"""The other kinds are read at a start alone, and written by a process that runs."""


def flip(path: Path, at: int, bit: int) -> str:
    """Change one bit. Returns what is in the file now; empty if it has not changed."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        before = file.read(1)[0]
        file.seek(at)
        file.write(bytes([before ^ 1 << bit]))
        file.seek(at)
        after = file.read(1)[0]
    return (
        f"byte {at} of {path.name} is {after}, was {before}" if after == before ^ 1 << bit else ""
    )


def content_bytes(path: Path) -> int:
    """The part of a file that holds something: what follows are zeros or spaces."""
    return len(path.read_bytes().rstrip(b" \0"))


def files_of(world: World, name: str, pattern: str) -> list[Path]:
    """A replica's files of a kind, with content."""
    return [path for path in sorted(world.data(name).glob(pattern)) if content_bytes(path)]


async def _prepare(world: World, name: str, pattern: str) -> None:
    """Some files are written at a clean end at the latest."""
    if not files_of(world, name, pattern):
        await world.do(world.cluster.stop, name)
        await world.start(name)
        await world.settled()


@asynccontextmanager
async def _rot(world: World, kind: str, count: int) -> Striking:
    pattern = KINDS[kind][1]
    names = world.random.sample(world.members(world.a_group()), count)
    for name in names:
        await _prepare(world, name, pattern)
    seen: list[str] = []
    kept: dict[str, tuple[Path, Path]] = {}
    try:
        if kind not in READ_ALL_ALONG:
            await world.do(world.cluster.kill, *names)
        for name in names:
            path = world.random.choice(files_of(world, name, pattern))
            copy = world.folder / "kept" / name
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(path, copy)
            kept[name] = path, copy
            size = content_bytes(path)
            for _ in range(FLIPS):
                said = flip(path, world.random.randrange(size), world.random.randrange(8))
                seen += [f"{name}: {said}"] if said else []
        yield Struck(targets=tuple(names), effect="; ".join(seen))
    finally:
        alive = [name for name in names if world.state(name) != "dead"]
        await world.do(world.cluster.kill, *alive)
        await world.do(world.cluster.start, *names, wait=False)
        for name in names:
            await _begin_again(world, name, kept.get(name), count)


async def _begin_again(world: World, name: str, kept: tuple[Path, Path] | None, count: int) -> None:
    try:
        await world.start(name)
    except ClusterError:
        if world.state(name) != "dead" or kept is None or kept[0].name != "replica.json":
            raise  # everything else the replica must mend itself
        if count > 1:
            shutil.copy(kept[1], kept[0])
        else:
            await asyncio.to_thread(move_away, world, name)
        await world.start(name)


def _fault(kind: str, word: str, replicas: int = 3) -> Fault:
    all_of_them = {3: "three", 5: "five"}[replicas]
    return Fault(
        name=f"flip-{kind}-{word}{'' if replicas == 3 else f'-of-{all_of_them}'}",
        what=f"bits flip in {KINDS[kind][0]} of {word} of {all_of_them} replicas",
        strike=partial(_rot, kind=kind, count=REPLICAS[word]),
        lasts_s=(3.0, 6.0),
        replicas=replicas,
    )


FAULTS = (
    *(_fault(kind, word) for kind in KINDS for word in REPLICAS),
    _fault("messages", "one", replicas=5),
)
