"""The batch: the unit of sending, storing, replicating and reading. Pure: bytes in, columns out,
and back.

A batch is an *envelope* of 64 bytes, which the master fills, and a *region*, which the producer
wrote and which never changes:

    envelope   magic "QMB1" | version | kind | total_bytes | region_crc | base_sequence | epoch |
               index | append_time_ms | flushed_position | reserved | envelope_crc
    region     producer_id | batch_sequence | flags | count | create_time_ms | columns | partition |
               body_bytes | subject_bytes | compression | subject, then the columns

Two CRC-32C protect a batch. The producer computes `region_crc` over the whole region, and every
receiver checks it: a bit that flips anywhere between two applications is detected. The master
computes `envelope_crc` over the preceding bytes of the envelope, `region_crc` included: an envelope
cannot be combined with another region.

Columns lie as Arrow lays out its buffers (little endian, int32 offsets, each buffer padded to 8
bytes), in the order of `Column`, and an absent column costs nothing. Sizes follow from `count` and
from each column's last offset, so there is no directory: `Layout.walk` finds every buffer in a few
steps, for any count. docs/FORMAT.md is the specification, byte by byte.

Worked example: one message "hi" without key or tags to subject "a" is 64 + 48 + 8 (subject) + 8
(two offsets) + 8 (body) = 136 bytes.

Stored messages are copied from a delay group or an outbox to a subject, into a dead-letter queue,
and out of one. A copy keeps its message's id, key, tags and create time. The create times of one
batch lie within `CREATED_SPAN_MS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from struct import Struct, error, unpack_from
from typing import Final, NamedTuple

from google_crc32c import value as crc32c  # type: ignore[import-untyped,unused-ignore]

from qmq import limits
from qmq.errors import CorruptBatch, InvalidArgument, InvariantBroken, MessageTooLarge
from qmq.wire.batch_columns import (
    ALIGN,
    REGION,
    REGION_BYTES,
    Columns,
    Compression,
    Layout,
    bytes_column,
    check_region,
    compress,
    decompress,
    int_column,
    last_offset,
    offsets,
    optional_buffers,
    padded,
    parse_header,
)

MAGIC: Final = int.from_bytes(b"QMB1", "little")
VERSION: Final = 1

_BODY_OF_ENVELOPE: Final = Struct("<IHHIIqqqqqI")
_ENVELOPE: Final = Struct("<IHHIIqqqqqII")
_SENT: Final = Struct("<IHHII")
_UNPLACED: Final = Struct(f"{_SENT.format}{_ENVELOPE.size - _SENT.size}x")
"""The envelope before a master has placed the batch."""
_TOTAL: Final = Struct("<I")
_TOTAL_AT: Final = 8
ENVELOPE_BYTES: Final = _ENVELOPE.size
BATCH_BYTES_MIN: Final = ENVELOPE_BYTES + REGION_BYTES + ALIGN


class Kind(IntEnum):
    """The kinds of batches in the logs."""

    DATA = 0
    SNAPSHOT = 1
    """The state before a segment, so that no replay needs an older segment. A segment may begin
    with several.
    """
    ACTIONS = 2
    """The actions of consumers, in the action log."""
    BARRIER = 3
    """A new master's first entry. It holds only the epoch;
    committing it commits the entries before it.
    """
    COMMAND = 4
    """A partition's last entry: a batch of one, which closes it (docs/ORDERING.md). No application
    sees it.
    """


_LONG_ONCE: Final = (Kind.SNAPSHOT, Kind.ACTIONS)
"""Release 0.2 wrote entries of these kinds with more than `limits.BATCH_BYTES_MAX`. They are read;
none is written any more.
"""


class Envelope(NamedTuple):
    """The part of a batch that the master writes. `base_sequence` is -1 until a master has placed
    the batch.
    """

    kind: int
    total_bytes: int
    region_crc: int
    base_sequence: int
    epoch: int
    index: int  # type: ignore[assignment]
    append_time_ms: int
    flushed_position: int


# --- writing --------------------------------------------------------------------------------------


def encode(
    subject: bytes,
    columns: Columns,
    *,
    producer_id: int,
    batch_sequence: int,
    create_time_ms: int,
    flags: int = 0,
    partition: int = 0,
    compression: Compression = Compression.NONE,
) -> tuple[bytes, bytes]:
    """Build a batch as (envelope, region), ready to send; the envelope is not placed yet.

    Raises:
        MessageTooLarge: the batch would exceed `limits.BATCH_BYTES_MAX`.
        InvalidArgument: no message, too many, or a compression whose library is not installed.
    """
    bodies = columns.bodies
    count = len(bodies)
    if not 0 < count <= limits.BATCH_MESSAGES_MAX:
        raise InvalidArgument(
            f"a batch holds 1 to {limits.BATCH_MESSAGES_MAX} messages, not {count}"
        )
    present, buffers = optional_buffers(columns)
    data = b"".join(bodies)
    if compression:
        data = compress(compression, data)
    body_bytes = len(data)
    header = REGION.pack(
        producer_id,
        batch_sequence,
        flags,
        count,
        create_time_ms,
        present,
        partition,
        body_bytes,
        len(subject),
        compression,
        0,
    )
    region = b"".join(
        (header, padded(subject), *buffers, offsets(bodies), data, bytes(-body_bytes & 7))
    )
    return sent_envelope(region), region


def sent_envelope(region: bytes) -> bytes:
    """The provisional envelope that precedes a region on its way to the master.
    Raises MessageTooLarge.
    """
    total = ENVELOPE_BYTES + len(region)
    if total > limits.BATCH_BYTES_MAX:
        raise MessageTooLarge(
            f"the batch has {total} bytes; the limit is {limits.BATCH_BYTES_MAX}: send fewer "
            "at once"
        )
    return _UNPLACED.pack(MAGIC, VERSION, Kind.DATA, total, crc32c(region))


def place(
    kind: int,
    total_bytes: int,
    region_crc: int,
    base_sequence: int,
    epoch: int,
    index: int,
    append_time_ms: int,
    flushed_position: int,
) -> bytes:
    """The envelope as the master writes it, with its checksum."""
    body = _BODY_OF_ENVELOPE.pack(
        MAGIC,
        VERSION,
        kind,
        total_bytes,
        region_crc,
        base_sequence,
        epoch,
        index,
        append_time_ms,
        flushed_position,
        0,
    )
    return body + int(crc32c(body)).to_bytes(4, "little")


_PAYLOAD: Final = Struct("<I")
PAYLOAD_AT: Final = _PAYLOAD.size
"""The place of the payload in the region of an entry that `wrap` made."""


def wrap(
    kind: Kind, payload: bytes, *, count: int, epoch: int, index: int, time_ms: int, flushed: int
) -> list[bytes]:
    """Build an entry that is not a batch of messages (actions, snapshots) from its payload. `count`
    is stored in base_sequence.

    The caller cuts: a longer entry than readers take stops the process, before it is written.
    """
    size = _PAYLOAD.size + len(payload)
    region = b"".join((_PAYLOAD.pack(len(payload)), payload, bytes(-size & (ALIGN - 1))))
    if len(region) < 56:
        region += bytes(56 - len(region))
    total = ENVELOPE_BYTES + len(region)
    if total > limits.BATCH_BYTES_MAX:  # not `check`, for which each entry would make the text
        raise InvariantBroken(
            f"an entry of kind {kind} with {total} bytes: no server of release 0.2 could read it"
        )
    return [place(kind, total, crc32c(region), count, epoch, index, time_ms, flushed), region]


# --- reading --------------------------------------------------------------------------------------


def sent_sizes(buffer: bytes | memoryview, offset: int = 0) -> tuple[int, int]:
    """(total_bytes, region_crc) of a batch on its way to the master. Raises CorruptBatch if the
    bytes are not such a batch.
    """
    try:
        magic, version, kind, total, region_crc = _SENT.unpack_from(buffer, offset)
    except error:
        raise CorruptBatch("the batch is shorter than its envelope") from None
    if magic != MAGIC or version != VERSION or kind != Kind.DATA:
        raise CorruptBatch(
            f"not a batch of version {VERSION}: magic {magic:#x}, version {version}, kind {kind}"
        )
    if not BATCH_BYTES_MIN <= total <= limits.BATCH_BYTES_MAX or total & 7:
        raise CorruptBatch(f"a batch cannot have {total} bytes")
    return total, region_crc


def parse_envelope(buffer: bytes | memoryview, offset: int = 0) -> Envelope:
    """Read and check a placed envelope. Raises CorruptBatch."""
    try:
        fields = _ENVELOPE.unpack_from(buffer, offset)
    except error:
        raise CorruptBatch("the envelope is incomplete") from None
    if fields[0] != MAGIC or fields[1] != VERSION:
        raise CorruptBatch(
            f"not a batch of version {VERSION}: magic {fields[0]:#x}, version {fields[1]}"
        )
    if crc32c(bytes(buffer[offset : offset + ENVELOPE_BYTES - 4])) != fields[11]:
        raise CorruptBatch("the checksum of the envelope is wrong")
    kind, total = fields[2], fields[3]
    is_too_long = total > limits.BATCH_BYTES_MAX and kind not in _LONG_ONCE
    if kind > Kind.COMMAND or total < BATCH_BYTES_MIN or is_too_long or total & 7:
        raise CorruptBatch(f"an envelope of kind {kind} cannot have {total} bytes")
    return Envelope._make(fields[2:10])


def unwrap(region: bytes) -> bytes:
    """The payload of an entry made by `wrap`. Raises CorruptBatch."""
    size: int = _PAYLOAD.unpack_from(region)[0] if len(region) >= _PAYLOAD.size else len(region)
    if size > len(region) - _PAYLOAD.size:
        raise CorruptBatch("the payload does not fit into its entry")
    return region[_PAYLOAD.size : _PAYLOAD.size + size]


def entry_bytes(buffer: bytes | memoryview, offset: int) -> int:
    """The length that the entry at `offset` states, unchecked. Raises CorruptBatch if the buffer
    ends before that.
    """
    try:
        size: int = _TOTAL.unpack_from(buffer, offset + _TOTAL_AT)[0]
    except error:
        raise CorruptBatch("the envelope is incomplete") from None
    return size


def region_crc_of(envelope: bytes) -> int:
    """The region's checksum that an envelope holds."""
    return int.from_bytes(envelope[12:16], "little")


