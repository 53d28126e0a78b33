"""The command line of ordered subjects, as a user types it, against a node process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from support import NodeProcess, cli_process, eventually

from qmq import connect
from qmq.client.consuming.ordered.message import OrderedMessage


def qmq(
    node: NodeProcess, command: str, *more: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a command, given as text, and more words that may hold spaces."""
    environment = {**os.environ, "QMQ_SERVER": node.address, "COLUMNS": "120"}
    return cli_process.run((*command.split(), *more), environment, data)


def found(node: NodeProcess, command: str, *more: str, data: bytes = b"") -> Any:
    done = qmq(node, command, *more, "--json", data=data)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def produce(node: NodeProcess, numbers: Iterable[int], *, keys: int = 20) -> None:
    lines = [json.dumps({"key": f"k{number % keys}", "body": str(number)}) for number in numbers]
    sent = found(node, "produce orders --format json", data="\n".join(lines).encode())
    assert sum(each["messages"] for each in sent) == len(lines)


def consume(node: NodeProcess, group: str, count: int) -> list[dict[str, Any]]:
    done = qmq(node, "consume orders -g", group, "-n", str(count), "--json")
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_key(messages: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {}
    for message in messages:
        seen.setdefault(message["key"], []).append(int(message["body"]))
    return seen


def group_of(node: NodeProcess, name: str) -> dict[str, Any]:
    (group,) = [
        each for each in found(node, "route show orders")["groups"] if each["group"] == name
    ]
    return dict(group)


async def test_a_user_splits_a_half_consumed_partition_and_sees_every_key_in_order(
    node_process: NodeProcess,
) -> None:
    node_process.start()
    assert found(node_process, "subject create orders --order strict --partitions 2") == [
        {"subject": "orders", "order": "strict"}
    ]
    assert {each["order"] for each in found(node_process, "subject list")} == {"strict"}
    produce(node_process, range(400))
    seen = consume(node_process, "billing", 100)
    plan = found(node_process, "route split orders 1 --at 100 --dry-run")
    assert [(each["partition"], each["first"], each["end"]) for each in plan["after"]] == [
        (3, 0, 100),
        (4, 100, 512),
        (2, 512, 1024),
    ]
    assert found(node_process, "route show orders")["version"] == 1
    made = found(node_process, "route split orders 1 --at 100 --reason hot --no-wait")
    assert made["undo"] == plan["undo"] == "qmq route merge orders 3 4 --to broker-0"
    produce(node_process, range(400, 600))
    shown = found(node_process, "route show orders")
    assert [each["partition"] for each in shown["partitions"]] == [3, 4, 2]
    (old,) = shown["older_partitions"]
    assert (old["partition"], old["first"], old["end"], old["state"]) == (1, 0, 512, "sealed")
    assert (
        group_of(node_process, "billing")["version"],
        group_of(node_process, "billing")["left"] > 0,
    ) == (1, True)
    seen += consume(node_process, "billing", 500)
    expected = {f"k{key}": list(range(key, 600, 20)) for key in range(20)}
    assert by_key(seen) == expected
    await eventually(lambda: group_of(node_process, "billing")["version"] == 2)
    (change,) = found(node_process, "route history orders")
    assert (change["kind"], change["sources"], change["reason"]) == ("split", [1], "hot")
    assert 0 <= change["refused_ms"] <= change["refused_ms_max"]
    undone = qmq(node_process, *made["undo"].split()[1:], "--no-wait")
    assert undone.returncode == 0, undone.stderr.decode()
    assert [each["end"] for each in found(node_process, "route show orders")["partitions"]] == [
        512,
        1024,
    ]
    found(node_process, "group reset orders billing --to earliest")
    assert by_key(consume(node_process, "billing", 600)) == expected


async def test_a_change_is_waited_for_until_a_living_consumer_has_continued(
    node_process: NodeProcess,
) -> None:
    node_process.start()
    found(node_process, "subject create orders --order strict --partitions 1")
    produce(node_process, range(100))
    environment = {**os.environ, "QMQ_SERVER": node_process.address}
    command = [sys.executable, "-m", "qmq.cli", "consume", "orders", "-g", "live", "--json"]
    consumer = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert consumer.stdout is not None
    try:
        seen = [json.loads(consumer.stdout.readline()) for _ in range(100)]
        done = qmq(node_process, "route split orders 1 --partitions 3")
        assert done.returncode == 0, done.stderr.decode()
        assert b"group live reads version 2" in done.stderr
        produce(node_process, range(100, 200))
        seen += [json.loads(consumer.stdout.readline()) for _ in range(100)]
    finally:
        consumer.terminate()
        consumer.communicate(timeout=30)
    assert by_key(seen) == {f"k{key}": list(range(key, 200, 20)) for key in range(20)}
    assert {each["route_version"] for each in seen} == {1, 2}


def test_unsupported_options_of_ordered_subjects_are_named(node_process: NodeProcess) -> None:
    node_process.start()
    found(node_process, "subject create orders --order strict")
    found(node_process, "subject create plain")
    produce(node_process, range(10))
    consume(node_process, "billing", 10)
    assert found(node_process, "dlq list orders billing") == []
    assert (
        found(node_process, "route policy orders --enable split_backlog=5000")[0]["split_backlog"]
        == 5000
    )
    assert found(node_process, "route explain orders")["policy"]["is_enabled"] is True
    for command, says in (
        ("route show plain", "is not ordered"),
        ("route move orders 1 --to g9", "there is no broker group g9"),
        ("group reset orders billing --to 5", "the earliest, the latest, or a time"),
        ("consume orders -g billing --tag t", "--tag cannot filter"),
        ("broker drain broker-0", "no other broker group accepts messages"),
    ):
        done = qmq(node_process, command)
        assert (done.returncode, says in done.stderr.decode().replace("\n", " ")) == (2, True), (
            command,
            done.stderr,
        )
    keyless = qmq(node_process, "produce orders", data=b"no key\n")
    assert (keyless.returncode, b"key" in keyless.stderr) == (2, True), keyless.stderr
    assert found(node_process, "broker drain broker-0 --no-move") == [
        {"group": "broker-0", "from": "read-write", "to": "read-only"}
    ]


async def test_a_parked_key_is_listed_replayed_in_order_and_gone(node_process: NodeProcess) -> None:
    address = node_process.start()
    found(node_process, "subject create orders --order strict --partitions 2")
    produce(node_process, range(60))
    handled: list[int] = []

    async def handler(message: OrderedMessage) -> None:
        if message.key == "k7":
            raise ValueError("this key cannot be worked on")
        handled.append(int(message.body))

    async with connect(address) as mq:
        consumer = mq.ordered_consumer(
            "orders", "billing", on_failure="park", attempts_max=1, retry_delays_s=(0.01,)
        )
        working = asyncio.create_task(consumer.run(handler))
        await eventually(lambda: len(handled) == 57)
        await eventually(
            lambda: (
                bool(parked := found(node_process, "dlq list orders billing"))
                and parked[0]["messages"] == 3
            )
        )
        await consumer.close()
        await working
    (shown,) = found(node_process, "dlq show orders billing k7")
    assert (shown["key"], shown["hex"]) == ("k7", "hex:6b37")
    assert group_of(node_process, "billing")["parked_keys"] == 1
    assert found(node_process, "dlq replay orders billing k7")[0]["messages"] == 3
    assert by_key(consume(node_process, "billing", 3)) == {"k7": [7, 27, 47]}
    assert found(node_process, "dlq list orders billing") == []
