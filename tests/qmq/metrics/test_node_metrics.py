"""The figures of a running node say exactly what was done: over TCP and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from metric_pages import Values, get, scrape
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from support import eventually, node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.client.connection.connection import connect
from qmq.errors import ReadOnly
from qmq.log.log_config import LogConfig
from qmq.node.dev_node import Node
from qmq.node.metrics.broker import TieringSource
from qmq.node.metrics.serving import figures_by_role, metrics_host
from qmq.process.event_loop import SystemClock
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

GROUP = {"subject": "flights", "group": "ops"}
DELAYED = {"broker_group": "delay"}
SOON = timedelta(seconds=20)


def suffixed(kind: str, name: str) -> str:
    return f"{name}_count" if kind == "histogram" else name


@pytest.fixture
async def metered(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with a delay group and metrics."""
    async with running(replace(node_config(tmp_path / "node", delay=True), metrics_port=0)) as node:
        yield node


@pytest.fixture
async def mq(metered: Node) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(metered.address) as found:
        yield found


async def page(node: Node) -> Values:
    assert node.metrics is not None
    return await scrape(node.metrics.port)


async def once(node: Node, name: str, value: float, **labels: str) -> Values:
    """A page on which the figure is that."""
    async with asyncio.timeout(20):
        while True:
            values = await page(node)
            rows = [found for its, found in values.rows(name) if labels.items() <= its.items()]
            if rows == [value]:
                return values
            await asyncio.sleep(0.02)


