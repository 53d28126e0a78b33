"""Makes delayed batches from delayed batches: cuts one by buckets, or makes a batch of one message with another due time. Pure.

A piece has the batch's header (producer, number, flags, create time) and its columns, for fewer messages, and always the column MESSAGE_ID,
since ids no longer follow from the place in the batch. Bodies are not compressed: another version of a library may compress to other bytes,
and all replicas must have the same. Nothing is decoded as text, so cutting changes no value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from struct import Struct, pack
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.batch import BatchView, Envelope
from qmq.batch_columns import REGION, BatchFlag, Column, RegionHeader, bytes_column, int_column, last_offset, offsets, padded
from qmq.headers import PLANNED, SCHEDULE_ID
from qmq.text_numbers import whole_number

REGION_BYTES_MAX: Final = 16 * 1024 * 1024 - 64
FEW: Final = 8
"""For fewer messages a loop is faster than numpy."""
_UNPLACED: Final = Envelope(0, 0, 0, -1, 0, 0, 0, 0)
_ID: Final = Struct(">QHIH")
_TWO: Final = Struct("<2i")
_DUE: Final = Struct("<q")
_BATCH_SEQUENCE_MASK: Final = 0xFFFF_FFFF
_PLAIN: Final = int(Column.MESSAGE_ID | Column.DUE)
_ZEROS: Final = tuple(map(bytes, range(8)))
_RECURRING: Final = int(BatchFlag.RECURRING)
_HALF: Final = int(BatchFlag.HALF)
_PLANNED_MAX: Final = 10**18 - 1
_SCHEDULE_ID: Final = SCHEDULE_ID.encode()
_PLANNED: Final = PLANNED.encode()
_T = TypeVar("_T")


def id_of(producer_id: int, batch_sequence: int, place: int) -> bytes:
    """The message id for a producer, batch and place; see `model.MessageId`."""
    return _ID.pack(producer_id, batch_sequence >> 32 & 0xFFFF, batch_sequence & _BATCH_SEQUENCE_MASK, place)


def ids_of(producer_id: int, batch_sequence: int, count: int) -> list[bytes]:
    """The message ids of a whole batch."""
    first = id_of(producer_id, batch_sequence, 0)[:-2]
    return [first + each for each in _places(count)]


@lru_cache(maxsize=4)
def _places(count: int) -> list[bytes]:
    return [place.to_bytes(2, "big") for place in range(count)]


def run_id(first_id: bytes, due_ms: int) -> bytes:
    """The message id of a recurring message's run."""
    return hashlib.blake2b(first_id + _DUE.pack(due_ms), digest_size=16).digest()


def planned_ms(header: bytes, due_ms: int) -> int:
    """The time by the schedule of a run that is due then, by its header `qmq-planned`, which is empty if it has none."""
    at_ms, _, moved_to = header.partition(b"/")
    found = whole_number(at_ms, _PLANNED_MAX) if moved_to == b"%d" % due_ms else None
    return due_ms if found is None else found


def _strings(items: Sequence[bytes]) -> bytes:
    if len(items) == 1:
        item = items[0]
        return _TWO.pack(0, len(item)) + item + bytes(-len(item) & 7)
    return offsets(items) + padded(b"".join(items))


def _lists(items: Sequence[Sequence[object]]) -> bytes:
    return offsets(items)  # type: ignore[arg-type]  # it only asks how long they are


def first_id(pieces: Pieces, at: int) -> bytes:
    """The public id of a message: for a recurring message, the id of its first run."""
    if pieces.header.flags & _RECURRING and pieces.headers is not None:
        for name, value in pieces.headers[at]:
            if name == _SCHEDULE_ID:
                with suppress(ValueError):  # the header is not a schedule id, so every replica keeps it unchanged
                    return bytes.fromhex(value.decode())
    return pieces.ids[at]


