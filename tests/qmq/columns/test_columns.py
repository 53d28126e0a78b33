"""Columns for Spark: the same rows as a loop over messages makes, in Spark's own types. Batches
with false offsets are refused.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType
from pyspark_qmq.source_schema import COLUMNS, MORE_COLUMNS, columns_of, default_schema
from qmq_ordering.routes import LpRange
from row_twin import NAMES, QUEUE, expected, rows_of, stored, whole
from support.forms import examples

from qmq.columns.model import QueuePiece, ReadSelection, SourceBatch
from qmq.columns.projector import Projector
from qmq.errors import CorruptBatch, InvalidArgument
from qmq.wire.batch_columns import BatchFlag, Columns, Compression, Layout, parse_header

KEYS = (b"", b"a", b"ab", b"a\xff", b"\x80", b"N14228")
TAGS = ("UA", "AA", "é", "delayed")
MESSAGE = st.tuples(
    st.binary(max_size=40),
    st.sampled_from(KEYS),
    st.lists(st.sampled_from(TAGS), max_size=3, unique=True).map(tuple),
    st.dictionaries(st.text(min_size=1, max_size=4), st.binary(max_size=6), max_size=3),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 65_535),
)
SELECTION = st.builds(
    ReadSelection,
    tags_any=st.lists(st.sampled_from((*TAGS, "none")), max_size=2).map(tuple),
    tags_all=st.lists(st.sampled_from(TAGS), max_size=2).map(tuple),
    keys=st.lists(st.sampled_from((*KEYS, b"none")), max_size=3).map(tuple),
    key_from=st.none() | st.sampled_from(KEYS),
    key_until=st.none() | st.sampled_from(KEYS),
    with_directed=st.booleans(),
)
LP_RANGE = st.tuples(st.integers(0, 40_000), st.integers(1, 30_000)).map(
    lambda each: LpRange(each[0], sum(each))
)
LPS = st.lists(LP_RANGE, max_size=2).map(tuple)


@st.composite
def queues(draw: st.DrawFn) -> list[SourceBatch]:
    """A queue's batches, ascending. Sequences may have gaps, where a log skipped batches."""
    found, base = [], draw(st.integers(0, 10))
    for number in range(draw(st.integers(1, 5))):
        messages = draw(st.lists(MESSAGE, min_size=1, max_size=6))
        bodies, keys, tags, headers, deltas, ids, lps = (
            list(column) for column in zip(*messages, strict=True)
        )
        which = draw(st.integers(0, 63))
        columns = Columns(
            bodies,
            keys if which & 1 else None,
            tags if which & 2 else None,
            headers if which & 4 else None,
            deltas if which & 8 else None,
            ids if which & 16 else None,
            lps if which & 32 else None,
        )
        flags = draw(st.sampled_from([0, 0, BatchFlag.BENT, BatchFlag.DIRECTED]))
        batch = stored(
            columns,
            base,
            flags=flags,
            compression=draw(st.sampled_from(Compression)),
            producer_id=draw(st.integers(0, 2**64 - 1)),
            batch_sequence=draw(st.integers(0, 2**48 - 1)),
            epoch=number,
            entry=10 * number,
        )
        found.append(
            batch._replace(region=memoryview(batch.region)) if draw(st.booleans()) else batch
        )
        base += len(messages) + draw(st.sampled_from([0, 0, 3]))
    return found


@pytest.mark.sampled
@settings(max_examples=examples(300))
@given(
    queues(),
    st.integers(0, 40),
    st.integers(0, 40),
    SELECTION | st.just(ReadSelection()),
    LPS,
    st.none() | st.integers(1, 9),
)
def test_rows_are_those_of_a_loop_over_messages(
    batches: list[SourceBatch],
    first: int,
    count: int,
    selection: ReadSelection,
    lps: tuple[LpRange, ...],
    version: int | None,
) -> None:
    piece = QueuePiece(QUEUE, first, first + count, lps=lps)
    routes = {("orders", 3): version} if version else {}
    found = rows_of(
        Projector(NAMES, routes=routes, selection=selection).convert(iter(batches), piece)
    )
    wanted = expected(batches, piece, selection, version)
    assert found == [{name: row[name] for name in NAMES} for row in wanted]


@given(queues(), st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
def test_a_projection_gives_what_it_names_in_its_order(
    batches: list[SourceBatch], names: list[str]
) -> None:
    found = rows_of(Projector(names).convert(iter(batches), whole()))
    assert [tuple(row) for row in found] == [tuple(names)] * len(found)
    assert found == [{name: row[name] for name in names} for row in expected(batches, whole())]


def test_types_are_exactly_those_that_spark_derives_from_the_schema() -> None:
    everything = StructType(
        [StructField(name, kind, True) for name, kind in {**COLUMNS, **MORE_COLUMNS}.items()]
    )
    for schema in (
        everything,
        default_schema(with_headers=False),
        default_schema(with_headers=True),
    ):
        wanted = to_arrow_schema(schema, timezone="UTC")
        batch = next(
            Projector(columns_of(schema)).convert(
                [stored(Columns([b"x"], headers=[{"a": b"1"}], tags=[("UA",)]))], whole()
            )
        )
        assert batch.schema.equals(wanted, check_metadata=True)
        for column, field in zip(batch.columns, wanted, strict=True):
            assert str(column.type) == str(field.type)
            assert column.type.equals(field.type)


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="offset"):
        Projector(["sequence", "offset"])


