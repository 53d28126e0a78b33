"""Spark against a broker with TLS and enforced rules: the reader, the sink, and which credentials
Spark's web pages show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from access_support import Papers
from fast_session import MESSAGES, drive, standalone, variables
from support import eventually, node_config

import qmq
from qmq.node.dev_node import Node
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.tls import Credentials, Tls

pytestmark = pytest.mark.xdist_group("drivers")


@asynccontextmanager
async def closed(folder: Path, tls: Tls, client: Tls) -> AsyncIterator[tuple[Node, qmq.Client]]:
    """A node that enforces rules: `app:reports` may read `orders` and write `copies`, and nothing
    else.
    """
    node = Node(node_config(folder), network=TlsNetwork(Credentials(tls)))
    await node.start()
    try:
        async with qmq.connect(node.address, tls=client) as first:
            token = (await first.access.create_token("op:admin")).token
        await eventually(lambda: bool(node.view.access.tokens))
        async with qmq.connect(node.address, tls=client, token=token) as operator:
            await operator.send_many("orders", [b"%d" % number for number in range(MESSAGES)])
            for subject in ("payments", "copies"):
                await operator.metadata.create_subject(qmq.SubjectConfig(subject))
            await operator.access.put_rule("app:reports", ["browse"], "subject", "orders")
            await operator.access.put_rule(
                "app:reports", ["produce", "browse"], "subject", "copies"
            )
            await operator.access.put_rule("op:admin", [], "cluster")
            for kind in ("subject", "group"):
                await operator.access.put_rule("op:admin", [], kind)
            await operator.access.set_mode("enforce")
            await eventually(lambda: node.view.access.mode.value == "enforce")
            yield node, operator
    finally:
        await node.stop()


async def check(found: dict[str, Any], operator: qmq.Client) -> None:
    """The reader read all, the sink wrote all, twice; and what no rule allows was refused, by
    name.
    """
    assert found["read"] == MESSAGES
    assert len(found["refused"]) == 2
    assert all("app:reports may not" in each and "payments" in each for each in found["refused"]), (
        found["refused"]
    )
    copies = list[bytes]()
    async with operator.consumer("copies", "g") as consumer:
        while len(copies) < 2 * MESSAGES:
            copies += (await consumer.pull(2 * MESSAGES)).bodies
    assert sorted(copies) == sorted([b"%d" % number for number in range(MESSAGES)] * 2)


@pytest.mark.sampled
async def test_spark_reads_and_writes_what_its_certificate_may(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    reports = papers.of("reports", "app")
    async with closed(tmp_path / "data", papers.server, papers.client) as (node, operator):
        found, shown = await asyncio.to_thread(
            drive, tmp_path, "local[2]", node.address, variables(reports), {}
        )
        await check(found, operator)
    assert reports.key is not None
    secret = reports.key.read_text().splitlines()[1]
    assert secret not in shown


@pytest.mark.long
async def test_executors_of_a_cluster_get_a_token_that_no_page_of_spark_shows(
    tmp_path: Path,
) -> None:
    papers = Papers(tmp_path / "papers")
    server = replace(papers.server, requires_clients=False)
    async with closed(tmp_path / "data", server, papers.ca_only) as (node, operator):
        token = (await operator.access.create_token("app:reports")).token
        given = {**variables(papers.ca_only), "QMQ_TOKEN": token}
        with standalone(tmp_path / "cluster") as cluster:
            conf = {f"spark.executorEnv.{name}": value for name, value in given.items()}
            found, shown = await asyncio.to_thread(
                drive, tmp_path, cluster.url, node.address, given, conf
            )
        await check(found, operator)
        logs = "\n".join(
            path.read_text(errors="replace")
            for path in (tmp_path / "cluster").rglob("*")
            if path.is_file() and path.suffix != ".jar"
        )
    assert "spark.executorEnv.QMQ_TOKEN" in shown, "the page of the environment was looked at"
    assert token.split("_", 2)[2] not in shown
    assert token.split("_", 2)[2] not in logs
