"""The machine's network with TLS: every TCP connection is encrypted, and the server's name is checked. Sockets in the file system are
without TLS.

asyncio keeps the context of a listening socket for good. So a listener whose certificates have changed listens once more on the same
socket, with a new context, and stops the old one: the kernel's queue of connections is the same, and connections that stand are not
touched.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from qmq.errors import InvalidArgument
from qmq.network import BACKLOG, NETWORK, UNIX, Factory, Network, ServerListener, TokenNetwork, bind, parse
from qmq.security.client_tokens import Token, token_source
from qmq.security.tls import LOOK_S, Credentials, Tls
from qmq.token_source import TokenSource, no_token

if TYPE_CHECKING:
    import grpc

ACCEPTS_AT_ONCE: Final = 64
HANDSHAKE_S: Final = 10.0
"""How long a peer may take for a handshake; asyncio gives it a minute."""


class TlsListener(ServerListener):
    """A listener whose certificates can be renewed."""

    def __init__(
        self,
        server: asyncio.Server,
        port: int,
        listening: socket.socket,
        factory: Factory,
        credentials: Credentials,
        on_look: Callable[[], None],
    ) -> None:
        super().__init__(server, port)
        self._listening, self._factory, self._credentials = listening, factory, credentials
        self._version = credentials.version
        self._on_look = on_look
        self._looking = asyncio.ensure_future(self._look_for_ever())
        self._paused: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._looking.cancel()
        if self._paused is not None:
            self._paused.cancel()
        super().close()
        self._listening.close()

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def pause(self, pause_s: float) -> None:
        """A handshake costs a millisecond of the loop: with thousands of connections at once, those that stand must be served too."""
        if self._paused is None:
            super().close()
            self._paused = asyncio.ensure_future(self._go_on(pause_s))

    async def _go_on(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._paused = None
        await self._listen()

    async def _look_for_ever(self) -> None:
        while True:
            self._on_look()
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Use the present certificates for new connections."""
        if self._credentials.version != self._version and self._paused is None:
            await self._listen()

    async def _listen(self) -> None:
        version = self._credentials.version
        server = await _serve(self._factory, self._listening, self._credentials)
        super().close()
        self._server, self._version = server, version


async def _serve(factory: Factory, listening: socket.socket, credentials: Credentials) -> asyncio.Server:
    server = await asyncio.get_running_loop().create_server(
        factory,
        sock=listening.dup(),
        backlog=ACCEPTS_AT_ONCE,
        ssl=credentials.server_context(),
        ssl_handshake_timeout=HANDSHAKE_S,
    )
    listening.listen(BACKLOG)  # asyncio's backlog is both: the system's queue, and how many connections one round of the loop takes
    return server


class TlsNetwork(Network):
    """`credentials` are for all ports and all connections. `on_look` is called whenever a listener looks at the certificates."""

    def __init__(self, credentials: Credentials, on_look: Callable[[], None] = lambda: None) -> None:
        self.credentials: Credentials = credentials
        self._on_look = on_look

    async def listen(self, host: str, port: int, factory: Factory) -> ServerListener:
        if host.startswith(UNIX):
            return await super().listen(host, port, factory)
        listening = await asyncio.get_running_loop().run_in_executor(None, _listening, host, port)
        try:
            server = await _serve(factory, listening, self.credentials)
        except BaseException:
            listening.close()
            raise
        return TlsListener(server, listening.getsockname()[1], listening, factory, self.credentials, self._on_look)

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