def test_bodies_keys_and_tags_of_one_batch_are_not_copied() -> None:
    batch = stored(Columns([b"one", b"two"], [b"k1", b"k2"], [("UA",), ("AA",)]))
    start = np.frombuffer(batch.region, np.uint8).ctypes.data
    found = next(Projector(["body", "key", "tags"]).convert([batch], whole()))
    for column in (found.column("body"), found.column("key"), found.column("tags").values):
        assert start <= column.buffers()[2].address < start + len(batch.region)


def test_text_that_is_not_utf8_is_shown_as_consumers_see_it() -> None:
    columns = Columns(
        [b"x", b"y"], tags=[("UA", "##"), ("é",)], headers=[{"##": b"1", "$$": b"2"}, {"é": b"3"}]
    )
    batch = stored(columns)
    region = batch.region.replace(b"UA##", b"UA\xff\xfe").replace(b"##$$", b"\xff\xff\xfe\xfe")
    lying = SourceBatch(batch.envelope, region)
    found = rows_of(Projector(["tags", "headers"]).convert([lying], whole()))
    assert [row["tags"] for row in found] == [["UA", "\ufffd\ufffd"], ["é"]]
    assert [row["headers"] for row in found] == [{"\ufffd\ufffd": b"2"}, {"é": b"3"}]


def test_a_header_that_is_there_twice_counts_once_and_as_its_last() -> None:
    batch = stored(
        Columns([b"x", b"y"], headers=[{"aa": b"1", "bb": b"2", "cc": b"3"}, {"cc": b"4"}])
    )
    lying = SourceBatch(batch.envelope, batch.region.replace(b"aabbcc", b"aabbaa"))
    assert rows_of(Projector(["headers"]).convert([lying], whole())) == [
        {"headers": {"aa": b"3", "bb": b"2"}},
        {"headers": {"cc": b"4"}},
    ]


def test_a_batch_without_messages_gives_nothing() -> None:
    batch = stored(Columns([b"x"]))
    command = SourceBatch(batch.envelope._replace(kind=4), batch.region)
    assert list(Projector(NAMES).convert([command], whole())) == []


@pytest.mark.sampled
@settings(max_examples=examples(300))
@given(queues(), st.data())
def test_offsets_that_lie_are_an_error_and_never_foreign_memory(
    batches: list[SourceBatch], data: st.DataObject
) -> None:
    """The checksums of such a batch can be correct, because its sender computed them."""
    batch = batches[0]
    region = bytearray(batch.region)
    at = data.draw(st.integers(48, len(region) - 4).map(lambda each: each & ~3))
    struct.pack_into("<i", region, at, data.draw(st.sampled_from([-1, 1, 2**31 - 1, -(2**31), 5])))
    lying = SourceBatch(batch.envelope, bytes(region))
    try:
        found = list(
            Projector(NAMES, selection=ReadSelection(with_directed=True)).convert([lying], whole())
        )
    except CorruptBatch:
        return
    assert len(rows_of(found)) == parse_header(batch.region).count


@pytest.mark.parametrize(
    "column", ["key", "tag", "tag_list", "header_list", "header_name", "header_value", "body"]
)
@pytest.mark.parametrize("neighbours", [0, 1])
def test_an_offset_that_falls_is_corrupt_in_every_column(column: str, neighbours: int) -> None:
    columns = Columns([b"one", b"two", b"3"], [b"a", b"b", b"c"], [("UA",)] * 3, [{"n": b"v"}] * 3)
    batch = stored(columns)
    region = bytearray(batch.region)
    struct.pack_into(
        "<i",
        region,
        getattr(Layout.walk(batch.region, parse_header(batch.region)), column) + 4,
        100,
    )
    with pytest.raises(CorruptBatch):
        list(
            Projector(NAMES).convert(
                [SourceBatch(batch.envelope, bytes(region))] + [batch] * neighbours, whole()
            )
        )


def test_compressed_bodies_that_say_they_are_huge_are_not_unpacked() -> None:
    batch = stored(Columns([bytes(100), bytes(100)]), compression=Compression.ZSTD)
    region = bytearray(batch.region)
    struct.pack_into(
        "<i", region, Layout.walk(batch.region, parse_header(batch.region)).body + 8, 2**31 - 1
    )
    with pytest.raises(CorruptBatch, match="impossible size"):
        list(Projector(["body"]).convert([SourceBatch(batch.envelope, bytes(region))], whole()))
    assert pa.total_allocated_bytes() < 2**28
