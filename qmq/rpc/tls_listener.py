"""Listens with TLS, with TLS and plain text at the same port, or without TLS.

The listener accepts connections itself, without asyncio's server: so each handshake uses the
current certificates, accepting can pause, and a failed handshake is reported with the peer's
address.

With `takes_plaintext` the listener looks at a connection's first byte, which stays in the kernel's
buffer. HTTP/2 begins with "PRI", a handshake of TLS with byte 22. A connection that does not begin
with "P" must be TLS. Any other connection is refused and reported.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq.errors import InvalidArgument
from qmq.process.files import SHORT_OF
from qmq.rpc.network import BACKLOG, HANDSHAKE_S, Factory, Refused, ServerListener
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.security.tls import ALPN, LOOK_S, Credentials, ServedCertificate
from qmq.text import joined

log = logging.getLogger("qmq.security")

SHORTAGE_S: Final = 1.0
"""How long a listener waits when the process is out of descriptors or memory, or when it failed to
take a connection.
"""
HANDSHAKES_MAX: Final = 1_000
"""Handshakes under way at one port; each takes 55 KiB."""
_HTTP2: Final = b"P"
"""How a connection with HTTP/2 in plain text begins."""


@dataclass(frozen=True, slots=True)
class HandshakeBounds:
    """How long a peer may take for a handshake, how many are under way at one time, and whether
    there is room for a host.
    """

    handshake_s: float = HANDSHAKE_S
    handshakes_max: int = HANDSHAKES_MAX
    has_room: Callable[[str], bool] = lambda _host: True
    strangers: Strangers | None = None
    """The budget in which the protocols stay, too; None: the listener has one of its own."""


BOUNDS: Final = HandshakeBounds()


class TlsListener(ServerListener):
    """Accepts connections at `listening`, and does their handshakes beside each other. Made in a
    running loop.

    Handshakes under way are strangers (`qmq.rpc.strangers`): beyond `handshakes_max` the address
    with the most loses its oldest. So a peer that begins thousands and does not continue takes
    bounded memory, and pushes out nobody else. With `bounds.strangers`, the protocols stay in that
    budget, each by itself as the key, until the port says that they left.

    `on_look` is called every `LOOK_S`, `refused` for each handshake whose peer TLS does not accept.
    A connection from a host for which there is no room (`has_room`) is closed before its handshake.
    With `takes_plaintext` connections with HTTP/2 need no TLS. Without credentials no connection
    has TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        factory: Factory,
        credentials: Credentials | ServedCertificate | None,
        on_look: Callable[[], None],
        refused: Refused,
        *,
        bounds: HandshakeBounds = BOUNDS,
        alpn: str = ALPN,
        takes_plaintext: bool = False,
    ) -> None:
        self.port = listening.getsockname()[1]
        self._listening, self._factory, self._credentials = listening, factory, credentials
        self._on_look, self._refused = on_look, refused
        self._bounds, self._alpn = bounds, alpn
        self._takes_plaintext = takes_plaintext
        self._context = (
            None if credentials is None else (credentials.version, credentials.server_context(alpn))
        )
        self._stays = bounds.strangers is not None
        own = Strangers(StrangerBounds(bounds.handshakes_max), asyncio.get_running_loop().time)
        self._strangers = (
            own if bounds.strangers is None else bounds.strangers
        )  # one without strangers is false
        self._shaking: set[asyncio.Task[bool]] = set()
        """The handshakes under way."""
        self._pause_s = 0.0
        self._is_paused = False
        self._tasks = {
            asyncio.ensure_future(each) for each in (self._look_for_ever(), self._accept_for_ever())
        }

    def close(self) -> None:
        for each in (*self._tasks, *self._shaking):
            each.cancel()
        self._listening.close()

    @property
    def handshakes(self) -> int:
        """The number of handshakes in progress."""
        return len(self._shaking)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self, pause_s: float) -> None:
        """A handshake costs a millisecond of the loop: with thousands of connections at once, open
        connections must be served too.
        """
        self._pause_s = max(self._pause_s, pause_s)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                self._on_look()
            except Exception:
                log.exception(
                    "checking the certificates for changes failed: trying again in %d s", LOOK_S
                )
            await asyncio.sleep(LOOK_S)

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_s, self._pause_s = self._pause_s, 0.0
            self._is_paused = pause_s > 0
            # Also without a pause: one connection in a round of the loop, so that others have their
            # turn.
            await asyncio.sleep(pause_s)
            self._is_paused = False
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as cause:
                self._pause_s = SHORTAGE_S if cause.errno in SHORT_OF else 0.0
                continue
            try:
                self._take(accepted, *address[:2])
            except Exception:
                accepted.close()
                log.exception("a connection to port %d cannot be accepted", self.port)
                self._pause_s = SHORTAGE_S

    def _take(self, accepted: socket.socket, host: str, port: int) -> None:
        """Begin a connection's handshake, or close the connection if there is no room."""
        if not self._bounds.has_room(host):
            accepted.close()
            return
        protocol = self._factory()
        task = asyncio.ensure_future(self._shake_hands(accepted, joined(host, port), protocol))
        self._shaking.add(task)
        task.add_done_callback(lambda _: self._shaken(task, protocol))
        self._strangers.came(protocol, host, lambda: _cancel(task))

    def _shaken(self, task: asyncio.Task[bool], protocol: asyncio.BaseProtocol) -> None:
        self._shaking.discard(task)
        if not self._stays or task.cancelled() or not task.result():
            self._strangers.left(protocol)

    async def _shake_hands(
        self, accepted: socket.socket, address: str, protocol: asyncio.BaseProtocol
    ) -> bool:
        """Give a connection to its protocol, after the handshake.
        False if there is no connection.
        """
        loop = asyncio.get_running_loop()
        try:
            context = self._present_context()
            if context is None or (
                self._takes_plaintext and await self._first_byte(accepted) == _HTTP2
            ):
                await loop.connect_accepted_socket(lambda: protocol, accepted)
            else:
                await loop.connect_accepted_socket(
                    lambda: protocol,
                    accepted,
                    ssl=context,
                    ssl_handshake_timeout=self._bounds.handshake_s,
                )
            return True
        except ssl.SSLError as cause:
            self._refused(address, getattr(cause, "verify_message", "") or cause.reason or "no TLS")
        except OSError:
            pass  # the peer has disconnected, or is too slow
        except Exception:
            accepted.close()
            log.exception(
                "the TLS handshake with %s failed because of an error in this server", address
            )
        return False

    async def _first_byte(self, accepted: socket.socket) -> bytes:
        """The first bytes of a peer, without taking them. Empty if the peer closes before. Raises
        OSError: the peer has disconnected, or is slow.
        """
        loop = asyncio.get_running_loop()
        is_there = asyncio.Event()
        try:
            loop.add_reader(accepted.fileno(), is_there.set)
            try:
                await asyncio.wait_for(is_there.wait(), self._bounds.handshake_s)
            finally:
                loop.remove_reader(accepted.fileno())
            return accepted.recv(1, socket.MSG_PEEK)
        except BaseException:
            accepted.close()
            raise

    def _present_context(self) -> ssl.SSLContext | None:
        if self._credentials is None or self._context is None:
            return None
        version = self._credentials.version
        if self._context[0] != version:
            self._context = version, self._credentials.server_context(self._alpn)
        return self._context[1]


def listening_at(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """A socket that listens on the first address of a host. Raises OSError if the port is taken,
    InvalidArgument for no host.
    """
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as cause:
        raise InvalidArgument(f"{host} is not an address to listen on: {cause}") from cause
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.setblocking(False)
        found.bind(place)
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def _cancel(task: asyncio.Task[bool]) -> None:
    task.cancel()