class BatchView:
    """A batch that decodes each column at its first use.

    `region` must have been checked with `check_region`. Items come as Python objects; Arrow readers
    use `layout` instead.
    """

    __slots__ = ("_layout", "base_sequence", "envelope", "header", "region")

    def __init__(self, envelope: Envelope, region: bytes) -> None:
        self.envelope = envelope
        self.region = region
        self.header = parse_header(region)
        self.base_sequence = envelope.base_sequence
        self._layout: Layout | None = None

    @classmethod
    def parse(cls, buffer: bytes | memoryview, offset: int = 0) -> BatchView:
        """Read and check the batch at `offset`. Raises CorruptBatch."""
        envelope = parse_envelope(buffer, offset)
        region = bytes(buffer[offset + ENVELOPE_BYTES : offset + envelope.total_bytes])
        if len(region) != envelope.total_bytes - ENVELOPE_BYTES:
            raise CorruptBatch(
                f"the batch is cut short: {len(region)} of {envelope.total_bytes} bytes"
            )
        check_region(region, envelope.region_crc)
        return cls(envelope, region)

    @property
    def layout(self) -> Layout:
        """Where each buffer begins. Raises CorruptBatch."""
        if self._layout is None:
            self._layout = Layout.walk(self.region, self.header)
        return self._layout

    @property
    def count(self) -> int:
        """Messages in the batch."""
        return self.header.count

    @property
    def subject(self) -> str:
        """The subject that the batch was sent to; empty for a snapshot. Raises CorruptBatch."""
        try:
            return self.region[REGION_BYTES : REGION_BYTES + self.header.subject_bytes].decode()
        except UnicodeDecodeError as cause:
            raise CorruptBatch(f"the name of the subject is not UTF-8: {cause}") from cause

    @property
    def bodies_bytes(self) -> int:
        """The size of all bodies, decompressed: `bodies` refuses a batch that decompresses to
        another size. Raises CorruptBatch.
        """
        return _last_offset_of(self.region, self.layout.body, self.header.count)

    def bodies(self) -> list[bytes]:
        """All bodies, decompressed. Raises CorruptBatch."""
        header, layout = self.header, self.layout
        if not header.compression:
            return bytes_column(self.region, layout.body, layout.body_data, header.count)
        size = self.bodies_bytes
        stored = self.region[layout.body_data : layout.body_data + header.body_bytes]
        try:
            kind = Compression(header.compression)
        except ValueError:
            raise CorruptBatch(
                f"a batch with compression {header.compression} cannot be read: 0 is none, 1 "
                "zstd, 2 lz4"
            ) from None
        data = decompress(kind, stored, size)
        marks = unpack_from(f"<{header.count + 1}i", self.region, layout.body)
        return [data[a:b] for a, b in pairwise(marks)]

    def keys(self) -> list[bytes] | None:
        """All keys. A message without a key has an empty one."""
        at = self.layout.key
        return (
            None
            if at < 0
            else bytes_column(self.region, at, self.layout.key_data, self.header.count)
        )

    def logical_partitions(self) -> tuple[int, ...] | None:
        """The logical partition of every message; None in a batch of an unordered subject."""
        at = self.layout.logical_partition
        return None if at < 0 else int_column(self.region, at, "H", self.header.count)

    def tags(self) -> list[tuple[str, ...]] | None:
        """The tags of every message."""
        layout, count = self.layout, self.header.count
        if layout.tag_list < 0:
            return None
        marks = unpack_from(f"<{count + 1}i", self.region, layout.tag_list)
        flat = [
            each.decode(errors="replace")
            for each in bytes_column(self.region, layout.tag, layout.tag_data, marks[-1])
        ]
        return [tuple(flat[a:b]) for a, b in pairwise(marks)]

    def tag_hashes(self) -> tuple[int, ...]:
        """The hashes of all tags of all messages, one after another."""
        layout, count = self.layout, self.header.count
        if layout.tag_list < 0:
            return ()
        return int_column(
            self.region, layout.tag_hash, "Q", last_offset(self.region, layout.tag_list, count)
        )

    def headers(self) -> list[dict[str, bytes]] | None:
        """The headers of every message."""
        layout, count = self.layout, self.header.count
        if layout.header_list < 0:
            return None
        marks = unpack_from(f"<{count + 1}i", self.region, layout.header_list)
        names = bytes_column(self.region, layout.header_name, layout.header_name_data, marks[-1])
        values = bytes_column(self.region, layout.header_value, layout.header_value_data, marks[-1])
        pairs = [
            (name.decode(errors="replace"), value)
            for name, value in zip(names, values, strict=True)
        ]
        return [dict(pairs[a:b]) for a, b in pairwise(marks)]

    def create_times_ms(self) -> list[int]:
        """When each message was handed to the producer."""
        header, at = self.header, self.layout.create_delta
        if at < 0:
            return [header.create_time_ms] * header.count
        return [
            header.create_time_ms + each for each in int_column(self.region, at, "I", header.count)
        ]

    def due_times_ms(self) -> tuple[int, ...] | None:
        """When each message is to be delivered, milliseconds since 1970;
        None unless the batch is delayed.
        """
        at = self.layout.due
        return None if at < 0 else int_column(self.region, at, "q", self.header.count)

    def message_ids(self) -> list[bytes] | None:
        """The stored 16-byte ids; None where the ids follow from the producer and the
        batch (`model.MessageId`).
        """
        at = self.layout.message_id
        if at < 0:
            return None
        return [self.region[i : i + 16] for i in range(at, at + 16 * self.header.count, 16)]


