"""A write task's view of the cluster: locations of subjects, contents of queues, connections. Thin
I/O without long waits.

A process caches the cluster by address for as long as it runs, so that a stream with a task every
second does not reconnect each time.

To find the rows of a writer's epoch that a queue already has, FIND lists the batches of its
producer id, and FETCH reads them:

* Usually there are no such rows, and one request for the newest batch shows it.
* For unordered subjects, numbers tell which rows are stored. In a partition, the newest batch is
  read, then older ones as long as they are of this epoch.
* Stored batches are read to compare their rows with those of this attempt (`requests.py`). Outside
  of ordered subjects this needs a right that a sink may lack, to browse the subject: then the rows
  are not compared.
* A closed partition must be sealed *before* the lookup, so that no row is added after it.

Batches are sent over one connection to a broker group from the task's thread; another thread of the
connection receives the answers. So requests to all broker groups are in flight together, and a slow
broker does not delay the others. The thread receives only while an answer is expected (an idle
connection must not time out), and puts each answer into `events`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from pyspark_qmq.sink.packets import Packet
from pyspark_qmq.sink.requests import (
    Ask,
    Glance,
    Locate,
    Look,
    LookedUp,
    Prints,
    Where,
    of_batch,
    of_ids,
    unknown,
)
from pyspark_qmq.sink.row_identity import ID_BYTES, NUMBERS_END, Ids, RowTarget, RowWriter
from qmq.columns.model import QueueKey
from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.metaservers import Metadata
from qmq.columns.servers.reading import MasterConnections, batches_in, numbers_of
from qmq.errors import (
    AccessDenied,
    LogDamaged,
    QmqError,
    RouteChanged,
)
from qmq.limits import MIB
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView
from qmq.wire.frame import FrameKind

Call = Callable[[int, bytes], memoryview]
"""Sends (kind, payload) to the queue's master and returns the answer's payload."""
Batch = tuple[int, int, int]
"""Number, first sequence, number of messages."""

PAGE: Final = 1_000
FETCH_BYTES: Final = 4 * MIB


def look_up(ask: Look | Glance, writer: RowWriter, call: Call) -> LookedUp:
    """Answer a `Look` or a `Glance`. Raises RouteChanged for a closed partition that is not sealed
    yet, LogDamaged, and what `call` raises.
    """
    if isinstance(ask, Glance):
        return _newest(ask.target, writer, call)
    if ask.target.partition == 0:
        return _outside_partitions(ask.target, writer, call)
    if (
        ask.is_final
        and not wire.unpack_fetched(call(FrameKind.FETCH, numbers_of(_key(ask.target)).pack()))[
            0
        ].is_sealed
    ):
        raise RouteChanged(f"{ask.target} was closed, and its broker group has not sealed it yet")
    return _in_partition(ask, writer, call)


def _newest(to: RowTarget, writer: RowWriter, call: Call) -> LookedUp:
    batch = next(_sent(to, writer, call, NUMBERS_END), None)
    if batch is None:
        return LookedUp()
    if to.partition == 0:
        return LookedUp(has_any=True, has_later=batch[0] >= writer.numbers_end)
    view = _read(to, batch, call) if batch[2] and not writer.has_own_ids else None
    has_later = view is not None and writer.read_ids(_ids_of(view))[1] > writer.epoch
    return LookedUp(has_any=True, has_later=has_later)


def _outside_partitions(to: RowTarget, writer: RowWriter, call: Call) -> LookedUp:
    batches = _sent(to, writer, call, NUMBERS_END)
    newest = next(batches, None)
    has_later = newest is not None and newest[0] >= writer.numbers_end
    if has_later:
        batches = _sent(to, writer, call, writer.numbers_end)
    elif newest is not None:
        batches = chain([newest], batches)
    runs: dict[int, Prints] = {}
    for batch in batches:
        if batch[0] < writer.numbers_begin:
            break
        if batch[2]:
            runs[batch[0] - writer.numbers_begin] = _prints_of(to, batch, writer, call)
    return LookedUp(runs=runs, has_later=has_later)


def _prints_of(to: RowTarget, batch: Batch, writer: RowWriter, call: Call) -> Prints:
    try:
        view = _read(to, batch, call)
    except AccessDenied:
        view = None
    if view is None:
        return unknown(batch[2])
    return of_ids(_ids_of(view)) if writer.has_own_ids else of_batch(view)


def _in_partition(ask: Look, writer: RowWriter, call: Call) -> LookedUp:
    number, found, ids, has_later = 0, dict[int, int](), set[bytes](), False
    for batch in _sent(ask.target, writer, call, NUMBERS_END):
        number = max(number, batch[0] + 1)
        if batch[0] < ask.from_number:
            break
        if not batch[2]:
            continue
        view = _read(ask.target, batch, call)
        if view is None:
            continue
        if writer.has_own_ids:
            ids.update(each.tobytes() for each in _ids_of(view))
            continue
        rows, newest_epoch, is_mine = writer.read_ids(_ids_of(view))
        if len(rows):
            found.update(zip(rows.tolist(), of_batch(view)[is_mine].tolist(), strict=True))
        has_later |= newest_epoch > writer.epoch
        if newest_epoch < writer.epoch:
            break
    ordered = sorted(found.items())
    whole = np.array([row for row, _ in ordered], np.int64)
    return LookedUp(
        number,
        rows=whole,
        prints=np.array([each for _, each in ordered], np.uint64),
        ids=frozenset(ids),
        has_later=has_later,
    )


def _sent(to: RowTarget, writer: RowWriter, call: Call, before: int) -> Iterator[Batch]:
    """The writer's batches with numbers below `before`, the highest first."""
    producer, most = f"{writer.producer_id(to):016x}", 1
    while True:
        request = wire.Find(to.subject, to.partition, producer, before, most)
        found = wire.FoundBatches.unpack(call(FrameKind.FIND, request.pack())).found
        yield from [(number, sequence, count) for number, sequence, count in found]
        if len(found) < most or not found[-1][0]:
            return
        before, most = found[-1][0], PAGE


