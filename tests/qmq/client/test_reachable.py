"""A broker's machine that is gone is noticed in seconds; one whose process is stopped or busy is
not taken for gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
from struct import pack

import pytest

from qmq.client.connection.connection import Connection
from qmq.errors import NotConnected
from qmq.wire import reachable
from qmq.wire.frame import FrameKind

SO_ATTACH_FILTER = 26


def unplug(found: socket.socket) -> None:
    """Drop all packets to the socket with a filter that passes 0 bytes of each, so the kernel
    acknowledges nothing.
    """
    drop = ctypes.create_string_buffer(pack("=HBBI", 0x06, 0, 0, 0))
    program = pack("HxxxxxxP", 1, ctypes.addressof(drop))
    found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


async def connected(gone_s: float) -> tuple[Connection, socket.socket]:
    """A connection, and its other end, which sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection("broker", gone_s)
        await asyncio.get_running_loop().create_connection(
            lambda: connection.stream, *server.getsockname()
        )
        connection.start_sweeping()
        return connection, server.accept()[0]


async def test_a_machine_that_acknowledges_nothing_is_left_before_its_answer_is_due() -> None:
    connection, peer = await connected(0.1)
    with peer:
        unplug(peer)
        with pytest.raises(NotConnected, match="not acknowledged anything"):
            await connection.call(FrameKind.HEARTBEAT, b"", timeout_s=30)
        await connection.wait_closed()


async def test_a_broker_that_says_nothing_and_takes_nothing_keeps_its_connection() -> None:
    """The broker's kernel acknowledges the bytes. Unread bytes fill its buffer, and the rest waits
    here.
    """
    connection, peer = await connected(0.1)
    with peer:
        connection.request(FrameKind.PRODUCE, lambda _: None, bytes(16 << 20), timeout_s=30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.ended.wait(), 0.7)
        assert connection.is_open
        connection.abort("the test is over")
        await connection.wait_closed()


async def test_the_kernel_asks_a_peer_that_is_idle() -> None:
    connection, peer = await connected(3)
    with peer:
        found = connection.stream.socket
        assert found is not None
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert (
            found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == reachable.KEEPALIVE_IDLE_S
        )
        assert (
            found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == reachable.KEEPALIVE_PROBES
        )
        connection.abort("the test is over")
        await connection.wait_closed()


def test_sockets_other_than_tcp_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        reachable.watch(one)
        assert reachable.silent_ms(one) == reachable.silent_ms(None) == 0
        assert reachable.acknowledged_bytes(one) == reachable.acknowledged_bytes(None) == 0


def test_a_peer_acknowledges_what_it_reads() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        before = reachable.acknowledged_bytes(one)
        one.sendall(bytes(1000))
        assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
        other.sendall(b"x")  # with it goes the acknowledgement
        assert one.recv(1) == b"x"
        assert reachable.acknowledged_bytes(one) == before + 1000
