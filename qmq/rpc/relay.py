"""The port of a gRPC server that other machines reach: accepts connections as a data port does, and
passes their bytes on to the server.

gRPC for Python offers no bound on the rate of handshakes, does not report those that fail, and
accepts TLS 1.2. So the listener of the data port does the handshakes here, too; gRPC gets a peer
only after TLS has accepted it, over a socket in a folder that only this process's user can enter.

    client  -- TLS -->  TlsListener  -->  RelayedConnection  -- folder/socket -->  gRPC

Without TLS (`--insecure`) the same bounds hold for connections.

gRPC knows a relayed peer by the name that the socket's near end is bound to; `RpcListener.peers`
has the peer for each name. A name is removed before its socket is closed, so no other connection
can have it. A peer without an entry is anonymous.

A port that also accepts plain text (`RpcListener.takes_plaintext`) passes such connections on in
the same way.

A connection takes three descriptors: one of the peer, and both ends of the socket.

What passes is counted (`UnfinishedMessages`): messages that are not whole, which gRPC holds, take
bounded memory and time.

Bytes that one side has not read yet wait in the kernel and in a bounded buffer for each direction
(asyncio's marks). Meanwhile nothing is read from the other side. When one side ends, the other is
closed after gRPC's last answer is sent, or after 30 s (asyncio's time for closing TLS).

The bytes of gRPC messages that are not whole yet are counted from the frames of a connection. gRPC
holds a message until it is whole, up to 16 MiB for each of a connection's calls, and does not tell.
Who passes on the bytes of a connection sees the frames, and so the messages:

    frame     length 3 | kind 1 | flags 1 | call 4 | payload      DATA (kind 0) has bytes of a
                                                                  call's messages
    message   compressed 1 | length 4 | body                      in one frame, or in several beside
                                                                  frames of other calls

    DATA of call 1, 40 bytes: 00 00000064 and 35 of 100 bytes     40 bytes are unfinished
    DATA of call 1, 65 bytes                                      the message is whole: 0 bytes

A message that is not whole when its first bytes arrive is a stranger (`qmq.rpc.strangers`) until it
is whole, or until its call or connection ends. Bytes for a call that the server has ended are of no
message: gRPC drops them.
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
from qmq.rpc.tls_listener import HandshakeBounds, TlsListener, listening_at
from qmq.security.principal import CertificateNames, RpcPeer, RpcPeers
from qmq.security.quotas import RateMeter
from qmq.security.tls import RPC_ALPN, Credentials
from qmq.text import joined

if TYPE_CHECKING:
    import grpc

    from qmq.rpc.server import RpcListener


PREFACE_BYTES: Final = 24
"""What a client sends before its first frame."""
_FRAME_HEAD_BYTES: Final = 9
_MESSAGE_HEAD_BYTES: Final = 5
_DATA, _HEADERS, _RESET = 0, 1, 3
_END: Final = 0x1
_PADDED: Final = 0x8


class UnfinishedMessages:
    """The unfinished messages of a connection from `address`, in the budget `strangers`. `end` ends
    the connection if the budget is used up, or a message's time is over.
    """

    def __init__(self, strangers: Strangers, address: str, end: Callable[[], None]) -> None:
        self._strangers, self._address, self._end = strangers, address, end
        self._from_client = _Frames(PREFACE_BYTES, self._begin, self._take, self._end_call)
        self._from_server = _Frames(
            0, lambda _call: None, lambda _call, _data: None, self._end_call
        )
        self._calls: dict[int, _Message | None] = {}
        """The unfinished message of each call from which more may come."""
        self.is_over = False

    def sent(self, data: bytes) -> None:
        """The client has sent these bytes."""
        self._from_client.feed(data)

    def answered(self, data: bytes) -> None:
        """The server has sent these bytes, which may end calls."""
        self._from_server.feed(data)

    def over(self) -> None:
        """The connection has ended."""
        self.is_over = True
        while self._calls:
            self._end_call(next(iter(self._calls)))

    def _cut(self) -> None:
        self.over()
        self._end()

    def _begin(self, call: int) -> None:
        if not self.is_over:
            self._calls.setdefault(call, None)

    def _take(self, call: int, data: bytes) -> None:
        if call not in self._calls:
            return
        place, message = 0, self._calls[call]
        if message is not None:
            place = message.take(data, 0)
            if not message.is_whole:
                self._strangers.received((self, call), place)
                return
            self._calls[call] = None
            self._strangers.left((self, call))
        place = _after_whole(data, place)
        if place < len(data):
            message = self._calls[call] = _Message()
            message.take(data, place)
            self._strangers.came((self, call), self._address, self._cut)
            self._strangers.received((self, call), len(data) - place)

    def _end_call(self, call: int) -> None:
        if self._calls.pop(call, None) is not None:
            self._strangers.left((self, call))


def _after_whole(data: bytes, place: int) -> int:
    """Where the message begins that is not whole, after the whole ones from `place` on; the end of
    the data if there is none.
    """
    while (begun := place + _MESSAGE_HEAD_BYTES) <= len(data):
        end = begun + int.from_bytes(data[place + 1 : begun], "big")
        if end > len(data):
            break
        place = end
    return place


class _Message:
    """How much of a message is there."""

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0

    @property
    def is_whole(self) -> bool:
        return len(self._head) == _MESSAGE_HEAD_BYTES and not self._missing

    def take(self, data: bytes, place: int) -> int:
        """Take this message's bytes, which begin at `place`, and return where they end."""
        if len(self._head) < _MESSAGE_HEAD_BYTES:
            more = data[place : place + _MESSAGE_HEAD_BYTES - len(self._head)]
            self._head += more
            place += len(more)
            if len(self._head) < _MESSAGE_HEAD_BYTES:
                return place
            self._missing = int.from_bytes(self._head[1:], "big")
        taken = min(self._missing, len(data) - place)
        self._missing -= taken
        return place + taken


