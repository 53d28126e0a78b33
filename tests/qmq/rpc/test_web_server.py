"""The console's and the HTTP gateway's server: TLS 1.3 with the certificate that the files have
now, and bounds for strangers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from support import eventually

from qmq.errors import InvalidArgument
from qmq.limits import KIB, MIB
from qmq.rpc.network import ignored
from qmq.rpc.strangers import SharedPlaces, StrangerBounds, Strangers
from qmq.rpc.tls_listener import HandshakeBounds, TlsListener
from qmq.rpc.web_server import WebServer, proven
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import ServedCertificate


def certificate(folder: Path) -> tuple[Path, Path]:
    create_authority(folder)
    made = issue(folder, "gateway", "node", ["127.0.0.1"])
    return made.cert, made.key


async def presented(port: int, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The certificate that a connection gets. Raises ssl.SSLError, ConnectionError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = (
        False,
        ssl.CERT_NONE,
        most,
    )
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
        return found
    finally:
        writer.close()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = certificate(tmp_path / "first")
    live = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(cert, live[0])
    shutil.copy(key, live[1])
    return live


@pytest.fixture
async def port(files: tuple[Path, Path]) -> AsyncIterator[int]:
    server = WebServer(
        Starlette(),
        "127.0.0.1",
        0,
        requests_max=10,
        certificate=ServedCertificate(files[0], files[1]),
    )
    yield await server.start()
    await server.stop()


class Silent(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def test_handshakes_take_places_in_the_budget_of_their_port() -> None:
    strangers, protocol = Strangers(StrangerBounds(places=10), time.monotonic), Silent()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    listener = TlsListener(
        listening,
        lambda: protocol,
        None,
        lambda: None,
        ignored,
        bounds=HandshakeBounds(strangers=strangers),
    )
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    await eventually(lambda: len(strangers) == 1 and not listener.handshakes)
    writer.close()
    await protocol.lost.wait()
    listener.close()


async def test_tls_1_2_is_refused(port: int) -> None:
    assert await presented(port)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await presented(port, ssl.TLSVersion.TLSv1_2)


def test_a_replaced_certificate_is_used_when_its_key_is_there(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    served = ServedCertificate(*files)
    first = handshake(served.server_context())
    cert, key = certificate(tmp_path / "second")
    os.replace(cert, files[0])
    served.look()
    assert handshake(served.server_context()) == first
    os.replace(key, files[1])
    served.look()
    assert handshake(served.server_context()) != first
    files[0].write_text("no certificate")
    served.look()
    assert handshake(served.server_context()) != first


def test_files_that_cannot_be_used_are_logged_once(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    served = ServedCertificate(*files)
    files[0].write_text("no certificate")
    for _ in range(3):
        served.look()
    assert caplog.text.count("cannot be used, the old certificate stays") == 1


def handshake(server: ssl.SSLContext) -> bytes:
    """The certificate that a server's context presents to a new connection, in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for each in (*ends, *ends):
        try:
            each.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = ends[0].getpeercert(True)
    assert found is not None
    return found


def test_files_that_are_no_certificate_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(InvalidArgument, match="no certificate with its key"):
        ServedCertificate(tmp_path / "x", tmp_path / "x")


# --- strangers ------------------------------------------------------------------------------------


LONG_BYTES: Final = 16 * MIB
RECEIVE_BYTES: Final = 256 * KIB


