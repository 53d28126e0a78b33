"""The `Network` through which processes listen and connect, at the addresses of
qmq/process/address.py.

Each component gets the `Network` through which it opens connections: the machine's network, or in a
test a network whose connections can be cut (qmq/testing). Port 0 takes a free port; of the sockets
in a folder, the lowest number that is free.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from qmq.errors import Stopping
from qmq.process.address import UNIX, Address, checked_path, is_private, parse, require_private
from qmq.rpc.server_name import NameSource
from qmq.security.principal import TokenSource, no_token
from qmq.text import joined

if TYPE_CHECKING:
    import ssl

    import grpc

    from qmq.rpc.server import RpcListener
    from qmq.security.tls import Credentials

BACKLOG: Final = 1024
HANDSHAKE_S: Final = 10.0
"""How long a peer may take for a handshake of TLS; asyncio gives it a minute."""
_LOOK_S: Final = 0.2
RESOLVE_S: Final = 2.0
"""The longest wait for the address of a name. The system's own limit is often 10 s or more."""
_CREDENTIALS: Final = Struct("iII")
"""The kernel's `struct ucred`: process, user, group."""

Factory = Callable[[], asyncio.BaseProtocol]
"""Makes the protocol of one connection."""
Refused = Callable[[str, str], None]
"""Called with a peer's address, and why TLS does not accept the peer."""


def choose_port(host: str, port: int) -> int:
    """The port to listen on. For a Unix domain socket, 0 becomes the lowest free number. Raises
    InvalidArgument; OSError if the port is taken.
    """
    if not host.startswith(UNIX):
        return port
    if port:
        _require_free(checked_path(f"{host[len(UNIX) :]}:{port}"))
        return port
    found = 1
    while os.path.lexists(checked_path(f"{host[len(UNIX) :]}:{found}")):
        found += 1
    return found


def _require_free(path: str) -> None:
    """Raise OSError if a process listens on the path: another listener would take the path from
    that process.
    """
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_LOOK_S)
        try:
            caller.connect(path)
        except OSError:
            return
    raise OSError(f"socket {path} is in use by another process")


def uid_of_peer(connection: Any) -> int | None:
    """The user id of the process at the other end of a Unix domain socket, from the kernel. None
    for TCP, and if the system cannot tell.
    """
    if (
        connection is None
        or connection.family != socket.AF_UNIX
        or not hasattr(socket, "SO_PEERCRED")
    ):
        return None
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        _, uid, _ = _CREDENTIALS.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    return int(uid)


def only_uid(host: str, port: int) -> int | None:
    """The only user, besides root, who can connect to a Unix domain socket. None for TCP, and if
    others can connect.

    gRPC does not identify the peer of a socket, but the socket's permissions limit the possible
    peers. Raises Stopping if the socket's file is gone: a server that stops deletes it while calls
    on open connections still arrive.
    """
    if not host.startswith(UNIX):
        return None
    path = f"{host[len(UNIX) :]}:{port}"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise Stopping(
            f"the socket {path} is gone, so this server is stopping: ask another one, or "
            "connect again"
        ) from None
    return None if found.st_mode & 0o022 else found.st_uid


def ignored(_address: str, _why: str) -> None:
    """Ignore a refusal: the default of a listener whose owner does not record refusals."""


class ServerListener:
    """A server that accepts connections at `port`."""

    def __init__(self, server: asyncio.Server, port: int, path: str = "") -> None:
        self.port = port
        self._server = server
        self._path = path

    @property
    def is_paused(self) -> bool:
        """Whether new connections wait because of `pause`."""
        return False

    def pause(self, pause_s: float) -> None:
        """Accept no connections for the given time: new connections wait in the kernel's queue.
        Used where accepting costs more than the kernel's part of it.
        """

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        loop = asyncio.get_running_loop()
        for each in self._server.sockets:
            loop.remove_reader(each.fileno())
        # A connection that asyncio has accepted gets its transport in this round. If the server is
        # closed before that, asyncio drops the connection without closing it.
        loop.call_soon(self._server.close)
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


class RpcPort:
    """A gRPC server that serves at `port`."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self.server, self.port = server, port

    async def stop(self, grace_s: float | None) -> None:
        """Accept no more connections, and end the calls under way after the given time."""
        await self.server.stop(grace_s)


class Network:
    """The machine's network. Tests override it with one that can be cut."""

    is_machine = True
    """True for the machine's network, False for a test's."""
    credentials: Credentials | None = None
    """TLS credentials for connections; None: no TLS."""

    def rpc_descriptors(self, host: str) -> int:
        """The number of descriptors that a connection to a gRPC server's port takes, if the server
        listens on this host.
        """
        return 1

    def token_for(self, address: str) -> str:
        """The token to show to the server at an address; empty for none. Raises InvalidArgument."""
        return ""

    def with_optional_certificates(self) -> Network:
        """The same network, but clients need not show a certificate at its ports."""
        return self

    async def listen(
        self, host: str, port: int, factory: Factory, refused: Refused = ignored
    ) -> ServerListener:
        """Accept connections; port 0 takes a free port. `refused` is called for each handshake of
        TLS that fails.

        Raises OSError if the port is taken, InvalidArgument if a path is too long.
        """
        loop = asyncio.get_running_loop()
        if host.startswith(UNIX):
            number = choose_port(host, port)
            path = f"{host[len(UNIX) :]}:{number}"
            return ServerListener(
                await loop.create_unix_server(factory, path, backlog=BACKLOG), number, path
            )
        server = await loop.create_server(factory, host.strip("[]"), port, backlog=BACKLOG)
        return ServerListener(server, server.sockets[0].getsockname()[1])

    async def connect(self, address: str, factory: Factory) -> None:
        """Open a connection, which belongs to the protocol from then on.
        Raises OSError, InvalidArgument.
        """
        place = parse(address)
        if place.path:
            await asyncio.get_running_loop().create_unix_connection(factory, place.path)
        else:
            await open_tcp(place, factory)

    def channel(
        self, address: str, server: NameSource, token: TokenSource = no_token
    ) -> grpc.aio.Channel:
        """A control connection to a server that now has this address. It is opened at its first
        use, names the server and shows a token with each call; the caller closes it.
        """
        from qmq.rpc.channel import RpcChannel

        return RpcChannel(address, server, token=token)

    async def serve(
        self, server: grpc.aio.Server, host: str, port: int, door: RpcListener
    ) -> RpcPort:
        """Start a gRPC server at a port; port 0 takes a free port. Raises OSError if the port is
        taken, InvalidArgument.
        """
        try:
            bound = bind(server, host, port)
        except BaseException:
            await end_unstarted(server)
            raise
        await server.start()
        return RpcPort(server, bound)


