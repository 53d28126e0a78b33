"""The frame codec: any split of a stream gives the same frames; garbage gives ProtocolViolation,
and never much memory.
"""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import ProtocolViolation
from qmq.wire.frame import HEADER_BYTES, FrameKind, FrameReader, SharedBuffer, frame

FRAMES = st.lists(
    st.tuples(
        st.sampled_from(list(FrameKind)),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[tuple[int, int, bytes, int]]:
    """Give the reader `data` in pieces. Returns the frames that the reader found, with copies of
    their payloads.
    """
    found, at, turn = [], 0, 0
    while at < len(data):
        buffer = reader.get_buffer()
        count = min(len(buffer), len(data) - at, sizes[turn % len(sizes)])
        buffer[:count] = data[at : at + count]
        found += [
            (each.kind, each.request_id, bytes(each.payload), each.deadline_ms)
            for each in reader.received(count)
        ]
        at += count
        turn += 1
    return found


@given(
    FRAMES, st.lists(st.integers(1, 400), min_size=1, max_size=10), st.sampled_from([64, 256, 4096])
)
def test_any_split_of_a_stream_gives_the_same_frames(
    frames: list, sizes: list[int], buffer_bytes: int
) -> None:
    data = b"".join(
        frame(kind, request, payload, deadline) for kind, request, payload, deadline in frames
    )
    assert feed(FrameReader(buffer_bytes=buffer_bytes), data, sizes) == [
        (k, r, p, d) for k, r, p, d in frames
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes.fromhex("160301020001000001fc0303") + bytes(32),
        bytes(16),
        b"\xff" * 16,
        (HEADER_BYTES - 1).to_bytes(4, "little") + bytes(12),
        (2**31).to_bytes(4, "little") + bytes([1]) + bytes(11),
        (2**32 - 1).to_bytes(4, "little") + bytes([1]) + bytes(11),
        frame(99, 1, b""),
        frame(0, 1, b""),
    ],
    ids=[
        "http",
        "tls",
        "zeros",
        "ones",
        "short length",
        "2^31",
        "2^32-1",
        "unknown kind",
        "kind 0",
    ],
)
def test_garbage_is_refused_by_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="is this the data port"):
        feed(FrameReader(), garbage, [5])


