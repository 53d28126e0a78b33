"""The identity of rows and batches, the same for every attempt on every machine; and the checks of
rows. Pure.

    writer        (name, Spark partition): the name is the query's id, the job's, or the user's
                  (`qmq.txnId`)
    row           (writer, epoch, row number): 8 bytes of a hash of the writer, the epoch and the
                  row number, big endian: the message id
    producer id   a hash of the writer and the queue, below 2^60, which is smaller than any real
                  producer's id

The numbering of batches depends on the queue:

* In a partition of an ordered subject, numbers must have no gaps: they continue from the newest
  number. Rows are identified by their ids.
* Elsewhere: the lower 16 bits of the epoch (every 65,536 epochs have their own producer id) and the
  number of the batch's first row. So two attempts that send the same rows to the same queue use the
  same number. A number is never used twice, because a stored row is in no other batch.

Rows with their own ids do not reveal their epoch, so on an ordered subject each epoch then has its
own producer id.

Rows are checked as whole columns before batches are made, so that an error names its row. Brokers
check again, but they refuse whole batches, and the row is then hard to find.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qmq.sink import arrow_vectors
from pyspark_qmq.sink.options import Fields
from qmq import limits, model
from qmq.errors import DelayTooLong, InvalidArgument, MessageTooLarge, QmqError

Rows = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint8]
"""Message ids, 16 bytes per row."""

ROWS_MAX: Final = 1 << 32
EPOCHS_MAX: Final = 1 << 32
NUMBERS_END: Final = 1 << 48
"""Larger than every batch number."""
ID_BYTES: Final = 16
_EPOCH_BITS: Final = 16
_ROW_BITS: Final = 32
_ALL_BITS: Final = 32
_BIRTH_BITS: Final = 60
_ROW_TYPE: Final = np.dtype([("writer", ">u8"), ("epoch", ">u4"), ("row", ">u4")])


class RowTarget(NamedTuple):
    """A queue to write to: of a subject, or of a delay group that stores its delayed messages."""

    subject: str
    partition: int
    broker_group: str
    is_delayed: bool = False

    def __str__(self) -> str:
        ending = ", delayed" if self.is_delayed else ""
        return f"{self.subject}/{self.partition}@{self.broker_group}{ending}"


@dataclass(frozen=True, slots=True)
class RowWriter:
    """The identity of one task in one epoch, shared by all attempts. Raises InvalidArgument."""

    name: str
    partition: int
    epoch: int = 0
    has_own_ids: bool = False
    """Whether rows have their own message ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < EPOCHS_MAX:
            text = (
                f"epoch {self.epoch} of {self.name!r} does not fit into a message id: start a "
                "new query with a new checkpoint"
            )
            raise InvalidArgument(text)

    def producer_id(self, to: RowTarget) -> int:
        """The producer id for a queue."""
        life = self.epoch >> (
            _EPOCH_BITS if to.partition == 0 else 0 if self.has_own_ids else _ALL_BITS
        )
        parts = (
            self.name,
            str(self.partition),
            to.subject,
            str(to.partition),
            to.broker_group,
            str(int(to.is_delayed)),
            str(life),
        )
        return int.from_bytes(_digest("\0".join(parts)), "big") >> (64 - _BIRTH_BITS)

    @property
    def hash(self) -> int:
        """The first 8 bytes of its rows' message ids."""
        return int.from_bytes(_digest(f"{self.name}\0{self.partition}"), "big")

    def message_ids(self, rows: Rows) -> Ids:
        """The ids of rows without their own."""
        found = np.empty(len(rows), _ROW_TYPE)
        found["writer"], found["epoch"], found["row"] = self.hash, self.epoch, rows
        return found.view(np.uint8).reshape(-1, ID_BYTES)

    def read_ids(self, ids: Ids) -> tuple[Rows, int, npt.NDArray[np.bool_]]:
        """The rows of a stored batch in this epoch, its newest epoch (-1 if it has no row of this
        writer), and where the rows are in the batch.
        """
        found = np.ascontiguousarray(ids).view(_ROW_TYPE).reshape(-1)
        is_mine = found["writer"] == self.hash
        newest = int(found["epoch"][is_mine].max()) if is_mine.any() else -1
        is_mine &= found["epoch"] == self.epoch
        return found["row"][is_mine].astype(np.int64), newest, is_mine

    # --- numbers outside of ordered partitions ----------------------------------------------------

    def number_of(self, first_row: int) -> int:
        """The number of a batch that begins with this row."""
        return self.numbers_begin + first_row

    @property
    def numbers_begin(self) -> int:
        """The lowest number of this epoch."""
        return (self.epoch & ((1 << _EPOCH_BITS) - 1)) << _ROW_BITS

    @property
    def numbers_end(self) -> int:
        return self.numbers_begin + (1 << _ROW_BITS)


