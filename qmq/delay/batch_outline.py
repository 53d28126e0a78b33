"""An outline of a batch in memory, with which single messages can be read from disk.

The due times of one batch are often spread over an hour, and each due message would need its whole batch, 130 KB for 100 bytes. An outline
has the places of the batch's columns in the region, so that a message takes a few small reads: its due time, its offsets, its bytes.

An outline is made only after the batch's checksum was verified in this process. Later damage is noticed only if values become impossible.
An outline takes about 250 bytes. Batches that are compressed, or so small that reading them whole costs as much, have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from struct import Struct, unpack
from typing import Final

from qmq.batch import BatchView
from qmq.delay.batch_cutting import id_of
from qmq.delay.interfaces import DueMessage, SchedulePlace
from qmq.errors import CorruptBatch
from qmq.limits import KIB

OUTLINED_BYTES_MIN: Final = 16 * KIB
"""Smaller batches are read whole."""
OUTLINES_MAX: Final = 100_000
STRETCH_MAX: Final = 8 * KIB
"""Unneeded bytes that are read to save a read."""
_FIELDS: Final = Struct("<qqQQqII15i")
_TWO: Final = Struct("<2i")
_DUE: Final = Struct("<q")
_DELTA: Final = Struct("<I")
Read = Callable[[int, int], bytes]
"""(place in the region, size) -> the bytes."""


def is_outlined(view: BatchView) -> bool:
    """Whether an outline of this batch is worth its memory."""
    return len(view.region) >= OUTLINED_BYTES_MIN and not view.header.compression


class BatchOutline:
    __slots__ = ("_packed", "_subject", "region_bytes")

    def __init__(self, view: BatchView) -> None:
        """The batch must have been checked. Raises CorruptBatch."""
        header, at = view.header, view.layout
        self._subject = sys.intern(view.subject)
        self.region_bytes = len(view.region)
        self._packed = _FIELDS.pack(
            view.base_sequence,
            view.envelope.append_time_ms,
            header.producer_id,
            header.batch_sequence,
            header.create_time_ms,
            header.flags,
            header.count,
            at.create_delta,
            at.message_id,
            at.key,
            at.key_data,
            at.tag_list,
            at.tag,
            at.tag_data,
            at.header_list,
            at.header_name,
            at.header_name_data,
            at.header_value,
            at.header_value_data,
            at.due,
            at.body,
            at.body_data,
        )

    def message(self, read: Read, place: int, due_ms: int, at: SchedulePlace) -> DueMessage | None:
        """The message at that place of the batch; None if it is another message, or is not due then. Raises CorruptBatch, LogDamaged."""
        (
            first,
            append_ms,
            producer_id,
            batch_sequence,
            create_ms,
            flags,
            count,
            deltas,
            ids,
            key,
            key_data,
            tag_list,
            tag,
            tag_data,
            header_list,
            name,
            name_data,
            value,
            value_data,
            due_times_ms,
            body,
            body_data,
        ) = _FIELDS.unpack(self._packed)
        if first + place != at.ordinal or place >= count:
            return None
        found_ms, begin, end = _due_and_body(read, due_times_ms + 8 * place, body + 4 * place)
        if found_ms != due_ms:
            return None
        items = _Items(read, self.region_bytes)
        return DueMessage(
            at,
            due_ms,
            self._subject,
            items.between(body_data, begin, end),
            items.item(key, key_data, place) if key >= 0 else b"",
            items.tags(tag_list, tag, tag_data, place) if tag_list >= 0 else (),
            items.headers(header_list, (name, name_data), (value, value_data), place) if header_list >= 0 else {},
            create_ms + (_DELTA.unpack(read(deltas + 4 * place, 4))[0] if deltas >= 0 else 0),
            read(ids + 16 * place, 16) if ids >= 0 else id_of(producer_id, batch_sequence, place),
            flags,
            append_ms,
        )


def _due_and_body(read: Read, due_at: int, offsets_at: int) -> tuple[int, int, int]:
    """(due time, begin and end of the body). The due times are stored before the bodies' offsets, and often close."""
    stretch = offsets_at - due_at + 8
    if stretch > STRETCH_MAX:
        return (*_DUE.unpack(read(due_at, 8)), *_TWO.unpack(read(offsets_at, 8)))
    data = read(due_at, stretch)
    return (*_DUE.unpack_from(data), *_TWO.unpack_from(data, stretch - 8))


class _Items:
    """Reads the items of a column with offsets, one at a time."""

    __slots__ = ("_read", "_size")

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size

    def between(self, data_at: int, begin: int, end: int) -> bytes:
        if not 0 <= begin <= end <= self._size - data_at:
            raise CorruptBatch(f"an item from {begin} to {end} is outside the batch, which was whole before: the disk changed it")
        return self._read(data_at + begin, end - begin) if end > begin else b""

    def item(self, offsets_at: int, data_at: int, place: int) -> bytes:
        return self.between(data_at, *_TWO.unpack(self._read(offsets_at + 4 * place, 8)))

    def _some(self, offsets_at: int, data_at: int, first: int, end: int) -> list[bytes]:
        """Adjacent items: one read for the offsets, one for the bytes."""
        marks = unpack(f"<{end - first + 1}i", self.between(offsets_at, 4 * first, 4 * end + 4))
        data = self.between(data_at, marks[0], marks[-1])
        return [data[begin - marks[0] : after - marks[0]] for begin, after in pairwise(marks)]

    def _list(self, list_at: int, place: int) -> tuple[int, int]:
        first, end = _TWO.unpack(self._read(list_at + 4 * place, 8))
        return first, max(first, end)

    def tags(self, list_at: int, offsets_at: int, data_at: int, place: int) -> tuple[str, ...]:
        first, end = self._list(list_at, place)
        return tuple(each.decode(errors="replace") for each in self._some(offsets_at, data_at, first, end)) if end > first else ()

    def headers(self, list_at: int, names: tuple[int, int], values: tuple[int, int], place: int) -> dict[str, bytes]:
        first, end = self._list(list_at, place)
        if end <= first:
            return {}
        keys = [each.decode(errors="replace") for each in self._some(*names, first, end)]
        return dict(zip(keys, self._some(*values, first, end), strict=True))
