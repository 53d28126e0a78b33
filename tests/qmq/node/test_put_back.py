"""An older copy of a replica's folder, put in its place: the replica knows it, and acknowledged
messages stay.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from qmq_coordination.broker_groups import CLUSTER, ReplicaRecord, replica_key
from qmq_coordination.coordination_store import Put
from qmq_coordination.ordered_records import stale_prefix
from support import eventually
from support.clusters import NAMES, ThreeReplicas, replica_config
from support.stores import FaultyStore

import qmq
from qmq.errors import CoordinationUnavailable, Unavailable, WrongServer
from qmq.log import commit_mark
from qmq.model import Order, SubjectConfig
from qmq.node.process import MACHINE, Environment, NodeTiming
from qmq.node.replica.context import ReplicaConfig
from qmq.operations.findings import findings
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import Severity
from qmq.proto.v1 import meta_pb2 as pb


class Cluster(ThreeReplicas):
    """Their folders can be copied and put back; each keeps its data port."""

    def __init__(self, folder: Path, environment: Environment = MACHINE) -> None:
        super().__init__(folder)
        self.environment = environment
        self.ports: dict[str, int] = {}

    def config(self, name: str) -> ReplicaConfig:
        return replica_config(self.folder, name, data_port=self.ports.get(name, 0))

    def environment_of(self, name: str) -> Environment:
        return self.environment

    async def start(self, *names: str, store: Any = None) -> None:
        await super().start(*names, store=store)
        for name in names:
            self.ports[name] = int(self.nodes[name].address.rpartition(":")[2])

    async def kill(self, *names: str) -> None:
        for name in names:
            await self.nodes.pop(name).stop(abruptly=True)

    async def record(self, name: str) -> ReplicaRecord:
        found = await self.store.get(replica_key("g", name))
        assert found is not None
        return ReplicaRecord.decode(found.value)

    def copy(self, name: str) -> None:
        shutil.copytree(self.folder / name, self.folder / f"copy-{name}")

    def put_back(self, name: str) -> None:
        shutil.rmtree(self.folder / name)
        shutil.move(self.folder / f"copy-{name}", self.folder / name)

    def counts(self, name: str) -> bool:
        return self.nodes[name].driver.core.state.may_count

    async def until_whole(self) -> None:
        indexes = lambda: {node.driver.core.state.commit for node in self.nodes.values()}  # noqa: E731
        await eventually(lambda: all(map(self.counts, self.nodes)) and len(indexes()) == 1)


@asynccontextmanager
async def running(
    folder: Path, environment: Environment = MACHINE
) -> AsyncIterator[tuple[Cluster, str]]:
    cluster = Cluster(folder, environment)
    async with cluster.running() as address:
        yield cluster, address


async def read(address: str, count: int) -> set[bytes]:
    async with qmq.connect(address) as mq, mq.consumer("s", "reader") as consumer:
        found: set[bytes] = set()
        while len(found) < count:
            got = await consumer.pull(1_000, timedelta(seconds=20))
            assert got, f"{count - len(found)} acknowledged messages are missing"
            found |= {message.body for message in got}
            await got.ack_sync()
        return found


async def send(address: str, first: int, count: int) -> None:
    async with qmq.connect(address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(first, first + count)])


async def test_an_old_copy_of_one_disk_put_back_loses_no_acknowledged_message(
    tmp_path: Path,
) -> None:
    """The third replica was down while the messages were acknowledged, so the copy and the third
    one must not elect a master.
    """
    async with running(tmp_path) as (cluster, address):
        first = await cluster.master()
        copied, away = (name for name in NAMES if name != first)
        await send(address, 0, 100)
        await cluster.stop(copied)
        cluster.copy(copied)
        await cluster.start(copied)
        await cluster.until_whole()
        await cluster.stop(away)
        await send(address, 100, 200)
        await cluster.kill(first, copied)
        cluster.put_back(copied)
        await cluster.start(copied, away)
        assert not cluster.counts(copied)
        assert cluster.counts(away)
        await cluster.start(first)
        await send(address, 300, 10)
        assert await read(address, 310) == {b"%d" % number for number in range(310)}
        await cluster.until_whole()


async def test_an_old_copy_knows_which_epochs_it_may_have_promised(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, address):
        first = await cluster.master()
        copied, other = (name for name in NAMES if name != first)
        await cluster.stop(copied)
        cluster.copy(copied)
        await cluster.start(copied)
        await cluster.until_whole()
        await cluster.kill(first)
        await send(address, 0, 10)
        epoch = cluster.nodes[copied].driver.core.state.promised
        await cluster.kill(copied, other)
        cluster.put_back(copied)
        await cluster.start(copied)
        assert cluster.nodes[copied].driver.core.state.promised >= epoch
        await cluster.start(first, other)
        assert await read(address, 10) == {b"%d" % number for number in range(10)}


async def test_the_last_good_copy_keeps_what_is_committed_and_doctor_names_it(
    tmp_path: Path,
) -> None:
    """Two disks and the store are put back at once: nothing shows that, until the third replica
    comes back.
    """
    async with running(tmp_path) as (cluster, address):
        good = await cluster.master()
        others = [name for name in NAMES if name != good]
        await send(address, 0, 10)
        await cluster.until_whole()
        records = [await cluster.record(name) for name in others]
        for name in others:
            await cluster.stop(name)
            cluster.copy(name)
        await cluster.start(*others)
        await send(address, 10, 10)
        await cluster.until_whole()
        node = cluster.nodes[good]
        committed = node.driver.core.state.commit
        await eventually(lambda: commit_mark_index(tmp_path / good) == committed)
        await cluster.kill(*NAMES)
        for name, record in zip(others, records, strict=True):
            cluster.put_back(name)
            await cluster.store.put(replica_key("g", name), record.encode())
        await cluster.start(*others)
        await cluster.master()
        await cluster.start(good)
        await eventually(lambda: cluster.nodes[good].driver.core.fork != "")
        assert cluster.nodes[good].broker.store.index >= committed
        async with qmq.connect(address) as mq:
            found = findings(await read_snapshot(mq.metadata))
        assert [(each.severity, each.about) for each in found if each.code == "replica-forked"] == [
            (Severity.CRITICAL, f"replica {good} of g")
        ]


def commit_mark_index(folder: Path) -> int:
    found = commit_mark.read(folder / "broker")
    return 0 if found is None else found.index


async def test_a_store_that_was_put_back_is_noticed_by_the_replicas(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, address):
        first = await cluster.master()
        name = next(each for each in NAMES if each != first)
        before = await cluster.record(name)
        for _ in range(2):
            await cluster.stop(name)
            await cluster.start(name)
        await cluster.stop(name)
        await cluster.store.put(replica_key("g", name), before.encode())
        await cluster.start(name)
        async with qmq.connect(address) as mq:
            found = findings(await read_snapshot(mq.metadata))
        (what,) = [each.what for each in found if each.code == "store-put-back"]
        assert f"{name} had registered generation 2, and 1 is registered" in what


async def test_a_replica_does_not_register_in_the_store_of_another_cluster(tmp_path: Path) -> None:
    """As when a restarted replica is given another cluster's etcd, which has a group and a replica
    with these names.
    """
    async with running(tmp_path) as (cluster, _):
        await cluster.master()
        name = NAMES[0]
        await cluster.stop(name)
        (own,) = (await cluster.store.list(CLUSTER)).items
        record = await cluster.record(name)
        await cluster.store.put(CLUSTER, b"another")
        with pytest.raises(
            WrongServer,
            match=(
                f"the folder of a belongs to cluster {own.value.decode()}, and .* has cluster "
                "another"
            ),
        ):
            await cluster.start(name)
        assert await cluster.record(name) == record
        await cluster.store.put(CLUSTER, own.value)
        await cluster.start(name)


async def test_a_copy_of_a_folder_in_use_is_older_after_a_while(tmp_path: Path) -> None:
    environment = replace(MACHINE, node_timing=NodeTiming(generation_s=0.02))
    async with running(tmp_path, environment) as (cluster, address):
        first = await cluster.master()
        copied = next(name for name in NAMES if name != first)
        cluster.copy(copied)
        before = (await cluster.record(copied)).generation
        await send(address, 0, 10)
        while (await cluster.record(copied)).generation <= before + 1:
            await send(address, 0, 1)
        await cluster.kill(first, copied)
        cluster.put_back(copied)
        await cluster.start(copied)
        assert not cluster.counts(copied)
        await cluster.start(first)
        await cluster.until_whole()


async def test_a_folder_that_was_in_use_until_it_was_killed_is_no_older_copy(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (cluster, address):
        await cluster.master()
        for name in NAMES:
            await send(address, 0, 1)
            await cluster.kill(name)
            await cluster.start(name)
            assert cluster.counts(name)


async def test_without_the_store_a_replica_starts_and_votes_once_the_store_answers(
    tmp_path: Path,
) -> None:
    environment = replace(MACHINE, node_timing=NodeTiming(known_wait_s=0.1))
    async with running(tmp_path, environment) as (cluster, address):
        first = await cluster.master()
        name = next(name for name in NAMES if name != first)
        await cluster.stop(name)
        away = FaultyStore(cluster.store)
        away.cut("list", "get", "txn", "grant", failure=CoordinationUnavailable("no answer"))
        await cluster.start(name, store=away)
        assert not cluster.counts(name)
        await send(address, 0, 10)
        state = cluster.nodes[first].driver.core.state
        await eventually(lambda: cluster.nodes[name].driver.core.state.commit == state.commit)
        away.heal()
        await eventually(lambda: cluster.counts(name))


async def test_routes_older_than_a_brokers_seals_are_refused_until_they_are_back(
    tmp_path: Path,
) -> None:
    environment = replace(MACHINE, node_timing=NodeTiming(stale_routes_s=0.1))
    async with running(tmp_path, environment) as (cluster, address), qmq.connect(address) as mq:
        await cluster.master()
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=64), partitions=2
        )
        old = (await cluster.store.list("/qmq/routes/o/")).items
        await mq.metadata.change_route(
            "o", split=pb.SplitOperation(partition=1, parts=2), from_version=1
        )
        assert (await mq.metadata.describe_route("o")).route.version == 2
        new = (await cluster.store.list("/qmq/routes/o/")).items
        await cluster.store.delete("/qmq/routes/o/", is_prefix=True)
        await cluster.store.txn([], [Put(item.key, item.value) for item in old])
        while not (await cluster.store.list(stale_prefix("o"))).items:
            await asyncio.sleep(0)
        async with qmq.connect(address) as fresh:
            with pytest.raises(Unavailable, match="rebuild it from the brokers' folders"):
                await fresh.metadata.locate("o")
            with pytest.raises(Unavailable, match="rebuild it from the brokers' folders"):
                await fresh.metadata.change_route(
                    "o", split=pb.SplitOperation(partition=2, parts=2), from_version=1
                )
            found = findings(await read_snapshot(fresh.metadata))
        (what,) = [each.what for each in found if each.code == "store-put-back"]
        assert "subject o: g sealed partition 1 for version 2" in what
        await cluster.store.txn([], [Put(item.key, item.value) for item in new])
        while (await cluster.store.list(stale_prefix("o"))).items:
            await asyncio.sleep(0)
        assert (await mq.metadata.describe_route("o")).route.version == 2
