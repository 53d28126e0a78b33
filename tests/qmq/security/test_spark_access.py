"""Spark's connections show the token that the environment names."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from access_support import guarded
from support import eventually
from system.spark_workload import read_log

from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.metaservers import Metadata
from qmq.errors import AccessDenied, InvalidArgument, NotConnected
from qmq.security.access import AccessConfig
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

FETCH = wire.Fetch("orders", 0, 0, 1, 0, 1000, [], [], [], 0)


async def test_a_reader_may_browse_what_its_token_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.send("orders", b"1")
        await cluster.allow("app:reports", "browse", "subject", "orders")
        file = tmp_path / "token"
        file.write_text(await cluster.token("app:reports") + "\n")
        monkeypatch.setenv("QMQ_TOKEN_FILE", str(file))

        def read(subject: str) -> int:
            metadata = Metadata(cluster.node.address)
            metadata.locate(subject)
            metadata.close()
            with BlockingConnection.connect(cluster.node.data_address) as channel:
                return len(channel.call(FrameKind.FETCH, replace(FETCH, subject=subject).pack()))

        assert await asyncio.to_thread(read, "orders") > 0
        with pytest.raises(AccessDenied, match="app:reports"):
            await asyncio.to_thread(read, "payments")


async def test_a_right_that_is_taken_between_two_fetches_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.send("orders", b"1")
        rule = await cluster.allow("app:reports", "browse", "subject", "orders")
        monkeypatch.setenv("QMQ_TOKEN", await cluster.token("app:reports"))
        address = cluster.node.data_address
        with await asyncio.to_thread(BlockingConnection.connect, address) as channel:
            assert len(await asyncio.to_thread(channel.call, FrameKind.FETCH, FETCH.pack())) > 0
            await cluster.admin.access.delete_rule(rule)
            await eventually(lambda: rule not in cluster.node.view.access.rules)
            with pytest.raises((AccessDenied, NotConnected)):
                await asyncio.to_thread(channel.call, FrameKind.FETCH, FETCH.pack())
        second = await asyncio.to_thread(BlockingConnection.connect, address)
        with second as channel, pytest.raises(AccessDenied, match="browse on subject orders"):
            await asyncio.to_thread(channel.call, FrameKind.FETCH, FETCH.pack())


async def test_spark_reads_the_audit_log_as_any_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, access=AccessConfig(audit_subject="audit.log")) as cluster:
        await cluster.allow("app:auditor", "browse", "subject", "audit.log")
        async with cluster.client("app:other") as other:
            with pytest.raises(AccessDenied):
                await other.send("payments", b"1")
        monkeypatch.setenv("QMQ_TOKEN", await cluster.token("app:auditor"))

        def records() -> list[dict[str, str]]:
            table, _ = read_log(cluster.node.address, "audit.log")
            return [json.loads(body) for body in table["body"].to_pylist()]

        async with asyncio.timeout(20):
            while not (
                denied := [
                    each for each in await asyncio.to_thread(records) if each["result"] == "denied"
                ]
            ):
                await asyncio.sleep(0.05)
    assert (denied[0]["principal"], denied[0]["on"], bool(denied[0]["request"])) == (
        "app:other",
        "subject payments",
        True,
    )


def test_a_token_does_not_leave_the_machine_in_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMQ_TOKEN", "qmq_" + "0" * 12 + "_" + "A" * 43)
    with pytest.raises(InvalidArgument, match="plain text"):
        Metadata("192.0.2.1:20880", retry_ms=0).list_subjects()