def rank(writer: RowWriter, first_row: int, target: RowTarget) -> bytes:
    """The rank of a queue for a batch that begins with this row. The batch goes to the
    highest-ranked queue that accepts it.
    """
    return _digest(
        f"{writer.name}\0{writer.partition}\0{writer.epoch}\0{first_row}\0{target.broker_group}"
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


ROW_BYTES_MAX: Final = limits.BATCH_BYTES_MAX - limits.MIB
"""The limit for body, key, tags and headers of one row: the largest body of a subject, which fits
into a batch with its overhead.
"""


def check(batch: pa.RecordBatch, fields: Fields, first_row: int) -> npt.NDArray[np.int64]:
    """Check a record batch whose first row is the task's row number `first_row`. Returns the bytes
    of each row.

    Raises:
        InvalidArgument: a null body, invalid tags or headers, or an invalid id.
        MessageTooLarge: a body, a key or headers exceed the limit.
    """
    body = batch.column(fields.body)
    if body.null_count:
        _refuse(
            InvalidArgument, ~arrow_vectors.valid(body), first_row, "has no body: use an empty one"
        )
    sizes = arrow_vectors.lengths(body)
    if fields.key >= 0:
        key_bytes = arrow_vectors.lengths(batch.column(fields.key))
        _refuse(
            MessageTooLarge,
            key_bytes > limits.KEY_BYTES_MAX,
            first_row,
            f"has a key of more than {limits.KEY_BYTES_MAX} bytes",
        )
        sizes = sizes + key_bytes
    if fields.tag >= 0:
        sizes = sizes + _check_tag(batch.column(fields.tag), first_row)
    if fields.tags >= 0:
        sizes = sizes + _check_tags(batch.column(fields.tags), first_row)
    if fields.headers >= 0:
        sizes = sizes + _check_headers(batch.column(fields.headers), first_row)
    if fields.create_time >= 0 and batch.column(fields.create_time).null_count:
        wrong = ~arrow_vectors.valid(batch.column(fields.create_time))
        _refuse(
            InvalidArgument,
            wrong,
            first_row,
            "has no create_time: leave the column out, or coalesce it with current_timestamp()",
        )
    if fields.message_id >= 0:
        _check_ids(batch.column(fields.message_id), first_row)
    _refuse(
        MessageTooLarge,
        sizes > ROW_BYTES_MAX,
        first_row,
        f"has more than {ROW_BYTES_MAX} bytes: send a reference to the content instead",
    )
    return sizes


def check_due_times(
    due_times_ms: npt.NDArray[np.int64], now_ms: int, rows: npt.NDArray[np.int64]
) -> None:
    """Raise DelayTooLong for a row whose delay exceeds the limit."""
    wrong = due_times_ms > now_ms + limits.DELAY_MS_MAX
    if wrong.any():
        days = limits.DELAY_MS_MAX // 86_400_000
        row = rows[int(np.argmax(wrong))]
        raise DelayTooLong(
            f"row {row} of its Spark partition is to be delivered in more than {days} days "
            "(two years), the longest delay"
        )


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
    _refuse(
        InvalidArgument,
        wrong,
        first_row,
        f"has a tag that has not 1 to {limits.TAG_BYTES_MAX} bytes",
    )
    return found


def _check_tags(array: pa.Array, first_row: int) -> npt.NDArray[np.int64]:
    marks, (items,) = arrow_vectors.lists(array)
    _refuse(
        InvalidArgument,
        np.diff(marks) > limits.TAGS_MAX,
        first_row,
        f"has more than {limits.TAGS_MAX} tags",
    )
    found = arrow_vectors.lengths(items)
    wrong = (found == 0) | (found > limits.TAG_BYTES_MAX)
    _refuse(
        InvalidArgument,
        _rows_of(wrong, marks),
        first_row,
        f"has a tag that has not 1 to {limits.TAG_BYTES_MAX} bytes",
    )
    return arrow_vectors.lengths(array)


def _check_headers(array: pa.Array, first_row: int) -> npt.NDArray[np.int64]:
    marks, (names, values) = arrow_vectors.lists(array)
    if values.null_count:
        _refuse(
            InvalidArgument,
            _rows_of(~arrow_vectors.valid(values), marks),
            first_row,
            "has a header without a value",
        )
    _refuse(
        InvalidArgument,
        _rows_of(arrow_vectors.lengths(names) == 0, marks),
        first_row,
        "has a header without a name",
    )
    reserved = pc.starts_with(names, model.PREFIX).to_numpy(zero_copy_only=False)
    text = (
        f"has a header whose name begins with {model.PREFIX!r}, which is reserved: remove it "
        "with map_filter"
    )
    _refuse(InvalidArgument, _rows_of(reserved, marks), first_row, text)
    found = arrow_vectors.lengths(array)
    _refuse(
        MessageTooLarge,
        found > limits.HEADER_BYTES_MAX,
        first_row,
        f"has more than {limits.HEADER_BYTES_MAX} bytes of headers",
    )
    return found


def _check_ids(array: pa.Array, first_row: int) -> None:
    if arrow_vectors.unhex(arrow_vectors.strings(array.drop_null())) is None:
        right = pc.fill_null(pc.match_substring_regex(array, "^[0-9a-f]{32}$"), True).to_numpy(
            zero_copy_only=False
        )
        _refuse(
            InvalidArgument,
            ~right,
            first_row,
            "has a message_id that is not 32 hexadecimal digits (0-9, a-f)",
        )
