"""Serves an ASGI application inside a running event loop: uvicorn behind our own listener, without
its signal handlers and logs.

A connection without a whole request is a stranger (`qmq.rpc.strangers`): from its first byte,
before TLS, until its request is whole or the application has proven who asks (`proven`). So idle
connections take half of the places, and bodies of strangers take bounded memory. Bytes count where
they arrive. An application asks who it is before it reads the body.

A request under way takes a place until the application has answered it, also if its peer has gone.
It belongs to the principal that was proven, and else to the peer's address. If all places are
taken, the owner that holds most makes room for another one with its oldest request, which is nearly
always one that waits for something (`qmq.rpc.strangers`). The refused request gets 503.

An answer is under way until its peer has read it. uvicorn reports it as complete when the transport
holds it, and the connection would then be a stranger, with a stranger's time, while its peer still
reads. So a long answer goes to uvicorn in pieces, each when the kernel has taken the ones before,
and its end when the kernel has taken all of them. A peer that reads nothing of an answer for
`UNREAD_S` loses its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from qmq.errors import Outcome, Overloaded, QmqError, QuotaExceeded
from qmq.limits import KIB, MIB
from qmq.rpc.network import ignored
from qmq.rpc.strangers import PROOFS_PER_S, SharedPlaces, StrangerBounds, Strangers, network_of
from qmq.rpc.tls_listener import HandshakeBounds, TlsListener
from qmq.security.tls import WEB_ALPN, ServedCertificate
from qmq.wire import reachable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("qmq.security")

STOP_S: Final = 2
LATE_LOOK_S: Final = 1.0
PIECE_BYTES: Final = 64 * KIB
"""Bytes of answers to one peer that wait in this process until the kernel takes them. With TLS they
are up to three times as many, because its transport has a buffer below its own.
"""
UNREAD_S: Final = 60.0
_STATE: Final = "qmq.connection"
"""The connection, in the state of its requests."""
_OWNED: Final = "qmq.owned"
"""What says to whom a request belongs, in its state."""
_FULL: Final = "this server has as many requests under way as it can"


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the owner of the loop."""
        yield


