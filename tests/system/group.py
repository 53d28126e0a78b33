"""A broker group for fault tests: the services of the compose file, started by scripts/cluster and observed through their control ports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from cluster_runner import Cluster

from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import network_of
from qmq.security.tls import Tls

ETCD = ("etcd0", "etcd1", "etcd2")
ETCD_USERS = ("etcd-users",)
METAS = ("meta0", "meta1")
REPLICAS = ("g1-a", "g1-b", "g1-c")
CONTROL_PORT = 20882
SECURE: Final = os.environ.get("QMQ_TEST_SECURE") == "1"
"""Whether the clusters of fault tests are secured: `scripts/test --secure`."""


async def describe(control: str, network: Network = NETWORK) -> pb.ReplicaStatus | None:
    """The description from the replica at a control port; None if there is no answer."""
    async with network.channel(control, any_server) as channel:
        try:
            status: pb.ReplicaStatus = await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
                pb.DescribeReplicaRequest(), timeout=1.0
            )
        except grpc.RpcError:
            return None
        return status


def papers_of(folder: Path, member: str) -> Tls:
    """The certificate of a member of the secured cluster in a folder."""
    members = folder / "volumes" / "certs" / "members" / member
    return Tls(*(members / name for name in ("ca.pem", "cert.pem", "key.pem")))


class Group:
    """Group g1 of a running cluster."""

    def __init__(self, cluster: Cluster, folder: Path, *, secure: bool = False) -> None:
        self.cluster = cluster
        self.folder = folder
        self.network = network_of(self.papers("admin")) if secure else NETWORK
        self.server = cluster.translate("meta0:20880,meta1:20880")

    def papers(self, member: str) -> Tls:
        """The certificate of a member of a secured cluster."""
        return papers_of(self.folder, member)

    def control(self, replica: str) -> str:
        """Address of a replica's control port."""
        return f"{self.cluster.address(replica)}:{CONTROL_PORT}"

    async def describe_all(self) -> dict[str, pb.ReplicaStatus]:
        """Those that answer."""
        found = await asyncio.gather(*[describe(self.control(name), self.network) for name in REPLICAS])
        return {name: status for name, status in zip(REPLICAS, found, strict=True) if status is not None}

    async def status(self, name: str, *, within_s: float = 30.0) -> pb.ReplicaStatus:
        """The status of one replica, waited for."""
        async with asyncio.timeout(within_s):
            while (found := await describe(self.control(name), self.network)) is None:
                await asyncio.sleep(0.05)
            return found

    async def master(self, *, other_than: str = "", within_s: float = 30.0) -> str:
        """The serving master of the highest epoch, waited for."""
        async with asyncio.timeout(within_s):
            while True:
                serving = {name: each for name, each in (await self.describe_all()).items() if each.is_serving}
                best = max(serving, key=lambda name: serving[name].epoch, default="")
                if best and best != other_than:
                    return best
                await asyncio.sleep(0.05)

    async def slave(self) -> str:
        """A replica that is not master."""
        master = await self.master()
        return next(name for name in REPLICAS if name != master)

    async def settled(self, *, within_s: float = 240.0) -> None:
        """True if all replicas run, are complete and in step, and have the same data."""
        async with asyncio.timeout(within_s):
            while True:
                found = await self.describe_all()
                if len(found) == len(REPLICAS) and _agree(list(found.values())):
                    return
                await asyncio.sleep(0.1)

    async def settled_peer(self, replica: str, *, within_s: float = 240.0) -> None:
        """Wait until the replica follows again: the master reports that it is in step and holds what is committed."""
        async with asyncio.timeout(within_s):
            while True:
                found = await self.describe_all()
                for status in found.values():
                    peers = {each.replica: each for each in status.peers}
                    if status.is_serving and replica in peers and peers[replica].in_step and peers[replica].silent_ms < 500:
                        return
                await asyncio.sleep(0.05)

    def store(self, replica: str) -> Path:
        """A replica's folder of log files."""
        return self.folder / "volumes" / replica / "broker"

    async def require_equal_files(self) -> None:
        """Both logs are the same bytes on every replica, as far as all still have them."""
        await self.settled()
        for log in ("message", "action"):
            contents = [{path.name: path.read_bytes() for path in (self.store(name) / log).iterdir()} for name in REPLICAS]
            for name in set.intersection(*[set(each) for each in contents]):
                assert len({each[name] for each in contents}) == 1, f"{log}/{name} differs between replicas"


def _agree(found: list[pb.ReplicaStatus]) -> bool:
    same = len({(each.last_index, each.commit_index, each.message_position, each.action_position) for each in found}) == 1
    done = all(each.is_whole and each.stored_index == each.last_index == each.commit_index for each in found)
    return same and done and sum(each.is_serving for each in found) == 1


def enforce_rules(cluster: Cluster) -> None:
    """Enforce rules in this secured cluster: only its servers and `admin` may act without a rule."""
    assert cluster.run(["qmq", "acl", "mode", "enforce"]) == 0


@contextmanager
def running_group(folder: Path, network: str, *, secure: bool = False, **environment: str) -> Iterator[Group]:
    """etcd, metaservers and group g1, until the end of the block; with `secure`, over TLS, and the cluster's `admin` looks at it."""
    settings = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500", **environment}
    with Cluster(folder, network=network, environment=settings, secure=secure) as cluster:
        cluster.up((*ETCD, *(ETCD_USERS if secure else ()), *METAS, *REPLICAS), deps=False)
        yield Group(cluster, folder, secure=secure)
