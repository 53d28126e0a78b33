"""`qmq browse` and `qmq tail`, as typed, against a node in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support import NodeProcess

import qmq.blocking


def command(node: NodeProcess, words: str) -> list[str]:
    return [sys.executable, "-m", "qmq.cli", *words.split(), "--server", node.address]


def said(node: NodeProcess, words: str) -> list[str]:
    done = subprocess.run(command(node, words), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def orders(node_process: NodeProcess) -> NodeProcess:
    """A node with five orders and a message that is no text."""
    node_process.start()
    with qmq.blocking.connect(node_process.address) as mq:
        for number in range(5):
            mq.send(
                "orders",
                {"total": number * 500},
                key=f"k{number % 2}",
                tags=["new"] if number else [],
                headers={"by": "shop"},
            )
        mq.send("orders", b"\xff\x00")
    return node_process


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Popen's own block waits for the process, also where the test has failed."""
    try:
        yield
    finally:
        process.kill()


def bodies(lines: Sequence[str]) -> list[object]:
    return [json.loads(line)["body"] for line in lines]


def test_browse_shows_stored_messages_and_selects_them(orders: NodeProcess) -> None:
    found = [json.loads(line) for line in said(orders, "browse orders --json")]
    assert [each["body"] for each in found] == [
        *[f'{{"total":{number * 500}}}' for number in range(5)],
        None,
    ]
    assert found[-1]["body_base64"] == "/wA="
    first = found[0]
    assert (first["sequence"], first["key"], first["headers"], first["broker_group"]) == (
        0,
        "k0",
        {"by": "shop"},
        "broker-0",
    )
    assert bodies(said(orders, "browse orders --json --key k1")) == [
        '{"total":500}',
        '{"total":1500}',
    ]
    large = bodies(said(orders, "browse orders --json --grep [0-9]{4}"))
    assert large == ['{"total":1000}', '{"total":1500}', '{"total":2000}']
    assert len(said(orders, "browse orders --tag new --limit 2")) == 2
    assert len(said(orders, "browse orders --at 1h")) == 6
    assert said(orders, "browse orders --until 1h") == []
    (line,) = said(orders, "browse orders --limit 1")
    assert line.endswith('broker-0@0  k0  {"total":0}')


def test_a_wrong_expression_or_subject_says_what_to_do(orders: NodeProcess) -> None:
    for words, text in (
        ("browse orders --grep (", "is not a regular expression"),
        ("browse order", "qmq subject list"),
    ):
        done = subprocess.run(command(orders, words), capture_output=True, text=True, check=False)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr


def test_tail_shows_the_newest_and_then_what_comes(orders: NodeProcess) -> None:
    process = subprocess.Popen(
        command(orders, "tail orders --limit 2 --json"), stdout=subprocess.PIPE, text=True
    )
    with process, ending(process):
        assert process.stdout is not None
        assert bodies([process.stdout.readline() for _ in range(2)]) == ['{"total":2000}', None]
        with qmq.blocking.connect(orders.address) as mq:
            mq.send("orders", "later")
        assert bodies([process.stdout.readline()]) == ["later"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
