"""How a task's rows are cut: into chunks, loads (the rows of a chunk for one subject) and packets
(for one queue); and the packets in flight. Pure.

    chunk  1 ── n  load (a subject, immediate or delayed)  1 ── n  packet (a queue, one batch)

Where a chunk ends depends only on the rows. A chunk ends before the row that would exceed the
number of rows, `CHUNK_BYTES` (a larger row is alone), or the range of create times that a batch can
store. So two attempts with the same rows make the same chunks, however Spark splits its record
batches.

The packets in flight to one queue are an in-flight window (qmq/delivery/window.py) of numbered
packets:

    flight ──stored──▶ gone
      │ ordered partition: OutOfSequence although every earlier packet is stored, or NumberTaken:
      │     look the queue up again
      │ RouteChanged: the partition may be closed: the owner of the window takes the packets back
      └ otherwise: ReadOnly (refused for now: the packet may go to another queue), NumberTaken
            (another attempt's batch has the number)

Rule: an unanswered packet is sent again to the same queue until there was no progress for
`retry_s`; then the task fails, and Spark repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from qmq_ordering.hashing import logical_partition

from pyspark_qmq.sink import arrow_vectors, row_identity
from pyspark_qmq.sink.options import Fields
from pyspark_qmq.sink.row_identity import ID_BYTES, ROWS_MAX, Ids, Rows, RowTarget
from qmq.delivery.retries import RetryRules
from qmq.delivery.window import InFlightBatch, InFlightWindow
from qmq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotConnected,
    NumberTaken,
    OrderMismatch,
    Outcome,
    QmqError,
    ReadOnly,
)
from qmq.limits import MIB
from qmq.model import check_name

CHUNK_BYTES: Final = 4 * MIB
SPREAD_MS_MAX: Final = (1 << 32) - 1
"""Create times in a batch are stored as the earliest one and 32-bit differences."""
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowChunk:
    """Consecutive rows; `first_row` is the number of the first one in the task."""

    number: int
    first_row: int
    batch: pa.RecordBatch
    sizes: Int64
    """Bytes of each row."""


def cut(batches: Iterable[pa.RecordBatch], fields: Fields, rows_max: int) -> Iterator[RowChunk]:
    """Yields chunks. Raises InvalidArgument or MessageTooLarge (`row_identity.check`) before the
    chunk with the invalid row.
    """
    cutter = Cutter(fields, rows_max)
    for batch in batches:
        if batch.num_rows:
            yield from cutter.put(batch)
    yield from cutter.end()


class Cutter:
    """Record batches in, chunks out."""

    def __init__(self, fields: Fields, rows_max: int, bytes_max: int = CHUNK_BYTES) -> None:
        self._fields = fields
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._parts: list[tuple[pa.RecordBatch, Int64]] = []
        self._rows = self._bytes = 0
        self._earliest: int | None = None
        self._latest = 0
        self._count = self._next_row = 0

    def put(self, batch: pa.RecordBatch) -> Iterator[RowChunk]:
        """Add a record batch and yield the chunks that are complete.
        Raises InvalidArgument, MessageTooLarge.
        """
        first_row = self._next_row + self._rows
        if first_row + batch.num_rows > ROWS_MAX:
            raise InvalidArgument(f"more than {ROWS_MAX} rows in one Spark partition: repartition")
        sizes = row_identity.check(batch, self._fields, first_row)
        times = self._times(batch)
        ends = np.cumsum(sizes)
        at = 0
        while at < batch.num_rows:
            count = self._fitting(ends, at)
            if times is not None:
                count = self._near(times[at : at + count])
            if count:
                self._add(batch.slice(at, count), sizes[at : at + count])
                at += count
            if at < batch.num_rows:
                yield self._whole()

    def end(self) -> Iterator[RowChunk]:
        if self._rows:
            yield self._whole()

    def _times(self, batch: pa.RecordBatch) -> Int64 | None:
        return (
            arrow_vectors.milliseconds(batch.column(self._fields.create_time), up=False)
            if self._fields.create_time >= 0
            else None
        )

    def _fitting(self, ends: Int64, at: int) -> int:
        """How many rows from `at` on fit into the open chunk."""
        room = self._bytes_max - self._bytes + (int(ends[at - 1]) if at else 0)
        count = min(
            int(np.searchsorted(ends, room, "right")) - at,
            self._rows_max - self._rows,
            len(ends) - at,
        )
        return 1 if count <= 0 and not self._rows else max(count, 0)

    def _near(self, times: Int64) -> int:
        """How many of these rows have create times near enough to each other and
        to the open chunk.
        """
        if not len(times):
            return 0
        earliest, latest = np.minimum.accumulate(times), np.maximum.accumulate(times)
        if self._earliest is not None:
            earliest, latest = (
                np.minimum(earliest, self._earliest),
                np.maximum(latest, self._latest),
            )
        count = int(np.searchsorted(latest - earliest, SPREAD_MS_MAX, "right"))
        if count:
            self._earliest, self._latest = int(earliest[count - 1]), int(latest[count - 1])
        return count

    def _add(self, batch: pa.RecordBatch, sizes: Int64) -> None:
        self._parts.append((batch, sizes))
        self._rows += batch.num_rows
        self._bytes += int(sizes.sum())

    def _whole(self) -> RowChunk:
        batches, sizes = zip(*self._parts, strict=True)
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        chunk = RowChunk(self._count, self._next_row, batch, np.concatenate(sizes))
        self._next_row += self._rows
        self._count += 1
        self._parts, self._rows, self._bytes, self._earliest = [], 0, 0, None
        return chunk


Lps = npt.NDArray[np.uint16]

ROW_BYTES: Final = 64
"""The approximate overhead of a row in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Rows of one chunk, in order."""

    number: int
    """The number of the chunk."""
    rows: Rows
    """The rows' numbers in the task, ascending."""
    size: int
    """The rows' approximate sizes in bytes."""
    chunk: Any = None
    places: npt.NDArray[np.int64] | None = None
    """The rows' positions in the chunk."""
    lps: Lps | None = None
    """For an ordered subject: the rows' logical partitions."""
    ids: Ids | None = None
    """The rows' own message ids, if they have any."""
    due_times_ms: npt.NDArray[np.int64] | None = None
    """For delayed rows: the due times in milliseconds since 1970."""

    def pick(self, chosen: npt.NDArray[np.int64]) -> Load:
        """The rows at these ascending indexes."""
        if len(chosen) == len(self.rows):
            return self

        def some(column: Any) -> Any:
            return None if column is None else column[chosen]

        size = max(self.size * len(chosen) // len(self.rows), 1)
        return Load(
            self.number,
            self.rows[chosen],
            size,
            self.chunk,
            some(self.places),
            some(self.lps),
            some(self.ids),
            some(self.due_times_ms),
        )

    @classmethod
    def join(cls, pieces: list[Load]) -> Load:
        """Join pieces of one load in the order of their rows."""
        order = np.argsort(np.concatenate([each.rows for each in pieces]))

        def whole(name: str) -> Any:
            columns = [getattr(each, name) for each in pieces]
            return None if columns[0] is None else np.concatenate(columns)[order]

        first = pieces[0]
        size = sum(each.size for each in pieces)
        return cls(
            first.number,
            whole("rows"),
            size,
            first.chunk,
            whole("places"),
            whole("lps"),
            whole("ids"),
            whole("due_times_ms"),
        )


@dataclass(slots=True, eq=False)
class Packet(InFlightBatch):
    """One batch for one queue."""

    load: Load
    to: RowTarget
    number: int
    """The number of the batch."""


class Done:
    """The rows known to be stored."""

    def __init__(self) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._prints: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._ids: set[bytes] = set()

    def add(self, rows: Rows, prints: npt.NDArray[np.uint64], ids: frozenset[bytes]) -> None:
        """Add rows, by number and fingerprint, or by their own ids."""
        if len(rows):
            self._rows, at = np.unique(np.concatenate([self._rows, rows]), return_index=True)
            self._prints = np.concatenate([self._prints, prints])[at]
        self._ids |= ids

    def prints(self, load: Load) -> npt.NDArray[np.uint64]:
        """The fingerprints of a load's rows as stored;
        0 for rows that are not known to be stored.
        """
        found = np.zeros(len(load.rows), np.uint64)
        is_done = np.isin(load.rows, self._rows)
        found[is_done] = self._prints[np.searchsorted(self._rows, load.rows[is_done])]
        return found

    def left(self, load: Load) -> Load | None:
        """The rows of a load that are not stored; None if all are."""
        if not len(self._rows) and not self._ids:
            return load
        is_done = np.isin(load.rows, self._rows)
        if self._ids and load.ids is not None:
            kind = pa.binary(ID_BYTES)
            found = pa.Array.from_buffers(
                kind, len(load.rows), [None, pa.py_buffer(np.ascontiguousarray(load.ids))]
            )
            is_done |= pc.is_in(found, value_set=pa.array(list(self._ids), kind)).to_numpy(
                zero_copy_only=False
            )
        chosen = np.flatnonzero(~is_done)
        return load.pick(chosen) if len(chosen) else None


def split(
    chunk: RowChunk, fields: Fields, default: str, own_ids: Ids | None, now_ms: int
) -> Iterator[tuple[str, bool, Load]]:
    """Split a chunk into loads: (subject, whether delayed, load). `own_ids`: the message ids of all
    rows, if they have their own.

    Raises InvalidArgument, InvalidName: a row's subject. DelayTooLong.
    """
    due_times_ms, is_delayed = _due_times_ms(chunk, fields, now_ms)
    names, codes = _subjects(chunk, fields, default)
    classes = codes * 2 if is_delayed is None else codes * 2 + is_delayed
    rows = chunk.first_row + np.arange(chunk.batch.num_rows, dtype=np.int64)
    for each in np.unique(classes).tolist():
        places = np.flatnonzero(classes == each)
        load = Load(
            chunk.number,
            rows[places],
            int(chunk.sizes[places].sum()) + ROW_BYTES * len(places),
            chunk,
            places,
        )
        if own_ids is not None:
            load = replace(load, ids=own_ids[places])
        if each % 2 and due_times_ms is not None:
            row_identity.check_due_times(due_times_ms[places], now_ms, load.rows)
            load = replace(load, due_times_ms=due_times_ms[places])
        yield names[each // 2], bool(each % 2), load


def _subjects(
    chunk: RowChunk, fields: Fields, default: str
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The distinct subjects, and the index of each row's subject."""
    if fields.subject < 0:
        return [default], np.zeros(chunk.batch.num_rows, np.int64)
    array = chunk.batch.column(fields.subject)
    if array.null_count:
        if not default:
            at = chunk.first_row + int(np.argmin(arrow_vectors.valid(array)))
            raise InvalidArgument(
                f"row {at} of its Spark partition has no subject, and there is no option "
                "subject for such rows"
            )
        array = pc.fill_null(array, default)
    found = array.dictionary_encode()
    names = [check_name("subject", each) for each in found.dictionary.to_pylist()]
    return names, found.indices.to_numpy().astype(np.int64)


def _due_times_ms(chunk: RowChunk, fields: Fields, now_ms: int) -> tuple[Any, Any]:
    """(due time of each row, mask of delayed rows); None if no row is delayed."""
    if fields.delay_ms >= 0:
        array = chunk.batch.column(fields.delay_ms)
        delays = pc.fill_null(array.cast(pa.int64()), 0).to_numpy()
        due_times_ms = now_ms + np.clip(delays, -now_ms, (1 << 62) - now_ms)
    elif fields.deliver_at >= 0:
        array = chunk.batch.column(fields.deliver_at)
        due_times_ms = np.maximum(arrow_vectors.milliseconds(array, up=True), 0)
    else:
        return None, None
    return (
        (due_times_ms, arrow_vectors.valid(array))
        if array.null_count < len(array)
        else (None, None)
    )


def routed(load: Load, fields: Fields, subject: str, logical_partitions: int) -> Load:
    """A load of an ordered subject with the logical partitions of its keys. Raises OrderMismatch
    for a row without a key.
    """
    keys = require_keys(load, fields, subject)
    distinct = keys.dictionary_encode()
    found = [
        logical_partition(_bytes(key), logical_partitions)
        for key in distinct.dictionary.to_pylist()
    ]
    return replace(load, lps=np.array(found, np.uint16)[distinct.indices.to_numpy()])


def require_keys(load: Load, fields: Fields, subject: str) -> pa.Array:
    """The keys of a load of an ordered subject. Raises OrderMismatch for a row without a key."""
    if fields.key < 0:
        raise OrderMismatch(
            f"subject {subject!r} is ordered: its messages have keys, so give the rows a "
            "column `key`"
        )
    assert load.places is not None
    keys = arrow_vectors.taken(load.chunk.batch.column(fields.key), load.places)
    empty = arrow_vectors.lengths(keys) == 0
    if empty.any():
        row = load.rows[int(np.argmax(empty))]
        raise OrderMismatch(
            f"row {row} of its Spark partition has no key, and subject {subject!r} is "
            "ordered: its messages need keys"
        )
    return keys


def _bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


WINDOW: Final = 8
"""Packets in flight to one queue: enough to keep a broker busy, and far fewer than the batches it
remembers (64).
"""


class PacketWindow(InFlightWindow[Packet]):
    """`number`: the first number, for a queue whose numbers have no gaps."""

    def __init__(
        self,
        to: RowTarget,
        retry_s: float,
        *,
        rules: RetryRules,
        number: int = 0,
        window: int = WINDOW,
    ) -> None:
        super().__init__(window, rules)
        self.to = to
        self.number = number
        self.stored = 0
        self._retry_s = retry_s
        self._returned: list[Load] = []
        self._taken: list[tuple[Load, QmqError]] = []
        self._is_miscounted = False
        self._last_failure: QmqError | None = None
        self.connected()  # The task connects when it has something to send.

    # --- out --------------------------------------------------------------------------------------

    def put(self, load: Load, now: float, number: int | None = None) -> None:
        """Add rows under this number; None: the next one."""
        if number is None:
            number, self.number = self.number, self.number + 1
        if not self.flight:
            self._quiet_since = now
        self.flight.append(Packet(load, self.to, number, size=load.size))

    def _may_send(self, packet: Packet) -> bool:
        return not self._is_miscounted

    def take(self) -> list[Load]:
        """Take all packets in order: the queue is closed,
        and a lookup will find the stored ones.
        """
        taken = [packet.load for packet in self.flight]
        for packet in list(self.flight):
            self._remove(packet)
        return taken

    def take_refused(self) -> list[Load]:
        """Take packets that are certainly not stored because the queue refuses messages; they may
        go to another queue.
        """
        returned, self._returned = self._returned, []
        return returned

    def take_disputed(self) -> list[tuple[Load, QmqError]]:
        """Take packets that are not stored because another batch has their number,
        with the refusals.
        """
        taken, self._taken = self._taken, []
        return taken

    def wake_at(self, now: float) -> float:
        """The latest time to call `next` and `check` again;
        infinity if only answers can change the state.
        """
        return (
            min(super().wake_at(now), self._quiet_since + self._retry_s)
            if self.flight
            else math.inf
        )

    # --- in ---------------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> int:
        """Handle the answer to a send; `failure` is None if the packet is stored.

        Returns the number of rows stored. Raises the failure if a retry cannot help.
        """
        if failure is not None:
            self.refused(packet, attempt, failure, now)
            return 0
        if not self.acknowledged(packet, now):
            return 0
        self._last_failure = None
        self.stored += 1
        return len(packet.load.rows)

    def refused(self, packet: Packet, attempt: int, failure: QmqError, now: float) -> None:
        is_current = attempt == packet.attempts and packet in self.flight[: self._sent]
        if is_current:
            self._last_failure = failure
        if is_current and isinstance(failure, ReadOnly | NumberTaken) and self.to.partition == 0:
            packet.unanswered -= 1
            self._remove(packet)  # The other packets are not held back; each gets its answer.
            if isinstance(failure, ReadOnly):
                self._returned.append(packet.load)
            else:
                self._taken.append((packet.load, failure))
        else:
            super().refused(packet, attempt, failure, now)

    def _retry_later(self, packet: Packet, failure: QmqError, now: float) -> None:
        if isinstance(failure, NumberTaken) and packet is self.flight[0]:
            self._forgotten(packet)
        super()._retry_later(packet, failure, now)

    def _forgotten(self, packet: Packet) -> None:
        """The queue's next number differs from ours: another attempt may have stored more rows."""
        self._is_miscounted = True

    def _reject(self, packet: Packet, failure: QmqError) -> None:
        raise failure

    def broken(self, failure: QmqError, now: float) -> None:
        """The connection was lost or could not be made: send all unanswered packets again."""
        for packet in self.flight:
            packet.is_uncertain, packet.unanswered = packet.is_uncertain or packet.unanswered > 0, 0
        self._begin_again()
        if self.flight:
            self._last_failure = failure
            self._back_off(failure, now)

    @property
    def wants_look(self) -> bool:
        """Whether the queue's next number differs from ours and no answer is outstanding."""
        return self._is_miscounted and not any(packet.unanswered for packet in self.flight)

    def looked(self, number: int, done: Done, now: float) -> int:
        """Handle the result of a new lookup: renumber the packets that are not stored. `number`:
        the queue's next number.

        Returns the number of rows found.
        """
        self._is_miscounted = False
        self._begin_again()
        found = [packet for packet in self.flight if done.left(packet.load) is None]
        for packet in found:
            self._remove(packet)
        for packet in self.flight:
            packet.number, packet.encoded = number, None
            number += 1
        self.number = number
        if found:
            self._quiet_since = now
        return sum(len(packet.load.rows) for packet in found)

    def check(self, now: float) -> None:
        """Raise the last failure if there was no progress for `retry_s`."""
        if not self.flight or now < self._quiet_since + self._retry_s:
            return
        text = (
            f"{self.to} did not take a batch for {self._retry_s:g} s; last failure: "
            f"{self._last_failure or 'no answer'}"
        )
        kind = NotConnected if isinstance(self._last_failure, NotConnected) else DeadlineExceeded
        raise kind(text, outcome=Outcome.UNKNOWN) from self._last_failure
