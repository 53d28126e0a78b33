"""The broker's data port: accepts connections; each one reads frames and writes answers. Thin: the
broker decides.

`StallWatch` finds connections without progress: the peer has begun a frame and sends nothing more,
or does not read its answers. It counts checks, not milliseconds: after a minute in which this
process was suspended, all connections seem to have done nothing, but at the next check their bytes
are there. A single byte is progress, so that slow uploads continue.

A slow reader makes progress if our kernel takes bytes, or if the peer's acknowledges some. The
first alone is too coarse: our kernel takes more when a third of its buffer, a MiB, is free again,
and with TLS what waits below the transport's buffer is not seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from qmq import limits
from qmq.broker.broker import Broker
from qmq.broker.connection.access import ConnectionAccess, ConnectionFlow, RoundBudget, Throttle
from qmq.broker.dispatch.dispatch import Dispatch
from qmq.broker.dispatch.lanes import FIRST_SESSION, Lanes
from qmq.broker.dispatch.sessions import PendingAnswer
from qmq.broker.maintenance import ProducerOwners
from qmq.broker.parts import ReplicaPeer
from qmq.broker.produce_checks import Destination
from qmq.broker.reading.fetches import messages_in, pack
from qmq.errors import Overloaded, PeerError, ProtocolViolation, QmqError, UnknownConsumer
from qmq.log.reading import ColdRead
from qmq.model import base_group, check_client
from qmq.process.files import SHORT_OF, connections_max, limit, refusal_of
from qmq.rpc.network import NETWORK, Network, ServerListener
from qmq.rpc.server_name import NameSource, ServerName, any_server
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.security.access import Caller
from qmq.security.principal import UNIX_PEER
from qmq.security.quotas import RateMeter
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import HEADER, HEADER_BYTES, Frame, FrameKind, PartialFrames, SharedBuffer
from qmq.wire.frame_stream import FrameStream

CHECKS: Final = 6
"""Consecutive checks without progress that end a connection."""


class Ending(Enum):
    """How a connection is ended."""

    CLOSE = 1
    """Close the connection with an error for the peer."""
    ABORT = 2
    """The peer does not read, so no error can be sent to it."""


class StallWatch:
    """Remembers the previous check of one connection."""

    __slots__ = ("_read_bytes", "_received_bytes", "_unread_checks", "_unsent_checks")

    def __init__(self) -> None:
        self._received_bytes = -1
        self._read_bytes = (-1, -1)
        """What our kernel had taken and the peer's had acknowledged, when last bytes waited."""
        self._unsent_checks = self._unread_checks = 0

    def check(self, found: FrameStream) -> Ending | None:
        """Whether the connection must end now. While the broker does not read from the peer, the
        peer's silence does not count.
        """
        may_send = found.reader.awaits_rest and found.is_reading
        self._unsent_checks = (
            self._unsent_checks + 1
            if may_send and found.received_bytes == self._received_bytes
            else 0
        )
        self._received_bytes = found.received_bytes
        if found.unsent_bytes:
            read_bytes = (found.taken_bytes, found.acknowledged_bytes)
            self._unread_checks = self._unread_checks + 1 if read_bytes == self._read_bytes else 0
            self._read_bytes = read_bytes
        else:
            self._unread_checks = 0
        if self._unread_checks >= CHECKS:
            return Ending.ABORT
        return Ending.CLOSE if self._unsent_checks >= CHECKS else None


log = logging.getLogger("qmq.broker")

ANSWERS_BYTES_MAX: Final = 2 * limits.PULL_BYTES_MAX
"""Bytes of answers to one connection in one turn, after which it gets no more messages."""

REPLICA_BUFFER_BYTES: Final = 4 * limits.MIB
"""A master's frames are as large as its writes: receiving them into one reused buffer saves an
allocation for each.
"""

