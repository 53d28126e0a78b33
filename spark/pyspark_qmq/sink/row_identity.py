"""The identity of rows and batches: the same for every attempt on every machine. Pure.

    writer        (name, Spark partition): the name is the query's id, the job's, or the user's (`qmq.txnId`)
    row           (writer, epoch, row number): 8 bytes of a hash of the writer, the epoch and the row number, big endian: the message id
    producer id   a hash of the writer and the queue, below 2^60, which is smaller than any real producer's id

The numbering of batches depends on the queue:

* In a partition of an ordered subject, numbers must have no gaps: they continue from the newest number. Rows are identified by their ids.
* Elsewhere: the lower 16 bits of the epoch (every 65,536 epochs have their own producer id) and the number of the batch's first row. So two
  attempts that send the same rows to the same queue use the same number. A number is never used twice, because a stored row is in no
  other batch.

Rows with their own ids do not reveal their epoch, so on an ordered subject each epoch then has its own producer id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import InvalidArgument

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
        return f"{self.subject}/{self.partition}@{self.broker_group}{', delayed' if self.is_delayed else ''}"


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
            text = f"epoch {self.epoch} of {self.name!r} does not fit into a message id: start a new query with a new checkpoint"
            raise InvalidArgument(text)

    def producer_id(self, to: RowTarget) -> int:
        """The producer id for a queue."""
        life = self.epoch >> (_EPOCH_BITS if to.partition == 0 else 0 if self.has_own_ids else _ALL_BITS)
        parts = (self.name, str(self.partition), to.subject, str(to.partition), to.broker_group, str(int(to.is_delayed)), str(life))
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
        """The rows of a stored batch in this epoch, its newest epoch (-1 if it has no row of this writer), and where the rows are in the
        batch.
        """
        found = np.ascontiguousarray(ids).view(_ROW_TYPE).reshape(-1)
        is_mine = found["writer"] == self.hash
        newest = int(found["epoch"][is_mine].max()) if is_mine.any() else -1
        is_mine &= found["epoch"] == self.epoch
        return found["row"][is_mine].astype(np.int64), newest, is_mine

    # --- numbers outside of ordered partitions -------------------------------------------------------------------------

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
    """The rank of a queue for a batch that begins with this row. The batch goes to the highest-ranked queue that accepts it."""
    return _digest(f"{writer.name}\0{writer.partition}\0{writer.epoch}\0{first_row}\0{target.broker_group}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
