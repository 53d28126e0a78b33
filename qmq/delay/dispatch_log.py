"""The dispatch log: the final states of a bucket's messages, in its file `.done`. Pure.

    record     crc u32 | kind u16 | 0 u16 | count u32 | 0 u32 | ordinals u32 * count | of MOVED:
               (bucket i32, ordinal u32) * count | pad8

The dispatch log has a message at most once. It does not have planned messages: plans are in the
action log and in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from qmq.delay.batches import SchedulePlace
from qmq.errors import CorruptBatch

_HEAD: Final = Struct("<IHHII")
_TARGET: Final = Struct("<iI")


class DispatchMark(IntEnum):
    """The state of a message: one byte of memory for each message of a loaded bucket."""

    PENDING = 0
    DELIVERED = 1
    CANCELLED = 2
    MOVED = 3
    PLANNED = 4


_MARKS: Final = frozenset(DispatchMark)


class DispatchRecord(NamedTuple):
    """Messages that got the same final state together."""

    mark: DispatchMark
    ordinals: npt.NDArray[np.uint32]
    targets: tuple[SchedulePlace, ...] = ()
    """For MOVED: the new place of each."""


def encode_record(
    mark: DispatchMark, ordinals: bytes, targets: Sequence[SchedulePlace] = ()
) -> bytes:
    """`ordinals` are little-endian u32."""
    data = ordinals + b"".join(_TARGET.pack(*each) for each in targets)
    rest = _HEAD.pack(0, mark, 0, len(ordinals) // 4, 0)[4:] + data + bytes(-len(data) & 7)
    return int(crc32c(rest)).to_bytes(4, "little") + rest


def decode_records(data: bytes) -> Iterator[tuple[int, DispatchRecord]]:
    """(position after it, record). Raises CorruptBatch at the first bad one."""
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise CorruptBatch("the head of a record is incomplete")
        crc, kind, _, count, _ = _HEAD.unpack_from(data, at)
        size = 4 * count + (_TARGET.size * count if kind == DispatchMark.MOVED else 0)
        end = at + _HEAD.size + size + (-size & 7)
        if end > len(data) or crc32c(data[at + 4 : end]) != crc:
            raise CorruptBatch("the checksum of a record is wrong")
        if kind not in _MARKS:
            raise CorruptBatch(f"this version of QMQ knows no record of kind {kind}")
        yield end, _record(data, at + _HEAD.size, kind, count)
        at = end


def _record(data: bytes, at: int, kind: int, count: int) -> DispatchRecord:
    ordinals = np.frombuffer(data, "<u4", count, at)
    if kind != DispatchMark.MOVED:
        return DispatchRecord(DispatchMark(kind), ordinals)
    targets = data[at + 4 * count : at + (4 + _TARGET.size) * count]
    return DispatchRecord(
        DispatchMark.MOVED,
        ordinals,
        tuple(SchedulePlace(*each) for each in _TARGET.iter_unpack(targets)),
    )
