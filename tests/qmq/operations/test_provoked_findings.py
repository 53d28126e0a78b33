"""Findings on real clusters: each test causes the finding's condition."""

from __future__ import annotations

import asyncio
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.view import ClusterView
from support import needs, node_config
from support.etcd_process import EtcdCluster

import qmq
from qmq.meta.server import MetaConfig, MetaServer
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.node.process import process_status
from qmq.operations.findings import findings
from qmq.operations.snapshot import ClusterSnapshot
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import THRESHOLDS, Finding, Severity, Thresholds
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.tls_network import network_of
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Tls
from qmq.testing import TestCluster
from qmq.testing.machine import MortalDisk
from qmq.testing.virtual_clock import virtual

SOON = timedelta(seconds=20)
WAIT_S = 30
ORDERED = SubjectConfig("orders", order=Order.STRICT, logical_partitions=16)


async def found(
    cluster: TestCluster,
    code: str,
    previous: ClusterSnapshot | None = None,
    limits: Thresholds = THRESHOLDS,
) -> Finding:
    """Wait for a finding, in real time, after its cause was made."""
    metadata = cluster.client().metadata
    async with asyncio.timeout(WAIT_S):
        while True:
            snapshot = await read_snapshot(metadata, cluster.clock)
            for each in findings(snapshot, previous, limits):
                if each.code == code:
                    return each
            await asyncio.sleep(0.02)