FETCHES_MAX: Final = 4
"""FETCHes of one connection that may wait until the client has read earlier answers."""
COLD_FETCHES_MAX: Final = 64
"""FETCHes of one connection that may wait for the object store."""

_ANSWERS_PRODUCE: Final = (FrameKind.PRODUCED, FrameKind.ERROR)
_SETTLED: Final = int(FrameKind.SETTLED)


@dataclass(frozen=True, slots=True)
class SharedByConnections:
    """What the connections of one data port share."""

    received: SharedBuffer | None = None
    """The buffer for all incoming bytes: they are handled before the next bytes come."""
    partial: PartialFrames | None = None
    """What frames that are not whole yet take of memory."""
    budget: RoundBudget | None = None
    throttle: Throttle | None = None
    owners: ProducerOwners = field(default_factory=ProducerOwners)
    strangers: Strangers | None = None
    """The connections without a HELLO."""


class DataConnection:
    """Serves one connection. Before its HELLO only a small frame is accepted.

    The answer to a SETTLE without a deadline is not urgent: it is sent with the next answer, or
    with the next tick. That saves a write for every single message.
    """

    def __init__(
        self,
        broker: Broker,
        on_closed: Callable[[DataConnection], None],
        shared: SharedByConnections | None = None,
        own: NameSource = any_server,
    ) -> None:
        """`own` returns the name of this replica."""
        shared = shared or SharedByConnections()
        self._strangers = shared.strangers
        self._broker = broker
        self._own = own
        self._on_closed = on_closed
        self._outbox_bytes = 0
        self._hurried: set[int] = set()
        self._fetches: deque[tuple[int, wire.Fetch]] = deque()
        self._cold_fetches = 0
        self.has_said_hello = False
        self.client = ""
        """The client's name, from its HELLO."""
        self._peer: ReplicaPeer | None = None
        """Set if the other end is a replica of our group."""
        self.stream = FrameStream(
            on_frames=self._on_frames,
            on_closed=self._closed,
            on_writable=self._writable,
            on_violation=self._violated,
            frame_bytes_max=limits.HELLO_BYTES_MAX,
            shared=shared.received,
            partial=shared.partial,
            on_made=self._made,
        )
        self._stalls = StallWatch()
        self.access = ConnectionAccess(broker.access, shared.owners)
        self._flow = ConnectionFlow(
            self.stream,
            self.access,
            broker.loop.call_later,
            limits.INFLIGHT_BYTES_MAX,
            shared.budget,
            shared.throttle,
        )

    def _made(self) -> None:
        peer = (
            self.stream.transport.get_extra_info("peername")
            if self.stream.transport is not None
            else None
        )
        if self._strangers is not None:
            self._strangers.came(
                self, str(peer[0]) if isinstance(peer, tuple) else UNIX_PEER, self.stream.abort
            )

    def _is_known(self) -> None:
        """The peer has said who it is."""
        self.has_said_hello = True
        if self._strangers is not None:
            self._strangers.left(self)

    # --- the broker's side ------------------------------------------------------------------------

    @property
    def is_writable(self) -> bool:
        """False while the client does not read its answers or has enough of them in flight, and
        after it has disconnected.
        """
        return self.stream.is_writable and self._outbox_bytes < ANSWERS_BYTES_MAX

    @property
    def unanswered_bytes(self) -> int:
        """Unanswered bytes of PRODUCE."""
        return self._flow.unanswered_bytes

    def send(self, *buffers: bytes) -> None:
        """Queue an answer for the end of the turn."""
        _, kind, _, _, request_id, _ = HEADER.unpack_from(buffers[0])
        if kind in _ANSWERS_PRODUCE:
            self._flow.answered(request_id)
        self.stream.put(*buffers)
        self._outbox_bytes += sum(map(len, buffers))
        if kind == _SETTLED and request_id not in self._hurried:
            self._broker.turns.leisurely[self] = None
            return
        self._hurried.discard(request_id)
        self._broker.turns.register_outbox(self)

    def delivered(self, subject: str, messages: int, size: int) -> None:
        """Count what was sent against the quotas of who receives it and of the subject."""
        if self._broker.access.has_quotas:
            self._flow.fetched(subject, messages, size)

    def flush(self) -> None:
        """Write the answers at the end of the turn. A client that does not read its answers is not
        read from.
        """
        was_full = self._outbox_bytes >= ANSWERS_BYTES_MAX
        self._outbox_bytes = 0
        self.stream.flush()
        if not self.stream.is_writable:
            self.stream.pause_reading()
            return
        if was_full:
            self._broker.writable(self)
        if self._fetches:
            self._serve_fetches()

    # --- frames -----------------------------------------------------------------------------------

    def _on_frames(self, received: list[Frame]) -> None:
        turns = self._broker.turns
        turns.begin_frames()
        try:
            for each in received:
                try:
                    if self._peer is not None or not self.has_said_hello:
                        self._handle_stranger_or_replica(each)
                        continue
                    self.access.request_id = each.request_id
                    handle = HANDLERS.get(each.kind)
                    if handle is None:
                        raise ProtocolViolation(
                            f"a client does not send frames of kind {each.kind}"
                        )
                    if each.kind in _ACTING:
                        self._broker.require_action_room()
                    handle(self, each)
                except Exception as failure:
                    if not self._survives(each.kind, each.request_id, failure):
                        return
        finally:
            turns.end_frames(self)

    def _survives(self, kind: int, request_id: int, failure: Exception) -> bool:
        """Answer a request that failed. False if the failure ends the connection."""
        if isinstance(failure, QmqError):
            self._broker.answer_error(self, request_id, failure)
            if isinstance(failure, PeerError):
                log.info("connection closed: %s", failure)
                self.stream.close()
                return False
        elif isinstance(failure, OSError) and failure.errno in SHORT_OF:
            self._broker.answer_error(self, request_id, refusal_of(failure))
        elif isinstance(failure, OSError | AssertionError):
            self._broker.fatal(failure)
        else:
            log.error(
                "handling a frame of kind %d failed; its connection is closed",
                kind,
                exc_info=failure,
            )
            self.stream.close()
            return False
        return True

    def _handle_stranger_or_replica(self, each: Frame) -> None:
        if self._peer is not None and self.has_said_hello:
            self._peer.take(each)
            return
        self.access.request_id = each.request_id
        if self._peer is not None:
            self._prove_peer(self._peer, each)
        else:
            self._hello(each)

    def _hello(self, each: Frame) -> None:
        if each.kind == FrameKind.REPLICA_HELLO and self._broker.accept_replica is not None:
            self.access.greet(self.stream.transport)
            self.access.accepts_replica()
            try:
                self._peer = self._broker.accept_replica(each, self)
            except ProtocolViolation as failure:
                self.access.refused("REPLICA_HELLO", "hello", failure)
                raise
            return
        if each.kind != FrameKind.HELLO:
            raise ProtocolViolation(f"the first frame must be HELLO, not kind {each.kind}")
        hello = wire.Hello.unpack(each.payload)
        if hello.version != wire.PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"this broker speaks version {wire.PROTOCOL_VERSION}, the client {hello.version}"
            )
        self.client = check_client(hello.client)
        self._own().require(ServerName.unpack(hello.server))
        self.access.greet(self.stream.transport, hello.token)
        self._flow.admit()
        self._is_known()
        self.stream.reader.frame_bytes_max = limits.FRAME_BYTES_MAX
        welcome = wire.Welcome(
            wire.PROTOCOL_VERSION,
            self._broker.config.name,
            self._broker.store.epoch,
            limits.FRAME_BYTES_MAX,
            limits.INFLIGHT_BYTES_MAX,
        )
        self.send(frames.frame(FrameKind.WELCOME, each.request_id, welcome.pack()))

    # --- a replica at the other end ---------------------------------------------------------------

    def _prove_peer(self, peer: ReplicaPeer, each: Frame) -> None:
        try:
            peer.take(each)
        except ProtocolViolation as failure:
            self.access.refused("REPLICA_HELLO", "proof", failure)
            raise

    def may_be(self, replica: str) -> bool:
        """See ReplicaConnection."""
        return self.access.may_be_replica(replica)

    def answer_peer(self, payload: bytes) -> None:
        self.stream.put(frames.frame(FrameKind.REPLICA_HELLO, 0, payload))
        self.stream.flush()

    def trust_peer(self) -> None:
        """See ReplicaConnection. From now on it may send large frames."""
        self._is_known()
        self.stream.reader.frame_bytes_max = limits.REPLICA_FRAME_BYTES_MAX
        self.stream.reader.grow(REPLICA_BUFFER_BYTES)

    def close_peer(self) -> None:
        self.stream.close()

    # --- requests ---------------------------------------------------------------------------------

    def _produce(self, each: Frame) -> None:
        broker, size = self._broker, HEADER_BYTES + len(each.payload)
        self._flow.began(each.request_id, size)
        is_open = self.access.is_open()
        took = broker.produce(
            self,
            each.request_id,
            each.payload,
            is_fast=each.kind == FrameKind.PRODUCE_FAST,
            awaits_flush=each.kind == FrameKind.PRODUCE_FLUSHED,
            find_queue=None if is_open else self._find_queue,
            admit=self.access.require_producers
            if not is_open and broker.access.is_enforced
            else None,
        )
        if self.access.has_quotas:
            self._flow.produced(each.request_id, size, took)

    def _find_queue(self, subject: bytes, partition: int) -> Destination:
        self.access.require_produce(subject)
        return self._broker.subjects.find_queue(subject, partition)

    def _consuming(self) -> Dispatch:
        """The part that serves consumers. Raises NotMaster."""
        self._broker.require_consumption()
        return self._broker.dispatch

    def _pull(self, each: Frame) -> None:
        self._consuming().pull(
            self, each.request_id, wire.unpack_pull(each.payload), each.deadline_ms
        )

    def _settle(self, each: Frame) -> None:
        if each.deadline_ms:
            self._hurried.add(each.request_id)
        self._consuming().settle(self, each.request_id, *wire.unpack_settle(each.payload))
        if each.deadline_ms:
            self._broker.store.unwritten.hurry()

    def _begun(self, each: Frame) -> None:
        if self._broker.is_serving:
            with suppress(UnknownConsumer):  # the client waits for no answer
                self._broker.dispatch.begun(self, *wire.unpack_begun(each.payload))

    def _heartbeat(self, each: Frame) -> None:
        number = wire.unpack_session(each.payload)
        (self._lanes() if number >= FIRST_SESSION else self._consuming()).heartbeat(self, number)
        self.send(frames.frame(FrameKind.OK, each.request_id))

    def _detach(self, each: Frame) -> None:
        number, received = wire.unpack_detach(each.payload)
        answer = frames.frame(FrameKind.OK, each.request_id)
        if number >= FIRST_SESSION:
            self._lanes().detach(self, number)
            self.send(answer)
        else:  # after this answer the client forgets its last request, so that must be committed
            self._consuming().detach(self, number, received)
            self._broker.responses.unwritten.append(PendingAnswer(0, self, each.request_id, answer))

    def _attach(self, each: Frame) -> None:
        request = wire.Attach.unpack(each.payload)
        self.access.require_consume(request.subject, request.group)
        consuming = self._consuming()
        self._flow.admit_group(request.subject, request.group, self._groups_of)
        attached = consuming.attach(self, request)
        self.send(frames.frame(FrameKind.ATTACHED, each.request_id, attached.pack()))

    def _lanes(self) -> Lanes:
        """The part that serves consumers of ordered subjects. Raises NotMaster."""
        self._broker.require_consumption()
        return self._broker.lanes

    def _lane_attach(self, each: Frame) -> None:
        request = wire.LaneAttach.unpack(each.payload)
        self.access.require_consume(request.subject, request.group)
        lanes = self._lanes()
        self._flow.admit_group(request.subject, request.group, self._groups_of)
        lanes.attach(self, each.request_id, request)

    def _groups_of(self, subjects: Collection[str]) -> set[tuple[str, str]]:
        queues = self._broker.store.queues.values()
        return {
            (each.id.subject, base_group(group))
            for each in queues
            if each.id.subject in subjects
            for group in (*each.shares, *each.lanes)
        }

    def _lane_pull(self, each: Frame) -> None:
        self._lanes().pull(
            self, each.request_id, wire.unpack_lane_pull(each.payload), each.deadline_ms
        )

    def _lane_settle(self, each: Frame) -> None:
        if each.deadline_ms:
            self._hurried.add(each.request_id)
        self._lanes().settle(self, each.request_id, *wire.unpack_lane_settle(each.payload))

    def _fetch(self, each: Frame) -> None:
        if len(self._fetches) >= FETCHES_MAX:
            raise Overloaded("too many fetches are unanswered: read their answers first")
        request = wire.Fetch.unpack(each.payload)
        self.access.require_browse(request.subject)
        self._fetches.append((each.request_id, request))
        self._serve_fetches()

    def _serve_fetches(self) -> None:
        """Serve waiting FETCHes while the client reads its answers."""
        while self._fetches and self.is_writable:
            fetch = self._fetches.popleft()
            try:
                self._answer_fetch(fetch)
            except Exception as failure:
                if not self._survives(FrameKind.FETCH, fetch[0], failure):
                    return

    def _answer_fetch(self, fetch: tuple[int, wire.Fetch]) -> None:
        request_id, request = fetch
        try:
            head, buffers = self._broker.fetching.fetch(request)
        except ColdRead as cold:
            if self._cold_fetches >= COLD_FETCHES_MAX:
                raise
            self._cold_fetches += 1
            cold.then((self, request_id), lambda failure: self._fetch_again(fetch, failure))
            return
        self.send(*pack((head, buffers), request_id))
        if self._broker.access.has_quotas:
            self._flow.fetched(request.subject, messages_in(buffers), sum(map(len, buffers)))

    def _fetch_again(self, fetch: tuple[int, wire.Fetch], failure: QmqError | None) -> None:
        """The data that a FETCH waits for has arrived, or the object store cannot provide it."""
        self._cold_fetches -= 1
        if failure is not None:
            self._broker.answer_error(self, fetch[0], failure)
            return
        self._fetches.append(fetch)
        self._serve_fetches()

    def _find(self, each: Frame) -> None:
        request = wire.Find.unpack(each.payload)
        self.access.require_find(request.subject)
        self._broker.fetching.find(self, each.request_id, request)

    def _reauthenticate(self, each: Frame) -> None:
        self.access.renew(wire.Reauth.unpack(each.payload).token)
        self.send(frames.frame(FrameKind.OK, each.request_id))

    def recheck_access(self) -> None:
        """End the connection if its sessions are no longer allowed, or its token has expired."""
        try:
            self.access.recheck()
        except QmqError as failure:
            log.info("connection of %r closed: %s", self.client, failure)
            self.stream.put(frames.frame(FrameKind.ERROR, 0, wire.pack_error(failure)))
            self.stream.close()

    # --- the connection's end ---------------------------------------------------------------------

    def _violated(self, violation: ProtocolViolation) -> None:
        log.info("connection closed: %s", violation)
        if self.has_said_hello:
            self.stream.put(frames.frame(FrameKind.ERROR, 0, wire.pack_error(violation)))

    def _writable(self) -> None:
        self._flow.writable()
        self._broker.writable(self)
        self._serve_fetches()

    def _closed(self, _cause: Exception | None) -> None:
        if self._strangers is not None:
            self._strangers.left(self)
        if self._peer is not None:
            self._peer.ended()
        self._flow.ended(was_admitted=self.has_said_hello and self._peer is None)
        self._broker.disconnected(self)
        self._on_closed(self)

    def end_if_stalled(self) -> None:
        """Called every `stall_ms` / `CHECKS`: end the connection if it makes no progress."""
        ending = self._stalls.check(self.stream)
        if ending is Ending.ABORT:
            log.info("connection of %r aborted: it does not read its answers", self.client)
            self.stream.abort()
        elif ending is Ending.CLOSE:
            self._violated(
                ProtocolViolation(
                    "the rest of a frame did not arrive in time: send the frame again on a "
                    "new connection"
                )
            )
            self.stream.close()

    def end_for_memory(self) -> None:
        """Too much memory is in incomplete frames, and this connection's frame has been without
        progress for longest.
        """
        failure = Overloaded(
            "the broker has too many incomplete frames: send this one again on a new connection"
        )
        log.info("connection of %r closed: %s", self.client, failure)
        self.stream.put(frames.frame(FrameKind.ERROR, 0, wire.pack_error(failure)))
        self.stream.close()

    def refuse(self, failure: Overloaded) -> None:
        """Too many connections: send the error as soon as this one is open, and close it."""
        self.stream.refusal = frames.frame(FrameKind.ERROR, 0, wire.pack_error(failure))


