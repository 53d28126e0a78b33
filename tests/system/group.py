"""A broker group for fault tests: the services of the compose file, started by scripts/cluster and
observed through their control ports.

A cluster for faults of ordered subjects: the services of docker-compose.yml in other numbers.

`shaped` makes a compose file with the wanted numbers of etcd members, metaservers, broker groups
and replicas: each service is a copy of the first service of its kind, with its own name and port.

A single node in the secured form of the fault tests (`scripts/test --secure`): TLS with
certificates of both sides, and enforced rules.

node = NodeProcess(folder / "node")
async with secured(node, folder):       # clients in this process and its children show the certificate of app:load
    node.start()
"""  # noqa: E501

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import grpc
from support import NodeProcess, eventually, needs

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from cluster_runner import Cluster
from cluster_runner.compose import COMPOSE_FILE, resolve

import qmq
from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import network_of
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls

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
            status: pb.ReplicaStatus = await control_pb2_grpc.BrokerControlStub(
                channel
            ).DescribeReplica(pb.DescribeReplicaRequest(), timeout=1.0)
        except grpc.RpcError:
            return None
        return status


async def statuses_at(controls: Mapping[str, str], network: Network) -> dict[str, pb.ReplicaStatus]:
    """The statuses of the replicas that answer, of these control ports."""
    found = await asyncio.gather(*[describe(each, network) for each in controls.values()])
    return {
        name: status for name, status in zip(controls, found, strict=True) if status is not None
    }


async def master_at(
    controls: Mapping[str, str], network: Network, *, other_than: str = "", within_s: float = 240.0
) -> str:
    """The serving master of the highest epoch, waited for."""
    async with asyncio.timeout(within_s):
        while True:
            found = await statuses_at(controls, network)
            serving = {name: each.epoch for name, each in found.items() if each.is_serving}
            best = max(serving, key=lambda name: serving[name], default="")
            if best and best != other_than:
                return best
            await asyncio.sleep(0.05)


async def settled_at(
    controls: Mapping[str, str], network: Network, *, within_s: float = 240.0
) -> str:
    """The master, when all these replicas are there and in step."""
    async with asyncio.timeout(within_s):
        while True:
            found = await statuses_at(controls, network)
            masters = [name for name, each in found.items() if each.is_serving]
            if (
                len(found) == len(controls)
                and len(masters) == 1
                and sum(peer.in_step for peer in found[masters[0]].peers) == len(found) - 1
            ):
                return masters[0]
            await asyncio.sleep(0.05)


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

    @property
    def _controls(self) -> dict[str, str]:
        return {name: self.control(name) for name in REPLICAS}

    async def describe_all(self) -> dict[str, pb.ReplicaStatus]:
        """Those that answer."""
        return await statuses_at(self._controls, self.network)

    async def status(self, name: str, *, within_s: float = 30.0) -> pb.ReplicaStatus:
        """The status of one replica, waited for."""
        async with asyncio.timeout(within_s):
            while (found := await describe(self.control(name), self.network)) is None:
                await asyncio.sleep(0.05)
            return found

    async def master(self, *, other_than: str = "", within_s: float = 30.0) -> str:
        """The serving master of the highest epoch, waited for."""
        return await master_at(
            self._controls, self.network, other_than=other_than, within_s=within_s
        )

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
        """Wait until the replica follows again: the master reports that it is in step and holds
        what is committed.
        """
        async with asyncio.timeout(within_s):
            while True:
                found = await self.describe_all()
                for status in found.values():
                    peers = {each.replica: each for each in status.peers}
                    if (
                        status.is_serving
                        and replica in peers
                        and peers[replica].in_step
                        and peers[replica].silent_ms < 500
                    ):
                        return
                await asyncio.sleep(0.05)

    def store(self, replica: str) -> Path:
        """A replica's folder of log files."""
        return self.folder / "volumes" / replica / "broker"

    async def require_equal_files(self) -> None:
        """Both logs are the same bytes on every replica, as far as all still have them."""
        await self.settled()
        for log in ("message", "action"):
            contents = [
                {path.name: path.read_bytes() for path in (self.store(name) / log).iterdir()}
                for name in REPLICAS
            ]
            for name in set.intersection(*[set(each) for each in contents]):
                assert len({each[name] for each in contents}) == 1, (
                    f"{log}/{name} differs between replicas"
                )


def _agree(found: list[pb.ReplicaStatus]) -> bool:
    same = (
        len(
            {
                (each.last_index, each.commit_index, each.message_position, each.action_position)
                for each in found
            }
        )
        == 1
    )
    done = all(
        each.is_whole and each.stored_index == each.last_index == each.commit_index
        for each in found
    )
    return same and done and sum(each.is_serving for each in found) == 1


