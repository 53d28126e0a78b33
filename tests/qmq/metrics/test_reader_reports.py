"""A stream reports how far it is when it asks for its queues' ends, and operators see it: the log
in columns as a driver uses it, a real node, and what operators look at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from metric_pages import scrape
from support import node_config, running
from typer.testing import CliRunner

import qmq
from qmq.broker.config import BrokerConfig
from qmq.cli.app import app
from qmq.columns.model import QueueKey, ReaderReport, Topology
from qmq.columns.servers.log import ServerAddress, ServerLog
from qmq.errors import UnknownGroup
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.operations.snapshot_reading import rates, read_snapshot
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire import frame_payloads as wire

NEVER_MS = 10**9


@pytest.fixture
async def seen(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with metrics whose retention never runs."""
    config = node_config(tmp_path / "node", broker=BrokerConfig(retention_interval_ms=NEVER_MS))
    async with running(replace(config, metrics_port=0)) as node:
        yield node


@pytest.fixture
async def mq(seen: Node) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(seen.address) as found:
        yield found


@pytest.fixture
def log(seen: Node) -> Iterator[ServerLog]:
    with closing(ServerAddress(seen.address).open()) as found:
        yield found


def queue(partition: int = 0, subject: str = "s") -> QueueKey:
    return QueueKey(subject, partition, "broker-0")


async def report(
    log: ServerLog, done: dict[QueueKey, int], lost: int = 0, reader: str = "copy"
) -> Topology:
    """The stream asks for its ends."""
    told = ReaderReport(reader, done, dict.fromkeys(done, lost) if lost else {})
    subjects = sorted({key.subject for key in done})
    return await asyncio.to_thread(log.topology, subjects, told)


async def said(node: Node, *words: str) -> Any:
    """The JSON that a command prints."""
    result = await asyncio.to_thread(
        CliRunner().invoke, app, [*words, "--json", "--server", node.address]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_operators_see_the_lag_of_a_reader_and_no_group(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    await mq.send_many("s", [b"x"] * 10)
    topology = await report(log, {queue(): 4}, lost=2)
    assert topology.queues[queue()].end == 10, "the answer is what it is without a report"
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["partition"], row["broker_group"], row["done_before"]) == (0, "broker-0", 4)
    assert (row["lag"], row["lost"], row["kept_read"]) == (6, 2, 4)
    assert (row["is_silent"], row["is_near_loss"]) == (False, False)
    assert 0 < row["loss_in_ms"] <= 7 * 24 * 3600 * 1000
    (listed,) = await said(seen, "group", "list", "s")
    assert (listed["group"], listed["kind"], listed["lag"]) == ("copy", "reader", 6)
    await report(log, {queue(): 10})
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["done_before"], row["lag"], row["loss_in_ms"]) == (10, 0, None)
    with pytest.raises(UnknownGroup):
        await mq.metadata.describe_groups("s", "copy")


async def test_groups_and_readers_stand_in_one_list_and_are_told_apart(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    await mq.send_many("s", [b"x"] * 10)
    async with mq.consumer("s", "billing") as consumer:
        await anext(consumer)
    await report(log, {queue(): 4})
    kinds = {each["group"]: each["kind"] for each in await said(seen, "group", "list")}
    assert kinds == {"billing": "group", "copy": "reader"}
    snapshot = await read_snapshot(mq.metadata)
    assert [each.group for each in snapshot.groups] == ["billing"]
    (reader,) = rates(None, snapshot).readers
    assert (reader.subject, reader.reader, reader.lag_messages) == ("s", "copy", 6)
    assert not snapshot.missing


async def test_a_reader_of_an_ordered_subject_is_seen_until_it_has_finished_a_partition(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    config = SubjectConfig("s", order=Order.STRICT, logical_partitions=16)
    await mq.metadata.create_subject(config, partitions=1)
    for number in range(6):
        await mq.send("s", b"x", key=f"k{number}")
    await report(log, {queue(1): 2})
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["partition"], row["lag"]) == (1, 4)
    await mq.metadata.change_route("s", split=pb.SplitOperation(partition=1, at=[8]))
    for number in range(20):
        await mq.send("s", b"x", key=f"k{number}")
    topology = await report(log, {queue(1): 6, queue(2): 0, queue(3): 1})
    rows = await said(seen, "group", "lag", "s", "copy")
    ends = topology.queues[queue(2)].end, topology.queues[queue(3)].end
    assert [(row["partition"], row["lag"]) for row in rows] == [(2, ends[0]), (3, ends[1] - 1)]


async def test_a_reader_is_near_a_loss_before_retention_reaches_it_and_after(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    await mq.metadata.create_subject(SubjectConfig("s", retention_ms=1))
    await mq.send_many("s", [b"x"] * 10)
    await report(log, {queue(): 4})
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["is_near_loss"], row["lost"], row["lag"]) == (True, 0, 6)
    stored = seen.store.queue("s", 0)
    assert stored is not None
    stored.start_sequence = 7
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["is_near_loss"], row["lost"], row["lag"]) == (True, 3, 3)
    await report(log, {queue(): 10}, lost=3)
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["is_near_loss"], row["lost"], row["lag"]) == (False, 3, 0)


async def test_a_purge_behind_which_a_reader_continues_is_no_loss(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    await mq.send_many("s", [b"x"] * 10)
    await report(log, {queue(): 10})
    await mq.metadata.purge_subject("s")
    await mq.send("s", b"y")
    await report(log, {queue(): 10})
    (row,) = await said(seen, "group", "lag", "s", "copy")
    assert (row["lag"], row["lost"], row["is_near_loss"]) == (1, 0, False)


async def test_the_metrics_have_readers_beside_groups(
    seen: Node, mq: qmq.Client, log: ServerLog
) -> None:
    await mq.send_many("s", [b"x"] * 10)
    await report(log, {queue(): 4})
    await report(log, {queue(): 7}, lost=1)
    await report(log, {queue(): 0}, reader="other")
    assert seen.metrics is not None
    page = await scrape(seen.metrics.port)
    labels = {"broker_group": "broker-0", "subject": "s", "reader": "copy"}
    assert page("qmq_reader_lag_messages", **labels) == 3
    assert page("qmq_reader_lag_messages", **{**labels, "reader": "other"}) == 10
    assert page("qmq_reader_read_messages_total", **labels) == 3
    assert page("qmq_reader_lost_messages", **labels) == 1
    assert page("qmq_reader_near_loss", **labels) == 0
    assert page("qmq_reader_committed_seconds", **labels) >= 0
    assert page("qmq_reader_silent_seconds", **labels) >= 0
    assert not page.rows("qmq_group_lag_messages")


def test_a_request_without_a_report_is_that_of_release_0_2() -> None:
    asked = wire.Fetch("s", 0, 0, 0, 0, 0, [], [], [], 0)
    assert set(json.loads(asked.pack())) == {
        "subject",
        "partition",
        "sequence",
        "until",
        "since_ms",
        "bytes_max",
        "tags_any",
        "tags_all",
        "lps",
        "directed",
    }
    told = replace(asked, reader="copy", done=4, lost=2)
    assert wire.Fetch.unpack(told.pack()) == told
    assert wire.Fetch.unpack(asked.pack()) == asked
