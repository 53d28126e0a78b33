"""A name of a server that has no address is said in one sentence, by every call and command, and none hangs.

`.invalid` is reserved for names that never have an address (RFC 2606).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import cli_process
import pytest
from support import node_config, running

import qmq
from qmq.client.client_timing import ClientTiming
from qmq.client.links import Links
from qmq.client.route_book import Master
from qmq.errors import NameUnresolved, QmqError, UnknownHost
from qmq.network import NamePatience

NOWHERE = "nowhere.invalid"
PATIENCE_S = ClientTiming().unresolved_s
SHORT = ClientTiming(unresolved_s=0.2)
Call = Callable[[qmq.Client], Awaitable[object]]


async def consume(mq: qmq.Client) -> object:
    return await anext(mq.consumer("s", group="g"))


async def consume_ordered(mq: qmq.Client) -> object:
    return await anext(mq.ordered_consumer("keys", group="g"))


async def browse(mq: qmq.Client) -> object:
    return [each async for each in mq.browse("s")]


async def produce(mq: qmq.Client) -> object:
    producer = mq.producer("s")
    ticket = producer.send(b"x")
    await producer.flush()
    return await ticket


CALLS: dict[str, Call] = {
    "send": lambda mq: mq.send("s", b"x"),
    "send delayed": lambda mq: mq.send("s", b"x", delay=timedelta(hours=1)),
    "send ordered": lambda mq: mq.send("keys", b"x", key="k"),
    "produce": produce,
    "consume": consume,
    "consume ordered": consume_ordered,
    "browse": browse,
}


@asynccontextmanager
async def misnamed(tmp_path: Path) -> AsyncIterator[str]:
    """The metaserver of a node whose broker and delay group tell clients a name that has no address."""
    async with running(replace(node_config(tmp_path, delay=True), advertise=NOWHERE)) as node:
        address = f"127.0.0.1:{node.meta_port}"
        async with qmq.connect(address) as mq:
            await mq.metadata.create_subject(qmq.SubjectConfig("s"))
            await mq.metadata.create_subject(qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=64), partitions=1)
        yield address


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_names_the_broker_that_cannot_be_resolved_and_close_ends(tmp_path: Path, call: str) -> None:
    async with misnamed(tmp_path) as address, qmq.Client(address, timing=SHORT) as mq:
        with pytest.raises(UnknownHost, match=f"{NOWHERE}:[0-9]+ cannot be resolved .*, where broker group .* says it is: .*QMQ_ADVERTISE"):
            await CALLS[call](mq)


async def test_a_client_that_is_closed_while_it_waits_for_a_name_ends(tmp_path: Path) -> None:
    async with misnamed(tmp_path) as address:
        async with qmq.Client(address, timing=SHORT) as mq:
            producer = mq.producer("s")
            ticket = producer.send(b"x")
            with pytest.raises(UnknownHost):
                await producer.close()
        with pytest.raises(UnknownHost):
            await ticket


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_names_the_metaserver_that_cannot_be_resolved(call: str) -> None:
    async with qmq.Client(f"{NOWHERE}:20880", timing=SHORT) as mq:
        with pytest.raises(QmqError, match=f"{NOWHERE}:20880 cannot be resolved"):
            await CALLS[call](mq)


COMMANDS = [
    "produce s",
    "consume s -g g -n 1 --idle 30",
    "subject list",
    "cluster status",
    "group list",
    "whoami",
    "doctor",
    "delay list",
    "acl list",
    "message find s 0",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_names_the_metaserver_that_cannot_be_resolved(words: str) -> None:
    found = cli_process.run(tuple(words.split()), {**os.environ, "QMQ_SERVER": f"{NOWHERE}:20880"}, b"x\n")
    assert found.returncode != 0
    assert re.search(f"{NOWHERE}:[0-9]+ cannot be resolved", (found.stdout + found.stderr).decode())


@pytest.mark.parametrize("words", ["produce s", "consume s -g g -n 1 --idle 30", "group list"])
async def test_a_command_names_the_broker_that_cannot_be_resolved(tmp_path: Path, words: str) -> None:
    async with misnamed(tmp_path) as address:
        found = await asyncio.to_thread(cli_process.run, tuple(words.split()), {**os.environ, "QMQ_SERVER": address}, b"x\n")
    assert found.returncode != 0
    assert re.search(f"{NOWHERE}:[0-9]+ cannot be resolved", (found.stdout + found.stderr).decode())


# --- when it is a mistake, and when an outage ------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_patience_ends_for_names_that_never_had_an_address_and_only_then() -> None:
    clock = Clock()
    names = NamePatience(clock, PATIENCE_S)
    names.tries("a:1")
    clock.now_s += PATIENCE_S - 0.1
    names.tries("a:1")
    assert not names.is_over(["a:1"])
    clock.now_s += 0.1
    assert names.is_over(["a:1"])
    assert not names.is_over(["a:1", "b:1"]), "another one was not tried"
    names.found("a:1")
    names.tries("a:1")
    clock.now_s += 10 * PATIENCE_S
    assert not names.is_over(["a:1"]), "it had an address, so DNS is away"


class Masters:
    """A locator that knows all masters."""

    def __init__(self, masters: dict[str, Master]) -> None:
        self._masters = masters

    async def master(self, _subject: str, group: str) -> Master:
        return self._masters[group]

    async def close(self) -> None: ...

    def doubt(self, *_: object) -> None: ...


async def test_a_client_that_reached_a_broker_waits_on_and_logs_the_name_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(node_config(tmp_path)) as node:
        locator: Any = Masters({"good": Master(node.data_address, 1), "lost": Master(f"{NOWHERE}:1", 1)})
        clock = Clock()
        links = Links(locator, "c", now_s=clock)

        async def failure() -> QmqError:
            clock.now_s += PATIENCE_S
            with pytest.raises(QmqError) as found:
                await links.reach("s", "lost")
            return found.value

        try:
            assert isinstance(await failure(), NameUnresolved), "a first try may come too early"
            assert isinstance(await failure(), UnknownHost)
            await links.reach("s", "good")
            assert [type(await failure()) for _ in range(3)] == [NameUnresolved] * 3
        finally:
            await links.close()
    assert len([each for each in caplog.records if each.levelname == "WARNING" and NOWHERE in each.getMessage()]) == 1
