"""Compression of a batch's bodies as one buffer. The decompressed size is known in advance, so a decompression bomb is refused."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from qmq.errors import CorruptBatch, InvalidArgument


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
        raise InvalidArgument(f"compression {kind.name.lower()} needs its library: pip install 'qmq[compression]'") from None


def compress(kind: Compression, data: bytes) -> bytes:
    """Compress the data. Raises InvalidArgument if the library is missing."""
    library = _library(kind)
    if kind is Compression.ZSTD:
        return bytes(library.ZstdCompressor(level=3).compress(data))
    return bytes(library.compress(data, store_size=False))


def decompress(kind: Compression, data: bytes, size: int) -> bytes:
    """Decompress the data to exactly `size` bytes. Raises CorruptBatch if the result has another size."""
    library = _library(kind)
    try:
        out = _zstd(library, data, size) if kind is Compression.ZSTD else library.decompress(data, uncompressed_size=size)
    except Exception as cause:
        raise CorruptBatch(f"the {kind.name.lower()} bodies cannot be decompressed: {cause}") from cause
    if len(out) != size:
        raise CorruptBatch(f"the bodies decompress to {len(out)} bytes instead of {size}")
    return bytes(out)


def _zstd(library: Any, data: bytes, size: int) -> bytes:
    reader = library.ZstdDecompressor().stream_reader(data)
    out: bytes = reader.read(size) if size else b""
    if reader.read(1):
        raise ValueError("more bytes than declared")
    return out
