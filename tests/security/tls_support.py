"""Certificates of a test's own authority, nodes that serve TLS, and the handshakes that a log tells of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support import node_config

from qmq.broker.config import BrokerConfig
from qmq.node.dev_node import Node
from qmq.rpc.tls_network import TlsNetwork
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

    def of(self, name: str, kind: str, *hosts: str, now: datetime | None = None, days: int = 7) -> Tls:
        made = issue(self.folder, name, kind, hosts, now=now, days=days)
        return Tls(self.folder / "ca.pem", made.cert, made.key)

    @property
    def ca_only(self) -> Tls:
        return Tls(self.folder / "ca.pem")


@asynccontextmanager
async def secured(folder: Path, tls: Tls, clock: FakeClock | None = None, hello_timeout_ms: int = 10_000) -> AsyncIterator[Node]:
    network = TlsNetwork(Credentials(tls, clock or FakeClock()))
    node = Node(node_config(folder, delay=True, broker=BrokerConfig(hello_timeout_ms=hello_timeout_ms)), network=network)
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
        "another authority's": lambda: replace(Papers(folder / "strange").server, ca=papers.server.ca),
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
            "broker control": next(iter(node.view.replicas(node.config.broker.name).values())).control_address,
            "metrics": f"127.0.0.1:{node.metrics.port}",
        }
    finally:
        await node.stop()
