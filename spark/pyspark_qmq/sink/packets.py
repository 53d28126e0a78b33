"""Loads and packets: the rows of a chunk for one subject, and for one queue. Pure.

chunk  1 ── n  load (a subject, immediate or delayed)  1 ── n  packet (a queue, one batch)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from qmq_ordering.hashing import logical_partition

from pyspark_qmq.sink import arrow_vectors, row_checks
from pyspark_qmq.sink.chunks import RowChunk
from pyspark_qmq.sink.row_identity import ID_BYTES, Ids, Rows, RowTarget
from pyspark_qmq.sink.sink_schema import Fields
from qmq.delivery.in_flight_batch import InFlightBatch
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.model import check_name

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
            self.number, self.rows[chosen], size, self.chunk, some(self.places), some(self.lps), some(self.ids), some(self.due_times_ms)
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
        return cls(first.number, whole("rows"), size, first.chunk, whole("places"), whole("lps"), whole("ids"), whole("due_times_ms"))


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
        """The fingerprints of a load's rows as stored; 0 for rows that are not known to be stored."""
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
            found = pa.Array.from_buffers(kind, len(load.rows), [None, pa.py_buffer(np.ascontiguousarray(load.ids))])
            is_done |= pc.is_in(found, value_set=pa.array(list(self._ids), kind)).to_numpy(zero_copy_only=False)
        chosen = np.flatnonzero(~is_done)
        return load.pick(chosen) if len(chosen) else None


def split(chunk: RowChunk, fields: Fields, default: str, own_ids: Ids | None, now_ms: int) -> Iterator[tuple[str, bool, Load]]:
    """Split a chunk into loads: (subject, whether delayed, load). `own_ids`: the message ids of all rows, if they have their own.

    Raises InvalidArgument, InvalidName: a row's subject. DelayTooLong.
    """
    due_times_ms, is_delayed = _due_times_ms(chunk, fields, now_ms)
    names, codes = _subjects(chunk, fields, default)
    classes = codes * 2 if is_delayed is None else codes * 2 + is_delayed
    rows = chunk.first_row + np.arange(chunk.batch.num_rows, dtype=np.int64)
    for each in np.unique(classes).tolist():
        places = np.flatnonzero(classes == each)
        load = Load(chunk.number, rows[places], int(chunk.sizes[places].sum()) + ROW_BYTES * len(places), chunk, places)
        if own_ids is not None:
            load = replace(load, ids=own_ids[places])
        if each % 2 and due_times_ms is not None:
            row_checks.check_due_times(due_times_ms[places], now_ms, load.rows)
            load = replace(load, due_times_ms=due_times_ms[places])
        yield names[each // 2], bool(each % 2), load


def _subjects(chunk: RowChunk, fields: Fields, default: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The distinct subjects, and the index of each row's subject."""
    if fields.subject < 0:
        return [default], np.zeros(chunk.batch.num_rows, np.int64)
    array = chunk.batch.column(fields.subject)
    if array.null_count:
        if not default:
            at = chunk.first_row + int(np.argmin(arrow_vectors.valid(array)))
            raise InvalidArgument(f"row {at} of its Spark partition has no subject, and there is no option subject for such rows")
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
    return (due_times_ms, arrow_vectors.valid(array)) if array.null_count < len(array) else (None, None)


def routed(load: Load, fields: Fields, subject: str, logical_partitions: int) -> Load:
    """A load of an ordered subject with the logical partitions of its keys. Raises OrderMismatch for a row without a key."""
    keys = require_keys(load, fields, subject)
    distinct = keys.dictionary_encode()
    found = [logical_partition(_bytes(key), logical_partitions) for key in distinct.dictionary.to_pylist()]
    return replace(load, lps=np.array(found, np.uint16)[distinct.indices.to_numpy()])


def require_keys(load: Load, fields: Fields, subject: str) -> pa.Array:
    """The keys of a load of an ordered subject. Raises OrderMismatch for a row without a key."""
    if fields.key < 0:
        raise OrderMismatch(f"subject {subject!r} is ordered: its messages have keys, so give the rows a column `key`")
    assert load.places is not None
    keys = arrow_vectors.taken(load.chunk.batch.column(fields.key), load.places)
    empty = arrow_vectors.lengths(keys) == 0
    if empty.any():
        row = load.rows[int(np.argmax(empty))]
        raise OrderMismatch(f"row {row} of its Spark partition has no key, and subject {subject!r} is ordered: its messages need keys")
    return keys


def _bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key
