"""A batch's region: the bytes that the producer wrote and that never change. This module builds and
parses its header and columns. Pure.

    producer_id | batch_sequence | flags | count | create_time_ms | columns | partition | body_bytes
    | subject_bytes | compression | subject, then the columns in the order of `Column`

Sizes follow from `count` and from each column's last offset, so there is no directory:
`Layout.walk` finds every buffer in a few steps, for any count. docs/FORMAT.md is the specification,
byte by byte; `qmq.wire.batch` puts the envelope before it.

A batch's bodies are compressed as one buffer. The decompressed size is known in advance, so a
decompression bomb is refused.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from struct import Struct, error, pack, unpack_from
from typing import Any, Final, NamedTuple

from google_crc32c import value as crc32c  # type: ignore[import-untyped,unused-ignore]

from qmq import limits
from qmq.errors import CorruptBatch, InvalidArgument

ALIGN: Final = 8
REGION: Final = Struct("<QQIIqIIIHBB")
REGION_BYTES: Final = REGION.size
_FIELDS: Final = Struct("<QQIIqIIIHBx")
"""The fields of `RegionHeader`."""
_FLAGS_AT: Final = 16
ONE_ITEM: Final = Struct("<ii")
"""The offsets of a single item."""


class Column(IntFlag):
    """Which columns a batch has, in their order. The body is always there and comes last."""

    CREATE_DELTA = 1
    MESSAGE_ID = 2
    KEY = 4
    LOGICAL_PARTITION = 8
    TAGS = 16
    HEADERS = 32
    DUE = 64
    """When a delayed message is to be delivered.
    Only delay servers accept batches with this column.
    """


UNREADABLE: Final = (CorruptBatch, error, ValueError, IndexError, OverflowError)
"""The errors of reading a region with a correct checksum, for `except`: older versions stored
batches that brokers now refuse.
"""
_KNOWN_COLUMNS: Final = sum(Column)
_CREATE_DELTA, _MESSAGE_ID, _KEY, _LOGICAL_PARTITION, _TAGS, _HEADERS, _DUE = map(int, Column)
"""Plain numbers, because reading a batch tests each of them,
and an enum's `&` creates a new member.
"""


class BatchFlag(IntFlag):
    """A producer's statements about a whole batch."""

    BENT = 1
    """Best-effort order: the messages belong to another partition, whose broker group could not
    take them.
    """
    ORDERED = 2
    """Delayed messages to an ordered subject."""
    RECURRING = 4
    """One delayed message that is delivered again and again; the headers `qmq-cron` and `qmq-zone`
    say when.
    """
    DIRECTED = 8
    """For one consumer group only, named by the header `qmq-group` of each message. Other groups
    skip the batch.
    """
    AGAIN = 16
    """The batch may be stored already under this number: the broker searches all of its history for
    the number.
    """
    HALF = 32
    """Delayed messages that wait for a decision: moving one commits it. Messages still undecided
    when due are cancelled, not delivered.
    """


_DIRECTED: Final = int(BatchFlag.DIRECTED)


class RegionHeader(NamedTuple):
    """The fixed part of a region."""

    producer_id: int
    batch_sequence: int
    flags: int
    count: int  # type: ignore[assignment]
    create_time_ms: int
    columns: int
    partition: int
    body_bytes: int
    subject_bytes: int
    compression: int

    @property
    def is_directed(self) -> bool:
        """Whether the batch is for one group (`qmq/rpc/channel.py`)."""
        return self.flags & _DIRECTED != 0


def pad(size: int) -> int:
    """Round up to the alignment of 8 bytes."""
    return (size + 7) & ~7


@lru_cache(maxsize=65_536)
def tag_hash(tag: str) -> int:
    """The 8-byte hash by which brokers compare tags: BLAKE2b with a digest of 8 bytes,
    read little endian.
    """
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "little")


def tag_bloom(hashes: Iterable[int]) -> int:
    """64 bits that say which tags *may* be in a batch:
    two bits a tag, from the low 12 bits of its hash.
    """
    bits = 0
    for each in hashes:
        bits |= 1 << (each & 63) | 1 << (each >> 6 & 63)
    return bits


@dataclass(slots=True)
class Columns:
    """The columns of one batch; a column that is None is absent.
    Each list has one item for each message.
    """

    bodies: list[bytes]
    keys: list[bytes] | None = None
    tags: list[tuple[str, ...]] | None = None
    headers: list[Mapping[str, bytes]] | None = None
    create_deltas: list[int] | None = None
    message_ids: list[bytes] | None = None
    logical_partitions: Sequence[int] | None = None
    due_times_ms: Sequence[int] | None = None


# --- writing --------------------------------------------------------------------------------------


def padded(data: bytes) -> bytes:
    """The data, padded with zeros up to the alignment."""
    short = -len(data) & 7
    return data + bytes(short) if short else data


