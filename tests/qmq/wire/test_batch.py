"""The batch format: decoding returns what was encoded, and refuses every damaged batch."""

from __future__ import annotations

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq import limits
from qmq.errors import CorruptBatch, InvalidArgument, MessageTooLarge
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Kind, encode, place, sent_sizes
from qmq.wire.batch_columns import Columns, Compression, offsets, tag_bloom, tag_hash

MESSAGE = st.tuples(
    st.binary(max_size=200),
    st.binary(max_size=30),
    st.lists(st.text(min_size=1, max_size=10), max_size=4).map(tuple),
    st.dictionaries(st.text(min_size=1, max_size=10), st.binary(max_size=20), max_size=3),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
)


def placed(envelope: bytes, region: bytes, base: int = 100) -> bytes:
    total, crc = sent_sizes(envelope)
    return place(Kind.DATA, total, crc, base, 3, 9, 1_700_000_000_000, 64) + region


def simple(bodies: list[bytes], compression: Compression = Compression.NONE) -> bytes:
    return placed(
        *encode(
            b"orders",
            Columns(bodies),
            producer_id=5,
            batch_sequence=1,
            create_time_ms=10,
            compression=compression,
        )
    )


@given(
    st.lists(MESSAGE, min_size=1, max_size=20),
    st.sampled_from(list(Compression)),
    st.integers(0, 31),
)
def test_every_column_comes_back_as_it_went_in(
    messages: list, compression: Compression, which: int
) -> None:
    bodies, keys, tags, headers, deltas, ids = (
        list(column) for column in zip(*messages, strict=True)
    )
    columns = Columns(
        bodies,
        keys if which & 1 else None,
        tags if which & 2 else None,
        headers if which & 4 else None,
        deltas if which & 8 else None,
        ids if which & 16 else None,
    )
    view = BatchView.parse(
        placed(
            *encode(
                b"s",
                columns,
                producer_id=2**64 - 1,
                batch_sequence=7,
                create_time_ms=50,
                compression=compression,
            )
        )
    )
    assert view.bodies() == bodies
    assert view.keys() == columns.keys
    assert view.tags() == columns.tags
    assert view.headers() == columns.headers
    assert view.message_ids() == columns.message_ids
    assert view.create_times_ms() == [50 + (delta if which & 8 else 0) for delta in deltas]
    assert (view.subject, view.base_sequence, view.envelope.epoch, view.envelope.index) == (
        "s",
        100,
        3,
        9,
    )
    assert view.header.producer_id == 2**64 - 1


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_the_offsets_of_one_item_are_those_that_longer_columns_begin_with(
    item: bytes, other: bytes
) -> None:
    assert offsets([item]) == offsets([item, other])[:8]


def test_a_lone_small_message_takes_136_bytes() -> None:
    envelope, region = encode(
        b"a", Columns([b"hi"]), producer_id=1, batch_sequence=0, create_time_ms=0
    )
    assert len(envelope) + len(region) == 136


def test_every_truncation_is_refused() -> None:
    data = simple([b"one", b"two"])
    for end in range(len(data)):
        with pytest.raises(CorruptBatch):
            BatchView.parse(data[:end])


def test_every_flipped_bit_is_refused() -> None:
    data = simple([b"one", b"", b"three"])
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            BatchView.parse(bytes(damaged))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptBatch):
        BatchView.parse(data)


@given(st.integers(0, 200), st.integers(-(2**31), 2**31 - 1))
def test_lying_offsets_are_refused_even_with_a_right_checksum(at: int, lie: int) -> None:
    """A malicious producer computes the checksum over the false offsets."""
    _, region = encode(
        b"s",
        Columns([b"x" * 9] * 4, keys=[b"k"] * 4),
        producer_id=1,
        batch_sequence=0,
        create_time_ms=0,
    )
    at = 48 + at * 4 % (len(region) - 48)
    lied = region[:at] + lie.to_bytes(4, "little", signed=True) + region[at + 4 :]
    data = place(Kind.DATA, ENVELOPE_BYTES + len(lied), crc32c(lied), 0, 1, 1, 0, 0) + lied
    try:
        view = BatchView.parse(data)
        found = [*view.bodies(), *(view.keys() or ())]
    except CorruptBatch:
        return
    assert sum(map(len, found)) <= 4 * len(data)


def test_a_decompression_bomb_is_refused_before_it_goes_off() -> None:
    data = bytearray(simple([b"\0" * 2_000_000], Compression.ZSTD))
    assert len(data) < 2_000
    region = bytes(data[ENVELOPE_BYTES:])
    lied = region.replace((2_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    assert lied != region
    bomb = place(Kind.DATA, len(data), crc32c(lied), 0, 1, 1, 0, 0) + lied
    with pytest.raises(CorruptBatch):
        BatchView.parse(bomb).bodies()


def test_a_batch_over_the_limit_is_refused_with_what_to_do() -> None:
    with pytest.raises(MessageTooLarge, match="send fewer"):
        encode(
            b"s",
            Columns([bytes(limits.BATCH_BYTES_MAX)]),
            producer_id=1,
            batch_sequence=0,
            create_time_ms=0,
        )
    with pytest.raises(InvalidArgument):
        encode(b"s", Columns([]), producer_id=1, batch_sequence=0, create_time_ms=0)
    with pytest.raises(InvalidArgument):
        encode(b"s", Columns([b""] * 65_536), producer_id=1, batch_sequence=0, create_time_ms=0)


def test_tag_hashes_are_those_of_the_specification() -> None:
    """docs/FORMAT.md names these values; another language must get the same."""
    assert tag_hash("UA") == 0xBA988D3C7E00BDDB
    assert tag_bloom([0b000001_000010]) == 1 << 2 | 1 << 1


@given(st.sets(st.text(min_size=1, max_size=8), max_size=30), st.text(min_size=1, max_size=8))
def test_the_bloom_never_denies_a_tag_that_is_there(tags: set[str], tag: str) -> None:
    bloom = tag_bloom(map(tag_hash, tags | {tag}))
    assert not tag_bloom([tag_hash(tag)]) & ~bloom