def enforce_rules(cluster: Cluster) -> None:
    """Enforce rules in this secured cluster: only its servers and `admin` may act without a
    rule.
    """
    assert cluster.run(["qmq", "acl", "mode", "enforce"]) == 0


@contextmanager
def running_group(
    folder: Path, network: str, *, secure: bool = False, **environment: str
) -> Iterator[Group]:
    """etcd, metaservers and group g1, until the end of the block; with `secure`, over TLS, and the
    cluster's `admin` looks at it.
    """
    settings = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500", **environment}
    with Cluster(folder, network=network, environment=settings, secure=secure) as cluster:
        cluster.up((*ETCD, *(ETCD_USERS if secure else ()), *METAS, *REPLICAS), deps=False)
        yield Group(cluster, folder, secure=secure)


META_PORT = 20880
FIRST_DATA_PORT = 20900
ETCD_TIMES = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}


class Shape(NamedTuple):
    """How many of each."""

    etcds: int = 1
    metas: int = 2
    groups: int = 2
    replicas: int = 3
    delays: int = 0
    """Replicas of the delay group d1; 0: there is none."""

    @property
    def etcd_names(self) -> list[str]:
        """The services of the coordination store."""
        return [f"etcd{number}" for number in range(self.etcds)]

    @property
    def meta_names(self) -> list[str]:
        """The metaservers."""
        return [f"meta{number}" for number in range(self.metas)]

    @property
    def replica_names(self) -> dict[str, list[str]]:
        """The replicas of each broker group."""
        return {
            f"g{number}": [f"g{number}-{'abcdefg'[at]}" for at in range(self.replicas)]
            for number in range(1, self.groups + 1)
        }

    @property
    def delay_names(self) -> list[str]:
        """The replicas of the delay group."""
        return [f"d1-{'abcdefg'[at]}" for at in range(self.delays)]


