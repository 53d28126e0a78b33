"""`qmq dev` as a cluster of one: the same keys, one way to locate; and a data folder of an earlier
release.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from meta_support import Caller
from qmq_coordination.broker_groups import Health, ReplicaRecord, group_key
from qmq_coordination.embedded import EmbeddedStore
from support import node_config, running

import qmq
from qmq.client.metadata.service import MetadataClient
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb


async def test_the_node_registers_as_a_group_of_one_and_says_goodbye(tmp_path: Path) -> None:
    async with running(node_config(tmp_path / "node")) as node:
        state = node.view.group("broker-0")
        assert (state.voters, state.health) == (("broker-0",), Health.READ_WRITE)
        assert state.master is not None
        assert (state.master.data_address, state.claim.epoch) == (
            node.data_address,
            node.store.epoch,
        )
        record = ReplicaRecord(
            "broker-0", "broker-0", node.data_address, state.master.control_address
        )
        assert (
            node.view.replicas("broker-0") == node.view.present("broker-0") == {"broker-0": record}
        )
        call = Caller(node.address)
        (group,) = (await call("DescribeCluster", pb.DescribeClusterRequest())).groups
        assert (group.replicas[0].status.role, group.replicas[0].status.is_serving) == (
            "master",
            True,
        )
        await call.channel.close()
    store = EmbeddedStore(tmp_path / "node" / "coordination.db")
    keys = [item.key for item in (await store.list("/qmq/")).items]
    own = [group_key("broker-0", kind) for kind in ("epoch", "members", "secret")]
    assert keys == [
        "/qmq/access/server-token",
        *own,
        "/qmq/meta/cluster",
        "/qmq/replicas/broker-0/broker-0",
    ]
    await store.close()


async def test_clients_reach_a_node_that_listens_everywhere_by_the_name_that_it_advertises(
    tmp_path: Path,
) -> None:
    async with (
        running(replace(node_config(tmp_path), advertise="localhost", delay=True)) as node,
        qmq.connect(node.address) as mq,
    ):
        groups = {
            replica.data_address.rpartition(":")[0]
            for group in (await mq.metadata.cluster()).groups
            for replica in group.replicas
        }
        assert groups == {"localhost"}
        await mq.send("s", b"later", delay=timedelta(milliseconds=1))
        async with asyncio.timeout(30):
            assert (await anext(mq.consumer("s", "g"))).body == b"later"


async def test_a_data_folder_of_an_earlier_release_works(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    store = EmbeddedStore(folder / "coordination.db")
    old = {"name": "old", "retention_ms": None, "retention_bytes": 5, "body_bytes_max": 100}
    await store.put("/qmq/subjects/old", json.dumps(old).encode())
    broker = {
        "group": "broker-0",
        "data_address": "127.0.0.1:1",
        "control_address": "127.0.0.1:2",
        "epoch": 1,
    }
    await store.put("/qmq/brokers/broker-0", json.dumps(broker).encode(), await store.grant(10))
    await store.close()
    async with running(node_config(folder)) as node:
        client = MetadataClient([node.address])
        found = await client.locate("old")
        assert [
            (each.broker_group, each.data_address, each.is_writable) for each in found.routes
        ] == [("broker-0", node.data_address, True)]
        assert (found.settings.body_bytes_max, found.settings.retention_bytes) == (100, 5)
        assert [each.settings.name for each in await client.list_subjects()] == ["old"]
        await client.close()


async def test_a_restart_finds_its_group_and_locates_at_its_new_port(tmp_path: Path) -> None:
    addresses = []
    for _ in range(2):
        async with running(node_config(tmp_path / "node")) as node:
            addresses.append(await _data_address(node))
            assert addresses[-1] == node.data_address
            assert node.view.group("broker-0").claim.epoch == node.store.epoch


async def _data_address(node: Node) -> str:
    client = MetadataClient([node.address])
    async with asyncio.timeout(20):
        found = await client.locate("s", create=True)
    await client.close()
    assert found.settings.broker_groups == ["broker-0"]
    return found.routes[0].data_address
