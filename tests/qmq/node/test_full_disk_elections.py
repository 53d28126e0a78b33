"""A disk without a byte left ends no process: a replica votes with what its files have, waits for
the rest, and starts all the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_replication.identity import FILE
from support import FullDisk, eventually, needs
from support.disks import fill, small_disk_at

import qmq
from qmq.errors import Unavailable
from qmq.log.disk import Disk
from qmq.testing import TestCluster
from qmq.testing.machine import MortalDisk, ReplicaMachine


@asynccontextmanager
async def cluster_of(full: set[str], delay: int = 0) -> AsyncIterator[TestCluster]:
    """Three replicas, whose disks are full while they are in `full`."""

    def make(name: str) -> FullDisk:
        return FullDisk(lambda: name in full)

    async with TestCluster(brokers=3, delay=delay, make_disk=make) as cluster:
        yield cluster


def replica(cluster: TestCluster, name: str) -> ReplicaMachine:
    found = cluster.machine(name)
    assert isinstance(found, ReplicaMachine)
    return found


async def is_known(mq: qmq.Client, bodies: list[bytes]) -> bool:
    async with mq.consumer("s", "check") as consumer:
        got = await consumer.pull(len(bodies), timedelta(seconds=20))
        return got.bodies == bodies


async def test_a_replica_without_a_byte_left_votes_and_continues_when_there_is_room() -> None:
    full: set[str] = set()
    async with cluster_of(full) as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        master = cluster.master()
        crowded = next(name for name in cluster.groups["group-1"] if name != master)
        promised = replica(cluster, crowded).epoch
        full.add(crowded)
        await cluster.kill(master)
        await eventually(lambda: replica(cluster, crowded).epoch > promised)
        full.clear()
        await cluster.until_master(other_than=master)
        await mq.send("s", b"2")
        assert await is_known(mq, [b"1", b"2"])


async def test_nothing_is_lost_when_a_master_dies_and_all_disks_are_full() -> None:
    full: set[str] = set()
    async with cluster_of(full) as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        master = cluster.master()
        epochs = {name: replica(cluster, name).epoch for name in cluster.groups["group-1"]}
        full.update(cluster.names)
        await cluster.kill(master)
        await eventually(
            lambda: all(
                replica(cluster, name).epoch > epochs[name]
                for name in cluster.groups["group-1"]
                if name != master
            )
        )
        full.clear()
        await cluster.until_master(other_than=master)
        assert await is_known(mq, [b"1"])


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_replica_starts_on_a_full_disk_and_takes_part_when_there_is_room(
    is_new: bool,
) -> None:
    """Also one whose files are those of a release that kept no spare: it cannot save its start, so
    it does not vote.
    """
    full: set[str] = set()
    async with cluster_of(full) as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        master = cluster.master()
        crowded = replica(
            cluster, next(name for name in cluster.groups["group-1"] if name != master)
        )
        assert crowded.node is not None
        data = crowded.node.config.data
        await cluster.kill(crowded.name)
        if is_new:
            (data / f"{FILE}.spare").unlink()
        full.add(crowded.name)
        await crowded.start()
        if is_new:
            with pytest.raises(Unavailable, match="free some space"):
                crowded.node.driver.act(lambda _: None)
        await cluster.kill(master)
        if not is_new:
            await eventually(lambda: crowded.epoch > 1)
        full.clear()
        await cluster.until_master(other_than=master)
        await mq.send("s", b"2")
        assert await is_known(mq, [b"1", b"2"])


async def test_entries_that_do_not_fit_are_written_when_there_is_room() -> None:
    """The space was there when the replica asked for it, and another program took it."""
    full: set[str] = set()

    class Taken(FullDisk):
        def free_bytes(self, folder: Path) -> int:
            return 1 << 40

    async with TestCluster(
        brokers=3, delay=False, make_disk=lambda name: Taken(lambda: name in full)
    ) as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        master = cluster.master()
        crowded = next(name for name in cluster.groups["group-1"] if name != master)
        full.add(crowded)
        bodies = [b"1", *(bytes([65 + number]) * 9_000 for number in range(5))]
        for body in bodies[1:]:
            await mq.send("s", body)
        node = replica(cluster, crowded).node
        assert node is not None
        await eventually(lambda: node.driver.is_waiting)
        full.clear()
        await eventually(
            lambda: node.broker.store.index == replica(cluster, master).node.broker.store.index
        )  # type: ignore[union-attr]
        assert await is_known(mq, bodies)


async def test_acknowledgements_are_replicated_into_the_reserve() -> None:
    """On disks of one size the slaves have room for what the master admitted, and for what comes
    after it.
    """
    free = [1 << 40]

    class Sized(MortalDisk):
        def free_bytes(self, folder: Path) -> int:
            return free[0]

    async with TestCluster(brokers=3, delay=False, make_disk=lambda _: Sized()) as cluster:
        mq = cluster.client()
        await mq.send_many("s", [b"%d" % number for number in range(20)])
        stores = [replica(cluster, name).node.broker.store for name in cluster.groups["group-1"]]  # type: ignore[union-attr]
        await eventually(lambda: len({each.index for each in stores}) == 1)
        free[0] = stores[0].config.disk_free_bytes_min // 4
        for each in stores:
            each.space.forget()
        async with mq.consumer("s", "g", ack="explicit") as consumer:
            got = await consumer.pull(20, timedelta(seconds=20))
            await got.ack_sync()
        await eventually(lambda: len({each.index for each in stores}) == 1)
        master = cluster.master()
        await cluster.kill(master)
        await cluster.until_master(other_than=master)


# --- the file that promises are in ----------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "small", 1) as folder:
        yield folder


@needs.mounts
def test_a_file_is_rewritten_on_a_disk_without_a_byte_left(small_disk: Path) -> None:
    path, disk = small_disk / "state", Disk()
    disk.rewrite(path, b"0")
    fill(small_disk)
    for number in range(1, 100):
        disk.rewrite(path, b"%d" % number * 10)
        assert path.read_bytes().rstrip() == b"%d" % number * 10


class Crash(BaseException):
    """The process is killed here."""


class Crashing(Disk):
    """Is killed at its n-th step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def _step(self, do: Callable[[], object]) -> None:
        if not self._steps:
            raise Crash
        self._steps -= 1
        do()

    def write(self, fd: int, buffers: object, at: int) -> None:
        self._step(lambda: Disk.write(self, fd, buffers, at))  # type: ignore[arg-type]

    def truncate(self, fd: int, size: int) -> None:
        self._step(lambda: Disk.truncate(self, fd, size))

    def link(self, path: Path, to: Path) -> None:
        self._step(lambda: Disk.link(self, path, to))

    def rename(self, path: Path, to: Path) -> None:
        self._step(lambda: Disk.rename(self, path, to))

    def sync_folder(self, folder: Path) -> None:
        self._step(lambda: Disk.sync_folder(self, folder))


@pytest.mark.parametrize("first", [b"", b"old"])
def test_a_rewritten_file_is_the_old_or_the_new_one_wherever_the_process_dies(
    tmp_path: Path, first: bytes
) -> None:
    for steps in range(12):
        folder = tmp_path / str(steps)
        folder.mkdir()
        path = folder / "state"
        if first:
            Disk().rewrite(path, first)
        with suppress(Crash):
            Crashing(steps).rewrite(path, b"new")
        assert (
            not path.exists()
            if not first and not path.exists()
            else path.read_bytes().rstrip() in (first, b"new")
        )
        Disk().rewrite(path, b"next")
        Disk().rewrite(path, b"last")
        assert path.read_bytes().rstrip() == b"last"
