"""Clusters that enforce rules, the tokens of their principals, and JWTs of an issuer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from rights_table import ALL, NAMESPACE, Right, World
from support import NodeConfig, eventually, node_config, running

import qmq
import qmq.proto
from qmq.node.dev_node import Node
from qmq.proto.v1 import access_pb2, control_pb2, delay_pb2, meta_pb2
from qmq.security.access import AccessConfig

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

    async def allow(self, principal: str, operations: str, kind: str, pattern: str = "*", *, is_deny: bool = False) -> str:
        named = [] if operations == "*" else operations.split(",")
        rule = await self.admin.access.put_rule(principal, named, kind, pattern, is_deny=is_deny)
        await eventually(lambda: rule.id in self.node.view.access.rules)
        return rule.id

    async def deny(self, principal: str, operations: str, kind: str, pattern: str = "*") -> str:
        return await self.allow(principal, operations, kind, pattern, is_deny=True)


@asynccontextmanager
async def guarded(
    tmp_path: Path, mode: str = "enforce", *, delay: bool = False, access: AccessConfig | None = None
) -> AsyncIterator[Cluster]:
    config: NodeConfig = replace(node_config(tmp_path, delay=delay), access=access or AccessConfig())
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
    each.full_name: each for file in (meta_pb2, access_pb2, control_pb2, delay_pb2) for each in file.DESCRIPTOR.services_by_name.values()
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
        self._elsewhere = self._elsewhere or await self.of(frozenset(each for each in ALL if each[0] != "cluster"), "u.*")
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
        (each.replicas[0].control_address, each.replicas[0].data_address) for each in groups if each.is_delay or "Delay" not in service
    ]
    assert found
    return found


NOW_MS = 1_800_000_000_000


ISSUER = "https://id.example"


EC = ec.generate_private_key(ec.SECP256R1())


CLAIMS = {"iss": ISSUER, "aud": "qmq", "sub": "orders", "exp": NOW_MS // 1000 + 600}


def jwks(**keys: Any) -> bytes:
    kinds = {"EC": jwt.algorithms.ECAlgorithm, "RS": jwt.algorithms.RSAAlgorithm, "Ed": jwt.algorithms.OKPAlgorithm}
    found = []
    for name, key in keys.items():
        kind = kinds["RS" if isinstance(key, rsa.RSAPrivateKey) else "Ed" if isinstance(key, ed25519.Ed25519PrivateKey) else "EC"]
        found.append({**json.loads(kind.to_jwk(key.public_key())), "kid": name, "use": "sig"})
    return json.dumps({"keys": found}).encode()


def token(key: Any = EC, algorithm: str = "ES256", kid: str = "one", **claims: Any) -> str:
    whole = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(whole, key, algorithm=algorithm, headers={"kid": kid})
