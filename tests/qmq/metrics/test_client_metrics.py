"""Metrics of a client: messages sent, waited for, received and settled."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import pytest
from metric_pages import Values, scrape
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from support import eventually

import qmq
import qmq.blocking
from qmq.errors import InvalidArgument, QmqError
from qmq.node.dev_node import Node

GROUP = {"subject": "flights", "group": "ops"}


def shown(mq: qmq.Client) -> Values:
    """Through a registry of the application's."""
    registry = CollectorRegistry()
    registry.register(mq.metrics)
    return Values(generate_latest(registry).decode())


async def test_a_client_counts_what_it_sends_and_what_it_is_handed(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("flights", [b"x" * 10] * 10)
        async with mq.producer("flights") as producer:
            await producer.send(b"one more")
        consumer = mq.consumer("flights", "ops", ack="explicit")
        found = [await consumer.__anext__() for _ in range(11)]
        for message in found[:6]:
            await message.ack_sync()
        found[6].nack(delay=timedelta())
        assert (await consumer.__anext__()).attempt == 2
        values = shown(mq)
        assert values("qmq_client_sent_messages_total", subject="flights") == 11
        assert values("qmq_client_sent_batches_total", subject="flights") == 2
        assert values("qmq_client_sent_bytes_total", subject="flights") == 108
        assert values("qmq_client_resent_batches_total", subject="flights") == 0
        assert values("qmq_client_send_seconds_count") == 2
        assert values("qmq_client_send_seconds_sum") > 0
        assert values("qmq_client_waiting_bytes") == 0
        assert values("qmq_client_received_messages_total", **GROUP) == 12
        assert values("qmq_client_settled_messages_total", verdict="ack", **GROUP) == 6
        assert values("qmq_client_settled_messages_total", verdict="nack", **GROUP) == 1
        assert values("qmq_client_held_messages", **GROUP) == 5
        assert values("qmq_client_connections") == 1
        await eventually(lambda: shown(mq)("qmq_client_unheard_verdicts", **GROUP) == 0)
        consumer.attachments[0].verdicts.detached()  # as when the broker is away
        found[7].ack_later()
        assert shown(mq)("qmq_client_unheard_verdicts", **GROUP) == 1
        await consumer.close()
        values = shown(mq)
        assert not values.rows("qmq_client_held_messages"), "a consumer that was closed is not kept"
        assert values("qmq_client_stale_messages_total", **GROUP) == 0


async def test_messages_that_are_given_up_are_counted_and_so_is_what_waits(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("flights", b"x")
        node.broker.is_read_only = True
        producer = mq.producer("flights", delivery_timeout_s=0.3)
        ticket = producer.send(b"y" * 100)
        await eventually(lambda: shown(mq)("qmq_client_waiting_bytes") == 100)
        with pytest.raises(QmqError):
            await ticket
        values = shown(mq)
        assert values("qmq_client_failed_messages_total", subject="flights") == 1
        assert values("qmq_client_sent_messages_total", subject="flights") == 1
        assert values("qmq_client_waiting_bytes") == 0


async def test_a_client_counts_ordered_messages(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig("orders", order=qmq.Order.STRICT, logical_partitions=16)
        )
        for number in range(5):
            await mq.send("orders", b"x", key=f"k{number}")
        consumer = mq.ordered_consumer("orders", "billing")
        for _ in range(5):
            await consumer.__anext__()
        values = shown(mq)
        assert values("qmq_client_sent_messages_total", subject="orders") == 5
        assert values("qmq_client_received_messages_total", subject="orders", group="billing") == 5


async def test_a_client_shows_its_figures_until_it_is_closed(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("flights", b"x")
        port = await mq.serve_metrics()
        assert (await scrape(port))("qmq_client_sent_messages_total", subject="flights") == 1
        with pytest.raises(OSError, match="address already in use"):
            await mq.serve_metrics(port)
    with pytest.raises(ConnectionRefusedError):
        await scrape(port)


async def test_a_blocking_client_shows_the_same(node: Node) -> None:
    def work() -> tuple[Values, int]:
        with qmq.blocking.connect(node.address) as mq:
            mq.send("flights", b"x")
            registry = CollectorRegistry()
            registry.register(mq.metrics)
            return Values(generate_latest(registry).decode()), mq.serve_metrics()

    values, port = await asyncio.to_thread(work)
    assert values("qmq_client_sent_messages_total", subject="flights") == 1
    assert port > 0


async def test_without_prometheus_client_a_client_works_and_names_it(
    monkeypatch: pytest.MonkeyPatch, node: Node
) -> None:
    for name in [
        each
        for each in sys.modules
        if each.split(".")[0] == "prometheus_client" or each.startswith("qmq.metrics.e")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with qmq.connect(node.address) as mq:
        await mq.send("flights", b"x")
        with pytest.raises(InvalidArgument, match=r"qmq\[metrics\]"):
            _ = mq.metrics
        with pytest.raises(InvalidArgument, match=r"qmq\[metrics\]"):
            await mq.serve_metrics()
