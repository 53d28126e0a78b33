"""A batch in the schedule log: access to its single messages, and batches that are made of it.

Due messages of one batch are rarely due at the same tick, so single messages are read. The checksum
covers the whole batch, so checked batches are cached for a while, and their outlines for longer
(`BatchCache`).

A batch is cut by buckets, or a batch of one message is made with another due time. A piece has the
batch's header (producer, number, flags, create time) and its columns, for fewer messages, and
always the column MESSAGE_ID, since ids no longer follow from the place in the batch. Bodies are not
compressed: another version of a library may compress to other bytes, and all replicas must have the
same. Nothing is decoded as text, so cutting changes no value.

With the outline of a batch in memory, single messages can be read from disk. The due times of one
batch are often spread over an hour, and each due message would need its whole batch, 130 KB for 100
bytes. An outline has the places of the batch's columns in the region, so that a message takes a few
small reads: its due time, its offsets, its bytes.

An outline is made only after the batch's checksum was verified in this process. Later damage is
noticed only if values become impossible. An outline takes about 250 bytes. Batches that are
compressed, or so small that reading them whole costs as much, have none.

A message is named by its `SchedulePlace`. Arrays of places travel together as `Places`; a message
on its way out is a `DueMessage`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from struct import Struct, pack, unpack, unpack_from
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.errors import CorruptBatch, DelayTooLong, InvalidArgument
from qmq.limits import KIB, MIB
from qmq.model import PLANNED, SCHEDULE_ID
from qmq.text import whole_number
from qmq.wire.batch import BatchView, Envelope
from qmq.wire.batch_columns import (
    REGION,
    BatchFlag,
    Column,
    RegionHeader,
    bytes_column,
    check_region,
    int_column,
    last_offset,
    offsets,
    padded,
)

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


class SchedulePlace(NamedTuple):
    """The place of a delayed message: the `ordinal`-th of bucket number `due_ms // bucket_ms`."""

    bucket: int
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Many messages as three arrays of the same length; their order is up to the caller."""

    due_times_ms: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int32]
    ordinals: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.due_times_ms)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> Places:
        """A selection: by slice, mask, or indexes in any order."""
        return Places(self.due_times_ms[which], self.buckets[which], self.ordinals[which])

    def __iter__(self) -> Iterator[SchedulePlace]:
        return map(SchedulePlace, self.buckets.tolist(), self.ordinals.tolist())

    @classmethod
    def of(cls, places: Sequence[SchedulePlace], due_times_ms: Sequence[int] = ()) -> Places:
        """Make arrays of places; without `due_times_ms` (for reading only) due times are 0."""
        return cls(
            np.array(due_times_ms or [0] * len(places), np.int64),
            np.array([each.bucket for each in places], np.int32),
            np.array([each.ordinal for each in places], np.uint32),
        )


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message from the schedule log. `message_id` is 16 bytes; `flags` are its batch's."""

    place: SchedulePlace
    due_ms: int
    subject: str
    body: bytes
    key: bytes
    tags: tuple[str, ...]
    headers: dict[str, bytes]
    create_time_ms: int
    message_id: bytes
    flags: int
    append_ms: int = 0
    """When the delay group stored its batch."""


def check_due(due_ms: int, now_ms: int, delay_ms_max: int) -> None:
    """Refuse a due time that is farther away than the group allows, or is none. Raises
    DelayTooLong, InvalidArgument.
    """
    if due_ms < 0:
        raise InvalidArgument(f"a due time is milliseconds since 1970, not {due_ms}")
    if due_ms - now_ms > delay_ms_max:
        days = delay_ms_max / 86_400_000
        raise DelayTooLong(
            f"due in {(due_ms - now_ms) / 86_400_000:.1f} days, but {days:g} is the limit: "
            "use a shorter delay"
        )