def _last_offset_of(region: bytes, at: int, count: int) -> int:
    size: int = unpack_from("<i", region, at + 4 * count)[0]
    if not 0 <= size <= limits.BATCH_BYTES_MAX * 4:
        raise CorruptBatch(f"the bodies of a batch cannot have {size} bytes")
    return size


CREATED_SPAN_MS: Final = 1 << 32
"""The largest span of create times in a batch, which stores 32 bits of each,
relative to the first.
"""


def columns_of_copies(
    bodies: list[bytes],
    keys: list[bytes],
    tags: list[tuple[str, ...]],
    headers: Sequence[Mapping[str, bytes]],
    created_ms: Sequence[int],
    message_ids: list[bytes],
) -> tuple[Columns, int]:
    """Build the columns of a batch, and its first create time in milliseconds since 1970. Columns
    without any value are left out.
    """
    first = min(created_ms)
    columns = Columns(
        bodies,
        keys=keys if any(keys) else None,
        tags=tags if any(tags) else None,
        headers=list(headers) if any(headers) else None,
        create_deltas=[each - first for each in created_ms] if max(created_ms) != first else None,
        message_ids=message_ids,
    )
    return columns, first


def size_of_copy(body: bytes, key: bytes, tags: Sequence[str], headers: Mapping[str, bytes]) -> int:
    """An upper bound for the bytes of one uncompressed message."""
    size = len(body) + len(key) + sum([16 + len(tag) for tag in tags])
    return size + sum([16 + len(name) + len(value) for name, value in headers.items()])
