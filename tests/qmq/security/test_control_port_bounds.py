"""Limits of a control port against strangers, with real sockets: a metaserver's port and a
broker's, with TLS and without.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from access_support import Papers, handshakes, relayed
from support import eventually, node_config, running

from qmq.broker.control import ControlService, ProcessParts, serve_control
from qmq.client.metadata.service import MetadataClient
from qmq.errors import NotConnected, Overloaded
from qmq.meta.server import MetaConfig, MetaServer
from qmq.process.files import control_connections_max
from qmq.proto.v1 import control_pb2, control_pb2_grpc, meta_pb2
from qmq.rpc.channel import typed_error
from qmq.rpc.network import Network
from qmq.rpc.server import RpcBounds
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import ServerNetwork, TlsNetwork
from qmq.security.tls import Credentials, Tls

HOST = "127.0.0.1"
REACHABLE = "127.1"
"""The same address, in a form that counts as one of another machine."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
BOUNDS = RpcBounds(connections_max=50, calls_max=50)


class ControlPort:
    """A listening port, and a way to call it."""

    def __init__(
        self, role: str, port: int, network: Network, watchers: Any, served: Any = None
    ) -> None:
        self.role, self.port, self.address, self.watchers = role, port, f"{HOST}:{port}", watchers
        self.served = served
        self._network = network

    async def call(self) -> None:
        """Make one call over a separate connection. Raises typed errors."""
        if self.role == "meta":
            asker = MetadataClient([self.address], self._network)
            try:
                await asker.call(
                    "ListSubjects", meta_pb2.ListSubjectsRequest(), retry_s=0, timeout_s=10
                )
            finally:
                await asker.close()
            return
        async with self._network.channel(self.address, any_server) as channel:
            try:
                await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
                    control_pb2.DescribeReplicaRequest(), timeout=10
                )
            except Exception as failure:
                raise typed_error(failure, self.address) from failure

    async def served_soon(self) -> None:
        """Returns when a call is served. On a loaded machine a connection may take longer than the
        two seconds that a channel gives it.
        """
        await eventually(self.is_served)

    async def is_served(self) -> bool:
        try:
            await self.call()
        except (NotConnected, Overloaded):
            return False
        return True


@asynccontextmanager
async def listening(
    folder: Path, role: str, bounds: RpcBounds, papers: Papers | None = None, host: str = HOST
) -> AsyncIterator[ControlPort]:
    """A control port of this role, with these bounds, in front of a whole node; encrypted if there
    are papers.
    """

    def network(tls: Tls | None) -> Network:
        return ServerNetwork() if tls is None else TlsNetwork(Credentials(tls))

    server, client = network(papers and papers.server), network(papers and papers.client)
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(running(node_config(folder)))
        if role == "meta":
            meta = MetaServer(
                node.coordination, node.view, MetaConfig(host, 0, bounds=bounds), network=server
            )
            await meta.start()
            stack.push_async_callback(meta.stop)
            yield ControlPort(role, meta.port, client, lambda: meta.watchers, lambda: meta.rpc_port)
        else:
            parts = ProcessParts(network=server, access=node.broker.access)
            service = ControlService(node.broker, node.running.status, "g", parts)
            control = await serve_control(service, host, 0, bounds=bounds)
            stack.push_async_callback(control.stop, 0)
            yield ControlPort(role, control.port, client, None)


class Stranger:
    """A connection that sends only what the test tells it to send."""

    def __init__(self, port: int, first: bytes = b"") -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.sendall(first)
        self._socket.setblocking(False)

    async def greeted(self) -> None:
        """Returns when the server has answered."""
        assert await asyncio.get_running_loop().sock_recv(self._socket, 1)

    async def ended(self) -> None:
        """Returns when the server has closed it. Raises TimeoutError; without our bounds gRPC waits
        for two minutes, or for ever.
        """
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while await asyncio.get_running_loop().sock_recv(self._socket, 65_536):
                    pass
        self._socket.close()

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_who_says_nothing_or_stops_half_way_is_cut(
    tmp_path: Path, role: str, is_encrypted: bool
) -> None:
    papers = Papers(tmp_path / "papers") if is_encrypted else None
    halves = [b"", b"\x16\x03\x01\x02\x00\x01"] if is_encrypted else [b"", PREFACE]
    async with listening(tmp_path, role, replace(BOUNDS, handshake_ms=300), papers) as port:
        await asyncio.gather(
            *[Stranger(port.port, half).ended() for half in halves for _ in range(5)]
        )
        await port.call()


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_many_silent_connections_keep_no_client_out(
    tmp_path: Path, role: str, is_encrypted: bool
) -> None:
    papers = Papers(tmp_path / "papers") if is_encrypted else None
    async with listening(
        tmp_path, role, replace(BOUNDS, connections_max=200, handshake_ms=600_000), papers
    ) as port:
        strangers = [Stranger(port.port) for _ in range(190)]
        try:
            for _ in range(5):
                await port.served_soon()
        finally:
            for each in strangers:
                each.close()