async def test_messages_are_counted_as_they_are_stored_handed_out_and_settled(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send_many("flights", [b"x" * 100] * 20)
    await mq.send("flights", b"one more")
    async with mq.consumer("flights", "ops", ack="explicit") as consumer:
        found = [message for _ in range(21) async for message in one_of(consumer)]
        for message in found[:15]:
            await message.ack_sync()
        for message in found[15:18]:
            message.nack(delay=timedelta())
        again = [message for _ in range(3) async for message in one_of(consumer)]
        assert {message.attempt for message in again} == {2}
        values = await once(metered, "qmq_acked_messages_total", 15, **GROUP)
        assert values("qmq_stored_messages_total", subject="flights", broker_group="broker-0") == 21
        assert values("qmq_stored_batches_total", subject="flights") == 2
        assert values("qmq_stored_bytes_total", subject="flights") == stored_bytes(
            metered, "flights"
        )
        assert values("qmq_kept_messages", subject="flights") == 21
        assert values("qmq_pulled_messages_total", **GROUP) == 24
        assert values("qmq_retried_messages_total", **GROUP) == 3
        assert values("qmq_nacked_messages_total", **GROUP) == 3
        assert values("qmq_released_messages_total", **GROUP) == 0
        assert values("qmq_group_unacked_messages", **GROUP) == 6
        assert values("qmq_group_requeued_messages", **GROUP) == 0
        assert values("qmq_group_lag_messages", **GROUP) == 6
        assert values("qmq_group_lag_seconds", **GROUP) >= 0
        assert values("qmq_group_consumers", **GROUP) == 1
        assert (
            values("qmq_connections", broker_group="broker-0")
            == values("qmq_connections_accepted_total", broker_group="broker-0")
            == 1
        )
    values = await once(metered, "qmq_group_consumers", 0, **GROUP)
    assert values("qmq_group_lag_messages", **GROUP) == 6
    assert values("qmq_group_unacked_messages", **GROUP) == 0


async def one_of(consumer: qmq.Consumer) -> AsyncIterator[qmq.Message]:
    yield await consumer.__anext__()


def stored_bytes(node: Node, subject: str) -> int:
    queue = node.store.queue(subject, 0)
    assert queue is not None
    return queue.cumulative_bytes


async def test_a_message_that_dies_is_counted_and_is_stored_in_the_dead_letter_queue(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send_many("flights", [b"x"] * 3)
    await mq.metadata.set_group_settings("flights", "ops", attempts_max=1)
    async with mq.consumer("flights", "ops", ack="explicit") as consumer:
        for _ in range(2):
            (await consumer.__anext__()).nack()
        await once(metered, "qmq_stored_messages_total", 2, subject="%dlq%ops")
        values = await page(metered)
        assert values("qmq_dead_messages_total", **GROUP) == 2
        assert values("qmq_nacked_messages_total", **GROUP) == 2
        assert values("qmq_group_dying_messages", **GROUP) == 0
        assert values("qmq_group_lag_messages", **GROUP) == 1
        assert values("qmq_kept_messages", subject="%dlq%ops") == 2


async def test_a_broadcast_group_is_one_row_whatever_its_consumers_are_called(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send_many("flights", [b"x"] * 3)
    for name in ("a", "b"):
        consumer = mq.consumer(
            "flights", "ops", name=name, broadcast=True, start="earliest", ack="explicit"
        )
        for _ in range(3):
            await consumer.__anext__()
    values = await page(metered)
    assert values("qmq_pulled_messages_total", **GROUP) == 6
    assert values("qmq_group_consumers", **GROUP) == 2
    assert values("qmq_group_lag_messages", **GROUP) == 6
    shown = Values(generate_latest(registry_of(mq)).decode())
    assert shown("qmq_client_received_messages_total", **GROUP) == 6
    assert shown("qmq_client_held_messages", **GROUP) == 6


def registry_of(mq: qmq.Client) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(mq.metrics)
    return registry


async def test_a_pause_is_shown_by_broker_and_metaserver(metered: Node, mq: qmq.Client) -> None:
    await mq.send("flights", b"x")
    async with mq.consumer("flights", "ops") as consumer:
        await consumer.__anext__()
        await once(metered, "qmq_group_paused", 0, **GROUP)
        await mq.metadata.pause_group("flights", "ops")
        values = await once(metered, "qmq_group_paused", 1, **GROUP)
        assert values("qmq_pauses", kind="group") == 1
        assert values("qmq_pauses", kind="client") == 0


@pytest.mark.parametrize(
    ("host", "named", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.77.0.1", "", "127.77.0.1"),
        ("0.0.0.0", "", "127.0.0.1"),
        ("10.0.0.7", "", "127.0.0.1"),
        ("broker0", "", "127.0.0.1"),
        ("unix:/run/qmq/a", "", "127.0.0.1"),
        ("10.0.0.7", "10.0.0.7", "10.0.0.7"),
        ("unix:/run/qmq/a", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_metrics_are_served_to_this_machine_only_unless_an_address_is_named(
    host: str, named: str, address: str
) -> None:
    assert metrics_host(host, named) == address


async def test_metrics_are_served_where_the_operator_says(tmp_path: Path) -> None:
    async with running(
        replace(node_config(tmp_path), metrics_port=0, metrics_host="127.0.0.2")
    ) as node:
        assert node.metrics is not None
        assert node.metrics.address.startswith("127.0.0.2:")
        _, writer = await asyncio.open_connection("127.0.0.2", node.metrics.port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", node.metrics.port)


async def test_a_batch_sent_twice_is_stored_once_and_old_batches_are_not_counted_again(
    tmp_path: Path,
) -> None:
    config = replace(node_config(tmp_path / "node"), metrics_port=0)
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send_many("flights", [b"x"] * 5)
        assert (await page(node))("qmq_stored_messages_total", subject="flights") == 5
    async with running(config) as node, qmq.connect(node.address) as mq:
        values = await page(node)
        assert values.rows("qmq_stored_messages_total") == []
        assert values("qmq_kept_messages", subject="flights") == 5
        await mq.send("flights", b"y")
        assert (await page(node))("qmq_stored_messages_total", subject="flights") == 1


async def test_refused_requests_are_counted_by_error(metered: Node, mq: qmq.Client) -> None:
    await mq.send("flights", b"x")
    await mq.metadata.set_group_mode("broker-0", "read-only")
    await eventually(lambda: metered.broker.is_read_only)
    # Past the client, which sends nothing to a group that it knows to be read-only.
    connection = await connect(metered.data_address, "test")
    batch = b"".join(
        encode(b"flights", Columns([b"y"]), producer_id=1, batch_sequence=0, create_time_ms=1)
    )
    with pytest.raises(ReadOnly):
        await connection.call(FrameKind.PRODUCE, batch, timeout_s=10)
    connection.close()
    await connection.wait_closed()
    values = await page(metered)
    assert values("qmq_refused_requests_total", error="ReadOnly", broker_group="broker-0") >= 1
    assert values("qmq_read_only", broker_group="broker-0") == 1


async def test_a_client_that_does_not_read_its_answers_is_shown(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send("flights", b"x")
    (connection,) = metered.running.data.open_connections
    connection.stream.pause_writing()
    assert (await page(metered))("qmq_unread_connections", broker_group="broker-0") == 1
    connection.stream.resume_writing()
    values = await page(metered)
    assert values("qmq_unread_connections", broker_group="broker-0") == 0
    assert values("qmq_unanswered_bytes", broker_group="broker-0") == 0


class _Slow:
    """A committer that has not heard from a majority yet."""

    def written(self, index: int) -> None: ...

    def stored(self, index: int) -> None: ...


async def test_batches_that_wait_for_a_commit_are_shown_as_bytes(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send("flights", b"x")
    metered.store.commits_at_once = False
    metered.broker.committer = _Slow()
    sending = asyncio.create_task(mq.send("flights", b"y" * 1000))
    async with asyncio.timeout(20):
        while (await page(metered))("qmq_unanswered_bytes", broker_group="broker-0") < 1000:
            await asyncio.sleep(0.01)
    metered.broker.commit(metered.store.index)
    await sending
    values = await page(metered)
    assert values("qmq_unanswered_bytes", broker_group="broker-0") == 0
    assert values("qmq_commit_seconds_count", broker_group="broker-0") == 1


async def test_delayed_messages_are_shown_from_being_stored_to_being_delivered(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send("flights", b"soon", delay=timedelta(milliseconds=200))
    later = await mq.send("flights", b"later", delay=timedelta(hours=5))
    gone = await mq.send("flights", b"never", delay=timedelta(hours=5))
    moved = await mq.send("flights", b"moved", delay=timedelta(hours=5))
    assert later.delayed_id is not None
    assert gone.delayed_id is not None
    assert moved.delayed_id is not None
    await mq.delayed.cancel(gone.delayed_id)
    await mq.delayed.cancel(gone.delayed_id)
    await mq.delayed.move(moved.delayed_id, timedelta(hours=6))
    values = await once(metered, "qmq_delay_dispatched_messages_total", 1, **DELAYED)
    assert values("qmq_stored_messages_total", subject="flights", **DELAYED) == 4
    # delivered is counted when the broker has the message, pending falls when the delay group has
    # written that down
    values = await once(metered, "qmq_delay_pending_messages", 2, **DELAYED)
    assert values("qmq_delay_cancelled_messages_total", **DELAYED) == 1
    assert values("qmq_delay_moved_messages_total", **DELAYED) == 1
    assert values("qmq_delay_wheel_messages", **DELAYED) == 0
    assert values("qmq_delay_lateness_seconds_count", **DELAYED) == 1
    assert values("qmq_delay_lateness_seconds_bucket", le="+Inf", **DELAYED) == 1
    assert values("qmq_delay_lateness_seconds_sum", **DELAYED) > 0
    assert values("qmq_delay_waiting_messages", **DELAYED) == 0
    assert values("qmq_delay_schedule_bytes", **DELAYED) > 0
    # a page is not of one moment
    await once(metered, "qmq_stored_messages_total", 1, subject="flights", broker_group="broker-0")


async def test_a_node_shows_what_the_table_says_and_nothing_else(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send("flights", b"x")
    roles = figures_by_role()
    of_servers = {
        suffixed(figure.kind, figure.name)
        for role in ("broker", "delay", "meta")
        for figure in roles[role]
    }
    values = await page(metered)
    own = {
        name
        for name in values.names
        if name.startswith("qmq_") and not name.endswith(("_bucket", "_sum"))
    }
    assert own <= of_servers
    families = set(values.families) | {f"{name}_total" for name in values.families}
    assert {
        figure.name for role in ("broker", "delay", "meta") for figure in roles[role]
    } - families <= {
        "qmq_delay_horizon_timestamp_seconds",  # not before the clock has settled
        "qmq_certificate_expires_seconds",  # with TLS only
        *[figure.name for figure in TieringSource.figures],  # with an object store only
    }


async def test_an_ordered_subject_shows_its_route_its_lanes_and_what_is_parked(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig("orders", order=qmq.Order.STRICT, logical_partitions=16), partitions=2
    )
    for number in range(8):
        await mq.send("orders", b"x", key=f"k{number}")
    names = {"subject": "orders", "group": "billing"}

    async def handle(message: qmq.OrderedMessage) -> None:
        if message.key == "k3":
            raise ValueError("in this test")

    async with mq.ordered_consumer(
        "orders", "billing", on_failure="park", attempts_max=1, retry_delays_s=(0.01,)
    ) as consumer:
        running_it = asyncio.create_task(consumer.run(handle))
        values = await once(metered, "qmq_group_parked_keys", 1, **names)
        assert values("qmq_group_parked_messages", **names) == 1
        assert values("qmq_group_members", **names) == 1
        assert (
            values("qmq_lanes_granted_total", **names)
            == values("qmq_group_consumers", **names)
            == 2
        )
        values = await once(metered, "qmq_group_lag_messages", 0, **names)
        running_it.cancel()
    assert values("qmq_stored_messages_total", subject="orders", broker_group="broker-0") == 8
    assert values("qmq_pulled_messages_total", **names) == 8
    assert values("qmq_group_waiting_pulls", **names) == 2
    assert values("qmq_route_version", subject="orders") == 1
    assert values("qmq_group_route_version", **names) == 1
    assert values("qmq_subjects", order="strict") == 1
    assert values("qmq_route_changes_pending") == 0


async def test_a_metaserver_shows_groups_requests_and_the_coordination_store(
    metered: Node, mq: qmq.Client
) -> None:
    await mq.send("flights", b"x")
    with pytest.raises(qmq.errors.UnknownSubject):
        await mq.metadata.describe_route("nowhere")
    # the answer leaves before it is counted
    await eventually(lambda: bool(metered.meta.calls.failures))
    values = await page(metered)
    assert values("qmq_broker_group_has_master", broker_group="broker-0") == 1
    assert values("qmq_broker_group_present_replicas", broker_group="delay") == 1
    assert values("qmq_subjects", order="none") == 1
    assert values("qmq_meta_requests_total", method="Locate") >= 1
    assert values("qmq_meta_failures_total", method="DescribeRoute", code="NOT_FOUND") == 1
    assert values("qmq_meta_watchers") == 1
    assert values("qmq_coordination_calls_total", method="txn") > 0
    assert values("qmq_coordination_call_seconds_count") > 0
    assert values("qmq_coordination_failures_total", method="get") == 0
    assert values("qmq_coordination_silent_seconds") < 60


async def test_constant_scraping_does_not_change_the_outcome(metered: Node, mq: qmq.Client) -> None:
    assert metered.metrics is not None
    port = metered.metrics.port
    pages, is_over = 0, False

    async def scrape_on() -> None:
        nonlocal pages
        while not is_over:
            assert (await get(port)).status == 200
            pages += 1

    scraping = asyncio.create_task(scrape_on())
    sent = got = 0
    async with mq.consumer("flights", "ops") as consumer:
        while sent < 2000 or (pages < 2 and not scraping.done()):
            sent += len(await mq.send_many("flights", [b"x"] * 100))
        async for batch in consumer.batches():
            got += len(batch)
            if got == sent:
                break
        is_over = True
        await scraping
    values = await page(metered)
    assert values("qmq_stored_messages_total", subject="flights", broker_group="broker-0") == sent
    assert values("qmq_pulled_messages_total", **GROUP) == sent
    assert values("qmq_retried_messages_total", **GROUP) == 0


async def test_a_flush_and_a_checkpoint_are_shown(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node")
    config = replace(config, metrics_port=0, log=replace(config.log, checkpoint_interval_ms=1))
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send("flights", b"x")
        values = await once(node, "qmq_checkpoints_total", 1)
        assert values("qmq_checkpoint_timestamp_seconds") > 1_700_000_000
        assert values("qmq_flush_seconds_count") >= 1
        values = await once(node, "qmq_unflushed_bytes", 0)
        assert values("qmq_unflushed_age_seconds") == 0
        assert values("qmq_log_bytes", log="message") > 0
        assert values("qmq_disk_free_bytes") > values("qmq_disk_reserved_bytes")


async def test_what_retention_deletes_and_the_scrubber_finds_is_counted(tmp_path: Path) -> None:
    config = node_config(
        tmp_path / "node",
        LogConfig(segment_bytes=1 << 16, retention_ms=1),
        broker=BrokerConfig(retention_interval_ms=1),
    )
    async with running(replace(config, metrics_port=0)) as node, qmq.connect(node.address) as mq:
        for _ in range(10):
            await mq.send("flights", b"x" * 20_000)
        async with asyncio.timeout(20):
            while not (values := await page(node))("qmq_retention_deleted_files_total"):
                await asyncio.sleep(0.05)
        assert values("qmq_kept_messages", subject="flights") == 0
        assert values("qmq_stored_messages_total", subject="flights") == 10
        node.broker.counters.damaged += (
            1  # as the scrubber counts it: tests/qmq/broker/test_unhurried.py
        )
        assert (await page(node))("qmq_scrub_damaged_entries_total") == 1


class AheadClock(SystemClock):
    """The machine's clock, set ahead by a test."""

    ahead_ms = 0

    def time_ms(self) -> int:
        return super().time_ms() + self.ahead_ms

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


async def test_consumers_and_lanes_that_were_silent_too_long_are_counted(tmp_path: Path) -> None:
    clock = AheadClock()
    async with (
        running(replace(node_config(tmp_path), metrics_port=0), clock) as node,
        qmq.connect(node.address) as mq,
    ):
        await mq.metadata.create_subject(
            qmq.SubjectConfig("orders", order=qmq.Order.STRICT, logical_partitions=16)
        )
        await mq.send("orders", b"x", key="k")
        await mq.send("flights", b"x")
        consumer, ordered = mq.consumer("flights", "ops"), mq.ordered_consumer("orders", "billing")
        await consumer.__anext__()
        await ordered.__anext__()
        clock.ahead_ms = 10_000_000
        node.broker.tick()
        values = await page(node)
        assert values("qmq_leases_lost_total", **GROUP) == 1
        assert values("qmq_leases_lost_total", subject="orders", group="billing") == 1


async def test_a_node_listens_only_on_the_configured_ports(node: Node) -> None:
    assert node.metrics is None