class _Connection(H11Protocol):
    """A connection that is a stranger while it has no whole request, and while nobody has proven
    who asks.
    """

    strangers: Strangers
    unread_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def _expect_request(self) -> None:
        self.strangers.came(self, self.client[0] if self.client else "", self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_whole_request():
            self.strangers.left(self)
        else:
            self.strangers.received(self, len(data))

    def _has_whole_request(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def on_response_complete(self) -> None:
        if self.cycle is not None and not self.cycle.more_body:
            self.strangers.left(self)  # what comes next has its own time
        # also a connection that closes: it stays until its peer has read the last piece
        self._expect_request()
        super().on_response_complete()
        if self._has_whole_request():  # it arrived behind the one before
            self.strangers.left(self)

    async def make_room(self, size: int) -> None:
        """Wait until `size` more bytes, at most PIECE_BYTES, may be written, or the connection has
        ended. A connection whose peer reads nothing for `unread_s` is ended.
        """
        transport = self.transport
        # In this order: asyncio's TLS transport no longer knows its buffer when it has ended.
        if transport.is_closing() or transport.get_write_buffer_size() + size <= PIECE_BYTES:
            return
        transport.set_write_buffer_limits(1)  # with 0, TLS would pause an empty buffer
        while self.flow.write_paused:
            before = self._progress()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.unread_s):
                    await self.flow.drain()
            if self.flow.write_paused and self._progress() == before:
                transport.abort()
                return
        if not transport.is_closing():
            transport.set_write_buffer_limits()

    def _progress(self) -> tuple[int, int]:
        """What waits in this process, and what the peer's kernel has acknowledged: the first alone
        changes only when a third of our kernel's buffer is free again.
        """
        found = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size(), reachable.acknowledged_bytes(found)

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.left(self)
        super().connection_lost(exc)


class _Divided:
    """Divides an application's places among the owners of the requests under way. `refuse` makes
    the answer that tells an error.
    """

    def __init__(
        self, app: ASGIApp, requests_max: int, refuse: Callable[[QmqError], ASGIApp]
    ) -> None:
        self._app, self._refuse = app, refuse
        self._places = SharedPlaces(requests_max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = object()
        scope["state"][_OWNED] = partial(self._places.pass_on, request)
        connection: _Connection = scope["state"][_STATE]
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            body = message.get("body", b"")
            if len(body) > PIECE_BYTES:
                for begin in range(0, len(body), PIECE_BYTES):
                    await connection.make_room(PIECE_BYTES)
                    piece = body[begin : begin + PIECE_BYTES]
                    await send({**message, "body": piece, "more_body": True})
                    # others' turn, also that of the news that the peer has gone
                    await asyncio.sleep(0)
                body, message = b"", {**message, "body": b""}
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            # What waits behind the end has a stranger's time, and the kernel may take nothing more
            # until a slow peer has read a MiB.
            await connection.make_room(PIECE_BYTES if is_end and not body else len(body))
            await send(message)

        loop = asyncio.get_running_loop()
        failure = Overloaded(f"{_FULL}: try again later")
        try:
            async with asyncio.timeout(None) as limit:
                address = (scope.get("client") or ("",))[0]
                if self._places.take(
                    request, network_of(address), lambda: limit.reschedule(loop.time())
                ):
                    await self._app(scope, receive, sent)
                    return
        except TimeoutError:
            if not limit.expired():
                raise
            failure = Overloaded(
                f"{_FULL}, and yours are the most: this one made room for another",
                outcome=Outcome.UNKNOWN,
            )
        finally:
            self._places.leave(request)
        if not has_begun:
            await self._refuse(failure)(scope, receive, send)
            return
        connection.transport.abort()  # so that nobody takes the part for the whole answer
        while (await receive())["type"] != "http.disconnect":
            pass


def proven(scope: Scope, principal: str) -> None:
    """The peer has proven who it is, before its request was read: its body is no stranger's, and
    its place is the principal's. `principal` is "" if all peers prove the same: then the place
    stays the address's.
    """
    state = scope.get("state", {})
    if (connection := state.get(_STATE)) is not None:
        connection.strangers.left(connection)
    if principal and (pass_on := state.get(_OWNED)) is not None:
        pass_on(principal)


def attempt(scope: Scope) -> None:
    """Call this before a peer's proof is passed on to another server. Raises QuotaExceeded if the
    peer's address tries too often.
    """
    connection = scope.get("state", {}).get(_STATE)
    owed_s = (
        0.0
        if connection is None
        else connection.strangers.owes_s((scope.get("client") or ("",))[0])
    )
    if owed_s:
        raise QuotaExceeded(
            f"more than {PROOFS_PER_S} logins a second come from this address: try again in "
            f"{owed_s:.1f} s"
        )


def plain_refusal(failure: QmqError) -> ASGIApp:
    """An error as plain text, for servers whose peers are people."""
    return PlainTextResponse(str(failure), 503, {"retry-after": "1"})


class WebServer:
    """An HTTP server. Call `start`, then `stop`. `start` raises OSError if the port is taken."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        requests_max: int,
        refuse: Callable[[QmqError], ASGIApp] = plain_refusal,
        strangers_bytes_max: int = 64 * MIB,
        certificate: ServedCertificate | None = None,
        unread_s: float = UNREAD_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`port` 0 takes a free one. A certificate turns TLS on. Connections without a whole
        request are half as many as requests under way, and take `strangers_bytes_max` together.
        `refuse` makes the answer that tells an error. A peer that reads nothing of its answer for
        `unread_s` loses its connection.
        """
        self._unread_s = unread_s
        self._strangers = Strangers(
            StrangerBounds(max(requests_max // 2, 1), strangers_bytes_max), now_s
        )
        self._host, self._port = host.strip("[]"), port
        self._server = _QuietServer(
            uvicorn.Config(
                _Divided(app, requests_max, refuse),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._certificate = certificate
        self._ending: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: TlsListener | None = None

    async def start(self, listening: socket.socket | None = None) -> int:
        """Listen, at `listening` if it is given, and serve until `stop`; returns the port."""
        if listening is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
        listening.setblocking(False)
        port: int = listening.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - it has no other way to report it
            await asyncio.sleep(0.01)
        if self._serving.done():
            listening.close()
            self._serving.result()
        certificate = self._certificate
        self._listener = TlsListener(
            listening,
            self._connection,
            certificate,
            (lambda: None) if certificate is None else certificate.look,
            ignored,
            alpn=WEB_ALPN,
            bounds=HandshakeBounds(strangers=self._strangers),
        )
        self._ending = asyncio.create_task(self._end_late())
        return port

    def _connection(self) -> _Connection:
        made = _Connection(self._server.config, self._server.server_state, {})
        made.strangers, made.unread_s = self._strangers, self._unread_s
        made.app_state = {_STATE: made}
        return made

    async def _end_late(self) -> None:
        while True:
            self._strangers.end_late()
            await asyncio.sleep(LATE_LOOK_S)

    async def stop(self) -> None:
        """Answer the requests under way, and stop listening. Does nothing before `start`."""
        if self._ending is not None:
            self._ending.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