async def test_of_too_many_handshakes_the_one_that_stands_still_longest_goes(
    tmp_path: Path,
) -> None:
    papers = Papers(tmp_path / "papers")
    async with listening(tmp_path, "meta", replace(BOUNDS, handshakes_max=3), papers) as port:
        strangers = [Stranger(port.port, b"\x16\x03\x01") for _ in range(3)]
        await eventually(lambda: port.served().handshakes == 3)
        await port.call()
        await strangers[0].ended()
        assert port.served().handshakes == 2
        for each in strangers:
            each.close()


@pytest.mark.parametrize("host", [HOST, REACHABLE])
@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_connections_beyond_the_most_are_closed_and_room_comes_back(
    tmp_path: Path, role: str, host: str
) -> None:
    async with listening(tmp_path, role, replace(BOUNDS, connections_max=5), host=host) as port:
        strangers = list[Stranger]()
        for _ in range(5):
            strangers.append(Stranger(port.port, PREFACE + SETTINGS))
            await strangers[-1].greeted()
        for _ in range(3):
            await Stranger(port.port).ended()
        assert not await port.is_served()
        for each in strangers:
            each.close()
        await port.served_soon()


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_an_address_whose_idle_connections_take_all_places_makes_room_for_others(
    tmp_path: Path, role: str, is_encrypted: bool
) -> None:
    papers = Papers(tmp_path / "papers") if is_encrypted else None
    context = None if papers is None else Credentials(papers.client).client_context()
    if context is not None:
        context.set_alpn_protocols(["h2"])
    async with listening(
        tmp_path, role, replace(BOUNDS, connections_max=6), papers, REACHABLE
    ) as port:
        idle = list[asyncio.StreamWriter]()
        # whole handshakes of TLS and of HTTP/2, from another address than the callers'
        for _ in range(6):
            reader, writer = await asyncio.open_connection(
                HOST, port.port, ssl=context, local_addr=("127.0.0.2", 0)
            )
            writer.write(PREFACE + SETTINGS)
            assert await reader.read(1)
            idle.append(writer)
        for _ in range(3):
            await port.served_soon()
        for writer in idle:
            writer.transport.abort()


@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_an_address_that_begins_handshakes_in_all_places_leaves_room(
    tmp_path: Path, role: str
) -> None:
    papers = Papers(tmp_path / "papers")
    async with listening(
        tmp_path, role, replace(BOUNDS, connections_max=6, handshake_ms=600_000), papers
    ) as port:
        strangers = [Stranger(port.port, b"\x16\x03\x01") for _ in range(12)]
        await port.served_soon()
        for each in strangers:
            each.close()


@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_an_idle_connection_is_closed(tmp_path: Path, role: str) -> None:
    async with listening(tmp_path, role, replace(BOUNDS, idle_ms=300)) as port:
        await Stranger(port.port, PREFACE + SETTINGS).ended()
        await port.call()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_flood_of_handshakes_waits_and_all_are_served(
    tmp_path: Path, is_encrypted: bool
) -> None:
    papers = Papers(tmp_path / "papers") if is_encrypted else None
    async with listening(
        tmp_path, "meta", replace(BOUNDS, handshakes_per_s=5), papers, REACHABLE
    ) as port:
        strangers = [Stranger(port.port) for _ in range(3)]
        calls = asyncio.gather(*[port.call() for _ in range(6)])
        await eventually(lambda: port.served().is_paused)
        await calls
        for each in strangers:
            each.close()


