"""The machine's network with TLS: every TCP connection is encrypted, and the server's name is checked. Sockets in the file system are
without TLS.

The listener accepts connections itself, instead of asyncio's server: so each handshake uses the certificates of the moment, accepting can
pause, and a handshake that fails is reported with the peer's address.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from qmq.errors import InvalidArgument
from qmq.file_descriptors import SHORT_OF
from qmq.network import BACKLOG, NETWORK, UNIX, Factory, Network, Refused, ServerListener, TokenNetwork, bind, ignored, parse
from qmq.security.client_tokens import Token, token_source
from qmq.security.tls import LOOK_S, Credentials, Tls
from qmq.token_source import TokenSource, no_token

if TYPE_CHECKING:
    import grpc

SHORTAGE_S: Final = 1.0
"""How long a listener waits when the process is out of descriptors or memory."""
HANDSHAKE_S: Final = 10.0
"""How long a peer may take for a handshake; asyncio gives it a minute."""


class TlsListener(ServerListener):
    """Accepts connections at `listening`, and does their handshakes beside each other. Made in a running loop.

    `on_look` is called every `LOOK_S`, `refused` for each handshake whose peer TLS does not accept.
    """

    def __init__(
        self, listening: socket.socket, factory: Factory, credentials: Credentials, on_look: Callable[[], None], refused: Refused
    ) -> None:
        self.port = listening.getsockname()[1]
        self._listening, self._factory, self._credentials = listening, factory, credentials
        self._on_look, self._refused = on_look, refused
        self._context = credentials.version, credentials.server_context()
        self._pause_s = 0.0
        self._is_paused = False
        self._tasks = {asyncio.ensure_future(each) for each in (self._look_for_ever(), self._accept_for_ever())}

    def close(self) -> None:
        for each in self._tasks:
            each.cancel()
        self._listening.close()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self, pause_s: float) -> None:
        """A handshake costs a millisecond of the loop: with thousands of connections at once, those that stand must be served too."""
        self._pause_s = max(self._pause_s, pause_s)

    async def _look_for_ever(self) -> None:
        while True:
            self._on_look()
            await asyncio.sleep(LOOK_S)

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_s, self._pause_s = self._pause_s, 0.0
            self._is_paused = pause_s > 0
            await asyncio.sleep(pause_s)  # also without a pause: one connection in a round of the loop, so that others have their turn
            self._is_paused = False
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as cause:
                self._pause_s = SHORTAGE_S if cause.errno in SHORT_OF else 0.0
                continue
            task = asyncio.ensure_future(self._shake_hands(accepted, f"{address[0]}:{address[1]}", self._factory()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str, protocol: asyncio.BaseProtocol) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._present_context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except ssl.SSLError as cause:
            self._refused(address, getattr(cause, "verify_message", "") or cause.reason or "no TLS")
        except OSError:
            pass  # the peer is gone, or too slow

    def _present_context(self) -> ssl.SSLContext:
        version = self._credentials.version
        if self._context[0] != version:
            self._context = version, self._credentials.server_context()
        return self._context[1]


class TlsNetwork(Network):
    """`credentials` are for all ports and all connections. `on_look` is called whenever a listener looks at the certificates."""

    def __init__(self, credentials: Credentials, on_look: Callable[[], None] = lambda: None) -> None:
        self.credentials: Credentials = credentials
        self._on_look = on_look

    async def listen(self, host: str, port: int, factory: Factory, refused: Refused = ignored) -> ServerListener:
        if host.startswith(UNIX):
            return await super().listen(host, port, factory, refused)
        listening = await asyncio.get_running_loop().run_in_executor(None, _listening, host, port)
        try:
            return TlsListener(listening, factory, self.credentials, self._on_look, refused)
        except BaseException:
            listening.close()
            raise

    async def connect(self, address: str, factory: Factory) -> None:
        place = parse(address)
        if place.path:
            await super().connect(address, factory)
            return
        host = place.host.strip("[]")
        await asyncio.get_running_loop().create_connection(
            factory,
            host,
            place.port,
            ssl=self.credentials.client_context(),
            server_hostname=host,
            ssl_handshake_timeout=HANDSHAKE_S,
        )

    def channel(self, address: str, token: TokenSource = no_token) -> grpc.aio.Channel:
        from qmq.rpc_channel import RpcChannel

        credentials = None if address.startswith(UNIX) else self.credentials
        return RpcChannel(address, credentials=credentials, token=token)

    def bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        return bind(server, host, port, None if host.startswith(UNIX) else self.credentials.server_credentials())


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens on the first address of a host. Raises OSError if the port is taken, InvalidArgument for no host."""
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as cause:
        raise InvalidArgument(f"{host} is no address to listen on: {cause}") from cause
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind(place)
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def network_of(tls: Tls | None = None, token: Token = None, environment: Mapping[str, str] | None = None) -> Network:
    """With TLS and a token as they are given, or as the environment says: this process's, if none is given. Raises InvalidArgument."""
    tls, source = tls or Tls.from_environment(environment), token_source(token, environment)
    found = NETWORK if tls is None else TlsNetwork(Credentials(tls))
    return found if source is None else TokenNetwork(found, source)
