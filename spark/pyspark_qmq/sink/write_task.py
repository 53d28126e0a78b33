"""Runs one task: receives record batches and sends batches until all rows are stored. Thin I/O
around the cores.

    cut in chunks ─▶ split by subject ─▶ core (BalancedRows, PartitionedRows) ─▶ packets
    packets ─▶ connections ─▶ brokers
    core ─▶ asks where the rows go, and what is there already ─▶ connections ─▶ answers ─▶ core

At most `INFLIGHT_BYTES` are in flight; further rows wait in Spark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import pyarrow as pa

from pyspark_qmq.sink import arrow_vectors, encoding, packets
from pyspark_qmq.sink.cluster import SinkAnswer, SinkCluster, SinkConnection
from pyspark_qmq.sink.left_over import Destination, has_later_rows
from pyspark_qmq.sink.options import Fields, SinkOptions
from pyspark_qmq.sink.packets import Load, Packet, RowChunk, cut
from pyspark_qmq.sink.requests import Locate, LookedUp, Prints, of_load
from pyspark_qmq.sink.row_distribution import BalancedRows, PartitionedRows, SubjectCore
from pyspark_qmq.sink.row_identity import Ids, RowTarget, RowWriter
from qmq.client.producing.delayed import DelayHome
from qmq.errors import NotConnected, NotMaster, Outcome, QmqError, Stopping, Unavailable
from qmq.limits import MIB

INFLIGHT_BYTES: Final = 32 * MIB
"""The limit for rows that are not stored yet."""
WAIT_S_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a task."""

    rows: int = 0
    batches: int = 0
    found: int = 0
    """Rows stored by an earlier attempt."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows, self.batches + other.batches, self.found + other.found
        )


class WriteTask:
    """One task; `run` is called once. `may_repeat`: rows of its epoch or of later ones may be
    stored, by any Spark partition.
    """

    def __init__(
        self,
        cluster: SinkCluster,
        writer: RowWriter,
        fields: Fields,
        options: SinkOptions,
        *,
        may_repeat: bool = False,
        clock: Callable[[], float] = time.monotonic,
        time_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._cluster, self._writer, self._fields, self._options = cluster, writer, fields, options
        self._may_repeat, self._clock, self._time_ms = may_repeat, clock, time_ms
        self._retry_s = options.retry_ms / 1000
        self._kinds: dict[str, int] = {}
        self._cores: dict[Destination, SubjectCore] = {}
        self._active: dict[Destination, SubjectCore] = {}
        self._connections: dict[tuple[str, bool], SinkConnection] = {}
        self._events: SimpleQueue[SinkAnswer] = SimpleQueue()

    def run(self, batches: Iterable[pa.RecordBatch]) -> Counts:
        """Store all rows.

        Raises:
            InvalidArgument, MessageTooLarge, DelayTooLong, OrderMismatch, InvalidName: a row is
            invalid. InvalidArgument: an earlier attempt stored other rows. UnknownSubject: a
            subject does not exist. NotConnected, DeadlineExceeded: a broker group was unreachable
            for `qmq.retryMs`. The next attempt finds the rows stored so far.
        """
        rows = 0
        try:
            for chunk in cut(batches, self._fields, self._options.batch_messages):
                self._put(chunk)
                rows += chunk.batch.num_rows
                self._pump(INFLIGHT_BYTES)
            self._pump(0)
            for core in self._cores.values():
                core.end()
        finally:
            self._end()
        cores = self._cores.values()
        return Counts(rows, sum(core.batches for core in cores), sum(core.found for core in cores))

    @property
    def destinations(self) -> frozenset[Destination]:
        """The subjects of its rows, and whether the rows are delayed."""
        return frozenset(self._cores)

    # --- rows in ----------------------------------------------------------------------------------

    def _put(self, chunk: RowChunk) -> None:
        own_ids = self._own_ids(chunk)
        for subject, is_delayed, load in packets.split(
            chunk, self._fields, self._options.subject, own_ids, self._time_ms()
        ):
            lps = self._logical_partitions(subject)
            if lps and is_delayed:
                packets.require_keys(load, self._fields, subject)
            elif lps:
                load = packets.routed(load, self._fields, subject, lps)
            key = subject, is_delayed
            core = self._cores.get(key)
            if core is None:
                core = self._cores[key] = self._core(subject, is_delayed, is_ordered=lps > 0)
            core.put(load)
            self._active[key] = core

    def _own_ids(self, chunk: RowChunk) -> Ids | None:
        """The rows' message ids; rows without an id get the writer's."""
        if self._fields.message_id < 0:
            return None
        array = chunk.batch.column(self._fields.message_id)
        ids = self._writer.message_ids(chunk.first_row + np.arange(len(array), dtype=np.int64))
        ids[arrow_vectors.valid(array)] = arrow_vectors.unhex(
            arrow_vectors.strings(array.drop_null())
        )
        return ids

    def _logical_partitions(self, subject: str) -> int:
        found = self._kinds.get(subject)
        if found is None:
            found = self._kinds[subject] = self._patiently(
                lambda: self._cluster.logical_partitions(subject, creates=self._options.creates)
            )
        return found

    def _patiently(self, act: Callable[[], int]) -> int:
        until = self._clock() + self._retry_s
        while True:
            try:
                return act()
            except Unavailable:
                if self._clock() >= until:
                    raise
                self._work(WAIT_S_MAX / 10)

    def _core(self, subject: str, is_delayed: bool, *, is_ordered: bool) -> SubjectCore:
        has_later = self._may_repeat and bool(
            self._patiently(
                lambda: has_later_rows(self._cluster.answer, self._writer, (subject, is_delayed))
            )
        )
        if is_ordered and not is_delayed:
            return PartitionedRows(
                subject,
                self._retry_s,
                may_skip=lambda to: self._cluster.may_skip(self._writer, to),
                prints_of=self._prints_of,
                has_later=has_later,
            )
        home = DelayHome(subject) if is_ordered else None
        return BalancedRows(
            subject,
            self._writer,
            self._retry_s,
            is_delayed=is_delayed,
            home=home,
            prints_of=self._prints_of,
            has_later=has_later,
        )

    def _prints_of(self, load: Load) -> Prints:
        return of_load(load, self._fields)

    # --- batches out ------------------------------------------------------------------------------

    def _pump(self, pending_bytes_max: int) -> None:
        """Work until at most this many bytes are pending; 0: until all rows are stored."""
        self._advance()
        while self._active and (not pending_bytes_max or self._pending_bytes() > pending_bytes_max):
            self._work(WAIT_S_MAX)
            self._advance()

    def _pending_bytes(self) -> int:
        return sum(core.pending_bytes for core in self._active.values())

    def _advance(self) -> None:
        """Do everything that is possible without waiting."""
        while not self._events.empty():
            self._take(self._events.get())
        for core in list(self._active.values()):
            self._ask(core)
            while (packet := core.next(self._clock())) is not None:
                self._send(packet)
            core.check(self._clock())
        self._active = {key: core for key, core in self._active.items() if not core.is_idle}

    def _work(self, wait_s: float) -> None:
        """Wait for an event and handle it."""
        now = self._clock()
        wake_at = min([core.wake_at(now) for core in self._active.values()], default=math.inf)
        try:
            self._take(self._events.get(timeout=max(min(wake_at - now, wait_s), 0.001)))
        except Empty:
            return

    def _ask(self, core: SubjectCore) -> None:
        for ask in core.asks(self._clock()):
            try:
                found = self._cluster.answer(ask, self._writer)
            except QmqError as failure:
                core.failed(failure, self._clock())
                return
            if isinstance(ask, Locate):
                assert not isinstance(found, LookedUp)
                core.located(found, self._clock())
            else:
                assert isinstance(found, LookedUp)
                core.looked(ask.target, found, self._clock())

    def _send(self, packet: Packet) -> None:
        if packet.encoded is None:
            packet.encoded = encoding.encode(
                packet,
                self._writer,
                self._fields,
                now_ms=self._time_ms(),
                is_ordered=self._kinds[packet.to.subject] > 0,
                compression=self._options.compression,
            )
        try:
            self._connection(packet.to).send(packet, packet.encoded)
        except QmqError as failure:
            self._break(packet.to, failure)

    def _connection(self, to: RowTarget) -> SinkConnection:
        key = to.broker_group, to.is_delayed
        found = self._connections.get(key)
        if found is None:
            found = self._connections[key] = SinkConnection(
                to, self._cluster.take(to), self._events
            )
        return found

    # --- answers ----------------------------------------------------------------------------------

    def _take(self, answer: SinkAnswer) -> None:
        connection = answer.connection
        if (
            self._connections.get((connection.to.broker_group, connection.to.is_delayed))
            is not connection
        ):
            return  # An answer of an abandoned connection; its packets are looked up again anyway.
        if answer.is_broken:
            self._break(
                connection.to,
                answer.failure or NotConnected("the connection ended", outcome=Outcome.UNKNOWN),
            )
            return
        packet, attempt = connection.under_way.pop(answer.request_id)
        core = self._cores[packet.to.subject, packet.to.is_delayed]
        core.answered(packet, attempt, answer.failure, self._clock())
        if isinstance(answer.failure, NotMaster | Stopping):
            self._break(connection.to, answer.failure)

    def _break(self, to: RowTarget, failure: QmqError) -> None:
        """Abandon a connection."""
        connection = self._connections.pop((to.broker_group, to.is_delayed), None)
        if connection is not None:
            connection.channel.close()
            connection.end()
        self._cluster.doubt(to)
        for (_, is_delayed), core in self._cores.items():
            if is_delayed == to.is_delayed:
                core.broken(to.broker_group, failure, self._clock())

    def _end(self) -> None:
        for connection in self._connections.values():
            if connection.end():
                self._cluster.give(connection.to, connection.channel)
        self._connections.clear()
