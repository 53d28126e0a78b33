"""`qmq dev` has a delay group beside its broker, in the same process and found as a cluster's
is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.broker_groups import DelaySettings, Health
from support import NodeProcess, eventually, node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.errors import InvalidArgument, LogDamaged, NotConnected
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.node.dev_node import Node, NodeConfig


def config(data: Path, log: LogConfig | None = None) -> NodeConfig:
    return node_config(data, log, delay=True, broker=BrokerConfig(retention_interval_ms=50))


async def test_a_delayed_message_is_delivered_and_not_before_it_is_due(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as node, qmq.connect(node.address) as mq:
        receipt = await mq.send("s", b"later", delay=timedelta(milliseconds=700))
        await mq.send("s", b"now")
        async with mq.consumer("s", "g") as consumer:
            found = []
            while len(found) < 2:
                got = await consumer.pull(2, timedelta(seconds=10))
                found += list(got)
                await got.ack_sync()
        assert [message.body for message in found] == [b"now", b"later"]
        # the broker goes by another clock than the delay group
        assert found[1].append_time_ms >= receipt.due_ms - 5


async def test_schedules_survive_a_restart(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as node, qmq.connect(node.address) as mq:
        soon = await mq.send("s", b"soon", delay=timedelta(seconds=1))
        late = await mq.send("s", b"late", delay=timedelta(days=700))
    async with running(config(tmp_path)) as node, qmq.connect(node.address) as mq:
        assert late.delayed_id is not None
        assert soon.delayed_id is not None
        assert (await mq.delayed.show(late.delayed_id)).state == "pending"
        await eventually(
            lambda: (queue := node.store.queue("s", 0)) is not None and queue.next_sequence == 1
        )


async def test_a_delay_server_has_its_own_group_and_leaves_it_at_the_stop(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as node, qmq.connect(node.address) as mq:
        groups = {each.broker_group: each for each in (await mq.metadata.cluster()).groups}
        assert {name: each.is_delay for name, each in groups.items()} == {
            "broker-0": False,
            "delay": True,
        }
        assert groups["delay"].replicas[0].status.is_serving
        await mq.send("s", b"1")
        assert [each.broker_group for each in (await mq.metadata.locate("s")).routes] == [
            "broker-0"
        ]
        state = node.view.group("delay")
        assert (state.health, state.delay) == (Health.READ_WRITE, node.config.delay_settings)


async def test_without_a_delay_group_nothing_of_one_is_there(tmp_path: Path) -> None:
    async with running(node_config(tmp_path, delay=False)) as node, qmq.connect(node.address) as mq:
        assert [each.broker_group for each in (await mq.metadata.cluster()).groups] == ["broker-0"]
        await mq.send("s", b"1")
        with pytest.raises(NotConnected, match="there is no delay group"):
            await mq.metadata.routes("s", delayed=True)
        assert not (tmp_path / "delay").exists()


async def test_other_settings_than_the_folders_are_refused_and_nothing_stays_locked(
    tmp_path: Path,
) -> None:
    async with running(config(tmp_path)):
        pass
    other = replace(config(tmp_path), delay_settings=DelaySettings(1_800_000, 10**10))
    with pytest.raises(InvalidArgument, match="was created with"):
        await Node(other).start()
    with pytest.raises(InvalidArgument, match="broker-0 is a broker group"):
        await Node(replace(config(tmp_path), delay_group="broker-0")).start()
    with pytest.raises(InvalidArgument, match="5 minutes to 24 hours"):
        await Node(replace(config(tmp_path), delay_settings=DelaySettings(1, 1))).start()
    async with running(config(tmp_path)) as node:
        assert node.delay is not None


async def test_an_incomplete_schedule_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """No other replica has the schedule."""
    log = LogConfig(
        segment_bytes=64 * KIB,
        action_segment_bytes=64 * KIB,
        retention_ms=1,
        checkpoint_interval_ms=100,
    )
    async with running(config(tmp_path, log)) as node, qmq.connect(node.address) as mq:
        for _ in range(4):
            await mq.send_many("s", [b"x" * KIB] * 60, delays=timedelta(days=1))
        assert node.delay is not None
        messages = node.delay.broker.store.messages
        await eventually(lambda: messages.start > 0)
    shutil.rmtree(tmp_path / "delay" / "checkpoint")
    for _ in range(2):
        with pytest.raises(LogDamaged, match="no longer reaches back"):
            await Node(config(tmp_path, log)).start()


@pytest.mark.sampled
async def test_a_killed_node_delivers_after_its_restart_what_it_had_acknowledged(
    tmp_path: Path,
) -> None:
    process = NodeProcess(tmp_path)
    process.variables = {"QMQ_TICK_MS": "50"}
    try:
        async with qmq.connect(process.start()) as mq:
            await mq.send("s", b"soon", delay=timedelta(seconds=1))
        process.kill()
        async with qmq.connect(process.start()) as mq, mq.consumer("s", "g") as consumer:
            assert [message.body for message in await consumer.pull(1, timedelta(seconds=20))] == [
                b"soon"
            ]
        groups = json.loads(_cluster_status(process, "--json"))["groups"]
        assert [(each["group"], each["is_delay"]) for each in groups] == [
            ("broker-0", False),
            ("delay", True),
        ]
        assert "delay group" in _cluster_status(process)
    finally:
        process.stop()


def _cluster_status(process: NodeProcess, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "qmq.cli",
        "cluster",
        "status",
        "--server",
        process.address,
        *options,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
