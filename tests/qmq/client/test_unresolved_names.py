"""A name of a server that has no address is said in one sentence, by every call and command, and
none hangs.

`.invalid` is reserved for names that never have an address (RFC 2606).
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import cli_process, node_config, running
from support.clusters import CALLS, KnownMasters

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master
from qmq.errors import NameUnresolved, QmqError, UnknownHost

NOWHERE = "nowhere.invalid"
PATIENCE_S = ClientTiming().mistake_s
SHORT = ClientTiming(mistake_s=0.2)


@asynccontextmanager
async def misnamed(tmp_path: Path) -> AsyncIterator[str]:
    """The metaserver of a node whose broker and delay group tell clients a name that has no
    address.
    """
    async with running(replace(node_config(tmp_path, delay=True), advertise=NOWHERE)) as node:
        address = f"127.0.0.1:{node.meta_port}"
        async with qmq.connect(address) as mq:
            await mq.metadata.create_subject(qmq.SubjectConfig("s"))
            await mq.metadata.create_subject(
                qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=64),
                partitions=1,
            )
        yield address


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_names_the_broker_that_cannot_be_resolved_and_close_ends(
    tmp_path: Path, call: str
) -> None:
    async with misnamed(tmp_path) as address, qmq.Client(address, timing=SHORT) as mq:
        with pytest.raises(
            UnknownHost,
            match=(
                f"{NOWHERE}:[0-9]+ cannot be resolved .*, where broker group .* says it is: "
                ".*QMQ_ADVERTISE"
            ),
        ):
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


@pytest.mark.parametrize(
    "words",
    ["produce s", "consume s -g g -n 1 --timeout 30", "subject list", "doctor", "delay list"],
)
def test_a_command_names_the_metaserver_that_cannot_be_resolved(words: str) -> None:
    found = cli_process.run(
        tuple(words.split()), {**os.environ, "QMQ_SERVER": f"{NOWHERE}:20880"}, b"x\n"
    )
    assert found.returncode != 0
    assert re.search(f"{NOWHERE}:[0-9]+ cannot be resolved", (found.stdout + found.stderr).decode())


@pytest.mark.parametrize("words", ["produce s", "consume s -g g -n 1 --timeout 30", "group list"])
async def test_a_command_names_the_broker_that_cannot_be_resolved(
    tmp_path: Path, words: str
) -> None:
    async with misnamed(tmp_path) as address:
        found = await asyncio.to_thread(
            cli_process.run, tuple(words.split()), {**os.environ, "QMQ_SERVER": address}, b"x\n"
        )
    assert found.returncode != 0
    assert re.search(f"{NOWHERE}:[0-9]+ cannot be resolved", (found.stdout + found.stderr).decode())


# --- when it is a mistake, and when an outage -----------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_client_that_reached_a_broker_waits_on_and_logs_the_name_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(node_config(tmp_path)) as node:
        locator: Any = KnownMasters(
            {"good": Master(node.data_address, 1), "lost": Master(f"{NOWHERE}:1", 1)}
        )
        clock = Clock()
        links = ConnectionPool(locator, "c", now_s=clock)

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
    assert (
        len(
            [
                each
                for each in caplog.records
                if each.levelname == "WARNING" and NOWHERE in each.getMessage()
            ]
        )
        == 1
    )


SILENT_DNS = """
import asyncio, socket, threading
from qmq.rpc import network
network.RESOLVE_S = 0.1
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
try:
    asyncio.run(network.require_resolvable("broker0.example"))
except socket.gaierror as failure:
    print(failure.strerror)
"""


def test_a_process_that_ends_does_not_wait_for_a_silent_dns() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SILENT_DNS], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout == "DNS does not answer\n"
