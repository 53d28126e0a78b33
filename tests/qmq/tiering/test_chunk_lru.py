"""Which chunks stay in the cache, and which are fetched: decisions without I/O."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.log.segment_index import SegmentIndex
from qmq.tiering.stored_reads import ChunkKey, ChunkLru, to_fetch

INDEX = SegmentIndex(1000, 95, 10, tuple(range(10)), b"")


def key(number: int) -> ChunkKey:
    return ChunkKey(INDEX.base, number)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(1, 40)), max_size=60))
def test_the_cache_keeps_what_was_used_last_within_its_bytes(
    steps: list[tuple[bool, int, int]],
) -> None:
    cache, model = ChunkLru[str](50), list[tuple[ChunkKey, int]]()
    for puts, number, size in steps:
        known = next((each for each in model if each[0] == key(number)), None)
        if puts:
            model = [each for each in model if each is not known] + [(key(number), size)]
            left = 1 if known is not None else 0
            while sum(each[1] for each in model) > 50 and len(model) > 1:
                model.pop(0)
                left += 1
            assert len(cache.put(key(number), "value", size)) == left
        else:
            assert (cache.get(key(number)) is not None) == (known is not None)
            if known is not None:
                model = [each for each in model if each is not known] + [known]
        assert [each for each in map(key, range(7)) if each in cache] == sorted(
            each[0] for each in model
        )
        assert cache.bytes == sum(each[1] for each in model)


def test_a_read_fetches_the_chunks_that_it_needs_and_are_not_here() -> None:
    assert to_fetch(INDEX, 35, 20, lambda each: each == key(4)) == [key(3), key(5)]
    assert to_fetch(INDEX, 35, 5, lambda each: each == key(3)) == []


def test_a_reader_in_order_has_the_next_chunks_fetched_and_others_have_not() -> None:
    assert to_fetch(INDEX, 0, 1, lambda _: False) == [key(0), key(1), key(2)], (
        "a segment's beginning"
    )
    assert to_fetch(INDEX, 50, 1, lambda each: each == key(4)) == [key(5), key(6), key(7)]
    assert to_fetch(INDEX, 50, 1, lambda _: False) == [key(5)]
    assert to_fetch(INDEX, 85, 10, lambda each: each == key(7)) == [key(8), key(9)], (
        "not behind the segment's end"
    )


def test_the_last_chunk_is_as_long_as_what_is_left() -> None:
    assert (INDEX.chunk_size(8), INDEX.chunk_size(9)) == (10, 5)
    assert list(INDEX.chunks_of(94, 100)) == [9]