def id_of(producer_id: int, batch_sequence: int, place: int) -> bytes:
    """The message id for a producer, batch and place; see `model.MessageId`."""
    return _ID.pack(
        producer_id, batch_sequence >> 32 & 0xFFFF, batch_sequence & _BATCH_SEQUENCE_MASK, place
    )


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
    """The time by the schedule of a run that is due then, by its header `qmq-planned`, which is
    empty if it has none.
    """
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
                # if the header is no schedule id, every replica keeps it unchanged
                with suppress(ValueError):
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
        self._deltas = (
            np.frombuffer(region, "<u4", count, layout.create_delta)
            if layout.create_delta >= 0
            else None
        )
        self.ids = view.message_ids() or ids_of(header.producer_id, header.batch_sequence, count)
        self._id_rows: npt.NDArray[np.uint8] | None = None
        self._keys = view.keys()
        self._lps = view.logical_partitions()
        self._tags = (
            _lists_of(region, layout.tag_list, count, self._tags_at(view))
            if layout.tag_list >= 0
            else None
        )
        self.headers = (
            _lists_of(region, layout.header_list, count, self._headers_at(view))
            if layout.header_list >= 0
            else None
        )
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
        return list(
            zip(
                view.tag_hashes(),
                bytes_column(view.region, layout.tag, layout.tag_data, total),
                strict=True,
            )
        )

    @staticmethod
    def _headers_at(view: BatchView) -> list[tuple[bytes, bytes]]:
        layout, region = view.layout, view.region
        total = last_offset(region, layout.header_list, view.count)
        names = bytes_column(region, layout.header_name, layout.header_name_data, total)
        return list(
            zip(
                names,
                bytes_column(region, layout.header_value, layout.header_value_data, total),
                strict=True,
            )
        )

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
            (
                self._head(1, size),
                self._subject,
                self.ids[place],
                _DUE.pack(self.due_times_ms[place]),
                ends,
                body,
                _ZEROS[-size & 7],
            )
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
            buffers += (
                _lists(tags),
                pack(f"<{len(flat)}Q", *[each[0] for each in flat]),
                _strings([each[1] for each in flat]),
            )
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
        return _piece_head(self.header, self._columns, count, body_bytes)

    # --- batches of one ---------------------------------------------------------------------------

    def decide(self) -> None:
        """Make the batch's half messages ordinary delayed messages."""
        self.header = self.header._replace(flags=self.header.flags & ~_HALF)

    def moved(self, place: int, due_ms: int) -> bytes:
        """A batch of one: the same message with another due time."""
        self.due_times_ms = (*self.due_times_ms[:place], due_ms, *self.due_times_ms[place + 1 :])
        self._due_rows = np.array(self.due_times_ms, "<i8")
        return self.piece((place,))

    def postponed(self, place: int, due_ms: int) -> bytes:
        """As `moved`. A run of a recurring message keeps its time by the schedule, so that the run
        after that time is the next one.
        """
        own = self.headers[place] if self.headers is not None else []
        if self.header.flags & _RECURRING and any(name == _SCHEDULE_ID for name, _ in own):
            at_ms = planned_ms(
                next((value for name, value in own if name == _PLANNED), b""),
                self.due_times_ms[place],
            )
            kept = [each for each in own if each[0] != _PLANNED]
            self._replace_headers(
                place, kept if at_ms == due_ms else [*kept, (_PLANNED, b"%d/%d" % (at_ms, due_ms))]
            )
        return self.moved(place, due_ms)

    def next_run(self, place: int, first_id: bytes, due_ms: int) -> bytes:
        """A batch of one: a recurring message's run at that time.
        `first_id` is the id of its first run.
        """
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


def cut_by_bucket(
    pieces: Pieces, numbers: npt.NDArray[np.int32], which: Sequence[int]
) -> list[tuple[int, Sequence[int], bytes]]:
    """(bucket, places, region) of the messages at the places `which` (ascending), by bucket.
    `numbers` has the bucket of each message of the batch.
    """
    places = np.array(which, np.intp)
    some = numbers[places]
    order = np.argsort(some, kind="stable")
    ends = [*(np.flatnonzero(np.diff(some[order])) + 1).tolist(), len(order)]
    first, every = 0, places[order].tolist()
    found: list[tuple[int, Sequence[int], bytes]] = []
    for number, end in zip(some[order[[0, *ends[:-1]]]].tolist(), ends, strict=True):
        if end == first + 1:
            found.append((number, every[first:end], pieces.one(every[first])))
        else:
            found += [(number, *each) for each in pieces.cut(every[first:end])]
        first = end
    return found