def offsets(items: Sequence[bytes]) -> bytes:
    """The buffer that says where each item begins."""
    if len(items) == 1:
        return ONE_ITEM.pack(0, len(items[0]))
    return padded(
        pack(f"<{len(items) + 1}i", *accumulate(map(len, items), initial=0))
    )  # an array would convert the numbers one by one


def _strings(items: Sequence[bytes]) -> list[bytes]:
    return [offsets(items), padded(b"".join(items))]


def _list_offsets(items: Sequence[Sequence[object] | Mapping[str, bytes]]) -> bytes:
    return padded(array("i", accumulate(map(len, items), initial=0)).tobytes())


def _tag_buffers(tags: list[tuple[str, ...]]) -> list[bytes]:
    flat = list(chain.from_iterable(tags))
    hashes = array("Q", map(tag_hash, flat)).tobytes()
    return [_list_offsets(tags), hashes, *_strings([each.encode() for each in flat])]


def _header_buffers(headers: list[Mapping[str, bytes]]) -> list[bytes]:
    names = [name.encode() for each in headers for name in each]
    values = [value for each in headers for value in each.values()]
    return [_list_offsets(headers), *_strings(names), *_strings(values)]


def optional_buffers(columns: Columns) -> tuple[int, list[bytes]]:
    """(the columns that are present, their buffers in order), without the bodies."""
    flags = 0
    buffers: list[bytes] = []
    if columns.create_deltas is not None:
        flags |= Column.CREATE_DELTA
        buffers.append(padded(array("I", columns.create_deltas).tobytes()))
    if columns.message_ids is not None:
        flags |= Column.MESSAGE_ID
        buffers.append(b"".join(columns.message_ids))
    if columns.keys is not None:
        flags |= Column.KEY
        buffers += _strings(columns.keys)
    if columns.logical_partitions is not None:
        flags |= Column.LOGICAL_PARTITION
        buffers.append(padded(array("H", columns.logical_partitions).tobytes()))
    if columns.tags is not None:
        flags |= Column.TAGS
        buffers += _tag_buffers(columns.tags)
    if columns.headers is not None:
        flags |= Column.HEADERS
        buffers += _header_buffers(columns.headers)
    if columns.due_times_ms is not None:
        flags |= Column.DUE
        buffers.append(array("q", columns.due_times_ms).tobytes())
    return flags, buffers


# --- reading --------------------------------------------------------------------------------------


def is_same_batch(region: bytes, crc: int, stored_head: bytes, stored_crc: int) -> bool:
    """Whether a region equals the region that is stored under its number, by checksum.
    `stored_head` is the fixed part of the stored one.

    The flag AGAIN is ignored: a batch equals its first copy, which did not have the flag.
    """
    if crc == stored_crc:
        return True
    mine = parse_header(region)
    if (mine.flags ^ parse_header(stored_head).flags) != BatchFlag.AGAIN:
        return False
    as_stored = bytearray(region)
    as_stored[_FLAGS_AT : _FLAGS_AT + 4] = (mine.flags ^ BatchFlag.AGAIN).to_bytes(4, "little")
    return bool(crc32c(bytes(as_stored)) == stored_crc)


def parse_header(region: bytes | memoryview) -> RegionHeader:
    """Read the fixed part of a region. Raises CorruptBatch."""
    try:
        header = tuple.__new__(
            RegionHeader, _FIELDS.unpack_from(region)
        )  # `_make` would be one more call for each batch
    except error:
        raise CorruptBatch("the region is incomplete") from None
    if not 0 < header.count <= limits.BATCH_MESSAGES_MAX or header.columns & ~_KNOWN_COLUMNS:
        raise CorruptBatch(
            f"a region cannot have {header.count} messages and columns {header.columns:#x}"
        )
    return header


def check_region(region: bytes, region_crc: int) -> None:
    """Raise CorruptBatch if the producer's checksum is wrong."""
    if crc32c(region) != region_crc:
        raise CorruptBatch(
            "the producer's checksum is wrong: the batch was damaged after it was made"
        )


def last_offset(region: bytes | memoryview, at: int, count: int) -> int:
    """Where the last of `count` items ends. Raises CorruptBatch if that is outside the region."""
    last: int = unpack_from("<i", region, at + 4 * count)[0]
    if not 0 <= last <= len(region):
        raise CorruptBatch(f"an offset of {last} points outside the batch")
    return last


