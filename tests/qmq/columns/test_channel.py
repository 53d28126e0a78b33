"""A blocking connection to a broker: requests, answers, and the errors when there is no answer. The
other end is a script in a thread.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import node_config, running

from qmq.columns.servers.connection import BlockingConnection, Head
from qmq.errors import (
    DeadlineExceeded,
    NotConnected,
    NotMaster,
    Outcome,
    ProtocolViolation,
    UnknownSubject,
)
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import HEADER, HEADER_BYTES, FrameKind

Script = Callable[["Peer"], None]


class Peer:
    """The broker's end of one connection."""

    def __init__(self, found: socket.socket) -> None:
        self.socket = found

    def receive(self) -> tuple[int, int, bytes]:
        """(kind, request id, payload) of the next frame."""
        head = self._exactly(HEADER_BYTES)
        length, kind, _, _, request_id, _ = HEADER.unpack(head)
        return kind, request_id, self._exactly(length - HEADER_BYTES)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def welcome(self) -> None:
        _, number, _ = self.receive()
        self.send(
            frames.frame(FrameKind.WELCOME, number, wire.Welcome(1, "b", 1, 1 << 24, 777).pack())
        )

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)


@contextmanager
def peer(script: Script) -> Iterator[str]:
    """The address where one connection is served by a script, and then closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            found, _ = server.accept()
            with found:
                script(Peer(found))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def until_closed(it: Peer) -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            it.receive()


def test_answers_come_with_the_ids_of_their_requests_in_the_brokers_order() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        asked = [it.receive() for _ in range(3)]
        assert [each[2] for each in asked] == [b"abc", b"", b"de"]
        it.send(
            b"".join(
                frames.frame(FrameKind.OK, number, payload)
                for _, number, payload in reversed(asked)
            )
        )
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        assert channel.inflight_bytes_max == 777
        payloads: list[tuple[bytes | memoryview, ...]] = [
            (b"a", b"", memoryview(b"bc")),
            (),
            (b"de",),
        ]
        sent = [channel.send(FrameKind.FETCH, *each) for each in payloads]
        found = [channel.receive() for _ in sent]
        assert [each.request_id for each in found] == sent[::-1]
        assert [bytes(each.payload) for each in found] == [b"de", b"", b"abc"]


def test_a_payload_is_not_changed_by_the_next_one() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        for _ in range(2):
            _, number, payload = it.receive()
            it.send(frames.frame(FrameKind.OK, number, payload * 100_000))
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        first = channel.call(FrameKind.FETCH, b"a")
        assert channel.call(FrameKind.FETCH, b"b") == b"b" * 100_000
        assert first == b"a" * 100_000


def test_an_answer_may_be_taken_head_first_to_ask_on_while_it_comes() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        _, number, _ = it.receive()
        it.send(frames.frame(FrameKind.FETCHED, number, b"head" + b"rest" * 100)[:-100])
        kind, _, payload = it.receive()
        assert (kind, payload) == (FrameKind.FETCH, b"next")
        it.send((b"rest" * 100)[-100:])
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        number = channel.send(FrameKind.FETCH, b"first")
        assert channel.receive_head() == Head(FrameKind.FETCHED, number, 404)
        assert channel.receive_payload(4) == b"head"
        channel.send(FrameKind.FETCH, b"next")
        assert channel.receive_payload(400) == b"rest" * 100


def test_an_error_is_raised_as_it_was_and_the_caller_knows_whose_it_is() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        asked = [it.receive() for _ in range(2)]
        it.send(frames.frame(FrameKind.ERROR, asked[1][1], wire.pack_error(NotMaster("elsewhere"))))
        it.send(frames.frame(FrameKind.OK, asked[0][1]))
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        first, second = channel.send(FrameKind.FETCH), channel.send(FrameKind.FETCH)
        with pytest.raises(NotMaster, match="elsewhere"):
            channel.receive()
        assert channel.answered_id == second
        assert channel.is_open
        assert channel.receive().request_id == first


def test_an_error_about_the_connection_ends_it_with_an_unknown_outcome() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        it.receive()
        it.send(frames.frame(FrameKind.ERROR, 0, wire.pack_error(ProtocolViolation("no frame"))))
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        with pytest.raises(NotConnected, match="no frame") as raised:
            channel.call(FrameKind.PRODUCE)
        assert raised.value.outcome is Outcome.UNKNOWN
        assert not channel.is_open


@pytest.mark.parametrize("cut", [0, 5, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_connection_that_ends_within_an_answer_leaves_the_outcome_unknown(cut: int) -> None:
    def script(it: Peer) -> None:
        it.welcome()
        _, number, _ = it.receive()
        it.send(frames.frame(FrameKind.PRODUCED, number, bytes(16))[:cut])

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        with pytest.raises(NotConnected) as raised:
            channel.call(FrameKind.PRODUCE)
        assert raised.value.outcome is Outcome.UNKNOWN
        with pytest.raises(NotConnected):
            channel.send(FrameKind.PRODUCE)


def test_a_broker_that_says_nothing_is_given_up() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address, answer_s=0.05) as channel:
        with pytest.raises(DeadlineExceeded) as raised:
            channel.call(FrameKind.FETCH)
        assert raised.value.outcome is Outcome.UNKNOWN
        assert not channel.is_open


def test_an_invalid_answer_is_refused() -> None:
    def script(it: Peer) -> None:
        it.welcome()
        it.receive()
        it.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        until_closed(it)

    with (
        peer(script) as address,
        BlockingConnection.connect(address) as channel,
        pytest.raises(ProtocolViolation, match="data port"),
    ):
        channel.call(FrameKind.FETCH)


def test_a_server_without_a_hello_is_not_a_broker() -> None:
    def script(it: Peer) -> None:
        _, number, _ = it.receive()
        it.send(frames.frame(FrameKind.OK, number))
        until_closed(it)

    with peer(script) as address, pytest.raises(ProtocolViolation, match="HELLO"):
        BlockingConnection.connect(address)
    for address in ("127.0.0.1:1", "127.0.0.1", "127.0.0.1:x"):
        with pytest.raises(NotConnected, match="no broker answers"):
            BlockingConnection.connect(address)


def test_thousands_of_buffers_leave_whole_and_in_order() -> None:
    """More than one call of the system takes."""
    buffers = [b"%07d" % n * 500 for n in range(2_000)]

    def script(it: Peer) -> None:
        it.welcome()
        _, number, payload = it.receive()
        assert payload == b"".join(buffers)
        it.send(frames.frame(FrameKind.OK, number))
        until_closed(it)

    with peer(script) as address, BlockingConnection.connect(address) as channel:
        assert channel.call(FrameKind.PRODUCE, *buffers) == b""


async def test_a_real_broker_answers(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:

        def talk() -> None:
            with BlockingConnection.connect(node.data_address) as channel:
                assert channel.inflight_bytes_max > 0
                with pytest.raises(UnknownSubject):
                    channel.call(
                        FrameKind.PRODUCE,
                        *encode(
                            b"s", Columns([b"x"]), producer_id=1, batch_sequence=0, create_time_ms=0
                        ),
                    )
                with pytest.raises(UnknownSubject):
                    channel.call(FrameKind.FIND, wire.Find("s", 0, f"{7:016x}", 1, 1).pack())

        await asyncio.to_thread(talk)
