"""RocketMQ's own Python client, unchanged, against a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gateway_stub
import pytest
import rocketmq_programs
from gateway_stub import GatewayStub, gateway_on

from qmq.cli.gateway import GatewayOptions
from qmq.gateway.config import GatewayConfig
from qmq.gateway.sending import TransactionTiming
from qmq.security.certificates import create_authority, issue
from qmq.testing import TestCluster

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(
        find_spec("rocketmq") is None,
        reason="needs RocketMQ's client: pip install rocketmq-python-client",
    ),
]

PROGRAM_S = 100
CHECKS = TransactionTiming(first_check_ms=500, look_ms=100)


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, GatewayConfig(port=0, sweep_ms=10, transactions=CHECKS)) as found,
    ):
        yield found


async def run(
    program: str,
    gateway: GatewayStub,
    topic: str,
    home: Path,
    group: str = "G",
    ca: Path | None = None,
) -> Any:
    """Run a program and return its output. It uses TLS if certificates are given."""
    environment = {**os.environ, "HOME": str(home)}  # there the client writes its log
    if ca is not None:
        environment |= {"PROGRAM_HAS_TLS": "1", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(ca)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        rocketmq_programs.__file__,
        program,
        f"127.0.0.1:{gateway.gateway.port}",
        topic,
        group,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), PROGRAM_S)
    except TimeoutError:
        process.kill()
        raise
    lines = [each for each in out.decode().splitlines() if each.startswith("result ")]
    assert process.returncode == 0, errors.decode()
    return json.loads(lines[-1].removeprefix("result "))


@pytest.mark.long
async def test_its_calls_are_those_of_the_page(gateway: GatewayStub, tmp_path: Path) -> None:
    for program in ("normal_producer", "simple_consumer"):
        await run(program, gateway, "normal", tmp_path)
    await run("push_consumer", gateway, "normal", tmp_path, "pushed")
    for program, topic in (
        ("fifo_producer", "fifo"),
        ("delay_producer", "delayed"),
        ("transaction_producer", "transactions"),
    ):
        await run(program, gateway, topic, tmp_path)
        await run("simple_consumer", gateway, topic, tmp_path)
    gateway_stub.check_column(gateway.gateway.counters.counts, "PYTHON")


async def test_its_normal_messages_reach_a_consumer_of_its_own(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    ids = await run("normal_producer", gateway, "normal", tmp_path)
    seen = await run("simple_consumer", gateway, "normal", tmp_path)
    assert {each["id"] for each in seen} == set(ids)
    assert not any(each["corrupted"] for each in seen)
    attempts = {each["id"]: each["attempt"] for each in seen}
    assert sorted(attempts.values()) == [1] * (len(ids) - 1) + [2]
    first = next(each for each in seen if each["body"] == "number 0")
    assert first["tag"] == "even"
    assert first["keys"] == ["key-0"]
    assert first["properties"] == {"number": "0"}


async def test_it_comes_with_tls_and_without_to_one_port(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "certs")
    made = issue(tmp_path / "certs", "gateway", "node", ["127.0.0.1"])
    options = GatewayOptions(port=0, tls_cert=made.cert, tls_key=made.key, tls="optional")
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, options.config(), network=options.network()) as gateway,
    ):
        ids = await run("normal_producer", gateway, "normal", tmp_path, ca=authority.cert)
        seen = await run("simple_consumer", gateway, "normal", tmp_path)
        assert {each["id"] for each in seen} == set(ids)


async def test_its_push_consumer_is_handed_a_failed_message_again(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    for number in range(rocketmq_programs.COUNT):
        await gateway.mq.send("pushed", f"body {number}".encode(), tags=["native"])
    seen = await run("push_consumer", gateway, "pushed", tmp_path)
    assert {each["body"] for each in seen} == {
        f"body {number}" for number in range(rocketmq_programs.COUNT)
    }
    assert [each["attempt"] for each in seen if each["body"] == seen[0]["body"]] == [1, 2]


async def test_its_fifo_messages_are_handed_out_in_order(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    await run("fifo_producer", gateway, "fifo", tmp_path)
    seen = await run("simple_consumer", gateway, "fifo", tmp_path)
    orders = {
        group: [int(each["body"]) for each in seen if each["group"] == group]
        for group in ("group-0", "group-1", "group-2")
    }
    again = seen[0]["group"]
    assert orders[again][0] == orders[again][1], (
        "the message that was not acknowledged comes again before what follows it"
    )
    for group, bodies in orders.items():
        expected = list(range(int(group[-1]), rocketmq_programs.COUNT, 3))
        assert (bodies[1:] if group == again else bodies) == expected


async def test_its_delayed_message_can_be_recalled(gateway: GatewayStub, tmp_path: Path) -> None:
    told = await run("delay_producer", gateway, "delayed", tmp_path)
    assert told["recalled"] == told["late"]
    [got] = await gateway.receive("delayed", invisible_s=30, wait_s=20)
    assert (got.body, got.system_properties.message_id) == (b"soon", told["soon"])


async def test_its_producer_is_asked_about_a_transaction_that_it_forgot(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    told = await run("transaction_producer", gateway, "transactions", tmp_path)
    assert set(told["checked"]) == {told["forget"]}
    got = {
        each.system_properties.message_id: each.body
        for each in await gateway.receive_all(2, "transactions", invisible_s=30)
    }
    assert got == {told["commit"]: b"commit", told["forget"]: b"forget"}
    assert not await gateway.receive("transactions", invisible_s=30, wait_s=0.2)
