"""The broker's data port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.connection.connection import LOOKS, DataConnection
from qmq.broker.connection.flow_control import RoundBudget, Throttle
from qmq.broker.maintenance import ProducerOwners
from qmq.errors import Overloaded
from qmq.process.files import connections_max, limit
from qmq.rpc.network import NETWORK, Network, ServerListener
from qmq.rpc.server_name import NameSource, any_server
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.security.access import Caller
from qmq.security.quotas import RateMeter
from qmq.wire.frame import SharedBuffer
from qmq.wire.frame_stream import FrameStream
from qmq.wire.partial_frames import PartialFrames

CLOSE_S: Final = 2.0
"""How long a connection may take to read its last answers."""
ACCESS_LOOK_S: Final = 1.0
"""The interval of checks that depend on the clock: expired tokens, and rules that are too old."""
STRANGERS_SHARE: Final = 4
"""One of so many places is for connections that have not said HELLO: the address with most of them loses its oldest."""
STRANGERS_MIN: Final = 16


class DataServer:
    """Accepts connections for a broker."""

    def __init__(self, broker: Broker, network: Network = NETWORK, descriptors: int | None = None, own: NameSource = any_server) -> None:
        """`own` returns the name of this replica."""
        self._broker = broker
        self._own = own
        self._connections_max = connections_max(broker.config.connections_max, descriptors or limit())
        self._network = network
        self._received = SharedBuffer()
        """The buffer for all incoming bytes: they are handled before the next bytes come."""
        self._budget = RoundBudget(broker.loop.call_soon, lambda: broker.turns.count)
        self.throttle = Throttle(broker.access, broker.loop.time)
        self._owners = ProducerOwners()
        self.partial = PartialFrames(broker.config.partial_frames_bytes_max, self._exceeded)
        """What frames that are not whole yet take of memory."""
        self.open_connections: set[DataConnection] = set()
        places = max(self._connections_max // STRANGERS_SHARE, STRANGERS_MIN)
        self._strangers = Strangers(StrangerBounds(places, time_s=broker.config.hello_timeout_ms / 1000), broker.loop.time)
        """The connections without a HELLO. `_expect_hello` ends those whose time is over."""
        self._listener: ServerListener | None = None
        self._handshakes = RateMeter(broker.config.handshakes_per_s, broker.loop.time())
        self.port = 0
        self._all_closed = asyncio.Event()
        self._is_stopping = False
        self._looking: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._is_stale = False
        self._forget_access: Callable[[], object] = lambda: None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free port (`self.port`). Raises OSError if the port is taken, InvalidArgument."""
        self._listener = await self._network.listen(host, port, self._accept, self._refused)
        self.port = self._listener.port
        self._forget_access = self._broker.access.on_change(self._look_at_access)
        self._look_later()
        self._watch_clock()

    def _accept(self) -> asyncio.BaseProtocol:
        connection = DataConnection(
            self._broker, self._closed, self._received, self.partial, self._budget, self.throttle, self._owners, self._own, self._strangers
        )
        self._broker.counters.accepted += 1
        loop = asyncio.get_running_loop()
        self._limit_handshakes()
        if len(self.open_connections) >= self._connections_max:
            connection.refuse(
                Overloaded(
                    f"the broker has {len(self.open_connections)} connections, the limit: close some, or raise its limit of open files"
                )
            )
        if self._is_stopping:
            connection.stream.close()  # asyncio accepted it before the listener was closed
        self.open_connections.add(connection)
        loop.call_later(self._broker.config.hello_timeout_ms / 1000, self._expect_hello, connection)
        return connection.stream

    def _refused(self, address: str, why: str) -> None:
        """TLS refused a peer. Strangers can repeat this at will, so equal refusals are only counted."""
        self._broker.access.refused(Caller(address=address), "TLS handshake", why)

    def _limit_handshakes(self) -> None:
        owed_s = self._handshakes.take(1, self._broker.loop.time())
        if owed_s and self._listener is not None:
            self._listener.pause(owed_s)

    def _closed(self, connection: DataConnection) -> None:
        self.open_connections.discard(connection)
        if not self.open_connections:
            self._all_closed.set()

    def _expect_hello(self, connection: DataConnection) -> None:
        if not connection.has_said_hello and connection in self.open_connections:
            self._end(connection, FrameStream.close)

    def _exceeded(self, reader: Hashable) -> None:
        asyncio.get_running_loop().call_soon(self._end_reader, reader)  # not while another connection receives

    def _end_reader(self, reader: Hashable) -> None:
        for connection in list(self.open_connections):
            if connection.stream.reader is reader:
                connection.end_for_memory()

    def _end(self, connection: DataConnection, end: Callable[[FrameStream], None]) -> None:
        was_made = connection.stream.transport is not None
        end(connection.stream)
        if not was_made:  # asyncio does not report a connection whose TLS handshake failed
            self._closed(connection)

    def _look_later(self) -> None:
        wait_s = self._broker.config.stall_ms / 1000 / LOOKS
        self._looking = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self.end_stalled()
        self._look_at_access()
        self._look_later()

    def _look_at_access(self) -> None:
        """The rules changed, or tokens may have expired."""
        for connection in list(self.open_connections):
            connection.look_at_access()

    def _watch_clock(self) -> None:
        self.look_at_clock()
        self._watching = asyncio.get_running_loop().call_later(ACCESS_LOOK_S, self._watch_clock)

    def look_at_clock(self) -> None:
        """End sessions and connections that are no longer allowed because time has passed."""
        was_stale, self._is_stale = self._is_stale, self._broker.access.is_stale
        has_turned = was_stale is not self._is_stale
        for connection in list(self.open_connections):
            if has_turned or connection.access.has_ended:
                connection.look_at_access()

    def end_stalled(self) -> None:
        """Check every connection once; one without progress in `LOOKS` checks is ended."""
        for connection in list(self.open_connections):
            connection.end_if_stalled()

    @property
    def connections(self) -> int:
        return len(self.open_connections)

    @property
    def is_paused(self) -> bool:
        """Whether connections wait because handshakes came faster than the bound."""
        return self._listener is not None and self._listener.is_paused

    @property
    def unread(self) -> int:
        """Connections whose clients do not read their answers."""
        return sum([each.stream.is_open and not each.is_writable for each in self.open_connections])

    @property
    def unanswered_bytes(self) -> int:
        """Bytes of unanswered batches."""
        return sum([each.unanswered_bytes for each in self.open_connections])

    async def stop(self) -> None:
        """Accept no more connections, and close the open ones after their answers; those that do not read them are
        cut off after `CLOSE_S`.
        """
        self._is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for each in (self._looking, self._watching):
            if each is not None:
                each.cancel()
        self._forget_access()
        await asyncio.sleep(0)  # connections that asyncio has accepted are made in this round
        for end in (FrameStream.close, FrameStream.abort):
            self._all_closed.clear()
            for connection in list(self.open_connections):
                self._end(connection, end)
            if not self.open_connections:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._all_closed.wait()
