"""RocketMQ's own clients for Java, Node, Rust and Go, as they are, against a gateway: each runs its
programs in one process.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import gateway_stub
import pytest
from gateway_stub import MODULES, QUICK_START, GatewayStub, gateway_on, needs_java, needs_node
from system.gateway_processes import CACHE, PROGRAMS, java

from qmq.cli.gateway import GatewayOptions
from qmq.gateway.config import GatewayConfig
from qmq.gateway.sending import TransactionTiming
from qmq.security.certificates import create_authority, issue
from qmq.testing import TestCluster

# Starting a JVM and its client takes longer than what is tested.
pytestmark = pytest.mark.long

RUST_PROGRAMS: Final = CACHE / "rust" / "debug" / "rocketmq_programs"
GO_PROGRAMS: Final = CACHE / "go" / "rocketmq_programs"
PROGRAM_S: Final = 240
COUNT: Final = 20
CONFIG: Final = GatewayConfig(
    port=0, sweep_ms=10, transactions=TransactionTiming(first_check_ms=500, look_ms=100)
)

NORMAL: Final = ("normal_producer", "normal", "simple_consumer", "normal")
FIFO: Final = ("fifo_producer", "fifo", "simple_consumer", "fifo")

needs_rust = pytest.mark.skipif(
    not RUST_PROGRAMS.is_file(), reason="needs Rust, and scripts/rocketmq_clients"
)
needs_go = pytest.mark.skipif(
    not GO_PROGRAMS.is_file(), reason="needs Go, and scripts/rocketmq_clients"
)


class Seen(NamedTuple):
    """A program's line of output about a message."""

    id: str
    body: str = ""
    tag: str = ""
    group: str = ""
    attempt: str = ""


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with TestCluster() as cluster, gateway_on(cluster, CONFIG) as found:
        yield found


async def run(command: list[str], home: Path) -> list[tuple[str, list[Seen]]]:
    """The messages that each program of a process received."""
    environment = {**os.environ, "HOME": str(home)}  # there the clients write their logs
    pipe = asyncio.subprocess.PIPE
    # a warning does not cut a line
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=pipe
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), PROGRAM_S)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, (out + errors).decode()
    found: list[tuple[str, list[Seen]]] = []
    for kind, *parts in [line.split("\t") for line in out.decode().splitlines()]:
        if kind == "program":
            found.append((parts[0], []))
        elif kind == "result":
            found[-1][1].append(Seen(*parts))
    return found


def check_normal(sent: list[Seen], seen: list[Seen]) -> None:
    assert {each.id for each in seen} == {each.id for each in sent}
    assert {each.tag for each in seen} == {"red"}
    assert sorted(each.attempt for each in seen) == ["1"] * COUNT + ["2"]


def check_order(seen: list[Seen]) -> None:
    """The first message was seen twice, and in its place."""
    bodies: dict[str, list[int]] = defaultdict(list)
    for each in seen:
        bodies[each.group].append(int(each.body))
    again = bodies[seen[0].group]
    assert again[0] == again[1]
    del again[0]
    assert bodies == {f"group-{number}": list(range(number, COUNT, 3)) for number in range(3)}


def check_pushed(seen: list[Seen]) -> None:
    messages = [each for each in seen if each.attempt]
    assert {each.body for each in messages} == {f"body {number}" for number in range(COUNT)}
    # The listener fails one message. Listeners run in threads, so it need not be the first that is
    # printed.
    attempts = defaultdict[str, list[str]](list)
    for each in messages:
        attempts[each.id].append(each.attempt)
    assert sorted(attempts.values()) == [["1"]] * (COUNT - 1) + [["1", "2"]]


def check_pulled(seen: list[Seen], sent: set[str]) -> None:
    """All messages came, no matter what groups have consumed, and the offset behind the last
    message is kept.
    """
    assert {each.body for each in seen if each.id == "pulled"} == sent
    [(_, end, end_offset, *_), (_, updated, *_), (_, kept, kept_offset, *_)] = [
        each for each in seen if each.id in ("end", "updated", "kept")
    ]
    assert (end, updated, kept) == ("OK", "OK", "OK")
    assert end_offset == kept_offset == str(COUNT)


def check_not_pulled(seen: list[Seen]) -> None:
    """Each of the four calls is refused for an ordered topic, and says what to do."""
    assert [(each.id, each.body) for each in seen] == [
        (each, "UNSUPPORTED") for each in ("end", "no more", "updated", "kept")
    ]
    assert "receive from it" in seen[1].tag


@pytest.fixture
async def gateway_with_tls(tmp_path: Path) -> AsyncIterator[GatewayStub]:
    """A gateway with TLS, which the Java client uses by default, and plain text at the same
    port.
    """
    create_authority(tmp_path / "certs")
    made = issue(tmp_path / "certs", "gateway", "node", ["127.0.0.1"])
    network = GatewayOptions(tls_cert=made.cert, tls_key=made.key).network()
    config = replace(CONFIG, takes_plaintext=True)
    async with TestCluster() as cluster, gateway_on(cluster, config, network=network) as found:
        yield found


