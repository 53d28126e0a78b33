"""`qmq broker confirm-clock` against a node whose machine's clock leaps."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from support import cli_process, node_config, running

import qmq
from qmq.broker.timekeeper import SteadyClock, boot_ms, wall_ms
from qmq.node.metrics.broker import RETENTION_BEHIND
from qmq.operations.findings import findings
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import Thresholds

LEAP_MS = 30 * 86_400_000


def leaping() -> tuple[SteadyClock, list[int]]:
    """A clock, and how far it is behind: a test sets that to 0."""
    behind_ms = [LEAP_MS]
    return SteadyClock(lambda: wall_ms() - behind_ms[0], boot_ms), behind_ms


async def is_behind(mq: qmq.Client) -> bool:
    return any(
        each.code == "retention-behind"
        for each in findings(await read_snapshot(mq.metadata), None, Thresholds())
    )


async def place_of(mq: qmq.Client, *, is_delay: bool) -> tuple[str, ...]:
    """The command for the replica of the node's broker group or delay group, with the options
    before the verb.
    """
    (group,) = [each for each in (await mq.metadata.cluster()).groups if each.is_delay == is_delay]
    (replica,) = group.replicas
    host, _, port = replica.control_address.rpartition(":")
    role = "delay" if is_delay else "broker"
    return (
        role,
        "--group",
        group.broker_group,
        "--replica",
        replica.replica,
        "--host",
        host,
        "--control-port",
        port,
    )


@pytest.mark.parametrize("is_delay", [False, True], ids=["broker", "delay"])
async def test_an_operator_confirms_a_clock_that_leapt(tmp_path: Path, is_delay: bool) -> None:
    clock, behind_ms = leaping()
    async with (
        running(node_config(tmp_path, delay=is_delay), clock) as node,
        qmq.connect(node.address) as mq,
    ):
        assert not await is_behind(mq)
        behind_ms[0] = 0
        assert await is_behind(mq)
        place = await place_of(mq, is_delay=is_delay)
        replica = place[4]
        (behind_s,) = [
            row[1]
            for reading in node.sources()[1].read()
            if reading and reading.figure is RETENTION_BEHIND
            for row in reading.rows
        ]
        assert behind_s >= LEAP_MS / 1000 - 60

        refused = await asyncio.to_thread(
            cli_process.run, (*place, "confirm-clock"), dict(os.environ), b"other\n"
        )
        assert (refused.returncode, b"nothing was confirmed" in refused.stderr) == (2, True), (
            refused.stderr
        )
        assert clock.step_ms > 0

        done = await asyncio.to_thread(
            cli_process.run,
            (*place, "confirm-clock", "--json"),
            dict(os.environ),
            b"%b\n" % replica.encode(),
        )
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)
        assert (row["group"], row["replica"]) == (place[2], replica)
        assert row["behind_ms"] >= LEAP_MS - 60_000
        assert clock.step_ms == 0
        assert not await is_behind(mq)


async def test_a_clock_is_confirmed_only_by_who_may_operate_the_cluster(tmp_path: Path) -> None:
    clock, behind_ms = leaping()
    async with running(node_config(tmp_path), clock) as node, qmq.connect(node.address) as mq:
        tokens = {
            name: (await mq.access.create_token(name)).token for name in ("op:admin", "op:looker")
        }
        await mq.access.put_rule("op:admin", [], "cluster")
        await mq.access.put_rule("op:looker", ["describe"], "cluster")
        place = await place_of(mq, is_delay=False)
        async with qmq.connect(node.address, token=tokens["op:admin"]) as admin:
            await admin.access.set_mode("enforce")
        behind_ms[0] = 0
        for name, code in (("op:looker", 1), ("op:admin", 0)):
            shown = {**os.environ, "QMQ_TOKEN": tokens[name]}
            done = await asyncio.to_thread(
                cli_process.run, (*place, "confirm-clock", "--yes"), shown, b""
            )
            assert (done.returncode != 0, b"may not operate" in done.stderr) == (
                bool(code),
                bool(code),
            ), done.stderr
            assert (clock.step_ms > 0) is bool(code)
        handed = await asyncio.to_thread(cli_process.run, (*place, "hand-over"), shown, b"")
        assert handed.returncode == 0, handed.stderr