async def test_without_tls_too_many_connections_and_silent_ones_keep_no_other_machine_out(
    tmp_path: Path,
) -> None:
    async with listening(
        tmp_path, "broker", replace(BOUNDS, connections_max=5, handshake_ms=300), host=REACHABLE
    ) as port:
        for _ in range(2):
            strangers = [Stranger(port.port) for _ in range(8)]
            for each in strangers:
                await each.ended()
            await eventually(port.is_served)


@pytest.mark.parametrize("role", ["meta", "broker"])
async def test_handshakes_that_fail_are_in_the_audit_log(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    papers, strange = Papers(tmp_path / "papers"), Papers(tmp_path / "strange")
    async with listening(tmp_path, role, BOUNDS, papers) as port:
        for _ in range(3):
            await Stranger(port.port, b"GET / HTTP/1.1\r\n\r\n").ended()
        for wrong in (papers.ca_only, replace(strange.client, ca=papers.client.ca)):
            assert not await replace_papers(port, wrong).is_served()
        await eventually(lambda: len(handshakes(caplog)) == 3)
        await port.call()
    reasons = {str(each["on"]).lower() for each in handshakes(caplog)}
    assert len(reasons) == 3, "the same refusal is written once"
    for expected in ("http_request", "did_not_return_a_certificate", "local issuer"):
        assert any(expected in each for each in reasons), reasons
    assert {str(each["from"]).split(":")[0] for each in handshakes(caplog)} == {HOST}


def replace_papers(port: ControlPort, tls: Tls) -> ControlPort:
    return ControlPort(port.role, port.port, TlsNetwork(Credentials(tls)), None)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_an_old_version_of_tls_is_refused_at_a_control_port(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    async with listening(tmp_path, "meta", BOUNDS, papers) as port:
        context = Credentials(papers.client).client_context()
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(HOST, port.port, ssl=context)
        await port.call()


async def test_a_control_port_that_stops_leaves_no_socket_and_no_peer(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    async with listening(tmp_path, "meta", BOUNDS, papers) as port:
        relay = port.served()
        await port.call()
        await eventually(lambda: not relay.connections and not relay.peers)
        assert os.listdir(relay.folder) == ["grpc"]
        assert os.stat(relay.folder).st_mode & 0o077 == 0
    assert os.path.basename(relay.folder) not in os.listdir(gettempdir())


async def test_a_client_whose_idle_connection_was_ended_connects_again(tmp_path: Path) -> None:
    async with listening(tmp_path, "meta", replace(BOUNDS, connections_max=1, idle_ms=200)) as port:
        first, other = MetadataClient([port.address]), MetadataClient([port.address])
        # there is room for one, so each waits until the other one's connection has been ended
        for _ in range(3):
            for each in (first, other):
                async with asyncio.timeout(30):
                    await each.call("ListSubjects", meta_pb2.ListSubjectsRequest(), retry_s=20)
        await first.close()
        await other.close()


async def test_who_vanished_while_a_call_was_under_way_is_forgotten(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "meta", replace(BOUNDS, ping_ms=200, ping_timeout_ms=200)) as port,
        relayed(port.address) as relay,
    ):
        mq = MetadataClient([relay.address])
        watch = mq.watch()
        await anext(watch)
        assert port.watchers() == 1
        relay.cut.set()
        await eventually(lambda: port.watchers() == 0)
        await mq.close()


async def test_calls_over_the_limit_are_told_to_retry_later(tmp_path: Path) -> None:
    async with listening(tmp_path, "meta", replace(BOUNDS, calls_max=3)) as port:
        watching = [MetadataClient([port.address]) for _ in range(3)]
        watches = [each.watch() for each in watching]
        for each in watches:
            await anext(each)
        with pytest.raises(Overloaded, match="as many calls as it can"):
            await port.call()
        for each in watching:
            await each.close()
        await port.served_soon()


def test_connections_to_a_control_port_leave_descriptors_for_files() -> None:
    assert [control_connections_max(limit) for limit in (1 << 20, 1024, 300, 2)] == [
        256,
        256,
        75,
        1,
    ]