def _ids_of(view: BatchView) -> Ids:
    return np.frombuffer(
        view.region, np.uint8, view.count * ID_BYTES, view.layout.message_id
    ).reshape(-1, ID_BYTES)


def _read(to: RowTarget, batch: Batch, call: Call) -> BatchView | None:
    """A stored batch of this writer; None if retention deleted it meanwhile."""
    _, sequence, count = batch
    request = wire.Fetch(
        to.subject, to.partition, sequence, sequence + count, 0, FETCH_BYTES, [], [], [], 1
    )
    payload = call(FrameKind.FETCH, request.pack())
    fetched, start = wire.unpack_fetched(payload)
    for envelope, region in batches_in(payload[start:], fetched.batches, _key(to)):
        view = BatchView(envelope, bytes(region))
        if envelope.base_sequence == sequence and view.layout.message_id >= 0:
            return view
    if fetched.start_sequence > sequence:
        return None
    raise LogDamaged(
        f"{to} listed a batch of {count} messages from {sequence} on, but did not return it"
    )


def _key(to: RowTarget) -> QueueKey:
    return QueueKey(to.subject, to.partition, to.broker_group)


METADATA_MS: Final = 2_000
"""How long metaservers are asked before the caller checks its own deadline."""
REMEMBERED_MAX: Final = 100_000

_clusters: dict[str, SinkCluster] = {}


def cluster_at(servers: str) -> SinkCluster:
    """The cluster, opened once per process. Raises InvalidArgument."""
    found = _clusters.get(servers)
    if found is None:
        found = _clusters[servers] = SinkCluster(servers)
    return found


