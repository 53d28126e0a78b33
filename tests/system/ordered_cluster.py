"""A cluster for faults of ordered subjects: the services of docker-compose.yml in other numbers.

`shaped` makes a compose file with the wanted numbers of etcd members, metaservers, broker groups and replicas: each service is a copy of
the first service of its kind, with its own name and port.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from support import needs

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from cluster_runner import Cluster
from cluster_runner.compose import COMPOSE_FILE, resolve

from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.tls_network import network_of
from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from system.group import CONTROL_PORT, ETCD, ETCD_USERS, describe, enforce_rules, papers_of

META_PORT = 20880
FIRST_DATA_PORT = 20900
ETCD_TIMES = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}


class Shape(NamedTuple):
    """How many of each."""

    etcds: int = 1
    metas: int = 2
    groups: int = 2
    replicas: int = 3

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
        return {f"g{number}": [f"g{number}-{'abcdefg'[at]}" for at in range(self.replicas)] for number in range(1, self.groups + 1)}


def shaped(model: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The compose file for a shape. Pure."""
    known = model["services"]
    endpoints = ",".join(f"{name}:2379" for name in shape.etcd_names)
    members = ",".join(f"{name}=http://{name}:2380" for name in shape.etcd_names)
    needs = {name: {"condition": "service_healthy", "required": True} for name in shape.etcd_names}
    services: dict[str, Any] = {}
    for name in shape.etcd_names:
        urls = {"ETCD_ADVERTISE_CLIENT_URLS": f"http://{name}:2379", "ETCD_INITIAL_ADVERTISE_PEER_URLS": f"http://{name}:2380"}
        services[name] = _copy(known["etcd0"], name, ETCD_NAME=name, ETCD_INITIAL_CLUSTER=members, **urls)
    for name in shape.meta_names:
        services[name] = {**_copy(known["meta0"], name, QMQ_ETCD=endpoints), "depends_on": needs}
    port = FIRST_DATA_PORT
    for group, replicas in shape.replica_names.items():
        for name in replicas:
            own = {"QMQ_GROUP": group, "QMQ_REPLICA": name, "QMQ_REPLICAS": ",".join(replicas), "QMQ_ADVERTISE": name}
            body = _copy(known["g1-a"], name, QMQ_ETCD=endpoints, QMQ_DATA_PORT=str(port), **own)
            services[name] = {**body, "depends_on": needs}
            port += 1
    volumes = {name: {} for name, body in services.items() if "volumes" in body}
    return {"name": model.get("name", "qmq"), "services": services, "volumes": volumes}


def _copy(body: Mapping[str, Any], name: str, **environment: str) -> dict[str, Any]:
    found = copy.deepcopy({key: value for key, value in body.items() if key not in ("ports", "build", "networks", "depends_on")})
    found["environment"] = {**found.get("environment", {}), **environment}
    for volume in found.get("volumes", ()):
        volume["source"] = name
    return found


class OrderedCluster:
    """Some broker groups of a running cluster. Their control ports are reached through `network`."""

    def __init__(self, cluster: Cluster, shape: Shape, network: Network = NETWORK) -> None:
        self.cluster = cluster
        self.network = network
        self.shape = shape
        self.replicas = shape.replica_names
        self.metas = shape.meta_names
        self.server = cluster.translate(",".join(f"{name}:{META_PORT}" for name in self.metas))

    async def statuses(self, group: str) -> dict[str, pb.ReplicaStatus]:
        """The statuses of a broker group's replicas that answer."""
        names = self.replicas[group]
        found = await asyncio.gather(*[describe(f"{self.cluster.address(name)}:{CONTROL_PORT}", self.network) for name in names])
        return {name: status for name, status in zip(names, found, strict=True) if status is not None}

    async def master(self, group: str, *, other_than: str = "", within_s: float = 240.0) -> str:
        """The serving master of the highest epoch, waited for."""
        async with asyncio.timeout(within_s):
            while True:
                serving = {name: each for name, each in (await self.statuses(group)).items() if each.is_serving}
                best = max(serving, key=lambda name: serving[name].epoch, default="")
                if best and best != other_than:
                    return best
                await asyncio.sleep(0.05)

    async def settled(self, group: str, *, within_s: float = 240.0) -> str:
        """The master, when all replicas of a broker group are there and in step."""
        async with asyncio.timeout(within_s):
            while True:
                found = await self.statuses(group)
                masters = [name for name, each in found.items() if each.is_serving]
                is_whole = len(found) == len(self.replicas[group]) and len(masters) == 1
                if is_whole and sum(peer.in_step for peer in found[masters[0]].peers) == len(found) - 1:
                    return masters[0]
                await asyncio.sleep(0.05)

    async def start(self, name: str, *, within_s: float = 90.0) -> None:
        """Start a service again, and wait until it answers. Asked from here: a health check's process costs more than its answer."""
        await self.do(self.cluster.start, name, wait=False)
        async with asyncio.timeout(within_s):
            while not await self._answers(name):
                await asyncio.sleep(0.1)

    async def _answers(self, name: str) -> bool:
        if name not in self.metas:
            return await describe(f"{self.cluster.address(name)}:{CONTROL_PORT}", self.network) is not None
        metadata = MetadataClient([f"{self.cluster.address(name)}:{META_PORT}"], network=self.network)
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
    folder: Path, shape: Shape, network: str = "", environment: Mapping[str, str] | None = None, *, secure: bool = False
) -> Iterator[OrderedCluster]:
    """A cluster of that shape, until the end of the block.

    With `secure` the broker groups and metaservers are those of docker-compose.secure.yml, with its three members of etcd, and rules are
    enforced; clients in this process and its children show the administrator's certificate.
    """
    settings = {**ETCD_TIMES, **(environment or {})}
    file = folder / "compose.json"
    file.write_text(json.dumps(shaped(resolve(COMPOSE_FILE, settings), shape)))
    network = network or ("netns" if needs.can_use_namespaces() else "loopback")
    if secure:
        services = (*ETCD, *ETCD_USERS, *shape.meta_names, *chain.from_iterable(shape.replica_names.values()))
        with Cluster(folder / "cluster", network=network, environment=settings, secure=True) as cluster:
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
