"""Disks without a free block. The file system is the replica's own; another program takes all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager

from campaign.cluster import World
from campaign.faults.victims import follower, master, on
from campaign.values import LOOPS, Fault, Striking, Struck

NEEDS = frozenset({LOOPS})
DISK_MIB = 256
SETTINGS = {"QMQ_DISK_FREE_MIB": "16", "QMQ_SEGMENT_MIB": "16"}
"""Of each replica's own file system, and of the brokers on it."""


@asynccontextmanager
async def _full(world: World, names: Sequence[str]) -> Striking:
    (name,) = names
    disk = world.disks[name]
    await world.do(disk.fill)
    left = disk.free_bytes()
    try:
        yield Struck(targets=(name,), effect=f"{name} has {left} free bytes" if not left else "")
    finally:
        disk.make_room()


FAULTS = tuple(
    Fault(
        name=f"disk-full-{place}",
        what=f"another program takes the last byte of {whose} disk",
        strike=on(choose, _full),
        needs=NEEDS,
        disk_mib=DISK_MIB,
        settings=SETTINGS,
        lasts_s=(5.0, 9.0),
    )
    for place, whose, choose in (
        ("master", "the master's", master),
        ("follower", "a follower's", follower),
    )
)