class SinkCluster:
    """A cluster's connections. Not thread-safe."""

    def __init__(self, servers: str) -> None:
        self._metadata = Metadata(servers, METADATA_MS)
        self._masters = {
            is_delayed: MasterConnections(self._metadata, delayed=is_delayed)
            for is_delayed in (False, True)
        }
        self._closed: dict[tuple[str, RowTarget], int] = {}
        """Partitions that a writer saw closed, with the epoch;
        they cannot have rows of later epochs.
        """

    # --- answers for cores ------------------------------------------------------------------------

    def logical_partitions(self, subject: str, *, creates: bool) -> int:
        """The number of an ordered subject's logical partitions; 0: unordered. With `creates` a
        missing subject is created as by a first message. Raises UnknownSubject, InvalidName,
        NotConnected.
        """
        ordering = self._masters[False].locate(subject, create=creates).placement.ordering
        return 0 if ordering is None else ordering.route.logical_partitions

    def answer(self, ask: Ask | Glance, writer: RowWriter) -> Where | LookedUp:
        """Answer a question. Raises UnknownSubject, LogDamaged, and Unavailable if a retry
        may help.
        """
        return self._locate(ask) if isinstance(ask, Locate) else self._look_up(ask, writer)

    def _locate(self, ask: Locate) -> Where:
        found = self._masters[ask.is_delayed].locate(ask.subject)
        if found.placement.ordering is not None and not ask.is_delayed:
            return self._metadata.routes(ask.subject)
        writable = {each.group: each.is_writable for each in found.placement.routes}
        return {group: writable.get(group, False) for group in found.hosts}

    def _look_up(self, ask: Look | Glance, writer: RowWriter) -> LookedUp:
        to = ask.target
        channel = self.take(to)
        try:
            found = look_up(ask, writer, channel.call)
        except QmqError as failure:
            self._masters[to.is_delayed].lose(to.broker_group, channel, failure)
            raise
        except BaseException:
            channel.close()
            raise
        self._masters[to.is_delayed].give(to.broker_group, channel)
        if isinstance(ask, Look) and ask.is_final:
            self._remember(writer, to)
        return found

    def _remember(self, writer: RowWriter, to: RowTarget) -> None:
        if len(self._closed) >= REMEMBERED_MAX:
            self._closed.clear()
        self._closed.setdefault((writer.name, to), writer.epoch)

    def may_skip(self, writer: RowWriter, to: RowTarget) -> bool:
        """Whether a partition was seen closed in an earlier epoch of the writer."""
        return self._closed.get((writer.name, to), writer.epoch) < writer.epoch

    def subjects(self) -> list[str]:
        """The names of all subjects that this principal may see. Raises NotConnected."""
        return [each.settings.name for each in self._metadata.list_subjects()]

    # --- connections ------------------------------------------------------------------------------

    def take(self, to: RowTarget) -> BlockingConnection:
        """Take a connection to a queue's master. Raises NotConnected, UnknownSubject."""
        return self._masters[to.is_delayed].take(to.subject, to.broker_group, retry_ms=0)

    def give(self, to: RowTarget, channel: BlockingConnection) -> None:
        """Return a connection without requests in flight."""
        self._masters[to.is_delayed].give(to.broker_group, channel)

    def doubt(self, to: RowTarget) -> None:
        """Forget the queue's known master."""
        self._masters[to.is_delayed].doubt(to.broker_group)

    def close(self) -> None:
        """Close idle connections."""
        for each in self._masters.values():
            each.close()
        self._metadata.close()


class SinkAnswer(NamedTuple):
    """The outcome of a send. `is_broken`: the connection ended with all requests in flight."""

    connection: SinkConnection
    request_id: int
    failure: QmqError | None
    is_broken: bool = False


class SinkConnection:
    """A connection to a broker group; `to` is any of its queues."""

    def __init__(
        self, to: RowTarget, channel: BlockingConnection, events: SimpleQueue[SinkAnswer]
    ) -> None:
        self.to = to
        self.channel = channel
        self.under_way: dict[int, tuple[Packet, int]] = {}
        """The packet and the number of its attempt, by request id."""
        self._events = events
        self._due = threading.Semaphore(0)
        self._is_ending = False
        self._thread = threading.Thread(
            target=self._receive, name=f"answers of {to.broker_group}", daemon=True
        )
        self._thread.start()

    def send(self, packet: Packet, buffers: tuple[bytes, ...]) -> None:
        """Send a packet. Raises NotConnected or DeadlineExceeded,
        after which the outcome is unknown.
        """
        request_id = self.channel.send(FrameKind.PRODUCE, *buffers)
        self.under_way[request_id] = packet, packet.attempts
        self._due.release()

    def _receive(self) -> None:
        while True:
            self._due.acquire()
            if self._is_ending:
                return
            failure: QmqError | None = None
            request_id = 0
            try:
                request_id = self.channel.receive().request_id
            except QmqError as cause:
                failure, request_id = cause, self.channel.answered_id
            if not self.channel.is_open:
                self._events.put(SinkAnswer(self, 0, failure, is_broken=True))
                return
            self._events.put(SinkAnswer(self, request_id, failure))

    def end(self) -> bool:
        """Stop receiving. Returns whether the connection can be reused because no
        request is in flight.
        """
        self._is_ending = True
        is_free = self.channel.is_open and not self.under_way
        if not is_free:
            self.channel.close()
        self._due.release()
        self._thread.join()
        return is_free