def plain_pieces(
    header: RegionHeader, subject: bytes, messages: Sequence[tuple[int, int, bytes]]
) -> list[tuple[tuple[int, ...], bytes]]:
    """(due times, region) of a piece of a batch without other columns than due times: what
    `Pieces.cut` makes of it. `messages` are (due time, place, body).
    """
    dues, places, bodies = zip(*messages, strict=True)
    start = id_of(header.producer_id, header.batch_sequence, 0)[:-2]
    region = b"".join(
        (
            _piece_head(header, header.columns | _PLAIN, len(bodies), sum(map(len, bodies))),
            padded(subject),
            *[start + place.to_bytes(2, "big") for place in places],
            pack(f"<{len(dues)}q", *dues),
            _strings(bodies),
        )
    )
    if len(region) <= REGION_BYTES_MAX or len(messages) == 1:
        return [(dues, region)]
    middle = len(messages) // 2
    return [
        *plain_pieces(header, subject, messages[:middle]),
        *plain_pieces(header, subject, messages[middle:]),
    ]


def _piece_head(header: RegionHeader, columns: int, count: int, body_bytes: int) -> bytes:
    producer_id, batch_sequence, flags, _, create_time_ms, _, partition, _, subject_bytes, _ = (
        header
    )
    return REGION.pack(
        producer_id,
        batch_sequence,
        flags,
        count,
        create_time_ms,
        columns,
        partition,
        body_bytes,
        subject_bytes,
        0,
        0,
    )


def _rows(
    region: bytes, offsets_at: int, data_at: int, header: RegionHeader
) -> npt.NDArray[np.uint8] | None:
    """The bodies as rows of a table, if all have the same size:
    then they are selected by vector operations.
    """
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
    return [
        _lists(headers),
        _strings([each[0] for each in flat]),
        _strings([each[1] for each in flat]),
    ]


OUTLINED_BYTES_MIN: Final = 16 * KIB
"""Smaller batches are read whole."""
OUTLINES_MAX: Final = 100_000
STRETCH_MAX: Final = 8 * KIB
"""Unneeded bytes that are read to save a read."""
_FIELDS: Final = Struct("<qqQQqII15i")
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
        """The message at that place of the batch; None if it is another message, or is not due
        then. Raises CorruptBatch, LogDamaged.
        """
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
            items.headers(header_list, (name, name_data), (value, value_data), place)
            if header_list >= 0
            else {},
            create_ms + (_DELTA.unpack(read(deltas + 4 * place, 4))[0] if deltas >= 0 else 0),
            read(ids + 16 * place, 16) if ids >= 0 else id_of(producer_id, batch_sequence, place),
            flags,
            append_ms,
        )


def _due_and_body(read: Read, due_at: int, offsets_at: int) -> tuple[int, int, int]:
    """(due time, begin and end of the body). The due times are stored before the bodies' offsets,
    and often close.
    """
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
            raise CorruptBatch(
                f"an item from {begin} to {end} is outside the batch, which was whole "
                "before: the disk changed it"
            )
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
        return (
            tuple(
                each.decode(errors="replace")
                for each in self._some(offsets_at, data_at, first, end)
            )
            if end > first
            else ()
        )

    def headers(
        self, list_at: int, names: tuple[int, int], values: tuple[int, int], place: int
    ) -> dict[str, bytes]:
        first, end = self._list(list_at, place)
        if end <= first:
            return {}
        keys = [each.decode(errors="replace") for each in self._some(*names, first, end)]
        return dict(zip(keys, self._some(*values, first, end), strict=True))


CACHE_BYTES: Final = 16 * MIB


