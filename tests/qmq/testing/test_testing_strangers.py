"""A stranger that can reach the replicas' data ports and knows every name has no effect."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from qmq_replication import identity, wire
from qmq_replication.ready import Ack, Append, LogReset, Message, PromiseRequest, Refusal
from support import eventually

from qmq.log.disk import Disk
from qmq.node.replica.node import ReplicaNode
from qmq.rpc.network import NETWORK
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine
from qmq.wire import frame as frames
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_stream import FrameStream

NAMES = ("broker-1", "broker-2", "broker-3")
GROUP = "group-1"
FAR = 10**15
FAREST = (1 << 63) - 1


class Stranger:
    """A connection to a replica that claims to be a replica."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.heard: list[dict[str, Any]] = []
        self.answered = asyncio.Event()
        self.stream = FrameStream(
            on_frames=self._on_frames,
            on_closed=lambda _: self.is_over.set(),
            on_writable=lambda: None,
            on_violation=lambda _: None,
        )

    def _on_frames(self, received: list[Frame]) -> None:
        self.heard += [
            json.loads(bytes(each.payload))
            for each in received
            if each.kind == FrameKind.REPLICA_HELLO
        ]
        self.answered.set()

    def put(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame."""
        self.stream.put(frames.frame(kind, 0, payload))
        self.stream.flush()


async def connect(
    node: ReplicaNode, name: str, *said: Message, version: int = 2, proof: str = "0" * 64
) -> Stranger:
    """Say hello in a name, give a false proof, and continue as if it had been accepted."""
    stranger = Stranger()
    await NETWORK.connect(node.address, lambda: stranger.stream)
    hello = {
        "version": version,
        "group": GROUP,
        "replica": name,
        "to": node.config.replica,
        "nonce": "n",
    }
    stranger.put(FrameKind.REPLICA_HELLO, json.dumps(hello).encode())
    if version > 1:
        stranger.put(FrameKind.REPLICA_HELLO, json.dumps({"nonce": "", "proof": proof}).encode())
    for message in said:
        stranger.put(FrameKind.REPLICA, b"".join(wire.pack(message)))
    return stranger


async def say(
    nodes: dict[str, ReplicaNode], message: Callable[[ReplicaNode], Message], *names: str
) -> None:
    """Send to every replica, in every name, in this release's format and the previous one's, until
    all connections are closed.
    """
    for node in nodes.values():
        for name in names or ("stranger", *NAMES):
            for version in (1, 2):
                stranger = await connect(node, name, message(node), version=version)
                stranger.stream.close()
                await stranger.is_over.wait()


def nodes_of(cluster: TestCluster) -> dict[str, ReplicaNode]:
    return {
        name: cast(ReplicaNode, cast(ReplicaMachine, cluster.machine(name)).node) for name in NAMES
    }


def standing(nodes: dict[str, ReplicaNode]) -> list[tuple[str, int, str]]:
    return [
        (
            node.driver.core.state.role.value,
            node.driver.core.state.promised,
            node.driver.core.master,
        )
        for node in nodes.values()
    ]


async def settled(cluster: TestCluster) -> dict[str, ReplicaNode]:
    """The nodes, once all are in step and have reported it."""
    nodes = nodes_of(cluster)
    await cluster.client().send("s", b"first")
    leader = nodes[cluster.master()].driver.core.leader
    assert leader is not None
    await eventually(
        lambda: all(
            each.is_in_step and each.match == leader.state.history.last_index
            for each in leader.peers.values()
        )
    )
    return nodes


ORDERS: list[Callable[[ReplicaNode], Message]] = [
    lambda node: PromiseRequest(FAR),
    lambda node: PromiseRequest(FAREST),
    lambda node: PromiseRequest(node.driver.core.state.promised + 1),
    lambda node: Refusal(node.driver.core.state.promised + 1),
    lambda node: Append(node.driver.core.state.promised, 0, 0, 0, (), 0, 0, False, None),
    lambda node: Append(node.driver.core.state.promised + 1, 0, 0, 0, (), 0, 0, True, None),
    lambda node: LogReset(node.driver.core.state.promised + 1, 1, 0, 0, [0, 0], 0),
]


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_orders_of_a_stranger_are_without_effect(qmq_cluster: TestCluster) -> None:
    nodes = await settled(qmq_cluster)
    before = standing(nodes)
    for order in ORDERS:
        await say(nodes, order)
    await qmq_cluster.client().send("s", b"second")
    assert standing(nodes) == before
    assert sum(node.driver.arrivals.refused for node in nodes.values()) == 3 * 4 * 2 * len(ORDERS)


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_hello_in_a_replicas_name_displaces_no_replica(qmq_cluster: TestCluster) -> None:
    nodes = await settled(qmq_cluster)
    before = standing(nodes)
    held = [
        await connect(node, name, version=version)
        for node in nodes.values()
        for name in NAMES
        for version in (1, 2)
    ]
    await asyncio.gather(*[each.is_over.wait() for each in held])
    for number in range(20):
        await qmq_cluster.client().send("s", b"%d" % number)
    assert standing(nodes) == before
    assert all(
        set(node.driver.arrivals.proved) == set(NAMES) - {name} for name, node in nodes.items()
    )


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_peer_that_reconnects_has_its_older_connection_closed(
    qmq_cluster: TestCluster,
) -> None:
    from qmq_replication.links import DIALS, PeerHello, prove

    nodes = await settled(qmq_cluster)
    master = nodes[qmq_cluster.master()]
    slave = next(name for name in NAMES if name != master.config.replica)
    older, stranger = master.driver.arrivals.proved[slave], Stranger()
    await NETWORK.connect(master.address, lambda: stranger.stream)
    hello = PeerHello(GROUP, slave, master.config.replica, "n")
    stranger.put(FrameKind.REPLICA_HELLO, hello.pack())
    await stranger.answered.wait()
    proof = prove(master.driver.secret.value, DIALS, hello, stranger.heard[0]["nonce"])
    stranger.put(FrameKind.REPLICA_HELLO, json.dumps({"nonce": "", "proof": proof}).encode())
    await stranger.is_over.wait()  # the real one came back, and took its place again
    assert master.driver.arrivals.proved[slave] is not older
    await qmq_cluster.client().send("s", b"second")


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_acknowledgements_of_a_stranger_do_not_count(qmq_cluster: TestCluster) -> None:
    nodes = await settled(qmq_cluster)
    name = qmq_cluster.master()
    core, slaves = nodes[name].driver.core, [each for each in NAMES if each != name]
    places = nodes[name].broker.store
    mq = qmq_cluster.client(at=name)
    # A master without slaves gives up after a time: connect before they are cut off.
    await mq.send("s", b"second")
    nodes, last = await settled(qmq_cluster), core.state.history.last_index
    heal = [qmq_cluster.cut(name, slave) for slave in slaves]
    sending = asyncio.ensure_future(mq.send("s", b"nowhere else"))
    await eventually(lambda: core.state.history.last_index > last)
    place = [places.messages.end, places.actions.end]
    for round in range(4):
        for stored in (core.state.history.last_index, 1 << 40):
            await say(
                {name: nodes[name]},
                lambda _, r=round, s=stored: Ack(core.state.promised, r, s, s, place),
                *slaves,
            )  # type: ignore[misc]
    assert core.state.commit == last
    assert not sending.done()
    for each in heal:
        each()
    await sending


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_large_frame_is_refused_before_the_sender_is_proved(
    qmq_cluster: TestCluster,
) -> None:
    node = (await settled(qmq_cluster))["broker-1"]
    for name in ("nobody", "broker-2"):
        stranger = Stranger()
        await NETWORK.connect(node.address, lambda stranger=stranger: stranger.stream)
        hello = {"version": 2, "group": GROUP, "replica": name, "to": "broker-1", "nonce": "n"}
        stranger.put(FrameKind.REPLICA_HELLO, json.dumps(hello).encode())
        await stranger.answered.wait()
        stranger.stream.put(struct.pack("<IBBHII", 256 << 20, FrameKind.REPLICA, 0, 0, 9, 0))
        stranger.stream.flush()
        await stranger.is_over.wait()
    assert set(node.driver.arrivals.proved) == {"broker-2", "broker-3"}


@pytest.mark.qmq_cluster(brokers=3, delay=False)
@pytest.mark.parametrize("far", [FAR, FAREST])
async def test_replicas_that_promised_an_epoch_without_a_winner_recover(
    qmq_cluster: TestCluster, far: int
) -> None:
    """An earlier release accepted any request for a promise and stored it."""
    nodes = await settled(qmq_cluster)
    for name, node in nodes.items():
        await qmq_cluster.kill(name)
        if name != NAMES[0]:
            found = identity.load(node.config.data, GROUP, name)
            assert found is not None
            replace(found, promised=far).save(Disk(), node.config.data)
    for name in NAMES:
        await qmq_cluster.restart(name)
    await qmq_cluster.until_master()
    client = qmq_cluster.client()
    await client.send("s", b"second")
    consumer = client.consumer("s", group="g")
    got = [message.body for message in await consumer.pull(2)]
    assert got[:1] == [b"first"]


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_group_without_a_secret_gets_one(qmq_cluster: TestCluster) -> None:
    """An earlier release created the group without a secret."""
    from qmq_coordination.broker_groups import group_key
    from qmq_coordination.coordination_store import Delete
    from qmq_replication.coordinator import SECRET

    nodes = await settled(qmq_cluster)
    earlier = {node.driver.secret.value for node in nodes.values()}
    for name, node in nodes.items():
        await qmq_cluster.kill(name)
        found = identity.load(node.config.data, GROUP, name)
        assert found is not None
        replace(found, secret="").save(Disk(), node.config.data)
    await cast(ReplicaMachine, qmq_cluster.machine(NAMES[0])).site.store.txn(
        [], [Delete(group_key(GROUP, SECRET))]
    )
    for name in NAMES:
        await qmq_cluster.restart(name)
    await qmq_cluster.until_master()
    later = {node.driver.secret.value for node in nodes_of(qmq_cluster).values()}
    assert len(later) == 1
    assert not later & earlier
    await qmq_cluster.client().send("s", b"second")


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_hellos_and_proofs_that_do_not_hold_are_in_the_audit_log(
    qmq_cluster: TestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    node = (await settled(qmq_cluster))["broker-1"]
    before = node.broker.access.audit.refusals
    for name, on, why in (
        ("stranger", "hello", "is not another replica"),
        ("broker-2", "proof", "does not know the secret"),
    ):
        caplog.clear()
        stranger = await connect(node, name)
        await stranger.is_over.wait()
        (record,) = [
            json.loads(each.message) for each in caplog.records if each.name == "qmq.audit"
        ]
        assert (record["action"], record["on"], record["result"], record["from"]) == (
            "REPLICA_HELLO",
            on,
            "denied",
            "unix",
        )
        assert why in record["error"]
    assert node.broker.access.audit.refusals == before + 2
