"""Record batches of a size that suits Spark, for stored batches of any size."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from row_twin import rows_of, stored, whole

from qmq import limits
from qmq.columns.joined_batches import (
    BYTES_MAX,
    BYTES_WANTED,
    ROWS_FEW,
    ROWS_MAX,
    ROWS_WANTED,
    chunks,
    shaped,
    spans,
)
from qmq.columns.model import ReadSelection
from qmq.columns.projector import Projector
from qmq.wire.batch_columns import Columns, Compression


def test_batches_of_one_message_become_large_record_batches() -> None:
    count = 2 * ROWS_WANTED + 5
    batches = [stored(Columns([b"x"], [b"k"]), sequence) for sequence in range(count)]
    found = list(Projector(["sequence", "key"]).convert(iter(batches), whole()))
    assert [each.num_rows for each in found] == [ROWS_WANTED, ROWS_WANTED, 5]
    assert [row["sequence"] for row in rows_of(found)] == list(range(count))


def test_large_bodies_end_a_chunk_before_its_rows_do() -> None:
    batches = [stored(Columns([bytes(limits.MIB)]), sequence) for sequence in range(9)]
    groups = list(chunks(spans(batches, whole(), with_directed=False)))
    assert all(sum(len(span.region) for span in group) <= BYTES_WANTED for group in groups)
    assert [span.envelope.base_sequence for group in groups for span in group] == list(range(9))
    assert len(groups) == 3


def test_compressed_bodies_count_with_their_uncompressed_size() -> None:
    batches = [
        stored(Columns([bytes(3 * limits.MIB)]), sequence, compression=Compression.ZSTD)
        for sequence in range(3)
    ]
    assert [len(group) for group in chunks(spans(batches, whole(), with_directed=False))] == [
        1,
        1,
        1,
    ]


def test_a_batch_that_unpacks_to_more_than_a_record_batch_may_have_is_cut() -> None:
    batch = stored(Columns([bytes(limits.MIB)] * 40), compression=Compression.ZSTD)
    found = list(Projector(["sequence", "body"]).convert([batch], whole()))
    assert len(found) > 1
    assert all(each.nbytes <= BYTES_MAX for each in found)
    assert [row["sequence"] for row in rows_of(found)] == list(range(40))


def test_a_batch_of_the_most_messages_comes_whole() -> None:
    batch = stored(Columns([b""] * limits.BATCH_MESSAGES_MAX))
    assert [each.num_rows for each in Projector(["place"]).convert([batch], whole())] == [
        limits.BATCH_MESSAGES_MAX
    ]


def test_what_a_selection_leaves_of_many_chunks_is_put_together() -> None:
    size = ROWS_WANTED // 8
    batches = [
        stored(Columns([b""] * size, [b"a"] + [b"b"] * (size - 1)), i * size) for i in range(40)
    ]
    found = list(
        Projector(["sequence"], selection=ReadSelection(keys=(b"a",))).convert(
            iter(batches), whole()
        )
    )
    assert [each.num_rows for each in found] == [40]


@given(st.lists(st.integers(0, 3 * ROWS_FEW), max_size=8))
def test_shaping_keeps_every_row_in_order_and_leaves_at_most_one_small_batch(
    sizes: list[int],
) -> None:
    numbers = iter(range(sum(sizes)))
    found = list(
        shaped(
            pa.record_batch({"n": pa.array([next(numbers) for _ in range(size)], pa.int64())})
            for size in sizes
        )
    )
    assert [n for batch in found for n in batch.column("n").to_pylist()] == list(range(sum(sizes)))
    assert all(ROWS_FEW <= batch.num_rows <= ROWS_MAX for batch in found[:-1])
    assert all(batch.num_rows for batch in found)
