"""Calls and connections name the server that they mean; another server at the address refuses, and
the caller looks it up again.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eventually, node_config, running

from qmq.broker.config import BrokerConfig
from qmq.client.connection.connection import ClientTiming, Connection, connect
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master
from qmq.client.metadata.service import MetadataClient
from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.metaservers import Metadata
from qmq.errors import NotConnected, ProtocolViolation, QmqError, WrongServer
from qmq.node.dev_node import Node
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import RenewedChannel, typed_error
from qmq.rpc.network import NETWORK
from qmq.rpc.server import NameCheck, RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import ANY_SERVER, ServerName, always

PARTS = st.sampled_from(["", "a", "b"])
NAMES = st.builds(ServerName, PARTS, PARTS, PARTS)


@given(NAMES, NAMES)
def test_a_server_refuses_exactly_those_names_that_contradict_its_own(
    own: ServerName, meant: ServerName
) -> None:
    pairs = ((own.cluster, meant.cluster), (own.group, meant.group), (own.replica, meant.replica))
    contradicts = any("" not in pair and pair[0] != pair[1] for pair in pairs)
    try:
        own.require(meant)
    except WrongServer:
        assert contradicts
    else:
        assert not contradicts


@given(NAMES)
def test_a_name_is_read_as_it_was_written(name: ServerName) -> None:
    assert ServerName.unpack(name.pack()) == name


@given(st.text(max_size=20))
def test_any_other_text_is_refused_or_a_name(text: str) -> None:
    try:
        ServerName.unpack(text)
    except ProtocolViolation:
        assert text.count("/") != 2


# --- calls ----------------------------------------------------------------------------------------


class Server:
    """A gRPC server with a name, which counts the calls that it executed."""

    def __init__(self, name: ServerName, *, checks: bool = True) -> None:
        """`checks` False plants a bug: the server does not look at the name that a call means."""
        self.name, self.executed, self._checks = name, 0, checks

    async def _count(self, request: bytes, _: Any) -> bytes:
        self.executed += 1
        return self.name.replica.encode()

    async def _stream(self, request: bytes, _: Any) -> AsyncIterator[bytes]:
        self.executed += 1
        yield self.name.replica.encode()

    async def start(self) -> None:
        door = RpcListener(RpcBounds(100, 100))
        server = rpc_server(door, (NameCheck(always(self.name)),) if self._checks else ())
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self._count),
            "Follow": grpc.unary_stream_rpc_method_handler(self._stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
        self.served = await NETWORK.serve(server, "127.0.0.1", 0, door)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.served.port}"


@asynccontextmanager
async def serving(*names: ServerName) -> AsyncIterator[list[Server]]:
    servers = [Server(name) for name in names]
    for each in servers:
        await each.start()
    try:
        yield servers
    finally:
        for each in servers:
            await each.served.stop(None)


A, B = ServerName("c", "g", "a"), ServerName("c", "g", "b")


async def require_refusals(server: Server) -> None:
    """Fails if the server, which is A, executes a call that means B."""
    async with NETWORK.channel(server.address, always(B)) as channel:
        with pytest.raises(grpc.RpcError) as failed:
            await channel.unary_unary("/t/Ask")(b"", timeout=20)
        failure = typed_error(failed.value, server.address)
        assert isinstance(failure, WrongServer)
        assert "replica a of broker group g" in failure.message
        assert "replica b" in failure.message
        with pytest.raises(grpc.RpcError):
            async for _ in channel.unary_stream("/t/Follow")(b"", timeout=20):
                pass
        assert server.executed == 0


async def test_a_call_that_means_another_server_is_not_executed() -> None:
    async with serving(A) as (server,):
        await require_refusals(server)


async def test_a_server_that_does_not_check_the_meant_name_is_found() -> None:
    server = Server(A, checks=False)
    await server.start()
    try:
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            await require_refusals(server)
        assert server.executed == 1
    finally:
        await server.served.stop(None)


@pytest.mark.parametrize("meant", [A, ServerName(group="g"), ServerName("c"), ANY_SERVER])
async def test_calls_that_mean_the_server_or_name_none_are_executed(meant: ServerName) -> None:
    async with serving(A) as (server,), NETWORK.channel(server.address, always(meant)) as channel:
        assert await channel.unary_unary("/t/Ask")(b"", timeout=20) == b"a"
        assert [each async for each in channel.unary_stream("/t/Follow")(b"", timeout=20)] == [b"a"]


class Moving:
    """An address that leads to one server after the other: its first connection to the first, the
    next one to the second.
    """

    def __init__(self, *targets: str) -> None:
        self.targets, self.connections = list(targets), 0
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for each in self._pumps:
            each.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.targets[min(self.connections, len(self.targets) - 1)].rpartition(":")
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        for ends in ((reader, there_writer), (there_reader, writer)):
            self._pumps.add(asyncio.ensure_future(self._pump(*ends)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        finally:
            writer.close()


async def test_a_call_that_another_server_refused_is_repeated_on_a_new_connection() -> None:
    async with serving(A, B) as (a, b):
        async with (
            Moving(a.address, b.address) as address,
            NETWORK.channel(address, always(B)) as channel,
        ):
            assert await channel.unary_unary("/t/Ask")(b"", timeout=20) == b"b"
        assert (a.executed, b.executed) == (0, 1)


async def test_blocking_calls_of_spark_go_to_the_meant_server_too() -> None:
    async with serving(A, B) as (a, b):
        async with Moving(a.address, b.address) as address:
            channel = RenewedChannel(address)

            def ask() -> bytes:
                with channel.calling() as found:
                    return bytes(
                        found.unary_unary("/t/Ask")(
                            b"", timeout=20, metadata=(("qmq-server", B.pack()),)
                        )
                    )

            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(ask)
            assert await asyncio.to_thread(ask) == b"b"
            channel.close()
        assert (a.executed, b.executed) == (0, 1)


class Certificates:
    """Certificates that change whenever a test says so."""

    version = 1

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials()


def test_replaced_channels_are_closed_after_their_last_call() -> None:
    certificates = Certificates()
    channel = RenewedChannel("127.0.0.1:1", certificates)
    for _ in range(5):
        certificates.version += 1
        with channel.calling():
            assert channel.channels == 1
    with channel.calling():
        certificates.version += 1
        with channel.calling():
            assert channel.channels == 2, "a call is under way on the earlier one"
        assert channel.channels == 2
    assert channel.channels == 1
    channel.close()


def test_a_channel_that_reaches_no_server_is_replaced_once_a_second() -> None:
    now = [0.0]
    channel = RenewedChannel("127.0.0.1:1", now_s=lambda: now[0])

    def failed() -> grpc.Channel:
        with pytest.raises(grpc.RpcError), channel.calling() as found:
            found.unary_unary("/t/Ask")(b"", timeout=20)
        return found

    first = failed()
    assert failed() is first
    now[0] = 1.0
    assert failed() is first, "this failure replaces it"
    assert failed() is not first
    assert channel.channels == 1
    channel.close()


# --- data connections and nodes -------------------------------------------------------------------


@asynccontextmanager
async def node_named(folder: Path, name: str) -> AsyncIterator[Node]:
    async with running(node_config(folder, broker=BrokerConfig(name=name))) as node:
        yield node


async def test_a_broker_refuses_data_connections_that_mean_another_replica(tmp_path: Path) -> None:
    async with node_named(tmp_path / "node", "g1") as node:
        cluster = node.view.cluster
        assert cluster
        for meant in (ServerName(cluster, "g1", "g1"), ServerName("", "g1"), ANY_SERVER):
            (await connect(node.data_address, "c", server=meant)).close()
            (
                await asyncio.to_thread(BlockingConnection.connect, node.data_address, server=meant)
            ).close()
        for meant in (
            ServerName(cluster, "g1", "g2"),
            ServerName(cluster, "g2"),
            ServerName("another", "g1", "g1"),
        ):
            with pytest.raises(WrongServer, match="broker group g1"):
                await connect(node.data_address, "c", server=meant)
            with pytest.raises(WrongServer, match="broker group g1"):
                await asyncio.to_thread(BlockingConnection.connect, node.data_address, server=meant)


async def test_a_client_takes_no_answer_of_another_cluster(tmp_path: Path) -> None:
    async with node_named(tmp_path / "two", "g1") as two:
        async with node_named(tmp_path / "one", "g1") as one:
            client, spark = (
                MetadataClient([one.address, two.address]),
                Metadata(f"{one.address},{two.address}", retry_ms=300),
            )
            assert (await client.cluster()).cluster == one.view.cluster
            assert (await asyncio.to_thread(spark.cluster))[0].replicas[
                0
            ].data_address == one.data_address
        with pytest.raises(NotConnected):
            await client.cluster()
        with pytest.raises(NotConnected):
            await asyncio.to_thread(spark.cluster)
        await client.close()
        spark.close()


async def test_a_replica_s_control_port_refuses_calls_that_mean_another_replica(
    tmp_path: Path,
) -> None:
    async with node_named(tmp_path / "node", "g1") as node:
        control = node.view.present("g1")["g1"].control_address
        for meant, is_refused in (
            (ServerName("", "g1", "g1"), False),
            (ServerName("", "g1", "g2"), True),
            (ANY_SERVER, False),
        ):
            async with NETWORK.channel(control, always(meant)) as channel:
                call = control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
                    pb.DescribeReplicaRequest(), timeout=20
                )
                if not is_refused:
                    assert (await call).replica == "g1"
                    continue
                with pytest.raises(grpc.RpcError) as failed:
                    await call
                assert isinstance(typed_error(failed.value, control), WrongServer)


class OneMaster:
    """A locator that knows one master."""

    def __init__(self, master: Master) -> None:
        self.known = master

    async def master(self, _subject: str, _group: str) -> Master:
        return self.known

    async def close(self) -> None: ...

    def doubt(self, *_: object) -> None: ...


async def test_a_client_keeps_no_connection_that_has_ended(tmp_path: Path) -> None:
    async with node_named(tmp_path / "node", "g1") as node:
        locator: Any = OneMaster(Master(node.data_address, 1, ServerName("", "g1", "g1")))
        links = ConnectionPool(locator, "c", timing=ClientTiming())
        ended: list[weakref.ref[Connection]] = []
        for _ in range(3):
            _, connection = await links.reach("s", "g1")
            ended.append(weakref.ref(connection))
            connection.abort("the test ends it")
            await connection.ended.wait()
            del connection
        locator.known = Master("127.0.0.1:1", 2)
        with pytest.raises(QmqError):
            await links.reach("s", "g1")

        def is_gone() -> bool:
            gc.collect()
            return not any(each() for each in ended)

        await eventually(is_gone)
        await links.close()
