"""Errors in the options of a write are reported when it is planned, with the right values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from pyspark_qmq.sink import row_identity
from pyspark_qmq.sink.options import Fields, SinkOptions
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from pyspark_qmq.sink.writer import arrow_stream_writer, arrow_writer
from sink_node import fields_of, schema_of

from qmq.errors import InvalidArgument, InvalidName
from qmq.log.queue import birth_ms
from qmq.model import MessageId
from qmq.wire.batch_columns import Compression

SERVERS = {"qmq.servers": "a:1"}


def test_options_are_read_whatever_their_case_and_spark_may_add_its_own() -> None:
    asked = SinkOptions.parse(
        {
            "QMQ.SERVERS": "a:1,b:2",
            "Topic": "orders",
            "createsubject": "TRUE",
            "qmq.compression": "zstd",
            "qmq.batchmessages": "5",
            "qmq.retryms": "7",
            "qmq.txnid": "x",
            "checkpointLocation": "/c",
        }
    )
    assert asked == SinkOptions("a:1,b:2", "orders", True, "x", 7, Compression.ZSTD, 5, 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subjet": "orders"}, "did you mean 'subject'"),
        ({"qmq.server": "a:1"}, r"did you mean 'qmq\.servers'"),
        ({"qmq.txn": "a"}, r"did you mean 'qmq\.txnId'"),
        ({"qmq.compression": "gzip"}, "none, zstd, lz4"),
        ({"qmq.batchMessages": "0"}, "from 1 to 65535"),
        ({"qmq.retryMs": "soon"}, "integer"),
        ({"qmq.txnId": ""}, "1 to 200 printable"),
        ({"createSubject": "yes"}, "true or false"),
        ({"subject": "a", "topic": "b"}, "give one"),
        ({"path": "/somewhere"}, "without a path"),
    ],
)
def test_a_misspelt_or_senseless_option_is_refused_with_a_correction(
    options: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        SinkOptions.parse(SERVERS | options)


def test_servers_are_needed_and_a_subject_has_to_be_a_name() -> None:
    with pytest.raises(InvalidArgument, match=r"qmq\.servers"):
        SinkOptions.parse({"subject": "orders"})
    with pytest.raises(InvalidName):
        SinkOptions.parse(SERVERS | {"subject": "../orders"})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("key string", "need a column `body`"),
        ("bdy binary", "did you mean 'body'"),
        ("body binary, sequence bigint", "drop it"),
        ("body bigint", "binary or string, not bigint"),
        ("body binary, tags string", "array<string>, not string"),
        ("body binary, value string", "both are the body"),
        ("body binary, tag string, tags array<string>", "keep one"),
        ("body binary, delay_ms bigint, deliver_at timestamp", "keep one"),
    ],
)
def test_a_wrong_column_name_or_type_is_refused_with_the_right_one(schema: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        fields_of(schema)


def test_rows_need_a_subject_from_somewhere() -> None:
    with pytest.raises(InvalidArgument, match="option subject"):
        fields_of("body binary", has_subject=False)
    assert fields_of("topic string, Value string", has_subject=False) == Fields(body=1, subject=0)


def test_a_log_is_not_overwritten() -> None:
    for make in (arrow_writer, arrow_stream_writer):
        with pytest.raises(InvalidArgument, match="append"):
            make(SERVERS | {"subject": "orders"}, schema_of("body binary"), True)


def test_a_batch_writer_has_one_name_wherever_it_travels_and_each_job_another() -> None:
    one, other = (
        arrow_writer(SERVERS | {"subject": "orders"}, schema_of("body binary"), False)
        for _ in range(2)
    )
    assert copy.deepcopy(one).name == one.name != other.name
    named = arrow_writer(
        SERVERS | {"subject": "orders", "qmq.txnId": "load-7"}, schema_of("body binary"), False
    )
    assert named.name == "load-7"


def test_a_writer_is_older_than_any_real_producer_and_other_for_each_queue() -> None:
    writer = RowWriter("query", 3, 9)
    targets = [
        RowTarget("s", 0, "g1"),
        RowTarget("s", 0, "g2"),
        RowTarget("s", 1, "g1"),
        RowTarget("t", 0, "g1"),
        RowTarget("s", 0, "g1", True),
    ]
    ids = [writer.producer_id(each) for each in targets]
    assert len(set(ids)) == len(targets)
    assert all(birth_ms(each) < birth_ms(1_600_000_000_000 << 20) for each in ids)
    assert ids == [RowWriter("query", 3, 10).producer_id(each) for each in targets]
    assert ids[0] != RowWriter("query", 3, 9 + (1 << 16)).producer_id(targets[0])


def test_ids_and_numbers_say_which_row_it_is() -> None:
    writer, rows = RowWriter("query", 3, 0x1_0002), np.array([0, 7, row_identity.ROWS_MAX - 1])
    ids = writer.message_ids(rows)
    assert [bytes(each)[8:].hex() for each in ids] == [
        "0001000200000000",
        "0001000200000007",
        "00010002ffffffff",
    ]
    assert str(MessageId.parse(bytes(ids[1]).hex())) == bytes(ids[1]).hex()
    found, epoch, where = writer.read_ids(ids)
    assert (found.tolist(), epoch, where.all()) == (rows.tolist(), 0x1_0002, True)
    assert RowWriter("query", 3, 9).read_ids(ids)[0].tolist() == []
    assert RowWriter("query", 4, 0x1_0002).read_ids(ids)[1] == -1
    assert writer.number_of(7) == 2 << 32 | 7
    assert (
        writer.number_of(row_identity.ROWS_MAX - 1) < writer.numbers_end <= row_identity.NUMBERS_END
    )


def test_an_epoch_too_large_for_an_id_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="new checkpoint"):
        RowWriter("query", 0, 1 << 32)