class StoredBatch:
    """One checked batch of a bucket. `view.base_sequence` is the ordinal of its first message."""

    __slots__ = ("_bodies", "_subject", "view")

    def __init__(self, envelope: Envelope, region: bytes) -> None:
        """Raises CorruptBatch."""
        check_region(region, envelope.region_crc)
        self.view = BatchView(envelope, region)
        if self.view.layout.due < 0:
            raise CorruptBatch("a batch without due times")
        self._subject = self.view.subject
        self._bodies: list[bytes] | None = None

    def due_ms(self, place: int) -> int:
        """The due time of a message in the batch."""
        due: int = unpack_from("<q", self.view.region, self.view.layout.due + 8 * place)[0]
        return due

    def message_id(self, place: int) -> bytes:
        """16 bytes."""
        view = self.view
        at = view.layout.message_id
        if at < 0:
            return id_of(view.header.producer_id, view.header.batch_sequence, place)
        return view.region[at + 16 * place : at + 16 * place + 16]

    def find(self, message_id: bytes) -> int:
        """The place of the message with that id; -1 if it is not here."""
        header = self.view.header
        if self.view.layout.message_id >= 0:
            ids = self.view.message_ids() or []
            return ids.index(message_id) if message_id in ids else -1
        place = int.from_bytes(message_id[14:], "big")
        return (
            place
            if place < header.count
            and id_of(header.producer_id, header.batch_sequence, place) == message_id
            else -1
        )

    def message(self, place: int, at: SchedulePlace) -> DueMessage:
        """One message. Raises CorruptBatch if it cannot be decompressed."""
        view = self.view
        header, layout, region = view.header, view.layout, view.region
        create_ms = header.create_time_ms
        if layout.create_delta >= 0:
            create_ms += unpack_from("<I", region, layout.create_delta + 4 * place)[0]
        key = _item(region, layout.key, layout.key_data, place) if layout.key >= 0 else b""
        return DueMessage(
            at,
            self.due_ms(place),
            self._subject,
            self._body(place),
            key,
            self._tags(place),
            self._headers(place),
            create_ms,
            self.message_id(place),
            header.flags,
            view.envelope.append_time_ms,
        )

    def _body(self, place: int) -> bytes:
        if self.view.header.compression:
            if self._bodies is None:
                self._bodies = self.view.bodies()
            return self._bodies[place]
        return _item(self.view.region, self.view.layout.body, self.view.layout.body_data, place)

    def _tags(self, place: int) -> tuple[str, ...]:
        layout, region = self.view.layout, self.view.region
        if layout.tag_list < 0:
            return ()
        first, end = unpack_from("<2i", region, layout.tag_list + 4 * place)
        return tuple(
            _item(region, layout.tag, layout.tag_data, each).decode(errors="replace")
            for each in range(first, end)
        )

    def _headers(self, place: int) -> dict[str, bytes]:
        layout, region = self.view.layout, self.view.region
        if layout.header_list < 0:
            return {}
        first, end = unpack_from("<2i", region, layout.header_list + 4 * place)
        return {
            _item(region, layout.header_name, layout.header_name_data, each).decode(
                errors="replace"
            ): _item(region, layout.header_value, layout.header_value_data, each)
            for each in range(first, end)
        }


def _item(region: bytes, offsets_at: int, data_at: int, place: int) -> bytes:
    begin, end = unpack_from("<2i", region, offsets_at + 4 * place)
    return region[data_at + begin : data_at + end]


class BatchCache:
    """By (bucket, position): the batches that were read last, up to a number of bytes, and the
    newest outlines.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES, outlines_max: int = OUTLINES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[tuple[int, int], StoredBatch] = OrderedDict()
        self._outlines_max = outlines_max
        self._outlines: OrderedDict[int, BatchOutline] = OrderedDict()

    def get(self, bucket: int, position: int) -> StoredBatch | None:
        """The batch, if it is cached."""
        found = self._batches.get((bucket, position))
        if found is not None:
            self._batches.move_to_end((bucket, position))
        return found

    def put(self, bucket: int, position: int, batch: StoredBatch) -> None:
        """Cache a batch, and its outline."""
        self._batches[bucket, position] = batch
        self._bytes += len(batch.view.region)
        while self._bytes > self._bytes_max and len(self._batches) > 1:
            self._bytes -= len(self._batches.popitem(last=False)[1].view.region)
        if is_outlined(batch.view):
            self.put_outline(bucket, position, BatchOutline(batch.view))

    def outline(self, bucket: int, position: int) -> BatchOutline | None:
        """The outline of a batch, if it is cached."""
        return self._outlines.get(_key(bucket, position))

    def put_outline(self, bucket: int, position: int, outline: BatchOutline) -> None:
        """Cache an outline. The oldest are dropped first, because their buckets end first, too."""
        self._outlines[_key(bucket, position)] = outline
        if len(self._outlines) > self._outlines_max:
            self._outlines.popitem(last=False)


def _key(bucket: int, position: int) -> int:
    return bucket << 32 | position >> 3
