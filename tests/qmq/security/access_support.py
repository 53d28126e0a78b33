"""Clusters that enforce rules, the tokens of their principals, and JWTs of an issuer.

Certificates of a test's own authority, nodes that serve TLS, and the handshakes that a log tells
of.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from rights_table import ALL, NAMESPACE, Right, World
from support import NodeConfig, eventually, node_config, running

import qmq
import qmq.proto
from qmq.broker.config import BrokerConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import access_pb2, control_pb2, delay_pb2, meta_pb2
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.access import AccessConfig
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Credentials, Tls

HOST = "127.0.0.1"


NOW = datetime.now(UTC)


class Papers:
    """An authority in a folder, and the certificates that it signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        create_authority(folder)
        self.server = self.of("broker0", "node", HOST, "localhost")
        self.client = self.of("orders", "app")

    def of(
        self, name: str, kind: str, *hosts: str, now: datetime | None = None, days: int = 7
    ) -> Tls:
        made = issue(self.folder, name, kind, hosts, now=now, days=days)
        return Tls(self.folder / "ca.pem", made.cert, made.key)

    @property
    def ca_only(self) -> Tls:
        return Tls(self.folder / "ca.pem")


@asynccontextmanager
async def secured(
    folder: Path, tls: Tls, clock: FakeClock | None = None, hello_timeout_ms: int = 10_000
) -> AsyncIterator[Node]:
    network = TlsNetwork(Credentials(tls, clock or FakeClock()))
    node = Node(
        node_config(folder, delay=True, broker=BrokerConfig(hello_timeout_ms=hello_timeout_ms)),
        network=network,
    )
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


