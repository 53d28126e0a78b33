"""A cluster leaves nothing behind, does not see other clusters, and is available as a fixture;
servers listen on sockets, and clients find them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support import eventually, node_config, running

import qmq
from qmq.errors import InvalidArgument, NotConnected, StorageError
from qmq.node.replica.node import ReplicaNode
from qmq.process.address import Address, parse
from qmq.rpc.network import NETWORK, choose_port
from qmq.testing import TestCluster, virtual

pytest_plugins = ["pytester"]

SOON = timedelta(seconds=10)


def remains() -> tuple[set[asyncio.Task[object]], int, list[str]]:
    """Things that a cluster might leave behind: tasks, open files, folders."""
    gc.collect()
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("qmq-")]
    return asyncio.all_tasks(), len(os.listdir("/proc/self/fd")), folders


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short path for temporary folders, since sockets need one, and without other tests'
    folders.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


class OfTheTest(Exception):
    """An error raised by a test's body."""


@pytest.mark.parametrize("fault", ["none", "raised", "killed", "cut", "late"])
async def test_a_cluster_leaves_nothing_behind(fault: str, own_temporary_folder: None) -> None:
    async with TestCluster() as first:  # what is made once in a process is there now
        await first.client().send("s", b"1")
    before = remains()
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OfTheTest, TimeoutError):
        async with (
            asyncio.timeout(1_000) as limit,
            TestCluster(brokers=3, clock=virtual()) as cluster,
        ):
            mq = cluster.client()
            consumer = mq.consumer("s", group="g")
            await mq.send("s", b"1")
            await mq.send("s", b"2", delay=timedelta(days=1))
            await anext(aiter(consumer))
            if fault == "killed":
                await cluster.kill(cluster.master())
                mq.producer("s").send(b"on its way")
            if fault == "cut":
                cluster.cut("coordination", "meta")
                cluster.cut(cluster.master())
            if fault == "raised":
                raise OfTheTest
            if fault == "late":
                limit.reschedule(loop.time())
                await asyncio.sleep(1_000)
    assert remains()[0] == before[0]
    assert remains()[2] == []
    await eventually(lambda: remains()[1] <= before[1])  # gRPC closes its sockets a moment later


async def test_two_clusters_in_one_process_do_not_see_each_other() -> None:
    async with TestCluster(clock=virtual()) as one, TestCluster(delay=False) as other:
        mine, theirs = one.client(), other.client()
        await mine.send("s", b"mine")
        await theirs.send("s", b"theirs")
        await one.kill("broker-1")
        assert [m.body for m in await theirs.consumer("s", group="g").pull(10, SOON)] == [b"theirs"]
        await one.restart("broker-1")
        assert [m.body for m in await mine.consumer("s", group="g").pull(10, SOON)] == [b"mine"]


async def test_a_server_that_stops_by_itself_fails_the_test() -> None:
    with pytest.raises(
        StorageError, match="broker-1 stopped by itself: FloatingPointError: of the test"
    ):
        async with TestCluster(delay=False) as cluster:
            node = cluster.machine("broker-1").node
            assert isinstance(node, ReplicaNode)
            node.broker.fatal(FloatingPointError("of the test"))
            with pytest.raises(NotConnected):
                cluster.master()


@pytest.mark.sampled
def test_the_plugin_gives_each_test_a_cluster_as_its_marker_says(pytester: pytest.Pytester) -> None:
    # what the entry point does otherwise
    pytester.makeconftest("from qmq.testing.plugin import pytest_configure, qmq_cluster")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.asyncio
        async def test_one_broker_with_a_clock_that_stands(qmq_cluster):
            assert qmq_cluster.names == ("broker-1", "delay-1", "meta")
            before = qmq_cluster.clock.time_ms()
            await qmq_cluster.clock.advance(hours=1)
            assert qmq_cluster.clock.time_ms() == before + 3_600_000

        @pytest.mark.asyncio
        @pytest.mark.qmq_cluster(brokers=3, delay=False, clock=None)
        async def test_three_brokers_with_the_clock_of_the_machine(qmq_cluster):
            assert qmq_cluster.names == ("broker-1", "broker-2", "broker-3", "meta")
            assert (await qmq_cluster.client().send("s", b"1")).append_time_ms
        """
    )
    result = pytester.runpytest_subprocess(
        "-p",
        "no:xdist",
        "--strict-markers",
        "-W",
        "error",
        "-o",
        "asyncio_mode=strict",
        "-o",
        "asyncio_default_fixture_loop_scope=function",
        timeout=60,
    )
    result.assert_outcomes(passed=2)


async def test_a_client_of_its_own_finds_a_cluster_by_its_socket() -> None:
    async with TestCluster(delay=False) as cluster, qmq.connect(cluster.address) as mq:
        assert cluster.address.startswith("unix:/")
        await mq.send("s", b"1")
        assert [m.body for m in await mq.consumer("s", group="g").pull(1, SOON)] == [b"1"]


async def test_a_node_listens_on_sockets_as_on_ports(tmp_path: Path) -> None:
    config = replace(node_config(tmp_path / "data"), host=f"unix:{tmp_path}/q")
    async with running(config) as node, qmq.connect(node.address) as mq:
        assert node.address == f"unix:{tmp_path}/q:{node.meta_port}"
        await mq.send("s", b"1")
        assert [m.body for m in await mq.consumer("s", group="g").pull(1, SOON)] == [b"1"]
        with pytest.raises(OSError, match="in use by another process"):
            choose_port(config.host, node.meta_port)
    async with running(config) as node, qmq.connect(node.address) as mq:
        assert len(await mq.consumer("s", group="other").pull(1, SOON)) == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("localhost:20880", Address("localhost", 20880)),
        (" [::1]:1 ", Address("[::1]", 1)),
        ("localhost", Address("localhost", 20880)),
        ("unix:/run/qmq/a:1", Address("", 0, "/run/qmq/a:1")),
        ("unix:/run/q.sock", Address("", 0, "/run/q.sock")),
    ],
)
def test_an_address_is_read_as_it_was_written(text: str, place: Address) -> None:
    assert parse(text, 20880) == place
    assert parse(str(place), 20880) == place


@pytest.mark.parametrize(
    "text", ["", ":1", "host:x", "host:65536", "unix:", "unix:here", "unix:/" + "x" * 107]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)


async def test_who_does_not_listen_is_not_connected(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await NETWORK.connect(f"unix:{tmp_path}/nobody:1", asyncio.Protocol)
    async with qmq.connect(f"unix:{tmp_path}/nobody:1") as mq:
        with pytest.raises(NotConnected):
            await mq.metadata.routes("s")
