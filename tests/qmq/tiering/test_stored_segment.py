"""Chunks, names and manifests of a stored segment."""

from __future__ import annotations

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.tiering.stored_segment import (
    BadManifest,
    ChunkChecksums,
    Manifest,
    ObjectNames,
    SealedSegment,
    decode_manifest,
)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 17))
def test_chunk_checksums_do_not_depend_on_how_the_bytes_are_cut(
    pieces: list[bytes], chunk_bytes: int
) -> None:
    checksums = ChunkChecksums(chunk_bytes)
    for piece in pieces:
        checksums.add(piece)
    data = b"".join(pieces)
    assert checksums.end() == tuple(
        crc32c(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)
    )
    assert len(checksums.end()) == SealedSegment(0, len(data)).chunk_count(chunk_bytes)


@given(st.integers(0, 1 << 62), st.integers(1, 1 << 40), st.lists(st.integers(0, (1 << 32) - 1)))
def test_a_manifest_that_was_written_is_read_and_a_changed_byte_refused(
    base: int, size: int, checksums: list[int]
) -> None:
    manifest = Manifest(SealedSegment(base, size), 8 << 20, tuple(checksums))
    data = manifest.encode()
    assert decode_manifest(data) == manifest
    for at in range(len(data)):
        with pytest.raises(BadManifest):
            decode_manifest(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(BadManifest):
            decode_manifest(data[:at])


def test_names_sort_as_positions_do() -> None:
    names, segments = (
        ObjectNames("g1"),
        [SealedSegment(0, 5), SealedSegment(9, 5), SealedSegment(10**12, 5)],
    )
    found = [names.chunk(each, number) for each in segments for number in (0, 9, 10)]
    assert found == sorted(found)
    assert names.manifest(segments[1]) == "g1/message/00000000000000000009/manifest"
