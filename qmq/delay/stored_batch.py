"""A batch in the schedule log, and access to its single messages.

Due messages of one batch are rarely due at the same tick, so single messages are read. The checksum covers the whole batch, so checked
batches
are cached for a while, and their outlines for longer (`BatchCache`).
"""

from __future__ import annotations

from collections import OrderedDict
from struct import unpack_from
from typing import Final

from qmq.batch import BatchView, Envelope
from qmq.batch_columns import check_region
from qmq.delay.batch_cutting import id_of
from qmq.delay.batch_outline import OUTLINES_MAX, BatchOutline, is_outlined
from qmq.delay.interfaces import DueMessage, SchedulePlace
from qmq.errors import CorruptBatch
from qmq.limits import MIB

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
        return place if place < header.count and id_of(header.producer_id, header.batch_sequence, place) == message_id else -1

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
        return tuple(_item(region, layout.tag, layout.tag_data, each).decode(errors="replace") for each in range(first, end))

    def _headers(self, place: int) -> dict[str, bytes]:
        layout, region = self.view.layout, self.view.region
        if layout.header_list < 0:
            return {}
        first, end = unpack_from("<2i", region, layout.header_list + 4 * place)
        return {
            _item(region, layout.header_name, layout.header_name_data, each).decode(errors="replace"): _item(
                region, layout.header_value, layout.header_value_data, each
            )
            for each in range(first, end)
        }


def _item(region: bytes, offsets_at: int, data_at: int, place: int) -> bytes:
    begin, end = unpack_from("<2i", region, offsets_at + 4 * place)
    return region[data_at + begin : data_at + end]


class BatchCache:
    """By (bucket, position): the batches that were read last, up to a number of bytes, and the newest outlines."""

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