def long_answer() -> bytes:
    """More than kernels keep for a peer that does not read. No piece is as another one."""
    return b"".join(at.to_bytes(8, "big") * 128 for at in range(LONG_BYTES // 1024))


class Site:
    """An application that answers with the length of the body. Below `/known` callers prove a name
    first, the last part of the path: `slow` then waits, and `part` waits within its answer. With
    `?long` the answer is long. `/wait` answers when the test says so, `/gone` when the peer has
    gone.
    """

    def __init__(self) -> None:
        self.waiting = self.answered = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["path"].startswith("/known"):
            name = scope["path"].rpartition("/")[2]
            proven(scope, f"app:{name}")
            if name == "part":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            if scope["query_string"] == b"long":
                await Response(long_answer())(scope, receive, send)
                self.answered += 1
                return
            if name in ("part", "slow"):
                self.waiting += 1
                await asyncio.Event().wait()
        if scope["path"] == "/gone":
            self.waiting += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            await PlainTextResponse("too late")(scope, receive, send)
            self.answered += 1
            return
        if scope["path"] == "/wait":
            self.waiting += 1
            await self.go_on.wait()
        size = 0
        async for part in request.stream():
            size += len(part)
        await PlainTextResponse(str(size))(scope, receive, send)


class Served:
    """A server whose clock stands still, and its strangers."""

    def __init__(
        self, certificate: ServedCertificate | None = None, unread_s: float = 60.0
    ) -> None:
        self.now_s = 0.0
        self.site = Site()
        self.server = WebServer(
            self.site,
            "127.0.0.1",
            0,
            requests_max=20,
            strangers_bytes_max=300_000,
            certificate=certificate,
            unread_s=unread_s,
            now_s=lambda: self.now_s,
        )
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def open(
        self, sent: bytes = b"", context: ssl.SSLContext | None = None
    ) -> asyncio.StreamReader:
        """A connection whose kernel keeps little of what is not read."""
        connecting = socket.socket()
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        connecting.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connecting, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(
            sock=connecting, ssl=context, server_hostname=None if context is None else "127.0.0.1"
        )
        self._writers.append(writer)
        writer.write(sent)
        return reader

    async def ask(self, path: str = "/", body: bytes = b"") -> bytes:
        """The answer to a whole request on its own connection."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: "
            f"{len(body)}\r\n\r\n"
        )
        return await (await self.open(head.encode() + body)).read()

    def leave(self) -> None:
        for each in self._writers:
            each.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    found.port = await found.server.start()
    yield found
    found.leave()
    await found.server.stop()


def begun(path: str = "/", size: int = 1_000_000) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {size}\r\n\r\n".encode()


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_silent_connections_take_no_place_of_others(served: Served) -> None:
    readers = [await served.open() for _ in range(40)]
    assert (await served.ask()).startswith(b"HTTP/1.1 200")
    assert await ended(readers[0])


async def test_unfinished_bodies_of_strangers_are_bounded_together(served: Served) -> None:
    readers = [await served.open(begun() + bytes(60_000)) for _ in range(8)]
    assert all(await asyncio.gather(*map(ended, readers[:4])))
    assert (await served.ask()).startswith(b"HTTP/1.1 200")


async def test_a_body_in_chunks_beside_a_content_length_counts_as_it_arrives(
    served: Served,
) -> None:
    head = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (50_000, bytes(50_000))
    assert await ended(await served.open(head + 8 * chunk))


async def test_a_body_of_who_has_proven_a_name_is_no_strangers(served: Served) -> None:
    assert (await served.ask("/known", bytes(900_000))).endswith(b"900000")


async def test_a_request_that_stops_half_way_ends_when_its_time_is_over(served: Served) -> None:
    reader = await served.open(begun()[:20])
    assert (await served.ask()).startswith(b"HTTP/1.1 200")
    served.now_s = 30
    assert await ended(reader)


# --- peers that read slowly -----------------------------------------------------------------------


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The body of a long answer. Raises IncompleteReadError, ConnectionError."""
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(LONG_BYTES)


def context_for(files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    """What a peer connects with; None without TLS."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def slow_reads(files: tuple[Path, Path] | None) -> None:
    """A peer begins to read a long answer when the time of a stranger is over."""
    context = context_for(files)
    served = Served(None if files is None else ServedCertificate(*files))
    served.port = await served.server.start()
    try:
        reader = await served.open(begun("/known/slow?long", 0), context)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        stranger = await served.open(b"", context)
        served.now_s = 30
        assert await ended(stranger), "the server has looked who is late"
        assert await body_of(reader) == long_answer()
    finally:
        served.leave()
        await served.server.stop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_who_reads_a_long_answer_slowly_keeps_the_connection(
    new_loop: Callable[[], asyncio.AbstractEventLoop], is_tls: bool, files: tuple[Path, Path]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(slow_reads(files if is_tls else None))


async def late_answer(files: tuple[Path, Path] | None) -> None:
    """A request is answered when its peer has gone."""
    served = Served(None if files is None else ServedCertificate(*files))
    served.port = await served.server.start()
    try:
        await served.open(begun("/gone", 0), context_for(files))
        await eventually(lambda: served.site.waiting == 1)
        served.leave()
        await eventually(lambda: served.site.answered == 1)
    finally:
        await served.server.stop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_an_answer_to_a_peer_that_has_gone_is_no_error(
    new_loop: Callable[[], asyncio.AbstractEventLoop], is_tls: bool, files: tuple[Path, Path]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(late_answer(files if is_tls else None))


async def test_a_connection_is_asked_again_after_a_long_answer(served: Served) -> None:
    reader = await served.open(2 * begun("/known/slow?long", 0))
    for _ in range(2):
        assert await body_of(reader) == long_answer()


async def test_a_request_that_came_early_is_no_strangers(served: Served) -> None:
    reader = await served.open(begun("/", 0) + begun("/wait", 0))
    assert await reader.readuntil(b"\r\n\r\n0")
    await eventually(lambda: served.site.waiting == 1)
    stranger = await served.open()
    served.now_s = 30
    assert await ended(stranger)
    served.site.go_on.set()
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_who_reads_nothing_of_an_answer_loses_the_connection() -> None:
    served = Served(unread_s=0.1)
    served.port = await served.server.start()
    try:
        unread = await served.open(begun("/known/slow?long", 0))
        await eventually(lambda: served.site.answered == 1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await body_of(unread)
    finally:
        served.leave()
        await served.server.stop()


async def test_an_answer_that_is_not_read_keeps_its_place(served: Served) -> None:
    unread = await served.open(begun("/known/slow?long", 0))
    assert await unread.readline() == b"HTTP/1.1 200 OK\r\n"
    await held(served, "/known/slow", 19)
    assert (await served.ask("/known/other")).startswith(b"HTTP/1.1 200")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await body_of(unread)


# --- owners ---------------------------------------------------------------------------------------


async def held(served: Served, path: str, count: int) -> list[asyncio.StreamReader]:
    """Requests that wait in the application."""
    before = served.site.waiting
    readers = [await served.open(begun(path, 0)) for _ in range(count)]
    await eventually(lambda: served.site.waiting == before + count)
    return readers


async def test_a_principal_with_all_places_makes_room_with_its_oldest_request(
    served: Served,
) -> None:
    readers = await held(served, "/known/slow", 20)
    assert (await served.ask("/known/other")).startswith(b"HTTP/1.1 200")
    assert await readers[0].readline() == b"HTTP/1.1 503 Service Unavailable\r\n"


async def test_an_answer_under_way_that_makes_room_breaks_off(served: Served) -> None:
    readers = await held(served, "/known/part", 20)
    assert (await served.ask("/known/other")).startswith(b"HTTP/1.1 200")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await readers[0].readuntil(b"\r\n0\r\n")


async def test_requests_whose_peers_have_gone_keep_no_place_of_others(served: Served) -> None:
    await held(served, "/known/slow", 20)
    served.leave()
    assert (await served.ask("/known/other")).startswith(b"HTTP/1.1 200")


async def test_an_owner_makes_no_room_for_another_that_holds_as_much() -> None:
    ended: list[str] = []
    places = SharedPlaces(2)
    assert places.take("a1", "a", lambda: ended.append("a1"))
    assert places.take("b1", "b", lambda: ended.append("b1"))
    assert not places.take("c1", "c", lambda: None)
    places.pass_on("b1", "a")
    assert places.take("c1", "c", lambda: None)
    assert (ended, len(places)) == (["a1"], 2)
    places.leave("b1")
    assert places.take("a2", "a", lambda: None)
