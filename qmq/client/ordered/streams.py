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
from collections.abc import Callable
from typing import Final

from qmq_ordering.route import LpRange, PhysicalPartition

from qmq.client.links import Links
from qmq.client.ordered.batch_builder import BatchBuilder
from qmq.client.ordered.group_load import GroupLoad
from qmq.client.ordered.open_batches import OpenBatches
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.client.ordered.stream_connection import Encode, StreamConnection
from qmq.client.ordered.stream_partitioner import StreamPartitioner
from qmq.client.route_book import Ordering
from qmq.delivery.retries import final
from qmq.errors import ClientClosed, InvalidArgument, OrderMismatch, Outcome, QmqError, Unavailable
from qmq.model import Order
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Produced

NOWHERE: Final = PhysicalPartition(0, LpRange(0, 0), "")


class Streams:
    """`kind` is PRODUCE, or one of the frames of other `acks`; `new_id` returns a new producer id; `unknown` is as in `Stream`.

    stored, failed    called for each decided batch
    answered          called after batches were decided, or may have been
    """

    def __init__(
        self,
        links: Links,
        subject: str,
        kind: int,
        open_batches: OpenBatches,
        *,
        new_id: Callable[[], int],
        load_light: tuple[int, int],
        unknown: str,
        encode: Encode,
        stored: Callable[[Stream, OrderedBatch, Produced], None],
        failed: Callable[[OrderedBatch, QmqError], None],
        answered: Callable[[], None],
    ) -> None:
        self._subject = subject
        self._kind = kind
        self._open_batches = open_batches
        self._links = links
        self._new_id, self._unknown = new_id, unknown
        self._load_light = load_light
        self._loads: dict[str, GroupLoad] = {}
        """What is unanswered, by broker group."""
        self._encode = encode
        self._stored, self._failed, self._answered = stored, failed, answered
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

    def may_leave(self, builder: BatchBuilder) -> bool:
        """Whether an open batch that is not full need not gather more. See `ClientTiming.gather_s`."""
        connection = builder.connection
        if connection is None:
            return self._unrouted.is_idle
        stream, now = connection.stream, self._loop.time()
        if self._order is Order.BEST_EFFORT and stream.is_troubled(now):
            return True
        if not stream.is_idle:
            return False
        gathers_until = self._open_batches.filled[builder] + self._links.timing.gather_s
        return connection.load.is_light or builder.ticket.is_awaited or now >= gathers_until

    def put(self, connection: StreamConnection | None, batch: OrderedBatch) -> None:
        """Add a batch; it is sent as soon as possible."""
        if connection is None:
            self._unrouted.put(batch)
            self._loop.call_at(batch.until, self._tick_unrouted)
            if self._finding is None and not self._is_closed:
                self._finding = self._loop.create_task(self._find())
            return
        self._links.locator.touch(self._subject)
        connection.stream.put(batch)
        if not self._bend():
            connection.pump()

    # --- what changes --------------------------------------------------------------------------------------------------

    def _changed(self, connection: StreamConnection) -> None:
        """See `StreamConnection`."""
        stream = connection.stream
        self._take_decided(stream)
        if stream.is_settled:
            self._settle()
        else:
            self._let_go(connection)
            if not self._bend():
                connection.pump()
        if self._following is None and self._partitioner.wants_route and not self._is_closed:
            self._following = self._loop.create_task(self._follow())
        self._answered()

    def _gather(self, connection: StreamConnection) -> None:
        """Put the open batch behind the stream's batches."""
        batch = self._open_batches.take_of(connection)
        if batch is not None:
            connection.stream.put(batch)

    def _let_go(self, connection: StreamConnection) -> None:
        """A batch of this stream was answered, so open batches of the same broker group may leave. The caller pumps the stream itself."""
        for builder in list(self._open_batches.filled):
            other = builder.connection
            if other is not None and other.load is connection.load and self.may_leave(builder):
                self._gather(other)
                if other is not connection:
                    other.pump()

    def _take_decided(self, stream: Stream) -> None:
        for batch, result in stream.take_decided():
            if isinstance(result, QmqError):
                self._failed(batch, result)
            else:
                self._stored(stream, batch, result)

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
        """Fetch the first route."""
        locator = self._links.locator
        try:
            while not self._unrouted.is_idle and not self._partitioner.version and not self._is_closed:
                try:
                    ordering = await locator.ordering(self._subject, refresh=locator.book.groups(self._subject) is None)
                    self._open(ordering)
                except Unavailable as failure:
                    self._unrouted.trouble = failure
        except QmqError as failure:
            self._give_up(failure)
        finally:
            self._finding = None

    def _open(self, ordering: Ordering | None) -> None:
        """Raises OrderMismatch, InvalidArgument if this producer cannot send to the subject."""
        if ordering is None:
            self._refusal = OrderMismatch(f"subject {self._subject!r} is unordered: send to it with Client.producer")
        elif ordering.order is Order.STRICT and self._kind == FrameKind.PRODUCE_FAST:
            self._refusal = InvalidArgument(f"subject {self._subject!r} has strict order: its messages need acks='quorum' or 'flushed'")
        self.check_usable()
        assert ordering is not None
        self._order = ordering.order
        self._links.locator.listen(self._subject, self._rerouted)
        self._rerouted()
        self._cut_unrouted()

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        ordering = self._links.locator.book.ordering(self._subject)
        if ordering is None or self._is_closed:
            return
        self._partitioner.learn(ordering.route, ordering.fenced, self._loop.time())
        self._settle()
        for connection in list(self._connections.values()):
            connection.moved()

    def _make(self, part: PhysicalPartition) -> Stream:
        stream = Stream(part, self._new_id, unknown=self._unknown, ask_s=self._links.timing.fenced_s)
        connection = StreamConnection(
            self._links,
            self._subject,
            self._kind,
            stream,
            self._load_of(part.group),
            self._encode,
            self._changed,
            self._gather,
            self._give_up,
        )
        self._connections[part.number] = connection
        connection.reach(ahead=True)
        return stream

    def _load_of(self, group: str) -> GroupLoad:
        return self._loads.setdefault(group, GroupLoad(*self._load_light))

    def _settle(self) -> None:
        """Take the batches of settled streams. Streams that are left still take new batches for their ranges."""
        for stream in list(self._partitioner.partitions.values()):
            if stream.is_settled:
                self._gather(self._connections[stream.partition.number])
        settled = self._partitioner.settle()
        for stream in settled:
            self._take_decided(stream)
            self._connections.pop(stream.partition.number).close()
        if settled:
            self._reroute_open_batches()
        self._pump()

    def _reroute_open_batches(self) -> None:
        self._open_batches.rerouted([self._connections[stream.partition.number] for stream in self._partitioner.by_lp])

    def _cut_unrouted(self) -> None:
        """The first route is known: distribute the waiting batches."""
        self._gather_unrouted()
        self._reroute_open_batches()
        for batch in self._unrouted.take_left():
            batch.columns.logical_partitions = self._open_batches.keys.of_many(batch.columns.keys or ())
            self._partitioner.put_cut([batch])
        self._pump()

    async def _follow(self) -> None:
        """Ask for the route until it is newer; the locator keeps the pauses."""
        try:
            while self._partitioner.wants_route and not self._is_closed:
                try:
                    await self._links.locator.ordering(self._subject, refresh=True)
                except Unavailable:
                    continue
        except QmqError as failure:
            self._give_up(failure)
        finally:
            self._following = None

    # --- the end -------------------------------------------------------------------------------------------------------

    def _tick_unrouted(self) -> None:
        if self._unrouted.is_late(self._loop.time()):
            self._gather_unrouted()
            self._unrouted.tick(self._loop.time())
            self._take_decided(self._unrouted)

    def _gather_unrouted(self) -> None:
        batch = self._open_batches.take_of(None)
        if batch is not None:
            self._unrouted.put(batch)

    def _give_up(self, failure: QmqError) -> None:
        """See `StreamConnection`."""
        self._drop(lambda batch: final(failure, batch))

    def _drop(self, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        self._gather_unrouted()
        for connection in self._connections.values():
            self._gather(connection)
        for stream in [self._unrouted, *[connection.stream for connection in self._connections.values()]]:
            stream.drop(failure_of)
            self._take_decided(stream)
        self._answered()

    def abort(self) -> None:
        """End now: all undecided batches fail with ClientClosed."""
        self._is_closed = True
        self._links.locator.unlisten(self._subject, self._rerouted)
        for task in (self._finding, self._following):
            if task is not None:
                task.cancel()
        self._drop(_closed)
        for connection in self._connections.values():
            connection.close()


def _closed(batch: OrderedBatch) -> QmqError:
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    return ClientClosed("the producer was closed before the answer came", outcome=outcome)