async def test_a_group_that_lags_and_one_without_consumers(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    slow = mq.consumer("flights", group="slow", ack="explicit")
    gone = mq.consumer("flights", group="gone", ack="explicit")
    await mq.send_many("flights", [b"%d" % number for number in range(10)])
    for consumer in (slow, gone):
        await (await consumer.pull(2, SOON)).ack_sync()
    await gone.close()
    await qmq_cluster.clock.advance(seconds=400)
    held = await slow.pull(1, SOON)
    lag = await found(qmq_cluster, "group-lags")
    assert lag.about == "group slow of flights"
    assert lag.severity == Severity.WARNING
    assert lag.command == "qmq group show flights slow"
    assert lag.what.startswith("is behind: 8 messages, the oldest 6 min")
    alone = await found(qmq_cluster, "no-consumers")
    assert alone.about == "group gone of flights"
    await held.ack_sync()


async def test_a_paused_group_with_the_operators_reason(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    consumer = mq.consumer("flights", group="ops", ack="explicit")
    await mq.send_many("flights", [b"1", b"2"])
    await (await consumer.pull(1, SOON)).ack_sync()
    await mq.metadata.pause_group("*", "ops", reason="release 41")
    paused = await found(qmq_cluster, "group-paused")
    assert "(release 41); waiting: 1 message," in paused.what
    assert paused.command == "qmq resume group '*' ops"


async def test_dead_letters_that_grow(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    consumer = mq.consumer("flights", group="ops", ack="explicit")
    await mq.send("flights", b"0")
    await (await consumer.pull(1, SOON)).ack_sync()
    await mq.metadata.set_group_settings("flights", "ops", attempts_max=1)
    before = await read_snapshot(mq.metadata, qmq_cluster.clock)
    await mq.send("flights", b"bad")
    (message,) = await consumer.pull(1, SOON)
    message.nack(error="it fails")
    dead = await found(qmq_cluster, "dead-letters", before)
    assert dead.about == "dead letters of ops"
    assert dead.severity == Severity.WARNING
    assert dead.command == "qmq dlq show ops"


async def test_a_parked_key(qmq_cluster: TestCluster) -> None:
    async def handle(_: object) -> None:
        raise ValueError("it fails")

    mq = qmq_cluster.client()
    await mq.metadata.create_subject(ORDERED)
    consumer = mq.ordered_consumer(
        "orders", "billing", on_failure="park", attempts_max=1, retry_delays_s=(0.0,)
    )
    running = asyncio.create_task(consumer.run(handle))
    await mq.send("orders", b"1", key="k")
    parked = await found(qmq_cluster, "parked-keys")
    assert parked.about == "group billing of orders"
    assert parked.command == "qmq dlq list orders billing"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.qmq_cluster(brokers=1, groups=2, delay=False)
async def test_a_subject_on_one_broker_group_and_a_drained_one(qmq_cluster: TestCluster) -> None:
    metadata = qmq_cluster.client().metadata
    await metadata.create_subject(SubjectConfig("flights", groups=("group-2",)))
    one = await found(qmq_cluster, "one-broker-group")
    assert one.what == "is on group-2 only"
    assert one.command == "qmq subject place flights --groups group-1,group-2"
    await metadata.set_group_mode("group-1", "read-only")
    assert (await found(qmq_cluster, "drained")).command == "qmq broker resume group-1"


@pytest.mark.qmq_cluster(brokers=1, groups=2, delay=False)
async def test_a_split_that_cannot_be_published(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.metadata.create_subject(
        SubjectConfig("orders", groups=("group-2",), order=Order.STRICT, logical_partitions=16)
    )
    await mq.send("orders", b"1", key="k")
    heal = qmq_cluster.cut("broker-2", "meta")
    splitting = asyncio.create_task(
        mq.metadata.change_route("orders", split=pb.SplitOperation(partition=1, at=[8]))
    )
    metadata = mq.metadata
    async with asyncio.timeout(WAIT_S):
        while not (await metadata.describe_route("orders")).HasField("change"):
            await asyncio.sleep(0.02)
    await qmq_cluster.clock.advance(seconds=90)
    stuck = await found(qmq_cluster, "route-change-stuck")
    assert stuck.what.startswith("its split to version 2 has been prepared for 1 min 30 s")
    heal()
    await asyncio.gather(splitting, return_exceptions=True)


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_replica_that_is_killed_and_one_that_is_cut_off(qmq_cluster: TestCluster) -> None:
    master = qmq_cluster.master()
    one, other = [
        name for name in qmq_cluster.names if name.startswith("broker") and name != master
    ]
    heal = qmq_cluster.cut(one, master)
    behind = await found(qmq_cluster, "replica-behind", limits=Thresholds(replica_silent_ms=300))
    assert behind.about == f"replica {one} of group-1"
    heal()
    await qmq_cluster.kill(other)
    away = await found(qmq_cluster, "replica-away")
    assert away.about == f"replica {other} of group-1"
    assert "has no majority" in away.what


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_mastership_that_moved(qmq_cluster: TestCluster) -> None:
    before = await read_snapshot(qmq_cluster.client().metadata, qmq_cluster.clock)
    master = qmq_cluster.master()
    await qmq_cluster.kill(master)
    await qmq_cluster.until_master(other_than=master)
    moved = await found(qmq_cluster, "master-changed", before)
    assert moved.what.startswith(f"its master changed from {master} to ")


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_broker_group_without_a_majority(qmq_cluster: TestCluster) -> None:
    await qmq_cluster.client().send("flights", b"1")
    master = qmq_cluster.master()
    slave = next(name for name in ("broker-1", "broker-2") if name != master)
    for name in (slave, master):  # who is left is no master, and cannot become one
        await qmq_cluster.kill(name)
    await qmq_cluster.clock.advance(seconds=60)
    lost = await found(qmq_cluster, "no-master")
    assert lost.severity is Severity.CRITICAL
    assert "2 are needed; subjects there: 1" in lost.what


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_replica_that_was_not_upgraded(
    qmq_cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slave = next(name for name in ("broker-1", "broker-2") if name != qmq_cluster.master())
    await qmq_cluster.kill(slave)
    with monkeypatch.context() as older:
        older.setattr(qmq, "__version__", "0.0.9")
        await qmq_cluster.restart(slave)
    differs = await found(qmq_cluster, "version-differs")
    assert (differs.about, differs.severity) == (f"replica {slave}", Severity.NOTICE)
    assert differs.what == f"runs version 0.0.9; most servers run {qmq.__version__}"


async def test_a_metaserver_cut_off_from_the_coordination_store() -> None:
    async with TestCluster(delay=False) as cluster:
        cluster_client = cluster.client()
        with_heal = cluster.cut("meta", "coordination")
        async with asyncio.timeout(WAIT_S):
            while True:
                snapshot = await read_snapshot(cluster_client.metadata)
                silent = [
                    each
                    for each in findings(snapshot, limits=Thresholds(store_silent_ms=500))
                    if each.code == "store-silent"
                ]
                if silent:
                    break
                await asyncio.sleep(0.05)
        assert silent[0].severity is Severity.CRITICAL
        with_heal()


async def test_a_member_of_etcd_that_was_killed_and_a_release_that_may_corrupt_data(
    tmp_path: Path,
) -> None:
    needs.need_etcd()
    etcd = EtcdCluster(tmp_path / "etcd", 3)
    store = EtcdStore(etcd.endpoints)
    view = ClusterView(store)
    server = MetaServer(store, view, MetaConfig("127.0.0.1", 0), members=store.members)
    try:
        etcd.start()
        await view.start()
        await server.start()
        etcd.members[1].kill()
        async with qmq.connect(server.address) as mq:
            snapshot = await read_snapshot(mq.metadata)
    finally:
        await server.stop()
        await view.stop()
        await store.close()
        etcd.stop()
    first, killed, third = (f"etcd member 127.0.0.1:{each.client_port}" for each in etcd.members)
    found = [each for each in findings(snapshot) if each.code.startswith("store-")]
    assert {(each.code, each.about) for each in found} == {
        ("store-member-away", killed),
        *(("store-version", about) for about in (first, third)),
    }
    assert [each.what for each in found if each.code == "store-version"] == ["runs etcd 3.5.1"] * 2
    assert {each.severity for each in found} == {Severity.WARNING}


async def test_one_metaserver_of_two_that_does_not_answer(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away_at = f"127.0.0.1:{closed.getsockname()[1]}"
    async with qmq.connect([node.address, away_at]) as mq:
        snapshot = await read_snapshot(mq.metadata)
    (away,) = [each for each in findings(snapshot) if each.code == "metaserver-away"]
    assert (away.about, away.severity) == (f"metaserver {away_at}", Severity.WARNING)
    assert snapshot.broker_groups


async def test_a_certificate_that_ends_in_two_days(tmp_path: Path) -> None:
    create_authority(tmp_path)
    made = [
        issue(tmp_path, name, kind, hosts, days=2)
        for name, kind, hosts in (("b0", "node", ("127.0.0.1",)), ("bob", "op", ()))
    ]
    server, client = [Tls(tmp_path / "ca.pem", each.cert, each.key) for each in made]
    node = Node(node_config(tmp_path / "node"), network=network_of(server))
    await node.start()
    try:
        async with qmq.connect(node.address, tls=client) as mq:
            snapshot = await read_snapshot(mq.metadata)
    finally:
        await node.stop()
    ending = [each for each in findings(snapshot) if each.code == "certificate-ends"]
    assert [each.about for each in ending] == [f"metaserver {node.address}", "replica broker-0"]
    assert {each.severity for each in ending} == {Severity.WARNING}
    assert all(each.what.startswith("its certificate ends in 1 d 23 h") for each in ending)


async def test_a_server_that_strangers_may_reach(node: Node) -> None:
    """The server listens on loopback, but describes its process as reachable from outside."""
    server = MetaServer(
        node.coordination, node.view, MetaConfig("127.0.0.1", 0), process=process_status("broker-7")
    )
    await server.start()
    try:
        async with qmq.connect([node.address, server.address]) as mq:
            snapshot = await read_snapshot(mq.metadata)
    finally:
        await server.stop()
    assert [each.about for each in findings(snapshot) if each.code == "insecure-port"] == [
        f"metaserver {server.address}"
    ]


class OddDisk(MortalDisk):
    """A disk with little free space whose flushes wait while `gate` is shut."""

    def __init__(self, free: int, gate: threading.Event) -> None:
        super().__init__()
        self._free, self._gate = free, gate

    def free_bytes(self, folder: Path) -> int:
        return self._free

    def sync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._gate.wait()
        super().sync(fd)


async def test_a_disk_that_is_nearly_full_and_does_not_flush() -> None:
    gate = threading.Event()
    gate.set()
    async with TestCluster(
        delay=False, clock=virtual(), make_disk=lambda _: OddDisk(100 << 20, gate)
    ) as cluster:
        mq = cluster.client()
        await mq.send("flights", b"1")
        full = await found(cluster, "disk-full")
        assert full.what == "is nearly full: 100 MiB are free, and 64 MiB stay reserved"
        gate.clear()
        try:
            await mq.send("flights", b"2")
            await cluster.clock.advance(seconds=60)
            old = await found(cluster, "unflushed")
            assert old.about == "replica broker-1"
            assert "the oldest for 1 min" in old.what
        finally:
            gate.set()


@pytest.mark.qmq_cluster(brokers=1, delay=1)
async def test_due_messages_of_a_subject_that_cannot_be_delivered(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("flights", b"later", delay=timedelta(seconds=30))
    await mq.metadata.delete_subject("flights")
    await qmq_cluster.clock.advance(seconds=31)
    trouble = await found(qmq_cluster, "delay-trouble")
    assert trouble.about == "delayed messages of flights"
    assert trouble.what.startswith("1 due message cannot be delivered: ")


@pytest.mark.qmq_cluster(brokers=1, delay=1)
async def test_a_delay_group_that_stands_still(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("flights", b"later", delay=timedelta(seconds=30))
    heal = qmq_cluster.cut("delay-1", "broker-1")
    await qmq_cluster.clock.advance(seconds=31)
    metadata = mq.metadata
    before = await read_snapshot(metadata, qmq_cluster.clock)
    async with asyncio.timeout(WAIT_S):
        while not any(each.waiting for each in before.delay_groups):
            before = await read_snapshot(metadata, qmq_cluster.clock)
    behind = await found(qmq_cluster, "delay-behind", before)
    assert behind.about == "delay group delay"
    assert behind.what == "delivers nothing, although it has 1 due message"
    heal()
