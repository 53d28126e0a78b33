"""/readyz of replicas, over HTTP and from the processes' own memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support import eventually, node_config, running
from support.stores import SharedStore

from qmq.metrics.figures import Readiness
from qmq.node.broker import broker_node
from qmq.node.metrics.meta import of_meta
from qmq.node.process import EtcdOptions
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.node.replica.status import of_replica

NAMES = ("a", "b", "c")


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[dict[str, ReplicaNode]]:
    """Three replicas of one group, not started."""
    store, etcd = SharedStore(), EtcdOptions(("127.0.0.1:1",))
    configs = [
        ReplicaConfig(
            "g", name, NAMES, tmp_path / name, etcd, data_port=0, control_port=0, metrics_port=0
        )
        for name in NAMES
    ]
    found = {config.replica: broker_node(config, store) for config in configs}
    yield found
    for node in found.values():
        if node.metrics is not None:
            await node.stop()
    await store.end()


async def readiness(node: ReplicaNode) -> tuple[int, str]:
    """Status and line, as a container engine gets them."""
    assert node.metrics is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", node.metrics.port)
    writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_a_replica_is_ready_while_it_is_master_or_follows_one(
    nodes: dict[str, ReplicaNode],
) -> None:
    await nodes["a"].start()
    assert (await readiness(nodes["a"]))[0] == 503, "one replica of three is no majority"
    await nodes["b"].start()
    await nodes["c"].start()
    await eventually(lambda: all(node.readiness().is_ready for node in nodes.values()))
    assert sorted([await readiness(node) for node in nodes.values()]) == [
        (200, "master\n"),
        (200, "slave\n"),
        (200, "slave\n"),
    ]
    fetching = of_replica(nodes["a"].driver.core, is_serving=True, has_all=False)
    assert (fetching.is_ready, fetching.says.partition(": ")[2]) == (
        False,
        "the schedule is being fetched from another replica",
    )
    (master,) = [name for name, node in nodes.items() if node.readiness().says == "master"]
    left = next(name for name in NAMES if name != master)
    for name in NAMES:
        if name != left:
            await nodes[name].stop()
            nodes[name].metrics = None
    # The one that is left may be elected first: it notices then that it has no majority.
    await eventually(lambda: nodes[left].readiness().says.endswith(": no message from a master"))
    assert (await readiness(nodes[left]))[0] == 503


async def test_a_node_and_a_metaserver_are_ready_when_they_serve(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:
        assert node.readiness() == of_meta(True) == Readiness(True, "serving")
    assert not of_meta(False).is_ready
