"""Runs the streams of one ordered producer: follows the newest route, passes batches to their streams, cuts the batches of settled streams
again.

Rules:
* Until the first route is known, batches wait in a stream without a partition (`_unrouted`); they are cut when the route is known.
* The producer asks for the route when a partition answers that it is sealed (repeatedly, with the locator's pauses, until the route is
  newer), when a metaserver pushes, and when a broker group does not answer.
* Decisions are taken from a stream before it is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from qmq_ordering.route import LpRange, PhysicalPartition

from qmq.client.links import Links
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.client.ordered.stream_connection import StreamConnection
from qmq.client.ordered.stream_partitioner import StreamPartitioner
from qmq.client.route_book import Ordering
from qmq.delivery.retries import final
from qmq.errors import ClientClosed, InvalidArgument, OrderMismatch, Outcome, QmqError, Unavailable
from qmq.model import Order
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Produced

NOWHERE: Final = PhysicalPartition(0, LpRange(0, 0), "")


class StreamsOwner(Protocol):
    """What streams need of the producer."""

    subject: str
    kind: int
    """See `StreamConnectionOwner`."""

    def encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...

    def stored(self, stream: Stream, batch: OrderedBatch, produced: Produced) -> None: ...

    def failed(self, batch: OrderedBatch, failure: QmqError) -> None: ...

    def answered(self) -> None: ...

    def take_gathered(self, connection: StreamConnection | None) -> OrderedBatch | None:
        """Close the open batch of a stream, if it holds anything."""
        ...

    def key_partitions(self, keys: Sequence[bytes]) -> list[int]:
        """The logical partitions of keys."""
        ...

    def rerouted(self, logical_partitions: int, by_lp: Sequence[StreamConnection]) -> None:
        """The route has changed."""
        ...


class Streams:
    def __init__(self, links: Links, owner: StreamsOwner, new_id: Callable[[], int], unknown: str) -> None:
        self.subject = owner.subject
        self.kind = owner.kind
        self.encode = owner.encode
        self._links = links
        self._owner = owner
        self._new_id, self._unknown = new_id, unknown
        self._loop = asyncio.get_running_loop()
        self._order = Order.NONE
        self._partitioner = StreamPartitioner(self._make)
        self._connections: dict[int, StreamConnection] = {}
        self._unrouted = Stream(NOWHERE, new_id)
        self._finding: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._refusal: QmqError | None = None
        self._is_closed = False

    # --- the way out ---------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises OrderMismatch, InvalidArgument if this producer cannot send to the subject."""
        if self._refusal is not None:
            raise self._refusal

    def is_idle(self, connection: StreamConnection | None) -> bool:
        """Whether the partition has no batch in flight or waiting, or is about to be replaced: the open batch need not gather more."""
        stream = self._unrouted if connection is None else connection.stream
        return stream.is_idle or (self._order is Order.BEST_EFFORT and stream.is_troubled(self._loop.time()))

    def put(self, connection: StreamConnection | None, batch: OrderedBatch) -> None:
        """Add a batch; it is sent as soon as possible."""
        if connection is None:
            self._unrouted.put(batch)
            self._loop.call_at(batch.until, self._tick_unrouted)
            if self._finding is None and not self._is_closed:
                self._finding = self._loop.create_task(self._find())
            return
        self._links.locator.touch(self.subject)
        connection.stream.put(batch)
        if not self._bend():
            connection.pump()

    # --- what changes --------------------------------------------------------------------------------------------------

    def changed(self, connection: StreamConnection) -> None:
        """For a connection: see `StreamConnectionOwner`."""
        stream = connection.stream
        self._take_decided(stream)
        if stream.is_settled:
            self._settle()
        else:
            if self.is_idle(connection):
                self.gather(connection)
            if not self._bend():
                connection.pump()
        if self._following is None and self._partitioner.wants_route and not self._is_closed:
            self._following = self._loop.create_task(self._follow())
        self._owner.answered()

    def gather(self, connection: StreamConnection) -> None:
        """For a connection: put the open batch behind the stream's batches."""
        batch = self._owner.take_gathered(connection)
        if batch is not None:
            connection.stream.put(batch)

    def _take_decided(self, stream: Stream) -> None:
        for batch, result in stream.take_decided():
            if isinstance(result, QmqError):
                self._owner.failed(batch, result)
            else:
                self._owner.stored(stream, batch, result)

    def _bend(self) -> bool:
        """Best-effort order: let healthy groups take the batches of troubled ones. Returns whether any moved; then
        all streams were pumped.
        """
        if self._order is not Order.BEST_EFFORT:
            return False
        given = self._partitioner.bend(self._loop.time())
        for stream in given:
            self._connections[stream.partition.number].reach(ahead=True)
        if given:
            self._pump()
        return bool(given)

    @property
    def bent(self) -> int:
        """Messages that went to another partition than their own."""
        return self._partitioner.bent

    def _pump(self) -> None:
        for connection in list(self._connections.values()):
            connection.pump()

    # --- routes --------------------------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Learn the first route."""
        locator = self._links.locator
        try:
            while not self._unrouted.is_idle and not self._partitioner.version and not self._is_closed:
                try:
                    ordering = await locator.ordering(self.subject, anew=locator.book.groups(self.subject) is None)
                    self._open(ordering)
                except Unavailable as failure:
                    self._unrouted.trouble = failure
        except QmqError as failure:
            self.give_up(failure)
        finally:
            self._finding = None

    def _open(self, ordering: Ordering | None) -> None:
        """Raises OrderMismatch, InvalidArgument if this producer cannot send to the subject."""
        if ordering is None:
            self._refusal = OrderMismatch(f"subject {self.subject!r} is unordered: send to it with Client.producer")
        elif ordering.order is Order.STRICT and self.kind == FrameKind.PRODUCE_FAST:
            self._refusal = InvalidArgument(f"subject {self.subject!r} has strict order: its messages need acks='quorum' or 'flushed'")
        self.check_usable()
        assert ordering is not None
        self._order = ordering.order
        self._links.locator.listen(self.subject, self._rerouted)
        self._rerouted()
        self._cut_unrouted()

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        ordering = self._links.locator.book.ordering(self.subject)
        if ordering is None or self._is_closed:
            return
        self._partitioner.learn(ordering.route, ordering.fenced, self._loop.time())
        self._settle()
        for connection in list(self._connections.values()):
            connection.moved()

    def _make(self, part: PhysicalPartition) -> Stream:
        stream = Stream(part, self._new_id, unknown=self._unknown, ask_s=self._links.timing.fenced_s)
        connection = self._connections[part.number] = StreamConnection(self._links, stream, self)
        connection.reach(ahead=True)
        return stream

    def _settle(self) -> None:
        """Take the batches of settled streams. Streams that are left still take new batches for their ranges."""
        for stream in list(self._partitioner.partitions.values()):
            if stream.is_settled:
                self.gather(self._connections[stream.partition.number])
        settled = self._partitioner.settle()
        for stream in settled:
            self._take_decided(stream)
            self._connections.pop(stream.partition.number).close()
        if settled:
            self._tell_owner()
        self._pump()

    def _tell_owner(self) -> None:
        by_lp = [self._connections[stream.partition.number] for stream in self._partitioner.by_lp]
        self._owner.rerouted(len(by_lp), by_lp)

    def _cut_unrouted(self) -> None:
        """The first route is known: distribute the waiting batches."""
        self._gather_unrouted()
        self._tell_owner()
        for batch in self._unrouted.take_left():
            batch.columns.logical_partitions = self._owner.key_partitions(batch.columns.keys or ())
            self._partitioner.put_cut([batch])
        self._pump()

    async def _follow(self) -> None:
        """Ask for the route until it is newer; the locator keeps the pauses."""
        try:
            while self._partitioner.wants_route and not self._is_closed:
                try:
                    await self._links.locator.ordering(self.subject, anew=True)
                except Unavailable:
                    continue
        except QmqError as failure:
            self.give_up(failure)
        finally:
            self._following = None

    # --- the end -------------------------------------------------------------------------------------------------------

    def _tick_unrouted(self) -> None:
        if self._unrouted.is_late(self._loop.time()):
            self._gather_unrouted()
            self._unrouted.tick(self._loop.time())
            self._take_decided(self._unrouted)

    def _gather_unrouted(self) -> None:
        batch = self._owner.take_gathered(None)
        if batch is not None:
            self._unrouted.put(batch)

    def give_up(self, failure: QmqError) -> None:
        """For a connection: see `StreamConnectionOwner`."""
        self._drop(lambda batch: final(failure, batch))

    def _drop(self, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        self._gather_unrouted()
        for connection in self._connections.values():
            self.gather(connection)
        for stream in [self._unrouted, *[connection.stream for connection in self._connections.values()]]:
            stream.drop(failure_of)
            self._take_decided(stream)
        self._owner.answered()

    def abort(self) -> None:
        """End now: all undecided batches fail with ClientClosed."""
        self._is_closed = True
        self._links.locator.unlisten(self.subject, self._rerouted)
        for task in (self._finding, self._following):
            if task is not None:
                task.cancel()
        self._drop(_closed)
        for connection in self._connections.values():
            connection.close()


def _closed(batch: OrderedBatch) -> QmqError:
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    return ClientClosed("the producer was closed before the answer came", outcome=outcome)