class _Frames:
    """Finds the frames of one direction, which come in pieces. `begin` gets each call that begins,
    `take` the bytes of its messages, and `end` each call that ends.
    """

    def __init__(
        self,
        skipped: int,
        begin: Callable[[int], None],
        take: Callable[[int, bytes], None],
        end: Callable[[int], None],
    ) -> None:
        self._begin, self._take, self._end = begin, take, end
        self._skipped = skipped
        """Bytes to come that are of no message: of another kind of frame, or padding."""
        self._head = b""
        self._pads = self._data = 0
        """Bytes to come: of the length of the padding, 0 or 1; of messages and padding."""
        self._padding = 0
        self._call, self._is_last = 0, False

    def feed(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            place = self._fed(data, place)

    def _fed(self, data: bytes, place: int) -> int:
        if self._skipped:
            end = min(place + self._skipped, len(data))
            self._skipped -= end - place
            return end
        if self._data:
            return self._of_data(data, place)
        more = data[place : place + _FRAME_HEAD_BYTES - len(self._head)]
        self._head += more
        if len(self._head) == _FRAME_HEAD_BYTES:
            head, self._head = self._head, b""
            self._read(head)
        return place + len(more)

    def _read(self, head: bytes) -> None:
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        self._call = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        is_last = kind == _RESET or (kind in (_DATA, _HEADERS) and bool(flags & _END))
        if kind == _DATA and size:
            self._data, self._pads, self._is_last = size, int(bool(flags & _PADDED)), is_last
            return
        self._skipped = size
        if is_last:
            self._end(self._call)
        elif kind == _HEADERS:
            self._begin(self._call)

    def _of_data(self, data: bytes, place: int) -> int:
        if self._pads:
            self._pads, self._padding = 0, data[place]
            self._data -= 1
            end = place + 1
        else:
            end = min(place + self._data - self._padding, len(data))
            self._data -= end - place
            self._take(self._call, data[place:end])
        if self._data <= self._padding:
            self._skipped, self._data, self._padding = self._data, 0, 0
            if self._is_last:
                self._end(self._call)
        return end


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
    """A connection of one peer, after TLS accepted it or without TLS. Bytes in both directions wait
    until the other side reads.
    """

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
        self.peer = cast(
            "asyncio.Transport", transport
        )  # uvloop's transports are not subclasses of asyncio's
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
        self._relay.note_activity(self)
        self.messages.sent(data)
        if self.messages.is_over:
            return
        if self._near is not None:
            self._near.write(data)
            return
        self._early += data
        # again: uvloop begins to read a connection without TLS after `connection_made`
        self.peer.pause_reading()

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
        self._listening, self._credentials, self._door, self._on_look = (
            listening,
            credentials,
            door,
            on_look,
        )
        self.folder = tempfile.mkdtemp(prefix="qmq-")
        """The folder of the sockets to gRPC."""
        self._numbers = count()
        self._names: dict[RelayedConnection, str] = {}
        self._handshakes = RateMeter(
            door.bounds.handshakes_per_s, asyncio.get_running_loop().time()
        )
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
        """Serve. Raises OSError, InvalidArgument: the server's certificate cannot be used, or
        TMPDIR is too long.
        """
        try:
            self.server.add_insecure_port(f"unix:{self.folder}/{_SOCKET}")
        except RuntimeError as cause:
            await end_unstarted(self.server)
            raise OSError(
                f"no socket can be made in {self.folder}: TMPDIR names a folder for it ({cause})"
            ) from cause
        await self.server.start()
        try:
            checked_path(self._place(_NUMBER_MAX))
        except InvalidArgument as cause:
            raise InvalidArgument(
                f"the folder that TMPDIR names is too deep for this port's sockets: {cause.message}"
            ) from cause
        self._listener = TlsListener(
            self._listening,
            self._accept,
            self._credentials,
            self._on_look,
            self._door.refused,
            bounds=HandshakeBounds(
                self._door.bounds.handshake_ms / 1000,
                min(
                    self._door.bounds.handshakes_max, max(self._door.bounds.connections_max // 2, 1)
                ),
                self._has_room,
            ),
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
        """Whether a host may connect. If all places are taken, the network with the most
        connections makes room for another one: it loses the connection that has been silent for
        longest.
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

    def note_activity(self, connection: RelayedConnection) -> None:
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
        """Log that a peer, which TLS accepted, cannot be passed on,
        unless this was logged a moment ago.
        """
        now_s = asyncio.get_running_loop().time()
        if not self._has_stopped and now_s >= self._silent_until_s:
            self._silent_until_s = now_s + SILENCE_S
            log.error(
                (
                    "connections to port %d are closed, because none can be passed on to gRPC in "
                    "%s: %s"
                ),
                self.port,
                self.folder,
                cause,
            )

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
        listening = await asyncio.get_running_loop().run_in_executor(
            None, partial(listening_at, host, port, shares_port=door.shares_port)
        )
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
