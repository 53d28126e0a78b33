"""Who writes a row, and under which numbers: the same for every attempt, on whatever machine. Pure.

    writer        (name, Spark partition): the name is the query's id, the job's, or what the user says (`qmq.txnId`)
    row           (writer, epoch, row number): 8 bytes of a hash of the writer, the epoch and the row number, big endian: the message id
    producer id   a hash of the writer and the queue, below 2^60: it lies before any real producer's birth

How batches are numbered differs, because brokers ask for different things:

* To a partition of an ordered subject, where numbers must have no gaps: on from the newest number there. Rows are known by their ids.
* Everywhere else: the epoch (its lower 16 bits; each 65,536 epochs have a producer id of their own) and the number of the batch's first
  row. So the number says which row the batch begins with, and two attempts that send the same rows to the same queue use the same number,
  whatever else they know. A number is never needed twice: a row that is stored is in no other batch.

Rows that bring an id of their own say nothing of their epoch, so on an ordered subject each epoch has its own producer id then.
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
"""Message ids, one a row of 16 bytes."""

ROWS_MAX: Final = 1 << 32
EPOCHS_MAX: Final = 1 << 32
NUMBERS_END: Final = 1 << 48
"""Behind every batch number."""
ID_BYTES: Final = 16
_EPOCH_BITS: Final = 16
_ROW_BITS: Final = 32
_ALL_BITS: Final = 32
_BIRTH_BITS: Final = 60
_ROW_TYPE: Final = np.dtype([("writer", ">u8"), ("epoch", ">u4"), ("row", ">u4")])


class RowTarget(NamedTuple):
    """A queue that is written to: of a subject itself, or of a delay group that keeps its messages until they are due."""

    subject: str
    partition: int
    broker_group: str
    is_delayed: bool = False

    def __str__(self) -> str:
        return f"{self.subject}/{self.partition}@{self.broker_group}{', delayed' if self.is_delayed else ''}"


@dataclass(frozen=True, slots=True)
class RowWriter:
    """One task's identity in one epoch, over all its attempts. Raises InvalidArgument."""

    name: str
    partition: int
    epoch: int = 0
    has_own_ids: bool = False
    """Whether rows bring their message ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < EPOCHS_MAX:
            text = f"epoch {self.epoch} of {self.name!r} is beyond what a message id holds: begin a new query, with a new checkpoint"
            raise InvalidArgument(text)

    def producer_id(self, to: RowTarget) -> int:
        """Under which it sends to a queue."""
        life = self.epoch >> (_EPOCH_BITS if to.partition == 0 else 0 if self.has_own_ids else _ALL_BITS)
        parts = (self.name, str(self.partition), to.subject, str(to.partition), to.broker_group, str(int(to.is_delayed)), str(life))
        return int.from_bytes(_digest("\0".join(parts)), "big") >> (64 - _BIRTH_BITS)

    @property
    def hash(self) -> int:
        """The first 8 bytes of its rows' message ids."""
        return int.from_bytes(_digest(f"{self.name}\0{self.partition}"), "big")

    def message_ids(self, rows: Rows) -> Ids:
        """The ids of rows that bring none."""
        found = np.empty(len(rows), _ROW_TYPE)
        found["writer"], found["epoch"], found["row"] = self.hash, self.epoch, rows
        return found.view(np.uint8).reshape(-1, ID_BYTES)

    def read_ids(self, ids: Ids) -> tuple[Rows, int]:
        """Of a stored batch: its rows in this epoch, and the newest epoch in it, -1 if there is no row of this writer."""
        found = np.ascontiguousarray(ids).view(_ROW_TYPE).reshape(-1)
        mine = found[found["writer"] == self.hash]
        newest = int(mine["epoch"].max()) if len(mine) else -1
        return mine["row"][mine["epoch"] == self.epoch].astype(np.int64), newest

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
    """How much a batch that begins with this row belongs to a queue: it goes to the highest one that takes it."""
    return _digest(f"{writer.name}\0{writer.partition}\0{writer.epoch}\0{first_row}\0{target.broker_group}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
