"""Validates rows as whole columns before batches are made, so that an error names its row. Pure.

Brokers check again, but they refuse whole batches, and the row is then hard to find.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qmq.sink import arrow_vectors
from pyspark_qmq.sink.sink_schema import Fields
from qmq import headers as system
from qmq import limits
from qmq.errors import DelayTooLong, InvalidArgument, MessageTooLarge, QmqError

ROW_BYTES_MAX: Final = limits.BATCH_BYTES_MAX - limits.MIB
"""The limit for body, key, tags and headers of one row: the largest body of a subject, which fits into a batch with its overhead."""


def check(batch: pa.RecordBatch, fields: Fields, first_row: int) -> npt.NDArray[np.int64]:
    """Check a record batch whose first row is the task's row number `first_row`. Returns the bytes of each row.

    Raises:
        InvalidArgument: a null body, invalid tags or headers, or an invalid id.
        MessageTooLarge: a body, a key or headers exceed the limit.
    """
    body = batch.column(fields.body)
    if body.null_count:
        _refuse(InvalidArgument, ~arrow_vectors.valid(body), first_row, "has no body: use an empty one")
    sizes = arrow_vectors.lengths(body)
    if fields.key >= 0:
        key_bytes = arrow_vectors.lengths(batch.column(fields.key))
        _refuse(MessageTooLarge, key_bytes > limits.KEY_BYTES_MAX, first_row, f"has a key of more than {limits.KEY_BYTES_MAX} bytes")
        sizes = sizes + key_bytes
    if fields.tag >= 0:
        sizes = sizes + _check_tag(batch.column(fields.tag), first_row)
    if fields.tags >= 0:
        sizes = sizes + _check_tags(batch.column(fields.tags), first_row)
    if fields.headers >= 0:
        sizes = sizes + _check_headers(batch.column(fields.headers), first_row)
    if fields.create_time >= 0 and batch.column(fields.create_time).null_count:
        wrong = ~arrow_vectors.valid(batch.column(fields.create_time))
        _refuse(InvalidArgument, wrong, first_row, "has no create_time: leave the column out, or coalesce it with current_timestamp()")
    if fields.message_id >= 0:
        _check_ids(batch.column(fields.message_id), first_row)
    _refuse(
        MessageTooLarge, sizes > ROW_BYTES_MAX, first_row, f"has more than {ROW_BYTES_MAX} bytes: send a reference to the content instead"
    )
    return sizes


def check_due_times(due_times_ms: npt.NDArray[np.int64], now_ms: int, rows: npt.NDArray[np.int64]) -> None:
    """Raise DelayTooLong for a row whose delay exceeds the limit."""
    wrong = due_times_ms > now_ms + limits.DELAY_MS_MAX
    if wrong.any():
        days = limits.DELAY_MS_MAX // 86_400_000
        row = rows[int(np.argmax(wrong))]
        raise DelayTooLong(f"row {row} of its Spark partition is to be delivered in more than {days} days (two years), the longest delay")


def _refuse(kind: type[QmqError], wrong: Any, first_row: int, text: str) -> None:
    """Raise an error for the first row of the mask `wrong`."""
    if wrong.any():
        raise kind(f"row {first_row + int(np.argmax(wrong))} of its Spark partition {text}")


def _rows_of(wrong: npt.NDArray[np.bool_], marks: arrow_vectors.Marks) -> npt.NDArray[np.bool_]:
    """A mask of the rows that have an invalid item."""
    before = np.concatenate(([0], np.cumsum(wrong)))
    found: npt.NDArray[np.bool_] = np.diff(before[marks]) > 0
    return found


def _check_tag(array: pa.Array, first_row: int) -> npt.NDArray[np.int64]:
    found = arrow_vectors.lengths(array)
    wrong = (found == 0) & arrow_vectors.valid(array) | (found > limits.TAG_BYTES_MAX)
    _refuse(InvalidArgument, wrong, first_row, f"has a tag that has not 1 to {limits.TAG_BYTES_MAX} bytes")
    return found


def _check_tags(array: pa.Array, first_row: int) -> npt.NDArray[np.int64]:
    marks, (items,) = arrow_vectors.lists(array)
    _refuse(InvalidArgument, np.diff(marks) > limits.TAGS_MAX, first_row, f"has more than {limits.TAGS_MAX} tags")
    found = arrow_vectors.lengths(items)
    wrong = (found == 0) | (found > limits.TAG_BYTES_MAX)
    _refuse(InvalidArgument, _rows_of(wrong, marks), first_row, f"has a tag that has not 1 to {limits.TAG_BYTES_MAX} bytes")
    return arrow_vectors.lengths(array)


def _check_headers(array: pa.Array, first_row: int) -> npt.NDArray[np.int64]:
    marks, (names, values) = arrow_vectors.lists(array)
    if values.null_count:
        _refuse(InvalidArgument, _rows_of(~arrow_vectors.valid(values), marks), first_row, "has a header without a value")
    _refuse(InvalidArgument, _rows_of(arrow_vectors.lengths(names) == 0, marks), first_row, "has a header without a name")
    reserved = pc.starts_with(names, system.PREFIX).to_numpy(zero_copy_only=False)
    text = f"has a header whose name begins with {system.PREFIX!r}, which is reserved: remove it with map_filter"
    _refuse(InvalidArgument, _rows_of(reserved, marks), first_row, text)
    found = arrow_vectors.lengths(array)
    _refuse(MessageTooLarge, found > limits.HEADER_BYTES_MAX, first_row, f"has more than {limits.HEADER_BYTES_MAX} bytes of headers")
    return found


def _check_ids(array: pa.Array, first_row: int) -> None:
    if arrow_vectors.unhex(arrow_vectors.strings(array.drop_null())) is None:
        right = pc.fill_null(pc.match_substring_regex(array, "^[0-9a-f]{32}$"), True).to_numpy(zero_copy_only=False)
        _refuse(InvalidArgument, ~right, first_row, "has a message_id that is not 32 hexadecimal digits (0-9, a-f)")