class FakeClock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def handshakes(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    found = [json.loads(each.message) for each in caplog.records if each.name == "qmq.audit"]
    return [each for each in found if each["action"] == "TLS handshake"]


AGO, LATER = NOW - timedelta(days=30), NOW + timedelta(days=30)


def wrong_clients(folder: Path, papers: Papers) -> dict[str, Tls]:
    strange = Papers(folder / "strange")
    return {
        "none": papers.ca_only,
        "another authority's": replace(strange.client, ca=papers.client.ca),
        "expired": papers.of("expired", "app", now=AGO),
        "not yet valid": papers.of("early", "app", now=LATER),
    }


WRONG_SERVERS = {
    "another authority's": "QMQ_TLS_CA must name the CA",
    "expired": "has expired.*not valid now: replace it",
    "not yet valid": "not yet valid.*not valid now: replace it .*, or correct this machine's clock",
    "another name": "not for this address: use a name that it has",
    "of a client": "the certificate of a client",
}


def wrong_server(what: str, folder: Path, papers: Papers) -> Tls:
    makers: dict[str, Callable[[], Tls]] = {
        "another authority's": lambda: replace(
            Papers(folder / "strange").server, ca=papers.server.ca
        ),
        "expired": lambda: papers.of("expired", "node", HOST, now=AGO),
        "not yet valid": lambda: papers.of("early", "node", HOST, now=LATER),
        "another name": lambda: papers.of("elsewhere", "node", "broker9.example"),
        "of a client": lambda: papers.of("app", "app", HOST),
    }
    return makers[what]()


@asynccontextmanager
async def node_with(folder: Path, tls: Tls) -> AsyncIterator[dict[str, str]]:
    """The addresses of a node with this certificate."""
    config = replace(node_config(folder), metrics_port=0, metrics_host="127.1")
    node = Node(config, network=TlsNetwork(Credentials(tls)))
    await node.start()
    try:
        assert node.metrics is not None
        yield {
            "data": node.data_address,
            "metaserver": node.address,
            "broker control": next(
                iter(node.view.replicas(node.config.broker.name).values())
            ).control_address,
            "metrics": f"127.0.0.1:{node.metrics.port}",
        }
    finally:
        await node.stop()


ADMIN = "op:admin"


class Cluster(NamedTuple):
    """A node whose rules are enforced, and the administrator's client."""

    node: Node
    admin: qmq.Client

    async def token(self, principal: str) -> str:
        made = await self.admin.access.create_token(principal)
        await eventually(lambda: made.info.id in self.node.view.access.tokens)
        return made.token

    @asynccontextmanager
    async def client(self, principal: str) -> AsyncIterator[qmq.Client]:
        async with qmq.connect(self.node.address, token=await self.token(principal)) as mq:
            yield mq

    async def allow(
        self,
        principal: str,
        operations: str,
        kind: str,
        pattern: str = "*",
        *,
        is_deny: bool = False,
    ) -> str:
        named = [] if operations == "*" else operations.split(",")
        rule = await self.admin.access.put_rule(principal, named, kind, pattern, is_deny=is_deny)
        await eventually(lambda: rule.id in self.node.view.access.rules)
        return rule.id

    async def deny(self, principal: str, operations: str, kind: str, pattern: str = "*") -> str:
        return await self.allow(principal, operations, kind, pattern, is_deny=True)


@asynccontextmanager
async def guarded(
    tmp_path: Path,
    mode: str = "enforce",
    *,
    delay: bool = False,
    access: AccessConfig | None = None,
) -> AsyncIterator[Cluster]:
    config: NodeConfig = replace(
        node_config(tmp_path, delay=delay), access=access or AccessConfig()
    )
    async with running(config) as node:
        async with qmq.connect(node.address) as first:
            made = await first.access.create_token(ADMIN)
            await first.access.put_rule(ADMIN, [], "cluster")
            await first.access.put_rule(ADMIN, [], "subject")
            await first.access.put_rule(ADMIN, [], "group")
            if mode == "watch":
                await first.access.set_mode(mode)
        async with qmq.connect(node.address, token=made.token) as admin:
            if mode == "enforce":
                await admin.access.set_mode(mode)
            await eventually(lambda: node.view.access.mode.value == mode)
            yield Cluster(node, admin)


Rights = frozenset[Right]


SERVICES = {
    each.full_name: each
    for file in (meta_pb2, access_pb2, control_pb2, delay_pb2)
    for each in file.DESCRIPTOR.services_by_name.values()
}


class Tokens:
    """A token for each set of rights: on what is named t.*, and on nothing else."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[Rights, str] = {}
        self._elsewhere = ""

    async def of(self, rights: Rights, pattern: str = f"{NAMESPACE}*") -> str:
        if rights not in self._made or pattern != f"{NAMESPACE}*":
            principal = f"app:p{len(self._made)}{pattern.strip('*')}"
            token = await self._cluster.token(principal)
            for kind in {each for each, _ in rights}:
                operations = ",".join(sorted(operation for its, operation in rights if its == kind))
                its_pattern = {"cluster": "*", "namespace": pattern.rstrip("*")}.get(kind, pattern)
                await self._cluster.allow(principal, operations, kind, its_pattern)
            if pattern != f"{NAMESPACE}*":
                return token
            self._made[rights] = token
        return self._made[rights]

    async def elsewhere(self) -> str:
        """All rights on other things."""
        self._elsewhere = self._elsewhere or await self.of(
            frozenset(each for each in ALL if each[0] != "cluster"), "u.*"
        )
        return self._elsewhere


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[tuple[Cluster, World, Tokens]]:
    async with guarded(tmp_path, delay=True) as cluster:
        made = World(cluster.admin, cluster.node.config.broker.name)
        await made.make()
        yield cluster, made, Tokens(cluster)


async def addresses(cluster: Cluster, service: str) -> list[tuple[str, str]]:
    """The control and data addresses of the servers that serve a service."""
    if service in ("qmq.v1.Meta", "qmq.v1.Access"):
        return [(cluster.node.address, "")]
    groups = (await cluster.admin.metadata.cluster()).groups
    found = [
        (each.replicas[0].control_address, each.replicas[0].data_address)
        for each in groups
        if each.is_delay or "Delay" not in service
    ]
    assert found
    return found


NOW_MS = 1_800_000_000_000


ISSUER = "https://id.example"


EC = ec.generate_private_key(ec.SECP256R1())


CLAIMS = {"iss": ISSUER, "aud": "qmq", "sub": "orders", "exp": NOW_MS // 1000 + 600}


def jwks(**keys: Any) -> bytes:
    kinds = {
        "EC": jwt.algorithms.ECAlgorithm,
        "RS": jwt.algorithms.RSAAlgorithm,
        "Ed": jwt.algorithms.OKPAlgorithm,
    }
    found = []
    for name, key in keys.items():
        kind = kinds[
            "RS"
            if isinstance(key, rsa.RSAPrivateKey)
            else "Ed"
            if isinstance(key, ed25519.Ed25519PrivateKey)
            else "EC"
        ]
        found.append({**json.loads(kind.to_jwk(key.public_key())), "kid": name, "use": "sig"})
    return json.dumps({"keys": found}).encode()


def token(key: Any = EC, algorithm: str = "ES256", kid: str = "one", **claims: Any) -> str:
    whole = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(whole, key, algorithm=algorithm, headers={"kid": kid})


class Relay(NamedTuple):
    """An address that leads to another one, and what went through it."""

    address: str
    cut: asyncio.Event
    """Once it is set, the relay holds all bytes, as after a pulled cable."""
    said: list[bytes]
    """By clients."""


@asynccontextmanager
async def relayed(address: str) -> AsyncIterator[Relay]:
    host, _, port = address.rpartition(":")
    cut, said, pumps = asyncio.Event(), list[bytes](), list[asyncio.Task[None]]()

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: list[bytes]
    ) -> None:
        try:
            while data := await reader.read(65_536):
                heard.append(data)
                if not cut.is_set():
                    writer.write(data)
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        pumps.extend(
            asyncio.ensure_future(each)
            for each in (pump(reader, there_writer, said), pump(there_reader, writer, []))
        )

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield Relay(f"{HOST}:{server.sockets[0].getsockname()[1]}", cut, said)
    finally:
        server.close()
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
