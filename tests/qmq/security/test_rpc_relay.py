"""The relay passes bytes of TLS connections on to a gRPC server: completely, in both directions,
and leaves nothing open.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from access_support import Papers
from support import eventually

from qmq.errors import InvalidArgument
from qmq.rpc.network import NETWORK
from qmq.rpc.relay import RpcRelay
from qmq.rpc.server import RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.tls import Credentials

HOST = "127.0.0.1"
MANY_BYTES = 8_000_000
"""More than all buffers on the way hold."""


async def _echo(request: bytes, _: Any) -> bytes:
    return request


async def _never(_: bytes, __: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


@asynccontextmanager
async def echoing(papers: Papers) -> AsyncIterator[tuple[RpcRelay, RpcListener]]:
    """A gRPC server behind a relay that sends back what it gets."""
    door = RpcListener(RpcBounds(100, 100))
    server = rpc_server(door)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Never": grpc.unary_unary_rpc_method_handler(_never),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    relay = await TlsNetwork(Credentials(papers.server)).serve(server, HOST, 0, door)
    assert isinstance(relay, RpcRelay)
    try:
        yield relay, door
    finally:
        await relay.stop(None)


async def test_large_requests_and_answers_pass_whole_and_side_by_side(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    async with (
        echoing(papers) as (relay, _),
        TlsNetwork(Credentials(papers.client)).channel(
            f"{HOST}:{relay.port}", any_server
        ) as channel,
    ):
        echo = channel.unary_unary("/t/Echo")
        bodies = [bytes([number]) * MANY_BYTES for number in range(3)]
        assert await asyncio.gather(*[echo(body) for body in bodies]) == bodies


async def test_peers_that_break_off_in_any_state_leave_no_descriptor_and_no_name(
    tmp_path: Path,
) -> None:
    papers = Papers(tmp_path / "papers")
    context = Credentials(papers.client).client_context()
    async with echoing(papers) as (relay, door):
        before = len(os.listdir("/proc/self/fd"))
        for number in range(30):
            _, writer = await asyncio.open_connection(
                HOST, relay.port, ssl=context, server_hostname=HOST
            )
            if number % 3:
                await eventually(lambda: bool(door.peers))
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            writer.transport.abort()
        async with TlsNetwork(Credentials(papers.client)).channel(
            f"{HOST}:{relay.port}", any_server
        ) as channel:
            under_way = asyncio.ensure_future(channel.unary_unary("/t/Never")(b""))
            await eventually(lambda: bool(door.peers))
            under_way.cancel()
        await eventually(lambda: not door.peers and not relay.connections)
        # gRPC's own for its client
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


async def test_a_peer_that_cannot_be_passed_on_is_closed_and_that_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    papers = Papers(tmp_path / "papers")
    context = Credentials(papers.client).client_context()
    async with echoing(papers) as (relay, door):
        shutil.rmtree(relay.folder)
        for _ in range(3):
            reader, writer = await asyncio.open_connection(
                HOST, relay.port, ssl=context, server_hostname=HOST
            )
            assert await reader.read() == b""
            writer.close()
        assert [
            relay.folder in each.getMessage()
            for each in caplog.records
            if each.levelname == "ERROR"
        ] == [True]
        await eventually(lambda: not door.peers and not relay.connections)


@pytest.mark.parametrize(
    "path_bytes", [85, 100]
)  # room for gRPC's socket and not for its peers' names; no room at all
async def test_a_temporary_folder_too_deep_for_sockets_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path_bytes: int
) -> None:
    papers = Papers(tmp_path / "papers")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        deep = Path(short) / ("d" * (path_bytes - len(short) - 1))
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises((InvalidArgument, OSError), match="TMPDIR"):
            async with echoing(papers):
                pass
        assert not list(deep.iterdir())


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_taken_port_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, is_encrypted: bool
) -> None:
    network = (
        TlsNetwork(Credentials(Papers(tmp_path / "papers").server)) if is_encrypted else NETWORK
    )

    async def serve(port: int) -> None:
        door = RpcListener(RpcBounds(1, 1))
        server = rpc_server(door)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {}),))
        await network.serve(server, HOST, port, door)

    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        # without `end_unstarted`, the second one ended the process by a segmentation fault
        for _ in range(3):
            with pytest.raises(OSError, match=r"in use|cannot be opened"):
                asyncio.run(serve(taken.getsockname()[1]))
            gc.collect()


def test_the_listening_socket_of_a_port_that_could_not_start_is_closed(tmp_path: Path) -> None:
    """So the next attempt can use the port."""
    papers = Papers(tmp_path / "papers")

    async def fail(port: int) -> None:
        door = RpcListener(RpcBounds(1, 1))
        await TlsNetwork(Credentials(papers.ca_only)).serve(rpc_server(door), HOST, port, door)

    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    with pytest.raises(InvalidArgument, match="--tls-cert"):
        asyncio.run(fail(port))
    with socket.socket() as again:
        again.bind((HOST, port))