@dataclass(slots=True)
class Layout:
    """Where each buffer of a region begins; -1 for a column that is absent. Regions share layouts:
    do not change one.
    """

    create_delta: int = -1
    message_id: int = -1
    key: int = -1
    key_data: int = -1
    logical_partition: int = -1
    tag_list: int = -1
    tag_hash: int = -1
    tag: int = -1
    tag_data: int = -1
    header_list: int = -1
    header_name: int = -1
    header_name_data: int = -1
    header_value: int = -1
    header_value_data: int = -1
    due: int = -1
    body: int = -1
    body_data: int = -1

    @classmethod
    def walk(cls, region: bytes | memoryview, header: RegionHeader) -> Layout:
        """Find every buffer. Raises CorruptBatch if they do not fill the region exactly."""
        if not header.columns:
            layout = _bodies_only(header.subject_bytes, header.count)
            at = layout.body_data + (header.body_bytes + 7 & ~7)
        else:
            layout = cls()
            try:
                at = layout._walk(region, header)
            except error:
                raise CorruptBatch("a column reaches outside the batch") from None
        if at != len(region):
            raise CorruptBatch(f"the columns end at byte {at} of a region of {len(region)} bytes")
        return layout

    def _walk(self, region: bytes | memoryview, header: RegionHeader) -> int:
        count, columns = header.count, header.columns
        at = REGION_BYTES + pad(header.subject_bytes)
        if columns & _CREATE_DELTA:
            self.create_delta, at = at, at + pad(4 * count)
        if columns & _MESSAGE_ID:
            self.message_id, at = at, at + 16 * count
        if columns & _KEY:
            self.key, self.key_data, at = _walk_strings(region, at, count)
        if columns & _LOGICAL_PARTITION:
            self.logical_partition, at = at, at + pad(2 * count)
        if columns & _TAGS:
            at = self._walk_tags(region, at, count)
        if columns & _HEADERS:
            at = self._walk_headers(region, at, count)
        if columns & _DUE:
            self.due, at = at, at + 8 * count
        self.body = at
        self.body_data = at + pad(4 * (count + 1))
        return self.body_data + pad(header.body_bytes)

    def _walk_tags(self, region: bytes | memoryview, at: int, count: int) -> int:
        self.tag_list = at
        total = last_offset(region, at, count)
        self.tag_hash = at + pad(4 * (count + 1))
        self.tag, self.tag_data, end = _walk_strings(region, self.tag_hash + 8 * total, total)
        return end

    def _walk_headers(self, region: bytes | memoryview, at: int, count: int) -> int:
        self.header_list = at
        total = last_offset(region, at, count)
        at += pad(4 * (count + 1))
        self.header_name, self.header_name_data, at = _walk_strings(region, at, total)
        self.header_value, self.header_value_data, at = _walk_strings(region, at, total)
        return at


@lru_cache(maxsize=1024)
def _bodies_only(subject_bytes: int, count: int) -> Layout:
    """The layout of a batch without optional columns."""
    body = REGION_BYTES + pad(subject_bytes)
    return Layout(body=body, body_data=body + pad(4 * (count + 1)))


def _walk_strings(region: bytes | memoryview, at: int, count: int) -> tuple[int, int, int]:
    data = at + pad(4 * (count + 1))
    return at, data, data + pad(last_offset(region, at, count))


def int_column(region: bytes, at: int, code: str, count: int) -> tuple[int, ...]:
    """`count` numbers of struct code `code` from byte `at`."""
    return unpack_from(f"<{count}{code}", region, at)


def bytes_column(region: bytes, offsets_at: int, data_at: int, count: int) -> list[bytes]:
    """The items of an offsets-and-bytes column."""
    marks = unpack_from(f"<{count + 1}i", region, offsets_at)
    data = region[data_at : data_at + marks[-1]]
    return [data[a:b] for a, b in pairwise(marks)]


class Compression(IntEnum):
    """The compression of bodies. zstd and lz4 need `pip install qmq[compression]`."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2


def _library(kind: Compression) -> Any:
    try:
        if kind is Compression.ZSTD:
            import zstandard

            return zstandard
        import lz4.block

        return lz4.block
    except ImportError:
        raise InvalidArgument(
            f"compression {kind.name.lower()} needs its library: pip install 'qmq[compression]'"
        ) from None


def compress(kind: Compression, data: bytes) -> bytes:
    """Compress the data. Raises InvalidArgument if the library is missing."""
    library = _library(kind)
    if kind is Compression.ZSTD:
        return bytes(library.ZstdCompressor(level=3).compress(data))
    return bytes(library.compress(data, store_size=False))


def decompress(kind: Compression, data: bytes, size: int) -> bytes:
    """Decompress the data to exactly `size` bytes.
    Raises CorruptBatch if the result has another size.
    """
    library = _library(kind)
    try:
        out = (
            _zstd(library, data, size)
            if kind is Compression.ZSTD
            else library.decompress(data, uncompressed_size=size)
        )
    except Exception as cause:
        raise CorruptBatch(
            f"the {kind.name.lower()} bodies cannot be decompressed: {cause}"
        ) from cause
    if len(out) != size:
        raise CorruptBatch(f"the bodies decompress to {len(out)} bytes instead of {size}")
    return bytes(out)


def _zstd(library: Any, data: bytes, size: int) -> bytes:
    reader = library.ZstdDecompressor().stream_reader(data)
    out: bytes = reader.read(size) if size else b""
    if reader.read(1):
        raise ValueError("more bytes than declared")
    return out