@needs_java
async def test_the_java_clients_programs_see_all_their_messages(
    gateway_with_tls: GatewayStub, tmp_path: Path
) -> None:
    gateway = gateway_with_tls
    await gateway.mq.send_many("pushed", [b"body %d" % number for number in range(COUNT)])
    names = ("tls", "true", *NORMAL[:2], "tls", "false", *NORMAL[2:], *FIFO[:2], "tls", "true")
    more = ("delay_producer", "delayed", "simple_consumer", "delayed", "push_consumer", "pushed")
    last = ("transaction_producer", "transactions", "simple_consumer", "transactions")
    pulls = ("pull_consumer", "normal", "pull_consumer", "fifo")
    command = [
        *java("RocketmqPrograms", QUICK_START),
        f"127.0.0.1:{gateway.gateway.port}",
        *(*names, *FIFO[2:], *more, *last, *pulls),
    ]
    told = [seen for name, seen in await run(command, tmp_path) if name != "tls"]
    check_normal(told[0], told[1])
    check_order(told[3])
    assert [(each.body, each.attempt) for each in told[5]] == [("soon", "1"), ("soon", "2")]
    delayed = {what: named for what, named, *_ in told[4]}
    assert delayed["recalled"] == delayed["late"]
    check_pushed(told[6])
    ids = {what: named for what, named, *_ in told[7]}
    assert ids["checked"] == ids["forget"]
    assert ids["in time"] == "true"
    check_pulled(told[9], {each.id for each in told[0]})
    check_not_pulled(told[10])
    received = {each.id for each in told[8]}
    assert received == {ids["commit"], ids["forget"]}
    gateway_stub.check_column(gateway.gateway.counters.counts, "JAVA")


@needs_node
async def test_the_node_clients_programs_see_all_their_messages(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    await gateway.mq.send_many("pushed", [b"body %d" % number for number in range(COUNT)])
    command = [
        "node",
        str(PROGRAMS / "rocketmq_programs.mjs"),
        str(MODULES),
        f"127.0.0.1:{gateway.gateway.port}",
        *NORMAL,
        *FIFO,
    ]
    told = [seen for _, seen in await run([*command, "push_consumer", "pushed"], tmp_path)]
    check_normal(told[0], told[1])
    check_order(told[3])
    check_pushed(told[4])
    gateway_stub.check_column(gateway.gateway.counters.counts, "HTTP")


@needs_rust
async def test_the_rust_clients_programs_see_all_their_messages(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    more = ("delay_producer", "delayed", "simple_consumer", "delayed")
    last = ("transaction_producer", "transactions", "simple_consumer", "transactions")
    command = [
        str(RUST_PROGRAMS),
        f"127.0.0.1:{gateway.gateway.port}",
        *NORMAL,
        *FIFO,
        *more,
        *last,
    ]
    told = [seen for _, seen in await run(command, tmp_path)]
    assert {each.id for each in told[1]} == {each.id for each in told[0]}
    assert {each.tag for each in told[1]} == {"red"}
    bodies = [
        [int(each.body) for each in told[3] if each.group == f"group-{number}"]
        for number in range(3)
    ]
    assert bodies == [list(range(number, COUNT, 3)) for number in range(3)]
    assert [(each.body, each.attempt) for each in told[5]] == [("soon", "1")]
    ids = {what: named for what, named, *_ in told[6]}
    assert (ids["checked"], ids["in time"]) == (ids["forget"], "true")
    assert {each.id for each in told[7]} == {ids["commit"], ids["forget"]}
    gateway_stub.check_column(gateway.gateway.counters.counts, "RUST")


@needs_go
async def test_the_go_clients_programs_see_all_their_messages(
    gateway: GatewayStub, tmp_path: Path
) -> None:
    await gateway.mq.send_many("pushed", [b"body %d" % number for number in range(COUNT)])
    more = ("delay_producer", "delayed", "simple_consumer", "delayed", "push_consumer", "pushed")
    last = ("transaction_producer", "transactions", "simple_consumer", "transactions")
    command = [str(GO_PROGRAMS), f"127.0.0.1:{gateway.gateway.port}", *NORMAL, *FIFO, *more, *last]
    told = [seen for _, seen in await run(command, tmp_path)]
    check_normal(told[0], told[1])
    check_order(told[3])
    delayed = {what: named for what, named, *_ in told[4]}
    assert delayed["recalled"] == delayed["late"]
    assert [(each.body, each.attempt) for each in told[5]] == [("soon", "1"), ("soon", "2")]
    check_pushed(told[6])
    ids = {what: named for what, named, *_ in told[7]}
    assert (ids["checked"], ids["in time"]) == (ids["forget"], "true")
    assert {each.id for each in told[8]} == {ids["commit"], ids["forget"]}
    gateway_stub.check_column(gateway.gateway.counters.counts, "GO")