class Pieces:
    """A parsed delayed batch, from which pieces are made. Raises CorruptBatch."""

    def __init__(self, region: bytes) -> None:
        view = BatchView(_UNPLACED, region)
        self.header = header = view.header
        layout, count = view.layout, header.count
        self._subject = padded(region[REGION.size : REGION.size + header.subject_bytes])
        self._columns = header.columns | _PLAIN
        self._deltas = np.frombuffer(region, "<u4", count, layout.create_delta) if layout.create_delta >= 0 else None
        self.ids = view.message_ids() or ids_of(header.producer_id, header.batch_sequence, count)
        self._id_rows: npt.NDArray[np.uint8] | None = None
        self._keys = view.keys()
        self._lps = view.logical_partitions()
        self._tags = _lists_of(region, layout.tag_list, count, self._tags_at(view)) if layout.tag_list >= 0 else None
        self.headers = _lists_of(region, layout.header_list, count, self._headers_at(view)) if layout.header_list >= 0 else None
        self.due_times_ms = view.due_times_ms() or (0,) * count
        self._due_rows = np.array(self.due_times_ms, "<i8")
        self._body_rows = _rows(region, layout.body, layout.body_data, header)
        self._view = view
        self._taken = view.bodies() if self._body_rows is None else None
        self._is_plain = not header.columns & ~_PLAIN

    @staticmethod
    def _tags_at(view: BatchView) -> list[tuple[int, bytes]]:
        layout = view.layout
        total = last_offset(view.region, layout.tag_list, view.count)
        return list(zip(view.tag_hashes(), bytes_column(view.region, layout.tag, layout.tag_data, total), strict=True))

    @staticmethod
    def _headers_at(view: BatchView) -> list[tuple[bytes, bytes]]:
        layout, region = view.layout, view.region
        total = last_offset(region, layout.header_list, view.count)
        names = bytes_column(region, layout.header_name, layout.header_name_data, total)
        return list(zip(names, bytes_column(region, layout.header_value, layout.header_value_data, total), strict=True))

    def cut(self, places: Sequence[int]) -> list[tuple[Sequence[int], bytes]]:
        """(places, region) of the messages at these places; several if one would be too large."""
        region = self.piece(places)
        if len(region) <= REGION_BYTES_MAX or len(places) == 1:
            return [(places, region)]
        middle = len(places) // 2
        return self.cut(places[:middle]) + self.cut(places[middle:])

    def one(self, place: int) -> bytes:
        """The region of one message."""
        if not self._is_plain:
            return self.piece((place,))
        body = self._bodies[place]
        size = len(body)
        ends = _TWO.pack(0, size)
        return b"".join(
            (self._head(1, size), self._subject, self.ids[place], _DUE.pack(self.due_times_ms[place]), ends, body, _ZEROS[-size & 7])
        )

    def piece(self, places: Sequence[int]) -> bytes:
        """The region of the messages at these places."""
        count = len(places)
        body_bytes, body_buffers = self._body_buffers(places)
        buffers = [self._head(count, body_bytes), self._subject]
        if self._deltas is not None:
            buffers.append(padded(self._deltas[list(places)].tobytes()))
        buffers.append(self._ids_at(places))
        if self._keys is not None:
            buffers.append(_strings([self._keys[each] for each in places]))
        if self._lps is not None:
            buffers.append(padded(pack(f"<{count}H", *[self._lps[each] for each in places])))
        if self._tags is not None:
            tags = [self._tags[each] for each in places]
            flat = list(chain.from_iterable(tags))
            buffers += (_lists(tags), pack(f"<{len(flat)}Q", *[each[0] for each in flat]), _strings([each[1] for each in flat]))
        if self.headers is not None:
            buffers += _header_buffers([self.headers[each] for each in places])
        return b"".join((*buffers, self._due_rows[list(places)].tobytes(), *body_buffers))

    def _ids_at(self, places: Sequence[int]) -> bytes:
        if len(places) < FEW:
            return b"".join([self.ids[each] for each in places])
        if self._id_rows is None:
            self._id_rows = np.frombuffer(b"".join(self.ids), np.uint8).reshape(-1, 16)
        return self._id_rows[list(places)].tobytes()

    def _body_buffers(self, places: Sequence[int]) -> tuple[int, list[bytes]]:
        """(bytes of the bodies, buffers of the column)."""
        if self._body_rows is None or len(places) < FEW:
            bodies = [self._bodies[each] for each in places]
            return sum(map(len, bodies)), [_strings(bodies)]
        count, size = len(places), self._body_rows.shape[1]
        ends = padded(np.arange(0, (count + 1) * size, size, dtype="<i4").tobytes())
        return count * size, [ends, padded(self._body_rows[list(places)].tobytes())]

    @property
    def _bodies(self) -> list[bytes]:
        """The bodies of all messages, decoded at first use."""
        if self._taken is None:
            self._taken = self._view.bodies()
        return self._taken

    def _head(self, count: int, body_bytes: int) -> bytes:
        producer_id, batch_sequence, flags, _, create_time_ms, _, partition, _, subject_bytes, _ = self.header
        return REGION.pack(
            producer_id, batch_sequence, flags, count, create_time_ms, self._columns, partition, body_bytes, subject_bytes, 0, 0
        )

    # --- batches of one ------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Make the batch's half messages ordinary delayed messages."""
        self.header = self.header._replace(flags=self.header.flags & ~_HALF)

    def moved(self, place: int, due_ms: int) -> bytes:
        """A batch of one: the same message with another due time."""
        self.due_times_ms = (*self.due_times_ms[:place], due_ms, *self.due_times_ms[place + 1 :])
        self._due_rows = np.array(self.due_times_ms, "<i8")
        return self.piece((place,))

    def postponed(self, place: int, due_ms: int) -> bytes:
        """As `moved`. A run of a recurring message keeps its time by the schedule, so that the run after that time is the next one."""
        own = self.headers[place] if self.headers is not None else []
        if self.header.flags & _RECURRING and any(name == _SCHEDULE_ID for name, _ in own):
            at_ms = planned_ms(next((value for name, value in own if name == _PLANNED), b""), self.due_times_ms[place])
            kept = [each for each in own if each[0] != _PLANNED]
            self._replace_headers(place, kept if at_ms == due_ms else [*kept, (_PLANNED, b"%d/%d" % (at_ms, due_ms))])
        return self.moved(place, due_ms)

    def next_run(self, place: int, first_id: bytes, due_ms: int) -> bytes:
        """A batch of one: a recurring message's run at that time. `first_id` is the id of its first run."""
        own = self.headers[place] if self.headers is not None else []
        kept = [each for each in own if each[0] not in (_SCHEDULE_ID, _PLANNED)]
        self._replace_headers(place, [*kept, (_SCHEDULE_ID, first_id.hex().encode())])
        self.ids = [*self.ids[:place], run_id(first_id, due_ms), *self.ids[place + 1 :]]
        self._id_rows = None
        return self.moved(place, due_ms)

    def _replace_headers(self, place: int, headers: list[tuple[bytes, bytes]]) -> None:
        before = self.headers if self.headers is not None else [[] for _ in self.ids]
        self.headers = [*before[:place], headers, *before[place + 1 :]]
        self._columns |= int(Column.HEADERS)


def _rows(region: bytes, offsets_at: int, data_at: int, header: RegionHeader) -> npt.NDArray[np.uint8] | None:
    """The bodies as rows of a table, if all have the same size: then they are selected by vector operations."""
    count, size = header.count, header.body_bytes // header.count
    if header.compression or not size or size * count != header.body_bytes:
        return None
    ends = np.frombuffer(region, "<i4", count + 1, offsets_at)
    if not np.array_equal(ends, np.arange(0, (count + 1) * size, size)):
        return None
    return np.frombuffer(region, np.uint8, count * size, data_at).reshape(count, size)


def _lists_of(region: bytes, at: int, count: int, flat: list[_T]) -> list[list[_T]]:
    marks = int_column(region, at, "i", count + 1)
    return [flat[marks[each] : marks[each + 1]] for each in range(count)]


def _header_buffers(headers: list[list[tuple[bytes, bytes]]]) -> list[bytes]:
    flat = list(chain.from_iterable(headers))
    return [_lists(headers), _strings([each[0] for each in flat]), _strings([each[1] for each in flat])]
