"""The port of a gRPC server that other machines reach: accepts connections as a data port does, and passes their bytes on to the server.

gRPC for Python offers no bound on the rate of handshakes, does not report those that fail, and accepts TLS 1.2. So the listener of the data
port does the handshakes here, too; gRPC gets a peer only after TLS has accepted it, over a socket in a folder that only this process's
user can enter.

    client  -- TLS -->  TlsListener  -->  RelayedConnection  -- folder/socket -->  gRPC

Without TLS (`--insecure`) the same bounds hold for connections.

gRPC knows a relayed peer by the name that the socket's near end is bound to; `RpcListener.peers` has the peer for each name. A name is
removed before its socket is closed, so no other connection can have it. A peer without an entry is anonymous.

A port that also accepts plain text (`RpcListener.takes_plaintext`) passes such connections on in the same way.

A connection takes three descriptors: one of the peer, and both ends of the socket.

What passes is counted (`qmq.rpc.unfinished_messages`): messages that are not whole, which gRPC holds, take bounded memory and time.

Bytes that one side has not read yet wait in the kernel and in a bounded buffer for each direction (asyncio's marks). Meanwhile nothing is
read from the other side. When one side ends, the other is closed after gRPC's last answer is sent, or after 30 s (asyncio's time
for closing TLS).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, cast

from qmq.errors import InvalidArgument
from qmq.process.address import checked_path
from qmq.rpc.network import RpcPort, end_unstarted
from qmq.rpc.strangers import Strangers, network_of
from qmq.rpc.tls_listener import TlsListener, listening_at
from qmq.rpc.unfinished_messages import UnfinishedMessages
from qmq.security.principal import CertificateNames, RpcPeer, RpcPeers
from qmq.security.quotas import RateMeter
from qmq.security.tls import RPC_ALPN, Credentials
from qmq.text import joined

if TYPE_CHECKING:
    import grpc

    from qmq.rpc.listener import RpcListener

log = logging.getLogger("qmq.security")

_SOCKET: Final = "grpc"
_NUMBER_MAX: Final = 1 << 63
LATE_LOOK_S: Final = 1.0
SILENCE_S: Final = 10.0
"""How long nothing more is logged when peers cannot be passed on."""


class _NearEnd(asyncio.Protocol):
    """This process's end of the socket to gRPC. It belongs to `connection`."""

    def __init__(self, connection: RelayedConnection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.messages.answered(data)
        self._connection.peer.write(data)

    def pause_writing(self) -> None:
        self._connection.peer.pause_reading()

    def resume_writing(self) -> None:
        self._connection.peer.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.peer.close()


class RelayedConnection(asyncio.Protocol):
    """A connection of one peer, after TLS accepted it or without TLS. Bytes in both directions wait until the other side reads."""

    peer: asyncio.Transport
    network: str
    """Whom the connection counts for."""
    messages: UnfinishedMessages

    def __init__(self, relay: RpcRelay) -> None:
        self._relay = relay
        self._near: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._early = bytearray()
        """Bytes that arrived before the socket to gRPC was open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of asyncio's
        self.peer.pause_reading()
        self.network = network_of(self.peer.get_extra_info("peername")[0])
        self.messages = UnfinishedMessages(self._relay.unfinished, self.network, self.peer.abort)
        self._relay.remember(self)
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        try:
            self._near = await self._relay.open(self)
        except OSError as cause:  # out of descriptors, or gRPC has stopped
            self._relay.failed(cause)
            self.peer.close()
            return
        self._near.write(bytes(self._early))
        self._early.clear()
        self.peer.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._relay.heard(self)
        self.messages.sent(data)
        if self.messages.is_over:
            return
        if self._near is not None:
            self._near.write(data)
            return
        self._early += data
        self.peer.pause_reading()  # again: uvloop begins to read a connection without TLS after `connection_made`

    def pause_writing(self) -> None:
        if self._near is not None:
            self._near.pause_reading()

    def resume_writing(self) -> None:
        if self._near is not None:
            self._near.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.messages.over()
        self._relay.forget(self)
        if self._opening is not None:
            self._opening.cancel()
        if self._near is not None:
            self._near.close()


class RpcRelay(RpcPort):
    """Listens at `listening` for a gRPC server. Made in a running loop; call `start`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        listening: socket.socket,
        credentials: Credentials | None,
        door: RpcListener,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(server, listening.getsockname()[1])
        self._listening, self._credentials, self._door, self._on_look = listening, credentials, door, on_look
        self.folder = tempfile.mkdtemp(prefix="qmq-")
        """The folder of the sockets to gRPC."""
        self._numbers = count()
        self._names: dict[RelayedConnection, str] = {}
        self._handshakes = RateMeter(door.bounds.handshakes_per_s, asyncio.get_running_loop().time())
        self.unfinished = Strangers(door.bounds.unfinished, asyncio.get_running_loop().time)
        """The messages of all connections that are not whole yet."""
        self._ending: asyncio.Task[None] | None = None
        self._listener: TlsListener | None = None
        self._silent_until_s = 0.0
        self._has_stopped = False
        self.connections: set[RelayedConnection] = set()
        self._by_network: dict[str, dict[RelayedConnection, None]] = {}
        """The same, of each network the one that has been silent for longest first."""

    async def start(self) -> None:
        """Serve. Raises OSError, InvalidArgument: the server's certificate cannot be used, or TMPDIR is too long."""
        try:
            self.server.add_insecure_port(f"unix:{self.folder}/{_SOCKET}")
        except RuntimeError as cause:
            await end_unstarted(self.server)
            raise OSError(f"no socket can be made in {self.folder}: TMPDIR names a folder for it ({cause})") from cause
        await self.server.start()
        try:
            checked_path(self._place(_NUMBER_MAX))
        except InvalidArgument as cause:
            raise InvalidArgument(f"the folder that TMPDIR names is too deep for this port's sockets: {cause.message}") from cause
        self._listener = TlsListener(
            self._listening,
            self._accept,
            self._credentials,
            self._on_look,
            self._door.refused,
            has_room=self._has_room,
            handshake_s=self._door.bounds.handshake_ms / 1000,
            handshakes_max=min(self._door.bounds.handshakes_max, max(self._door.bounds.connections_max // 2, 1)),
            alpn=RPC_ALPN,
            takes_plaintext=self._door.takes_plaintext,
        )
        self._ending = asyncio.create_task(self._end_late())

    async def _end_late(self) -> None:
        while True:
            self.unfinished.end_late()
            await asyncio.sleep(LATE_LOOK_S)

    @property
    def handshakes(self) -> int:
        """The number of TLS handshakes in progress."""
        return 0 if self._listener is None else self._listener.handshakes

    @property
    def peers(self) -> RpcPeers:
        """The identity behind each accepted TLS connection."""
        return self._door.peers

    @property
    def is_paused(self) -> bool:
        """Whether connections wait because handshakes came faster than the bound."""
        return self._listener is not None and self._listener.is_paused

    def _has_room(self, host: str) -> bool:
        """Whether a host may connect. If all places are taken, the network with the most connections makes room for another one: it loses
        the connection that has been silent for longest.
        """
        assert self._listener is not None
        if len(self.connections) + self._listener.handshakes < self._door.bounds.connections_max:
            return True
        most = max(self._by_network.values(), key=len, default={})
        if len(most) <= len(self._by_network.get(network_of(host), ())) + 1:
            return False
        silent = next(iter(most))
        silent.peer.abort()
        self.forget(silent)
        return True

    def remember(self, connection: RelayedConnection) -> None:
        """A peer has connected."""
        self.connections.add(connection)
        self._by_network.setdefault(connection.network, {})[connection] = None

    def heard(self, connection: RelayedConnection) -> None:
        """A peer has sent something."""
        of_network = self._by_network.get(connection.network, {})
        if connection in of_network:
            of_network[connection] = of_network.pop(connection)

    def _accept(self) -> asyncio.BaseProtocol:
        owed_s = self._handshakes.take(1, asyncio.get_running_loop().time())
        if owed_s and self._listener is not None:
            self._listener.pause(owed_s)
        return RelayedConnection(self)

    async def open(self, connection: RelayedConnection) -> asyncio.Transport:
        """Connect a peer to gRPC, and record its identity. Raises OSError."""
        place = self._place(next(self._numbers))
        name = os.path.basename(place)
        near = socket.socket(socket.AF_UNIX)
        try:
            near.setblocking(False)
            near.bind(place)
            host, port = connection.peer.get_extra_info("peername")[:2]
            names = CertificateNames.of_peer(connection.peer.get_extra_info("peercert"))
            self._names[connection] = name
            is_encrypted = connection.peer.get_extra_info("sslcontext") is not None
            self._door.peers[name] = RpcPeer(joined(host, port), names, is_encrypted)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(near, f"{self.folder}/{_SOCKET}")
            transport, _ = await loop.create_connection(lambda: _NearEnd(connection), sock=near)
        except BaseException:
            self.forget(connection)
            near.close()
            raise
        finally:
            with suppress(OSError):
                os.unlink(place)
        return transport

    def _place(self, number: int) -> str:
        return f"{self.folder}/peer-{number}"

    def failed(self, cause: OSError) -> None:
        """Log that a peer, which TLS accepted, cannot be passed on, unless this was logged a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if not self._has_stopped and now_s >= self._silent_until_s:
            self._silent_until_s = now_s + SILENCE_S
            log.error("connections to port %d are closed, because none can be passed on to gRPC in %s: %s", self.port, self.folder, cause)

    def forget(self, connection: RelayedConnection) -> None:
        """A peer has disconnected."""
        self.connections.discard(connection)
        of_network = self._by_network.get(connection.network, {})
        of_network.pop(connection, None)
        if not of_network:
            self._by_network.pop(connection.network, None)
        self._door.peers.pop(self._names.pop(connection, ""), None)

    async def stop(self, grace_s: float | None) -> None:
        self._has_stopped = True
        if self._ending is not None:
            self._ending.cancel()
        if self._listener is not None:
            self._listener.close()
        await super().stop(grace_s)
        for each in list(self.connections):
            each.peer.close()
        shutil.rmtree(self.folder, ignore_errors=True)


async def relay(
    server: grpc.aio.Server,
    host: str,
    port: int,
    door: RpcListener,
    credentials: Credentials | None = None,
    on_look: Callable[[], None] = lambda: None,
) -> RpcRelay:
    """Start a gRPC server behind a relay. Raises OSError if the port is taken, InvalidArgument."""
    try:
        listening = await asyncio.get_running_loop().run_in_executor(None, partial(listening_at, host, port, shares_port=door.shares_port))
    except BaseException:
        await end_unstarted(server)
        raise
    found = RpcRelay(server, listening, credentials, door, on_look)
    try:
        await found.start()
    except BaseException:
        await found.stop(None)
        listening.close()
        raise
    return found