NETWORK: Final = Network()
"""The default network."""


async def open_tcp(
    place: Address,
    factory: Factory,
    tls: ssl.SSLContext | None = None,
    handshake_s: float | None = None,
) -> None:
    """Connect to a host and port, with TLS if there is a context. Raises socket.gaierror as
    `require_resolvable`, OSError.
    """
    host = place.host.strip("[]")
    await require_resolvable(host)
    await asyncio.get_running_loop().create_connection(
        factory,
        host,
        place.port,
        ssl=tls,
        server_hostname=host if tls else None,
        ssl_handshake_timeout=handshake_s,
    )


async def require_resolvable(host: str) -> None:
    """Raises socket.gaierror if the name has no address, or none that DNS tells in time."""
    with suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return  # asking for it would cost each connection a turn of a thread
    try:
        async with asyncio.timeout(RESOLVE_S):
            await asyncio.get_running_loop().run_in_executor(
                _RESOLVER, socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM
            )
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "DNS does not answer") from None


class _Resolver(Executor):
    """Asks for the addresses of names. All callers share one thread for a name.

    The system may ask a silent DNS for a minute, and a process that ends waits for the threads of
    its loop: so these are daemons.
    """

    def __init__(self) -> None:
        self._asked: dict[Any, Future[Any]] = {}
        os.register_at_fork(after_in_child=self._asked.clear)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        found = self._asked.get(args)
        if found is None:
            found = self._asked[args] = Future()
            # one who stops waiting does not cancel it for others
            found.set_running_or_notify_cancel()
            threading.Thread(
                target=self._ask, args=(fn, args, found), name="qmq-resolve", daemon=True
            ).start()
        return found

    def _ask(self, fn: Callable[..., Any], args: Any, found: Future[Any]) -> None:
        try:
            answer = fn(*args)
        except (OSError, UnicodeError) as cause:
            self._asked.pop(args, None)
            found.set_exception(cause)
        else:
            self._asked.pop(args, None)
            found.set_result(answer)


_RESOLVER: Final = _Resolver()


class TokenNetwork(Network):
    """A network whose connections show a token to servers.

    A token is sent over TLS, to Unix domain sockets, and to this machine. Calls to any other
    address fail; with `is_required` False (servers), they are made without the token.
    """

    def __init__(self, inner: Network, token: TokenSource, *, is_required: bool = True) -> None:
        self._inner, self._token, self._is_required = inner, token, is_required
        self.is_machine = inner.is_machine
        self.credentials = inner.credentials

    def rpc_descriptors(self, host: str) -> int:
        return self._inner.rpc_descriptors(host)

    def with_optional_certificates(self) -> Network:
        return self._inner.with_optional_certificates()

    def token_for(self, address: str) -> str:
        if self._is_required:
            require_private(address, is_encrypted=self.credentials is not None)
        elif not is_private(address, is_encrypted=self.credentials is not None):
            return ""
        return self._token()

    async def listen(
        self, host: str, port: int, factory: Factory, refused: Refused = ignored
    ) -> ServerListener:
        return await self._inner.listen(host, port, factory, refused)

    async def connect(self, address: str, factory: Factory) -> None:
        await self._inner.connect(address, factory)

    def channel(
        self, address: str, server: NameSource, token: TokenSource = no_token
    ) -> grpc.aio.Channel:
        return self._inner.channel(address, server, lambda: self.token_for(address))

    async def serve(
        self, server: grpc.aio.Server, host: str, port: int, door: RpcListener
    ) -> RpcPort:
        return await self._inner.serve(server, host, port, door)


async def end_unstarted(server: grpc.aio.Server) -> None:
    """End a server that got no port. Otherwise gRPC would abort the process when it destroys a
    server that was never started.
    """
    await server.start()
    await server.stop(None)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind a gRPC server and return its port. Raises OSError if the port is taken."""
    number = choose_port(host, port)
    try:
        bound: int = server.add_insecure_port(joined(host, number))
    except RuntimeError as cause:
        raise OSError(
            f"port {port} on {host} cannot be opened: is another `qmq dev` running? ({cause})"
        ) from cause
    return number if host.startswith(UNIX) else bound
