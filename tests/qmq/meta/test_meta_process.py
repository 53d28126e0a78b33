"""`qmq meta` as processes on a real etcd: clients move to the next metaserver, and a signal ends
the process cleanly at any moment.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from meta_support import brokers
from qmq_coordination.etcd.store import EtcdStore
from support.etcd_process import EtcdProcess, free_ports

from qmq.client.metadata.service import MetadataClient
from qmq.errors import CoordinationUnavailable
from qmq.model import SubjectConfig

pytestmark = pytest.mark.sampled


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Meta:
    """A metaserver's process."""

    def __init__(self, *words: str) -> None:
        self.words = words

    async def start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("QMQ_")
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "qmq.cli",
            *self.words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    async def ready(self) -> str:
        """Its address."""
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        found = re.fullmatch(r"qmq meta is ready at (\S+) \(metrics at (\S+)\)\n", line)
        assert found is not None, await self.process.communicate()
        self.metrics = found[2]
        return found[1]

    async def end(self, number: int) -> tuple[int | None, str]:
        """Send a signal; return the exit status and the output."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(30):
            _, errors = await self.process.communicate()
        return self.process.returncode, errors.decode()


@pytest.fixture
async def metas(own_etcd: EtcdProcess) -> AsyncIterator[list[Meta]]:
    """Two metaservers on one etcd."""
    endpoint = own_etcd.endpoint.removeprefix("http://")
    found = [
        Meta("meta", "--etcd", endpoint, "--port", "0", "--metrics-port", "0") for _ in range(2)
    ]
    for each in found:
        await each.start()
    yield found
    for each in found:
        await each.end(signal.SIGKILL)


async def test_clients_go_to_the_other_metaserver_when_one_is_killed(
    own_etcd: EtcdProcess, metas: list[Meta]
) -> None:
    store = EtcdStore([own_etcd.endpoint])
    async with brokers(store, "g1"):
        client = MetadataClient([await each.ready() for each in metas])
        await client.create_subject(SubjectConfig("before"))
        await metas[0].end(signal.SIGKILL)
        for name in ("before", "after"):
            await client.create_subject(SubjectConfig(name))
            assert [route.broker_group for route in (await client.locate(name)).routes] == ["g1"]
        await client.close()
    await store.close()


async def test_known_subjects_are_located_while_etcd_is_away_and_changes_say_why_not(
    own_etcd: EtcdProcess, metas: list[Meta]
) -> None:
    store = EtcdStore([own_etcd.endpoint])
    async with brokers(store, "g1"):
        client = MetadataClient([await metas[0].ready()])
        await client.create_subject(SubjectConfig("known"))
        own_etcd.pause()
        try:
            assert len((await client.locate("known")).routes) == 1
            with pytest.raises(CoordinationUnavailable, match="nothing was changed"):
                await client.locate("unknown", create=True)
        finally:
            own_etcd.resume()
        await client.close()
    await store.close()


async def test_a_signal_ends_it_cleanly_with_watches_open_and_while_it_waits_for_etcd(
    own_etcd: EtcdProcess, metas: list[Meta]
) -> None:
    address = await metas[0].ready()
    health = Meta("health", "meta", metas[0].metrics, "--json")
    await health.start()
    status, _ = await health.end(0)
    assert status == 0
    client = MetadataClient([address])
    watching = aiter(client.watch())
    await anext(watching)
    assert await metas[0].end(signal.SIGTERM) == (0, "")
    await watching.aclose()
    await client.close()
    endpoint = own_etcd.endpoint
    own_etcd.kill()
    port = free_ports(1)[0]
    waiting = Meta("meta", "--etcd", endpoint, "--port", "0", "--metrics-port", str(port))
    await waiting.start()
    assert waiting.process.stderr is not None
    assert b"waiting for the coordination store" in await waiting.process.stderr.readline()
    assert await asyncio.to_thread(get, port, "/livez") == (200, "ok\n")
    assert await asyncio.to_thread(get, port, "/readyz") == (
        503,
        "starting: it waits for the coordination store\n",
    )
    assert (await waiting.end(signal.SIGTERM))[0] == 0


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("meta", "--etcd", ""), 2, "--etcd (QMQ_ETCD) is missing"),
        (("meta", "--etcd", "h:1", "--etcd-ca", "nowhere.pem"), 2, "nowhere.pem is not a file"),
        (("broker",), 2, "--group (QMQ_GROUP)"),
        (("health", "meta", "127.0.0.1:1"), 3, "no answer from 127.0.0.1:1"),
        (("health", "broker", "unix:/q:1"), 2, "give the HOST:PORT of --metrics-port"),
    ],
)
async def test_a_mistake_is_answered_with_what_to_do(
    words: tuple[str, ...], status: int, says: str
) -> None:
    process = Meta(*words)
    await process.start()
    _, errors = await process.process.communicate()
    assert process.process.returncode == status
    assert says in errors.decode().replace("\n", " ")
