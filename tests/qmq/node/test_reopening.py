"""A replica that must open its store again while it runs keeps answering the other replicas and its
clients.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import eventually
from support.clusters import NAMES, ThreeReplicas

import qmq
from qmq.errors import QmqError, Unavailable
from qmq.log.actions import Begin
from qmq.log.disk import Disk
from qmq.node.process import Environment
from qmq.node.replica.node import ReplicaNode
from qmq.testing.machine import TIMING


class HeldDisk(Disk):
    """After `hold`, opening a store on this disk waits for `let_go`, except in the event loop,
    which would wait forever.
    """

    def __init__(self) -> None:
        self._loops = threading.current_thread()
        self._may_go = threading.Event()
        self._may_go.set()
        self.is_reached = False
        self.held_the_loop = False

    def hold(self) -> None:
        self.is_reached = False
        self._may_go.clear()

    def let_go(self) -> None:
        self._may_go.set()

    def open_append(self, path: Path) -> int:
        if not self._may_go.is_set() and path.suffix == ".log":
            if threading.current_thread() is self._loops:
                self.held_the_loop = True
            else:
                self.is_reached = True
                self._may_go.wait(20)
        return super().open_append(path)


class Group(ThreeReplicas):
    """Each is on its own disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disks = {name: HeldDisk() for name in NAMES}
        self.fatal: list[BaseException] = []

    def environment_of(self, name: str) -> Environment:
        return Environment(disk=self.disks[name], timing=TIMING, fatal=self.fatal.append)

    def hashes(self) -> set[bytes]:
        return {
            b"".join(
                each.read_bytes() for each in sorted((self.folder / name).glob("broker/*/*.log"))
            )
            for name in NAMES
        }

    async def all_are_equal(self) -> None:
        def ends() -> set[tuple[int, int]]:
            return {
                (node.broker.store.index, node.broker.store.committed_index)
                for node in self.nodes.values()
            }

        await eventually(
            lambda: (
                len(ends()) == 1 and not any(node.driver.is_opening for node in self.nodes.values())
            )
        )
        assert len(self.hashes()) == 1


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Group, qmq.Client]]:
    group = Group(folder)
    async with group.running() as address, qmq.connect(address) as mq:
        await mq.send("s", b"before")
        try:
            yield group, mq
        finally:
            for disk in group.disks.values():
                disk.let_go()


def lose_the_role_with_something_unwritten(node: ReplicaNode) -> None:
    """Another replica has a higher epoch in the coordination store, in the middle of a turn."""
    node.broker.store.act(Begin("s", 0, "g", "", 0))
    node.driver.act(
        lambda now_ms: node.driver.core.superseded(now_ms, node.driver.core.state.promised + 1)
    )


async def test_a_deposed_master_reopens_its_store_without_blocking_the_loop(tmp_path: Path) -> None:
    async with running(tmp_path) as (group, mq):
        name = await group.master()
        node, disk = group.nodes[name], group.disks[name]
        disk.hold()
        lose_the_role_with_something_unwritten(node)
        await eventually(lambda: disk.is_reached or disk.held_the_loop)
        assert not disk.held_the_loop
        await mq.send("s", b"meanwhile")
        assert await group.master() != name
        assert node.driver.is_opening
        assert node.status.describe().role == "slave"
        with pytest.raises(Unavailable):
            node.status.read_log(0, 0, 1000)
        disk.let_go()
        await eventually(lambda: not node.driver.is_opening)
        await mq.send("s", b"after")
        await group.all_are_equal()
        assert [queue.shares for queue in node.broker.store.queues.values()] == [{}]
        assert group.fatal == []


@pytest.mark.sampled
async def test_an_uncommitted_tail_is_cut_without_delay_for_others(tmp_path: Path) -> None:
    async with running(tmp_path) as (group, mq):
        name = await group.master()
        others = [each for each in NAMES if each != name]
        await group.all_are_equal()
        for each in others:
            await group.stop(each)
        sending = asyncio.ensure_future(mq.send("s", b"alone"))
        store = group.nodes[name].broker.store
        await eventually(lambda: store.index > store.committed_index)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await group.stop(name)
        await asyncio.gather(*[group.start(each) for each in others])
        await mq.send("s", b"without it")
        disk = group.disks[name]
        disk.hold()
        await group.start(name)  # where the store is opened by the event loop
        await eventually(lambda: disk.is_reached)
        await mq.send("s", b"meanwhile")
        disk.let_go()
        await group.all_are_equal()
        assert group.fatal == []


async def test_a_replica_stopped_while_it_reopens_its_store_loses_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (group, mq):
        name = await group.master()
        node, disk = group.nodes[name], group.disks[name]
        disk.hold()
        lose_the_role_with_something_unwritten(node)
        await eventually(lambda: disk.is_reached or disk.held_the_loop)
        assert not disk.held_the_loop
        stopping = asyncio.ensure_future(group.stop(name))
        await mq.send("s", b"meanwhile")
        assert not stopping.done()
        disk.let_go()
        await stopping
        await group.start(name)
        await mq.send("s", b"after")
        await group.all_are_equal()
        assert group.fatal == []


async def test_a_store_that_cannot_be_reopened_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (group, _):
        name = await group.master()
        node, failure = group.nodes[name], OSError("the disk is gone")

        def gone(_: Path) -> int:
            raise failure

        monkeypatch.setattr(group.disks[name], "open_append", gone)
        lose_the_role_with_something_unwritten(node)
        await eventually(lambda: bool(group.fatal))
        assert group.fatal == [failure]
        with pytest.raises(QmqError):
            node.driver.act(lambda _: None)