_ACTING: Final = frozenset(
    {
        FrameKind.ATTACH,
        FrameKind.PULL,
        FrameKind.SETTLE,
        FrameKind.LANE_ATTACH,
        FrameKind.LANE_PULL,
        FrameKind.LANE_SETTLE,
    }
)
"""Requests that add actions. Heartbeats add none,
and those of DETACH are bounded by the sessions.
"""
HANDLERS: Final[dict[int, Callable[[DataConnection, Frame], None]]] = {
    FrameKind.PRODUCE: DataConnection._produce,
    FrameKind.PRODUCE_FAST: DataConnection._produce,
    FrameKind.PRODUCE_FLUSHED: DataConnection._produce,
    FrameKind.PULL: DataConnection._pull,
    FrameKind.SETTLE: DataConnection._settle,
    FrameKind.BEGUN: DataConnection._begun,
    FrameKind.HEARTBEAT: DataConnection._heartbeat,
    FrameKind.ATTACH: DataConnection._attach,
    FrameKind.DETACH: DataConnection._detach,
    FrameKind.FETCH: DataConnection._fetch,
    FrameKind.FIND: DataConnection._find,
    FrameKind.LANE_ATTACH: DataConnection._lane_attach,
    FrameKind.LANE_PULL: DataConnection._lane_pull,
    FrameKind.LANE_SETTLE: DataConnection._lane_settle,
    FrameKind.REAUTH: DataConnection._reauthenticate,
}


