"""Batches that no QMQ producer makes: their checksum holds, but their content is inconsistent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google_crc32c import value as crc32c

from qmq.wire.batch import encode, sent_envelope
from qmq.wire.batch_columns import REGION, REGION_BYTES, Columns


@dataclass(frozen=True, slots=True)
class Lie:
    """A field of a region's header, by its place in `REGION`, and the value that overwrites the field."""

    field: int
    value: int


LIES: Final = {
    "unknown compression": Lie(9, 9),
    "garbage that claims zstd": Lie(9, 1),
    "a number beyond a message id": Lie(1, 1 << 48),
    "a create time before 1970": Lie(4, -1),
    "a create time at the end of time": Lie(4, (1 << 63) - 1),
}
HARMLESS_AT_INTAKE: Final = {"garbage that claims zstd"}
"""A flaw that only decompression reveals."""


def region_of(name: str, body: bytes = b"poison", subject: bytes = b"s", *, due_ms: int | None = None) -> bytes:
    """A batch of one message with a false header. Create times have deltas, and a delayed message has a due time."""
    columns = Columns([body], create_deltas=[1], due_times_ms=None if due_ms is None else [due_ms])
    _, region = encode(subject, columns, producer_id=7, batch_sequence=3, create_time_ms=1)
    fields = list(REGION.unpack_from(region))
    fields[LIES[name].field] = LIES[name].value
    return REGION.pack(*fields) + region[REGION_BYTES:]


def sent(region: bytes) -> bytes:
    """The batch as a producer sends it, with a valid checksum."""
    return sent_envelope(region) + region


def crc(region: bytes) -> int:
    """Its checksum."""
    return int(crc32c(region))
