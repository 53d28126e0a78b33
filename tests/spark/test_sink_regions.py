"""Batches that the sink builds from Arrow's buffers are what a producer would have built from the
same rows one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_qmq.sink import arrow_vectors, encoding, packets
from pyspark_qmq.sink.options import Fields
from pyspark_qmq.sink.packets import Cutter, Load, Packet
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from sink_node import fields_of
from support.forms import examples

from qmq import limits
from qmq.errors import (
    DelayTooLong,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    OrderMismatch,
    QmqError,
)
from qmq.wire.batch import BatchView, Envelope, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Compression, check_region, tag_hash

NOW_MS = 1_790_000_000_000
WRITER = RowWriter("query", 3, 5)
SCHEMA = (
    "body binary, key string, tags array<string>, headers map<string,binary>, delay_ms "
    "bigint, create_time timestamp, message_id string, "
    "subject string"
)
ARROW = pa.schema(
    [
        ("body", pa.binary()),
        ("key", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("delay_ms", pa.int64()),
        ("create_time", pa.timestamp("us", "UTC")),
        ("message_id", pa.string()),
        ("subject", pa.string()),
    ]
)

_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5).filter(
    lambda each: not each.startswith("qmq-")
)
_row = st.fixed_dictionaries(
    {
        "body": st.binary(max_size=20),
        "key": st.none() | st.sampled_from(["", "a", "b", "ключ"]),
        "tags": st.none() | st.lists(_text, max_size=3),
        "headers": st.none() | st.dictionaries(_text, st.binary(max_size=5), max_size=3),
        "delay_ms": st.none() | st.integers(-5, 10_000),
        "create_time": st.integers(0, 3_000_000_000_000_000),
        "message_id": st.none() | st.uuids().map(lambda each: each.hex),
        "subject": st.none() | st.sampled_from(["s", "t"]),
    }
)


def loads_of(
    rows: list[dict[str, Any]], cuts: list[int], *, rows_max: int = 7, bytes_max: int = 60
) -> list[tuple[str, bool, Load]]:
    """The loads of rows in record batches of these sizes."""
    fields = fields_of(SCHEMA)
    table = pa.Table.from_pylist(rows, ARROW).combine_chunks()
    batch = table.to_batches()[0]
    cutter = Cutter(fields, rows_max, bytes_max)
    chunks, at = [], 0
    for size in [*cuts, len(rows)]:
        piece = batch.slice(at, size)
        at += piece.num_rows
        if piece.num_rows:
            chunks += cutter.put(piece)
    chunks += cutter.end()
    found = []
    for chunk in chunks:
        array = chunk.batch.column(fields.message_id)
        ids = WRITER.message_ids(chunk.first_row + np.arange(len(array), dtype=np.int64))
        ids[arrow_vectors.valid(array)] = arrow_vectors.unhex(
            arrow_vectors.strings(array.drop_null())
        )
        found += packets.split(chunk, fields, "s", ids, NOW_MS)
    return found


def view_of(
    load: Load,
    to: RowTarget,
    fields: Fields,
    *,
    is_ordered: bool = False,
    compression: Compression = Compression.NONE,
) -> BatchView:
    """The batch, read back with all its checks."""
    envelope, region = encoding.encode(
        Packet(load, to, 9, size=1),
        WRITER,
        fields,
        now_ms=NOW_MS,
        is_ordered=is_ordered,
        compression=compression,
    )
    total, crc = sent_sizes(envelope)
    assert total == len(envelope) + len(region)
    check_region(region, crc)
    view = BatchView(Envelope(0, total, crc, -1, 0, 0, 0, 0), region)
    assert view.layout.body_data > 0
    return view


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(_row, min_size=1, max_size=40),
    st.lists(st.integers(1, 9), max_size=6),
    st.sampled_from(list(Compression)),
)
def test_each_row_comes_back_from_a_batch_as_it_was(
    rows: list[dict[str, Any]], cuts: list[int], compression: Compression
) -> None:
    fields = fields_of(SCHEMA)
    seen = []
    for subject, is_delayed, load in loads_of(rows, cuts):
        view = view_of(
            load, RowTarget(subject, 0, "g1", is_delayed), fields, compression=compression
        )
        mine = [rows[row] for row in load.rows.tolist()]
        seen += load.rows.tolist()
        assert view.subject == subject
        assert {row["subject"] or "s" for row in mine} == {subject}
        assert view.bodies() == [row["body"] for row in mine]
        assert (view.keys() or [b""] * len(mine)) == [(row["key"] or "").encode() for row in mine]
        assert (view.tags() or [()] * len(mine)) == [tuple(row["tags"] or ()) for row in mine]
        assert view.tag_hashes() == tuple(
            tag_hash(tag) for row in mine for tag in row["tags"] or ()
        )
        assert (view.headers() or [{}] * len(mine)) == [row["headers"] or {} for row in mine]
        assert view.create_times_ms() == [row["create_time"] // 1000 for row in mine]
        assert view.due_times_ms() == (
            tuple(NOW_MS + row["delay_ms"] for row in mine) if is_delayed else None
        )
        assert all((row["delay_ms"] is not None) == is_delayed for row in mine)
        derived = WRITER.message_ids(load.rows)
        assert view.message_ids() == [
            bytes.fromhex(row["message_id"]) if row["message_id"] else bytes(derived[at])
            for at, row in enumerate(mine)
        ]
        assert not view.header.compression or not is_delayed
        assert view.header.producer_id < 1 << 60
    assert sorted(seen) == list(range(len(rows)))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(_row, min_size=1, max_size=40),
    st.lists(st.integers(1, 9), max_size=6),
    st.lists(st.integers(1, 9), max_size=6),
)
def test_rows_are_cut_alike_however_spark_cuts_its_record_batches(
    rows: list[dict[str, Any]], one: list[int], other: list[int]
) -> None:
    found = [
        [
            (subject, late, each.number, each.rows.tolist())
            for subject, late, each in loads_of(rows, cuts)
        ]
        for cuts in (one, other)
    ]
    assert found[0] == found[1]


def test_a_chunk_holds_so_many_rows_and_bytes_at_most_and_a_large_row_is_alone() -> None:
    rows = [{"body": bytes(size)} for size in (10, 10, 10, 10, 10, 10, 10, 10, 50, 51, 200, 1, 1)]
    sizes = [
        each.rows.tolist() for _, _, each in loads_of(rows_of(rows), [], rows_max=7, bytes_max=60)
    ]
    assert sizes == [[0, 1, 2, 3, 4, 5], [6, 7], [8], [9], [10], [11, 12]]


def rows_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict.fromkeys(ARROW.names) | {"create_time": 0} | row for row in rows]


def test_times_of_creation_that_one_batch_cannot_say_are_in_two() -> None:
    far = (1 << 32) * 1000
    rows = rows_of(
        [{"body": b"", "create_time": time} for time in (0, far - 1000, far, 5, far * 3)]
    )
    assert [each.rows.tolist() for _, _, each in loads_of(rows, [])] == [[0, 1], [2], [3], [4]]
    for _, _, load in loads_of(rows, []):
        times = view_of(load, RowTarget("s", 0, "g1"), fields_of(SCHEMA)).create_times_ms()
        assert times == [rows[row]["create_time"] // 1000 for row in load.rows.tolist()]


def test_a_partitions_batch_has_keys_logical_partitions_and_the_flag_again() -> None:
    fields = fields_of(SCHEMA)
    ((_, _, load),) = loads_of(
        rows_of([{"body": b"x", "key": key} for key in "abcab"]), [], bytes_max=1000
    )
    load = packets.routed(load, fields, "s", 1024)
    view = view_of(load, RowTarget("s", 2, "g1"), fields, is_ordered=True)
    lps = view.logical_partitions()
    assert lps is not None
    assert lps[0] == lps[3]
    assert lps[1] == lps[4]
    assert view.header.partition == 2
    assert view.header.flags == BatchFlag.AGAIN


def test_a_delayed_batch_of_an_ordered_subject_says_so_and_has_no_partition() -> None:
    ((_, is_delayed, load),) = loads_of(rows_of([{"body": b"x", "key": "k", "delay_ms": 5}]), [])
    view = view_of(load, RowTarget("s", 0, "d1", is_delayed), fields_of(SCHEMA), is_ordered=True)
    assert view.header.flags == BatchFlag.ORDERED
    assert view.logical_partitions() is None


def test_strings_with_wide_offsets_and_binary_headers_and_a_single_tag_are_taken_too() -> None:
    fields = fields_of("value string, tag string, headers map<string,string>, key binary")
    batch = pa.record_batch(
        {
            "value": pa.array(["one", "two"], pa.large_string()),
            "tag": pa.array([None, "x"], pa.string()),
            "headers": pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string())),
            "key": pa.array([b"k", None], pa.binary()),
        }
    )
    cutter = Cutter(fields, 10)
    chunk = [*cutter.put(batch.slice(0)), *cutter.end()][0]
    ((_, _, load),) = packets.split(chunk, fields, "s", None, NOW_MS)
    view = view_of(load, RowTarget("s", 0, "g1"), fields)
    assert (view.bodies(), view.keys(), view.tags()) == (
        [b"one", b"two"],
        [b"k", b""],
        [(), ("x",)],
    )
    assert view.headers() == [{"a": b"b"}, {}]


@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [
        ({"body": None}, InvalidArgument, "row 1 .* no body"),
        ({"body": bytes(15 * limits.MIB + 1)}, MessageTooLarge, "row 1"),
        ({"key": "k" * (limits.KEY_BYTES_MAX + 1)}, MessageTooLarge, "row 1 .* key"),
        ({"tags": ["a"] * 11}, InvalidArgument, "row 1 .* more than 10 tags"),
        ({"tags": ["a", ""]}, InvalidArgument, "row 1 .* tag"),
        ({"tags": [None]}, InvalidArgument, "row 1 .* tag"),
        ({"headers": {"qmq-cron": b"1"}}, InvalidArgument, "row 1 .* map_filter"),
        ({"headers": {"": b"1"}}, InvalidArgument, "row 1 .* without a name"),
        ({"headers": {"a": None}}, InvalidArgument, "row 1 .* without a value"),
        ({"headers": {"a": bytes(limits.HEADER_BYTES_MAX)}}, MessageTooLarge, "row 1 .* headers"),
        ({"message_id": "00"}, InvalidArgument, "row 1 .* 32 hexadecimal"),
        ({"message_id": "A" * 32}, InvalidArgument, "row 1 .* 32 hexadecimal"),
        ({"create_time": None}, InvalidArgument, "row 1 .* create_time"),
        ({"subject": "not a name"}, InvalidName, "not a name"),
        ({"delay_ms": limits.DELAY_MS_MAX + 1}, DelayTooLong, "row 1 .*two years"),
        ({"delay_ms": 1 << 62}, DelayTooLong, "row 1 .*two years"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_refused_and_named(
    row: dict[str, Any], kind: type[QmqError], said: str
) -> None:
    rows = rows_of([{"body": b"fine"}, {"body": b"x"} | row])
    with pytest.raises(kind, match=said):
        loads_of(rows, [], bytes_max=1 << 30)


def test_a_row_without_subject_or_key_where_they_are_needed_is_refused() -> None:
    fields = fields_of("body binary, subject string, key string", has_subject=False)
    batch = pa.record_batch(
        {
            "body": pa.array([b"a", b"b"]),
            "subject": pa.array(["s", None], pa.string()),
            "key": pa.array(["k", ""], pa.string()),
        }
    )
    cutter = Cutter(fields, 10)
    (chunk,) = [*cutter.put(batch), *cutter.end()]
    with pytest.raises(InvalidArgument, match=r"row 1 .* no subject"):
        list(packets.split(chunk, fields, "", None, NOW_MS))
    ((_, _, load),) = packets.split(
        chunk, fields_of("body binary, tag string, key string"), "s", None, NOW_MS
    )
    with pytest.raises(OrderMismatch, match=r"row 1 .* no key"):
        packets.routed(load, fields, "s", 16)
