"""A delay group of three replicas: what the node puts together."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.broker_groups import DelaySettings
from support import eventually
from support.clusters import NAMES, SETTINGS, delay_config, replica_config, running_delay
from support.stores import FaultyStore

import qmq
from qmq.errors import InvalidArgument
from qmq.node.broker import broker_node
from qmq.node.delay import delay_node
from qmq.node.process import Environment, NodeTiming

SOON = timedelta(milliseconds=300)
LATER = timedelta(hours=30)


async def test_every_replica_has_the_whole_schedule_and_what_is_due_is_delivered_once(
    tmp_path: Path,
) -> None:
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(100)], delays=SOON)
        await mq.send_many("s", [b"%d" % number for number in range(500)], delays=LATER)
        async with mq.consumer("s", "g") as consumer:
            found = []
            while len(found) < 100:
                got = await consumer.pull(100, timedelta(seconds=10))
                found += [message.body for message in got]
                await got.ack_sync()
        assert sorted(found, key=int) == [b"%d" % number for number in range(100)]
        master = (await cluster.master()).config.replica
        await eventually(
            lambda: all(cluster.pending(name) == cluster.pending(master) for name in NAMES)
        )
        assert sum(cluster.pending(master).values()) == 500
        assert cluster.delivered("s") == 100


async def test_a_master_that_stops_hands_over_and_the_next_one_delivers(tmp_path: Path) -> None:
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send_many(
            "s", [b"%d" % number for number in range(200)], delays=timedelta(seconds=1.5)
        )
        first = (await cluster.master()).config.replica
        await cluster.stop(first)
        await cluster.master(other_than=first)
        await eventually(lambda: cluster.delivered("s") >= 200)
        await cluster.start(first)
        await eventually(
            lambda: cluster.nodes[first].driver.core.state.commit > 0 and not cluster.pending(first)
        )
        assert cluster.delivered("s") == 200


async def test_delivery_needs_no_metaserver(tmp_path: Path) -> None:
    async with running_delay(tmp_path) as (cluster, address):
        async with qmq.connect(address) as mq:
            await mq.send_many("s", [b"1", b"2"], delays=timedelta(seconds=1))
        await cluster.stop_meta()
        await eventually(lambda: cluster.delivered("s") == 2)


@pytest.mark.sampled
async def test_a_whole_group_that_was_stopped_delivers_what_became_due_meanwhile(
    tmp_path: Path,
) -> None:
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(50)], delays=SOON * 2)
        for name in NAMES:
            await cluster.stop(name)
        assert cluster.delivered("s") == 0
        for name in NAMES:
            await cluster.start(name)
        await eventually(lambda: cluster.delivered("s") == 50)


async def test_a_delayed_message_sent_to_a_real_time_broker_is_refused(tmp_path: Path) -> None:
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send("s", b"now")
        with pytest.raises(InvalidArgument, match="delay group"):
            cluster.broker.broker.produce(*_produce(b"later", due_ms=1))


def _produce(body: bytes, *, due_ms: int) -> tuple[object, int, memoryview]:
    from qmq.wire.batch import encode
    from qmq.wire.batch_columns import Columns

    envelope, region = encode(
        b"s",
        Columns([body], due_times_ms=[due_ms]),
        producer_id=1,
        batch_sequence=0,
        create_time_ms=1,
    )
    return object(), 1, memoryview(envelope + region)


async def test_a_drained_delay_group_takes_nothing_new_and_delivers_what_it_has(
    tmp_path: Path,
) -> None:
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send("s", b"1", delay=timedelta(seconds=1))
        await mq.metadata.set_group_mode("d", "read-only")
        await eventually(lambda: all(node.broker.is_read_only for node in cluster.nodes.values()))
        await eventually(lambda: cluster.delivered("s") == 1)


# --- of which kind a group is ---------------------------------------------------------------------


async def test_replicas_that_disagree_on_the_group_are_refused_and_the_group_continues(
    tmp_path: Path,
) -> None:
    async with running_delay(tmp_path) as (cluster, _):
        other = DelaySettings(SETTINGS.bucket_ms // 2, SETTINGS.delay_ms_max)
        longer = DelaySettings(SETTINGS.bucket_ms, SETTINGS.delay_ms_max + 1)
        for settings in (other, longer):
            with pytest.raises(InvalidArgument, match="was created with"):
                await delay_node(
                    delay_config(tmp_path / "new", "new", settings=settings), cluster.store
                ).start()
        with pytest.raises(InvalidArgument, match="d is a delay group"):
            await broker_node(
                replica_config(tmp_path, "new", ("new",), group="d"), cluster.store
            ).start()
        with pytest.raises(InvalidArgument, match="g is a broker group"):
            await delay_node(delay_config(tmp_path / "new", "x", group="g"), cluster.store).start()
        await cluster.master()
        assert cluster.view.group("d").delay == SETTINGS
        assert cluster.view.group("g").delay is None


async def test_a_replica_keeps_to_its_groups_settings_while_the_store_is_away(
    tmp_path: Path,
) -> None:
    environment = Environment(node_timing=NodeTiming(known_wait_s=0.05))
    async with running_delay(tmp_path) as (cluster, _):
        await eventually(lambda: cluster.nodes["b"].driver.identity.membership != "")
        await cluster.stop("b")
        changed = replace(
            delay_config(tmp_path, "b"), settings=DelaySettings(1_800_000, SETTINGS.delay_ms_max)
        )
        silent = FaultyStore(cluster.store)
        silent.cut("list")
        with pytest.raises(InvalidArgument, match="was created with QMQ_BUCKET=60m"):
            await delay_node(changed, silent, environment=environment).start()
        with pytest.raises(InvalidArgument, match="is a delay group"):
            await broker_node(
                replica_config(tmp_path, "b", ("b",), group="d"), silent, environment=environment
            ).start()


@pytest.mark.parametrize("bucket_ms", [60_000, 7 * 60_000, 48 * 3_600_000])
def test_impossible_buckets_are_refused_before_anything_is_opened(
    tmp_path: Path, bucket_ms: int
) -> None:
    with pytest.raises(InvalidArgument, match="5 minutes to 24 hours"):
        delay_node(delay_config(tmp_path, "a", settings=DelaySettings(bucket_ms, 1)))
    assert list(tmp_path.iterdir()) == []