CLOSE_S: Final = 2.0
"""How long a connection may take to read its last answers."""
ACCESS_CHECK_S: Final = 1.0
"""The interval of checks that depend on the clock: expired tokens, and rules that are too old."""
STRANGERS_SHARE: Final = 4
"""One of so many places is for connections that have not said HELLO: the address with most of them
loses its oldest.
"""
STRANGERS_MIN: Final = 16


class DataServer:
    """Accepts connections for a broker."""

    def __init__(
        self,
        broker: Broker,
        network: Network = NETWORK,
        descriptors: int | None = None,
        own: NameSource = any_server,
    ) -> None:
        """`own` returns the name of this replica."""
        self._broker = broker
        self._own = own
        self._connections_max = connections_max(
            broker.config.connections_max, descriptors or limit()
        )
        self._network = network
        self.throttle = Throttle(broker.access, broker.loop.time)
        self.partial = PartialFrames(broker.config.partial_frames_bytes_max, self._exceeded)
        self.open_connections: set[DataConnection] = set()
        places = max(self._connections_max // STRANGERS_SHARE, STRANGERS_MIN)
        self._shared = SharedByConnections(
            SharedBuffer(),
            self.partial,
            RoundBudget(broker.loop.call_soon, lambda: broker.turns.count),
            self.throttle,
            strangers=Strangers(
                StrangerBounds(places, time_s=broker.config.hello_timeout_ms / 1000),
                broker.loop.time,
            ),
        )
        self._listener: ServerListener | None = None
        self._handshakes = RateMeter(broker.config.handshakes_per_s, broker.loop.time())
        self.port = 0
        self._all_closed = asyncio.Event()
        self._is_stopping = False
        self._checking: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._is_stale = False
        self._forget_access: Callable[[], object] = lambda: None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free port (`self.port`).
        Raises OSError if the port is taken, InvalidArgument.
        """
        self._listener = await self._network.listen(host, port, self._accept, self._refused)
        self.port = self._listener.port
        self._forget_access = self._broker.access.on_change(self._recheck_access)
        self._check_later()
        self._watch_clock()

    def _accept(self) -> asyncio.BaseProtocol:
        connection = DataConnection(self._broker, self._closed, self._shared, self._own)
        self._broker.counters.accepted += 1
        loop = asyncio.get_running_loop()
        self._limit_handshakes()
        if len(self.open_connections) >= self._connections_max:
            connection.refuse(
                Overloaded(
                    f"the broker has {len(self.open_connections)} connections, the limit: "
                    "close some, or raise its limit of open files"
                )
            )
        if self._is_stopping:
            connection.stream.close()  # asyncio accepted it before the listener was closed
        self.open_connections.add(connection)
        loop.call_later(self._broker.config.hello_timeout_ms / 1000, self._expect_hello, connection)
        return connection.stream

    def _refused(self, address: str, why: str) -> None:
        """TLS refused a peer. Strangers can repeat this at will,
        so equal refusals are only counted.
        """
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
        asyncio.get_running_loop().call_soon(
            self._end_reader, reader
        )  # not while another connection receives

    def _end_reader(self, reader: Hashable) -> None:
        for connection in list(self.open_connections):
            if connection.stream.reader is reader:
                connection.end_for_memory()

    def _end(self, connection: DataConnection, end: Callable[[FrameStream], None]) -> None:
        was_made = connection.stream.transport is not None
        end(connection.stream)
        if not was_made:  # asyncio does not report a connection whose TLS handshake failed
            self._closed(connection)

    def _check_later(self) -> None:
        wait_s = self._broker.config.stall_ms / 1000 / CHECKS
        self._checking = asyncio.get_running_loop().call_later(wait_s, self._check)

    def _check(self) -> None:
        self.end_stalled()
        self._recheck_access()
        self._check_later()

    def _recheck_access(self) -> None:
        """The rules changed, or tokens may have expired."""
        for connection in list(self.open_connections):
            connection.recheck_access()

    def _watch_clock(self) -> None:
        self.end_expired()
        self._watching = asyncio.get_running_loop().call_later(ACCESS_CHECK_S, self._watch_clock)

    def end_expired(self) -> None:
        """End sessions and connections that are no longer allowed because time has passed."""
        was_stale, self._is_stale = self._is_stale, self._broker.access.is_stale
        has_turned = was_stale is not self._is_stale
        for connection in list(self.open_connections):
            if has_turned or connection.access.has_ended:
                connection.recheck_access()

    def end_stalled(self) -> None:
        """Check every connection once; one without progress in `CHECKS` checks is ended."""
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
        """Accept no more connections, and close the open ones after their answers; those that do
        not read them are cut off after `CLOSE_S`.
        """
        self._is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for each in (self._checking, self._watching):
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
