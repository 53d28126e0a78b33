"""Where servers listen and how they are reached: addresses, and the network as a door.

    host:port               TCP; an IPv6 host in brackets
    unix:/path/socket       a socket in the file system: for processes of one machine, and guarded by the rights of its folder

A server that is told to listen on host `unix:/run/qmq/a` and port 20881 listens on the socket `/run/qmq/a:20881`, and its address is
`unix:/run/qmq/a:20881`: what joins hosts and ports need not know of sockets. Port 0 takes the lowest number that is free. The system
limits a socket's path to 107 bytes.

Data ports and control ports (gRPC) are reached alike. Who opens connections does so through a `Network` that it was handed: the
machine's own, or in a test one that can be cut (qmq/testing).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qmq.errors import InvalidArgument
from qmq.token_source import TokenSource, no_token

if TYPE_CHECKING:
    import grpc

    from qmq.security.tls import Credentials

UNIX: Final = "unix:"
PATH_BYTES_MAX: Final = 107
"""Of a socket's path on Linux, without the zero byte behind it; other systems allow a few less."""
BACKLOG: Final = 1024
_LOOK_S: Final = 0.2
_CREDENTIALS: Final = Struct("iII")
"""The kernel's `struct ucred`: process, user, group."""

Factory = Callable[[], asyncio.BaseProtocol]
"""Makes the protocol of one connection."""


class Address(NamedTuple):
    """A parsed address: `path` of a socket, or else a host and a port."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return UNIX + self.path if self.path else f"{self.host}:{self.port}"


def parse(address: str, default_port: int | None = None) -> Address:
    """An address as it was written. Without `default_port` the port must be there. Raises InvalidArgument."""
    text = address.strip()
    if text.startswith(UNIX):
        return Address("", 0, _checked(text[len(UNIX) :]))
    host, separator, port = text.rpartition(":")
    if not separator and default_port is not None:
        host, port = port, str(default_port)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        example = f"localhost:{default_port or 20880}"
        raise InvalidArgument(f"{address!r} is not an address: write host:port, such as {example}, or unix:/path/socket")
    return Address(host, int(port))


def _checked(path: str) -> str:
    if not path.startswith("/"):
        raise InvalidArgument(f"a socket's address has its whole path, unix:/path/socket, not {UNIX + path!r}")
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise InvalidArgument(f"the path of a socket has at most {PATH_BYTES_MAX} bytes, not {len(os.fsencode(path))}: {path}")
    return path


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens there; a name other than localhost may mean any address."""
    bare = host.strip("[]")
    try:
        return host.startswith(UNIX) or bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


# --- listening ---------------------------------------------------------------------------------------------------------


def choose_port(host: str, port: int) -> int:
    """The port to listen on: for a socket the lowest number that is free, if 0 is asked for. Raises InvalidArgument; OSError if taken."""
    if not host.startswith(UNIX):
        return port
    if port:
        _require_free(_checked(f"{host[len(UNIX) :]}:{port}"))
        return port
    found = 1
    while os.path.lexists(_checked(f"{host[len(UNIX) :]}:{found}")):
        found += 1
    return found


def _require_free(path: str) -> None:
    """Whoever listens on a path takes it away from who did before: so nobody may. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_LOOK_S)
        try:
            caller.connect(path)
        except OSError:
            return
    raise OSError(f"socket {path} is in use by another process")


def uid_of_peer(connection: Any) -> int | None:
    """Whose process is at the other end of a socket in the file system, as the kernel says; None for TCP, and where no kernel says."""
    if connection is None or connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def only_uid(host: str, port: int) -> int | None:
    """The one user who can connect to a socket in the file system, beside root; None for TCP, and where others can.

    gRPC does not tell who is at the other end of a socket; its rights do.
    """
    if not host.startswith(UNIX):
        return None
    found = os.stat(f"{host[len(UNIX) :]}:{port}")
    return None if found.st_mode & 0o022 else found.st_uid


class ServerListener:
    """A server that takes connections at `port`."""

    def __init__(self, server: asyncio.Server, port: int, path: str = "") -> None:
        self.port = port
        self._server = server
        self._path = path

    def pause(self, pause_s: float) -> None:
        """Take no connections for so long, where taking one costs more than the system's part: those that come wait in its queue."""

    def close(self) -> None:
        """Take no more; those that stand are left alone."""
        loop = asyncio.get_running_loop()
        for each in self._server.sockets:
            loop.remove_reader(each.fileno())
        # A connection that asyncio has accepted gets its transport in this round. If the server is closed before, asyncio drops the
        # connection without closing it.
        loop.call_soon(self._server.close)
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


