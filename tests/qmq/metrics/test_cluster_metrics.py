"""Three replicas and a metaserver: roles, how far the others are, elections, what a new master
counts; and a store that is silent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from metric_pages import Values, read
from support import eventually
from support.clusters import REPLICATED, ServerCluster, cluster
from support.stores import FaultyStore

import qmq
from qmq.errors import CoordinationUnavailable
from qmq.log.log_config import Flush, LogConfig
from qmq.node.metrics.meta import MetaSource
from qmq.node.metrics.replica import CoordinationSource, CountedStore, ReplicaSource
from qmq.node.replica.node import ReplicaNode
from qmq.proto.v1 import control_pb2 as control

OURS = {"broker_group": "g1"}


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[ServerCluster]:
    async with cluster(tmp_path, REPLICATED, LogConfig(flush=Flush.SYNC)) as found:
        yield found


async def of(node: ReplicaNode) -> Values:
    return await read(node.sources())


async def settled(master: ReplicaNode, others: list[ReplicaNode]) -> None:
    """Wait until all replicas have all entries, and report it."""
    await eventually(
        lambda: all(
            each.broker.store.committed_index == master.broker.store.index
            for each in (master, *others)
        )
    )
    await eventually(
        lambda: all(
            peer.match_index == master.broker.store.index for peer in master.status.describe().peers
        )
    )


async def test_a_master_and_its_slaves_say_which_they_are_and_how_far(three: ServerCluster) -> None:
    master = await three.master("g1")
    slaves = [node for node in three.nodes.values() if node is not master]
    async with qmq.connect(three.servers) as mq:
        for _ in range(5):
            await mq.send("flights", b"x")
        async with mq.consumer("flights", "ops") as consumer:
            assert (await consumer.__anext__()).body == b"x"
            await settled(master, slaves)
            values = await of(master)
            theirs = {slave.config.replica: await of(slave) for slave in slaves}
    assert values("qmq_serving", **OURS) == 1
    assert values("qmq_replica_info", role="master", replica=master.config.replica) == 1
    assert values("qmq_role_changes_total", role="master") == 1
    assert values("qmq_epoch") == 1
    assert values("qmq_members", kind="voter") == 3
    assert values("qmq_commit_index") == values("qmq_last_index") > 5
    assert values("qmq_stored_messages_total", subject="flights") == 5
    assert values("qmq_commit_seconds_count") >= 5
    assert values("qmq_flush_seconds_count") >= 1
    for name, its in theirs.items():
        assert values("qmq_replication_lag_entries", replica=name) == 0
        assert values("qmq_replication_in_step", replica=name) == 1
        assert values("qmq_replication_silent_seconds", replica=name) < 60
        assert its("qmq_serving") == 0
        assert its("qmq_replica_info", role="slave", replica=name) == 1
        assert (
            its.rows("qmq_stored_messages_total")
            == its.rows("qmq_group_lag_messages")
            == its.rows("qmq_replication_lag_entries")
            == []
        )
        assert its("qmq_kept_messages", subject="flights") == 5
        assert its("qmq_last_index") == values("qmq_last_index")


async def test_a_replica_that_is_away_falls_behind_and_the_metaserver_misses_it(
    three: ServerCluster,
) -> None:
    master = await three.master("g1")
    gone = next(name for name in three.nodes if three.nodes[name] is not master)
    await three.stop(gone)
    async with qmq.connect(three.servers) as mq:
        before = (await of(master))("qmq_replication_lag_entries", replica=gone)
        for _ in range(3):
            await mq.send("flights", b"x")
        values = await of(master)
        assert values("qmq_replication_lag_entries", replica=gone) == before + 3
        await eventually(lambda: len(three.view.present("g1")) == 2)
        known = await read([MetaSource(three.meta, three.view)])
        assert (
            known("qmq_broker_group_present_replicas", **OURS)
            - known("qmq_broker_group_voters", **OURS)
            == -1
        )
        assert known("qmq_broker_group_has_master", **OURS) == 1


async def test_a_new_master_counts_what_it_stored_itself(three: ServerCluster) -> None:
    first = await three.master("g1")
    async with qmq.connect(three.servers) as mq:
        for _ in range(4):
            await mq.send("flights", b"x")
        await settled(first, [node for node in three.nodes.values() if node is not first])
        await first.status.transfer("")
        second = await three.master("g1", other_than=first.config.replica)
        for _ in range(2):
            await mq.send("flights", b"y")
    values = await of(second)
    assert values("qmq_stored_messages_total", subject="flights") == 2
    assert values("qmq_epoch") == 2
    left = await of(first)
    assert left("qmq_stored_messages_total", subject="flights") == 4, (
        "what it stored while it was master"
    )
    assert left("qmq_serving") == 0


async def test_a_replica_that_starts_shows_no_place_yet() -> None:
    def starting() -> control.ReplicaStatus:
        raise qmq.errors.Unavailable("the replica is starting")

    assert (await read([ReplicaSource("g1", starting)])).rows("qmq_serving") == []


async def test_a_slave_ahead_of_the_noted_index_has_no_negative_lag() -> None:
    peer = control.Peer(replica="b", match_index=9, in_step=True, silent_ms=250)
    info = control.ReplicaStatus(replica="a", role="master", last_index=7, peers=[peer])
    values = await read([ReplicaSource("g1", lambda: info, {"master": 2})])
    assert values("qmq_replication_lag_entries", replica="b") == 0
    assert values("qmq_replication_silent_seconds", replica="b") == 0.25


async def test_calls_that_the_coordination_store_does_not_answer_are_counted(
    three: ServerCluster,
) -> None:
    silent = FaultyStore(three.store)
    silent.cut("get")
    store = CountedStore(silent)  # type: ignore[arg-type]
    with pytest.raises(CoordinationUnavailable):
        await store.get("key")
    values = await read([CoordinationSource(store, three.view)])
    assert values("qmq_coordination_calls_total", method="get") == 1
    assert values("qmq_coordination_failures_total", method="get") == 1
    assert values("qmq_coordination_call_seconds_count") == 1
