"""A wrong certificate, the server's or the client's, is told by every call within the patience for
mistakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from access_support import HOST, Papers, node_with, wrong_clients
from support import eventually, node_config
from support.clusters import CALLS, KnownMasters

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master
from qmq.errors import TlsFailed, TlsRefused
from qmq.node.dev_node import Node
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.tls import Credentials, Tls

SHORT = ClientTiming(mistake_s=0.2)
PATIENCE_S = ClientTiming().mistake_s


def client(address: str, tls: Tls) -> qmq.Client:
    return qmq.Client(address, timing=SHORT, network=TlsNetwork(Credentials(tls)))


@asynccontextmanager
async def misnamed(folder: Path, papers: Papers) -> AsyncIterator[Node]:
    """A node whose brokers tell clients a name that their certificate does not have."""
    config = replace(node_config(folder, delay=True), advertise="localhost")
    node = Node(config, network=TlsNetwork(Credentials(papers.of("broker1", "node", HOST))))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@pytest.mark.parametrize("call", CALLS)
async def test_each_call_names_the_broker_that_it_cannot_trust(tmp_path: Path, call: str) -> None:
    papers = Papers(tmp_path / "papers")
    async with (
        misnamed(tmp_path / "data", papers) as node,
        client(f"{HOST}:{node.meta_port}", papers.client) as mq,
    ):
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        await mq.metadata.create_subject(
            qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=64), partitions=1
        )
        with pytest.raises(
            TlsRefused, match=r"no TLS with localhost:[0-9]+: .*not for this address"
        ):
            await CALLS[call](mq)


@pytest.mark.parametrize("what", ["none", "another authority's", "expired", "not yet valid"])
async def test_a_client_whose_certificate_is_refused_logs_soon_what_to_look_at(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the handshake such a refusal looks like a server that is away, so the client waits
    on.
    """
    papers = Papers(tmp_path / "papers")
    wrong = wrong_clients(tmp_path, papers)[what]
    async with (
        node_with(tmp_path / "data", papers.server) as addresses,
        client(addresses["metaserver"], wrong) as mq,
    ):
        sending = asyncio.create_task(mq.send("s", b"x"))
        await eventually(
            lambda: any("QMQ_TLS_CERT" in each.getMessage() for each in caplog.records)
        )
        assert not sending.done()
        sending.cancel()
        await asyncio.wait([sending])


async def test_a_client_that_reached_a_broker_waits_for_one_that_it_cannot_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    papers = Papers(tmp_path / "papers")
    async with misnamed(tmp_path / "data", papers) as node:
        port = node.data_address.rpartition(":")[2]
        locator: Any = KnownMasters(
            {"good": Master(f"{HOST}:{port}", 1), "bad": Master(f"localhost:{port}", 1)}
        )
        now_s = iter(range(0, 1_000, int(PATIENCE_S)))
        links = ConnectionPool(
            locator,
            "c",
            now_s=lambda: float(next(now_s)),
            network=TlsNetwork(Credentials(papers.client)),
        )
        try:
            await links.reach("s", "good")
            for _ in range(5):
                with pytest.raises(TlsFailed):
                    await links.reach("s", "bad")
        finally:
            await links.close()
    assert (
        len(
            [
                each
                for each in caplog.records
                if each.name == "qmq.client" and "no TLS with localhost" in each.getMessage()
            ]
        )
        == 1
    )