class Network:
    """The machine's network. One that can be cut overrides this."""

    is_machine = True
    """Whether it is the machine's own, and not a test's."""
    credentials: Credentials | None = None
    """What its connections are encrypted with; None: they are not."""

    def token_for(self, address: str) -> str:
        """What to show to a server at an address, to say who this is; empty for nothing. Raises InvalidArgument."""
        return ""

    async def listen(self, host: str, port: int, factory: Factory) -> ServerListener:
        """Take connections; port 0 takes a free one. Raises OSError if the port is taken, InvalidArgument for a path that is too long."""
        loop = asyncio.get_running_loop()
        if host.startswith(UNIX):
            number = choose_port(host, port)
            path = f"{host[len(UNIX) :]}:{number}"
            return ServerListener(await loop.create_unix_server(factory, path, backlog=BACKLOG), number, path)
        server = await loop.create_server(factory, host, port, backlog=BACKLOG)
        return ServerListener(server, server.sockets[0].getsockname()[1])

    async def connect(self, address: str, factory: Factory) -> None:
        """Open a connection; it is the protocol's from here on. Raises OSError, InvalidArgument."""
        loop, place = asyncio.get_running_loop(), parse(address)
        if place.path:
            await loop.create_unix_connection(factory, place.path)
        else:
            await loop.create_connection(factory, place.host.strip("[]"), place.port)

    def channel(self, address: str, token: TokenSource = no_token) -> grpc.aio.Channel:
        """A control connection, opened when it is used first, which shows a token with each call; whoever asks closes it."""
        from qmq.rpc_channel import RpcChannel  # gRPC takes half of a client's import time

        return RpcChannel(address, token=token)

    def bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Bind a gRPC server; the port it got. Raises OSError if the port is taken."""
        return bind(server, host, port)


NETWORK: Final = Network()
"""The one that is meant where nobody says otherwise."""


def is_private(address: str, *, is_encrypted: bool) -> bool:
    """Whether nobody on the way to an address reads what is sent."""
    place = parse(address)
    return is_encrypted or bool(place.path) or is_local(place.host)


def require_private(address: str, *, is_encrypted: bool) -> None:
    """Raises InvalidArgument where a token would travel in plain text to another machine."""
    if not is_private(address, is_encrypted=is_encrypted):
        raise InvalidArgument(f"a token is not sent to {address} in plain text: use TLS (QMQ_TLS_CA, or qmq.connect(tls=...))")


class TokenNetwork(Network):
    """A network for somebody who shows servers a token.

    A token is sent over TLS, to sockets in the file system and to this machine. To any other address a client's calls fail; a server's
    go without the token (`is_required` False).
    """

    def __init__(self, inner: Network, token: TokenSource, *, is_required: bool = True) -> None:
        self._inner, self._token, self._is_required = inner, token, is_required
        self.is_machine = inner.is_machine
        self.credentials = inner.credentials

    def token_for(self, address: str) -> str:
        if self._is_required:
            require_private(address, is_encrypted=self.credentials is not None)
        elif not is_private(address, is_encrypted=self.credentials is not None):
            return ""
        return self._token()

    async def listen(self, host: str, port: int, factory: Factory) -> ServerListener:
        return await self._inner.listen(host, port, factory)

    async def connect(self, address: str, factory: Factory) -> None:
        await self._inner.connect(address, factory)

    def channel(self, address: str, token: TokenSource = no_token) -> grpc.aio.Channel:
        return self._inner.channel(address, lambda: self.token_for(address))

    def bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        return self._inner.bind(server, host, port)


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind a gRPC server, with TLS if there are credentials. Raises OSError if the port is taken."""
    number = choose_port(host, port)
    address = f"{host}:{number}"
    try:
        bound: int = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as cause:
        raise OSError(f"port {port} on {host} cannot be opened: is another `qmq dev` running? ({cause})") from cause
    return number if host.startswith(UNIX) else bound