def shaped(model: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The compose file for a shape. Pure."""
    known = model["services"]
    endpoints = ",".join(f"{name}:2379" for name in shape.etcd_names)
    members = ",".join(f"{name}=http://{name}:2380" for name in shape.etcd_names)
    needs = {name: {"condition": "service_healthy", "required": True} for name in shape.etcd_names}
    services: dict[str, Any] = {}
    for name in shape.etcd_names:
        urls = {
            "ETCD_ADVERTISE_CLIENT_URLS": f"http://{name}:2379",
            "ETCD_INITIAL_ADVERTISE_PEER_URLS": f"http://{name}:2380",
        }
        services[name] = _copy(
            known["etcd0"], name, ETCD_NAME=name, ETCD_INITIAL_CLUSTER=members, **urls
        )
    for name in shape.meta_names:
        services[name] = {**_copy(known["meta0"], name, QMQ_ETCD=endpoints), "depends_on": needs}
    port = FIRST_DATA_PORT
    members_of = {**shape.replica_names, **({"d1": shape.delay_names} if shape.delays else {})}
    for group, replicas in members_of.items():
        for name in replicas:
            own = {
                "QMQ_GROUP": group,
                "QMQ_REPLICA": name,
                "QMQ_REPLICAS": ",".join(replicas),
                "QMQ_ADVERTISE": name,
            }
            like = known["d1-a" if group == "d1" else "g1-a"]
            body = _copy(like, name, QMQ_ETCD=endpoints, QMQ_DATA_PORT=str(port), **own)
            services[name] = {**body, "depends_on": needs}
            port += 1
    volumes = {name: {} for name, body in services.items() if "volumes" in body}
    return {"name": model.get("name", "qmq"), "services": services, "volumes": volumes}


def _copy(body: Mapping[str, Any], name: str, **environment: str) -> dict[str, Any]:
    found = copy.deepcopy(
        {
            key: value
            for key, value in body.items()
            if key not in ("ports", "build", "networks", "depends_on")
        }
    )
    found["environment"] = {**found.get("environment", {}), **environment}
    for volume in found.get("volumes", ()):
        volume["source"] = name
    return found


class OrderedCluster:
    """Some broker groups of a running cluster. Their control ports are reached through
    `network`.
    """

    def __init__(self, cluster: Cluster, shape: Shape, network: Network = NETWORK) -> None:
        self.cluster = cluster
        self.network = network
        self.shape = shape
        self.replicas = shape.replica_names
        self.metas = shape.meta_names
        self.server = cluster.translate(",".join(f"{name}:{META_PORT}" for name in self.metas))

    def control(self, name: str) -> str:
        """Address of a replica's control port."""
        return f"{self.cluster.address(name)}:{CONTROL_PORT}"

    def _controls(self, group: str) -> dict[str, str]:
        return {name: self.control(name) for name in self.replicas[group]}

    async def statuses(self, group: str) -> dict[str, pb.ReplicaStatus]:
        """The statuses of a broker group's replicas that answer."""
        return await statuses_at(self._controls(group), self.network)

    async def master(self, group: str, *, other_than: str = "", within_s: float = 240.0) -> str:
        """The serving master of the highest epoch, waited for."""
        return await master_at(
            self._controls(group), self.network, other_than=other_than, within_s=within_s
        )

    async def settled(self, group: str, *, within_s: float = 240.0) -> str:
        """The master, when all replicas of a broker group are there and in step."""
        return await settled_at(self._controls(group), self.network, within_s=within_s)

    async def start(self, name: str, *, within_s: float = 90.0) -> None:
        """Start a service again, and wait until it answers. Asked from here: a health check's
        process costs more than its answer.
        """
        await self.do(self.cluster.start, name, wait=False)
        await eventually(lambda: self._answers(name), within_s=within_s, look_s=0.1)

    async def _answers(self, name: str) -> bool:
        if name not in self.metas:
            return await describe(self.control(name), self.network) is not None
        metadata = MetadataClient(
            [f"{self.cluster.address(name)}:{META_PORT}"], network=self.network
        )
        try:
            await metadata.cluster()
        except QmqError:
            return False
        finally:
            await metadata.close()
        return True

    async def do(self, act: Callable[..., None], *names: str, **options: Any) -> None:
        """One of the cluster's verbs, without holding up the loop."""
        await asyncio.to_thread(act, *names, **options)


@contextmanager
def running_cluster(
    folder: Path,
    shape: Shape,
    network: str = "",
    environment: Mapping[str, str] | None = None,
    *,
    secure: bool = False,
) -> Iterator[OrderedCluster]:
    """A cluster of that shape, until the end of the block.

    With `secure` the broker groups and metaservers are those of docker-compose.secure.yml, with its
    three members of etcd, and rules are enforced; clients in this process and its children show the
    administrator's certificate.
    """
    settings = {**ETCD_TIMES, **(environment or {})}
    file = folder / "compose.json"
    file.write_text(json.dumps(shaped(resolve(COMPOSE_FILE, settings), shape)))
    network = network or ("netns" if needs.can_use_namespaces() else "loopback")
    if secure:
        services = (
            *ETCD,
            *ETCD_USERS,
            *shape.meta_names,
            *chain.from_iterable(shape.replica_names.values()),
        )
        with Cluster(
            folder / "cluster", network=network, environment=settings, secure=True
        ) as cluster:
            cluster.up(services, deps=False)
            enforce_rules(cluster)
            shown = papers_of(folder / "cluster", "admin")
            variables = {CA_VARIABLE: shown.ca, CERT_VARIABLE: shown.cert, KEY_VARIABLE: shown.key}
            with patch.dict(os.environ, {name: str(path) for name, path in variables.items()}):
                yield OrderedCluster(cluster, shape, network_of(shown))
        return
    with Cluster(folder / "cluster", network=network, environment=settings, file=file) as cluster:
        cluster.up()
        yield OrderedCluster(cluster, shape)


LOAD: Final = "load"
ADMIN: Final = "admin"
_KINDS: Final = {"node": "node", LOAD: "app", ADMIN: "op"}


@asynccontextmanager
async def secured(node: NodeProcess, folder: Path, *, secure: bool = True) -> AsyncIterator[None]:
    """Close a node that does not run yet: it starts behind TLS and enforces rules, also after each
    later start. Nothing without `secure`.

    app:load may do everything with subjects and groups, and nothing with the cluster.
    """
    if not secure:
        yield
        return
    papers = _issued(folder / "papers")
    own, shown = papers["node"], papers[LOAD]
    node.options += (
        "--tls-ca",
        str(own.ca),
        "--tls-cert",
        str(own.cert),
        "--tls-key",
        str(own.key),
        "--admins",
        f"op:{ADMIN}",
    )
    with patch.dict(
        os.environ,
        {CA_VARIABLE: str(shown.ca), CERT_VARIABLE: str(shown.cert), KEY_VARIABLE: str(shown.key)},
    ):
        await asyncio.to_thread(node.start)
        try:
            await _enforce(node.address, papers[ADMIN])
        finally:
            await asyncio.to_thread(node.stop)
        yield


def _issued(folder: Path) -> dict[str, Tls]:
    create_authority(folder)
    made = {name: issue(folder, name, kind, ["127.0.0.1"]) for name, kind in _KINDS.items()}
    return {name: Tls(folder / "ca.pem", each.cert, each.key) for name, each in made.items()}


async def _enforce(address: str, papers: Tls) -> None:
    async with qmq.connect(address, tls=papers) as mq:
        for kind in ("subject", "group"):
            await mq.access.put_rule(f"app:{LOAD}", [], kind)
        await mq.access.set_mode("enforce")