@given(st.binary(min_size=16, max_size=2000), st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_random_bytes_give_frames_or_a_violation_and_nothing_else(
    data: bytes, sizes: list[int]
) -> None:
    try:
        feed(FrameReader(frame_bytes_max=512, buffer_bytes=256), data, sizes)
    except ProtocolViolation:
        pass


def test_a_lying_length_over_the_limit_allocates_nothing() -> None:
    reader = FrameReader(frame_bytes_max=4096)
    lie = (4097).to_bytes(4, "little") + bytes([1]) + bytes(11)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            feed(reader, lie, [16])
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_a_buffer_grows_between_frames_without_losing_a_byte() -> None:
    reader = FrameReader(1 << 20, buffer_bytes=64)
    whole = (
        frame(FrameKind.OK, 1, b"a" * 10)
        + frame(FrameKind.OK, 2, b"b" * 500)
        + frame(FrameKind.OK, 3)
    )
    found: list[tuple[int, bytes]] = []
    for at, byte in enumerate(whole):
        if at == 40:
            reader.grow(4096)
        reader.get_buffer()[:1] = bytes([byte])
        found += [(each.request_id, bytes(each.payload)) for each in reader.received(1)]
    assert found == [(1, b"a" * 10), (2, b"b" * 500), (3, b"")]


def large_frames(count: int, payload_bytes: int) -> tuple[bytes, list[tuple[int, int, bytes, int]]]:
    """(the stream, what a reader finds in it)"""
    found = [
        (int(FrameKind.PRODUCE), number, bytes([number]) * payload_bytes, 0)
        for number in range(count)
    ]
    return b"".join([frame(kind, number, payload) for kind, number, payload, _ in found]), found


@pytest.mark.parametrize("piece_bytes", [30_000, 200_000, 1 << 20])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("payload_bytes", [100_000, 256 * 1024 + 1000, 3 << 20])
def test_large_frames_come_whole_in_any_pieces(
    payload_bytes: int, is_shared: bool, piece_bytes: int
) -> None:
    data, expected = large_frames(5, payload_bytes)
    assert (
        feed(FrameReader(shared=SharedBuffer() if is_shared else None), data, [piece_bytes])
        == expected
    )


@pytest.mark.parametrize("is_shared", [True, False])
def test_full_batches_are_received_without_new_memory(is_shared: bool) -> None:
    """A batch of 256 KiB used to be copied twice into new buffers before it was complete."""
    data, _ = large_frames(12, 256 * 1024 + 1000)
    stream, at = memoryview(data), 0
    reader = FrameReader(shared=SharedBuffer() if is_shared else None)
    tracemalloc.start()
    try:
        while at < len(stream):
            buffer = reader.get_buffer()
            count = min(len(buffer), len(stream) - at)
            buffer[:count] = stream[at : at + count]
            reader.received(count)
            at += count
        # one more buffer, while the first keeps the beginning of a frame
        assert tracemalloc.get_traced_memory()[1] < 400 * 1024
    finally:
        tracemalloc.stop()


def test_a_buffer_of_one_reader_is_kept_for_the_next_large_answer() -> None:
    data, expected = large_frames(1, 1_300_000)
    reader = FrameReader()
    assert feed(reader, data, [1 << 20]) == expected
    tracemalloc.start()
    try:
        for at in range(0, len(data), 100_000):
            buffer = reader.get_buffer()
            piece = memoryview(data)[at : at + min(100_000, len(buffer))]
            buffer[: len(piece)] = piece
            found = reader.received(len(piece))
        assert found[0].payload == expected[0][2]
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_readers_that_keep_a_shared_buffer_give_it_back() -> None:
    shared = SharedBuffer(1 << 16)
    data = frame(FrameKind.PRODUCE, 1, bytes(60_000))
    readers = [FrameReader(shared=shared) for _ in range(50)]
    for each in readers:
        feed(each, data[:50_000], [1 << 16])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for each in readers[:40]:
            assert len(feed(each, data[50_000:], [1 << 16])) == 1
        for each in readers[40:]:
            each.release()
        again = [FrameReader(shared=shared) for _ in range(3)]
        for each in again:  # the spare buffers are enough for these
            feed(each, data[:50_000], [1 << 16])
        assert tracemalloc.get_traced_memory()[0] - before < 32 * 1024
    finally:
        tracemalloc.stop()
    assert not any(each.awaits_rest for each in readers)


def test_a_frame_that_only_asks_is_refused_by_its_header_if_it_is_large() -> None:
    for kind in (FrameKind.ATTACH, FrameKind.FETCH, FrameKind.LANE_ATTACH, FrameKind.PULL):
        with pytest.raises(ProtocolViolation, match="at most 65536 bytes"):
            feed(FrameReader(), frame(kind, 1, bytes(64 * 1024))[:HEADER_BYTES], [HEADER_BYTES])


def test_a_frame_that_is_announced_takes_memory_only_as_it_comes() -> None:
    reader = FrameReader(1 << 28)
    announced = (1 << 28).to_bytes(4, "little") + bytes([FrameKind.PRODUCE]) + bytes(11)
    tracemalloc.start()
    try:
        feed(reader, announced + bytes(100_000), [1 << 20])
        reader.get_buffer()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(
    FRAMES, FRAMES, st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(0, 2**32)
)
def test_readers_that_share_a_buffer_do_not_mix_their_bytes(
    one: list, other: list, sizes: list[int], seed: int
) -> None:
    shared, random = SharedBuffer(256), Random(seed)
    readers = [FrameReader(shared=shared), FrameReader(shared=shared)]
    left = [b"".join(frame(k, r, p, d) for k, r, p, d in frames) for frames in (one, other)]
    found: list[list] = [[], []]
    while any(left):
        at = random.choice([number for number in (0, 1) if left[number]])
        readers[1 - at].get_buffer()  # nothing came for it
        piece = left[at][: random.choice(sizes)]
        buffer = readers[at].get_buffer()
        count = min(len(piece), len(buffer))
        buffer[:count] = piece[:count]
        found[at] += [
            (each.kind, each.request_id, bytes(each.payload), each.deadline_ms)
            for each in readers[at].received(count)
        ]
        left[at] = left[at][count:]
    assert found == [[(k, r, p, d) for k, r, p, d in frames] for frames in (one, other)]


def test_readers_that_share_a_buffer_hold_nothing_of_their_own() -> None:
    shared = SharedBuffer(1 << 16)
    tracemalloc.start()
    try:
        readers = [FrameReader(shared=shared) for _ in range(1000)]
        for each in readers:
            feed(each, frame(FrameKind.HELLO, 1, b"{}"), [1000])
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
