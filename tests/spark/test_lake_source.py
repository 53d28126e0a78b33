"""One plan: history from the lake, the tail from brokers, each message once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from unittest.mock import patch

import pyarrow as pa
import pytest
from file_support import Traffic, folder_in_memory, forget_old, mark
from lake_support import ORDER, SMALL, HistoryReader, Lake, history
from publishing import change_route, create_ordered, send, send_ordered
from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameReader
from pyspark.sql.types import LongType, StructField, StructType
from pyspark_qmq.lake import maintenance
from pyspark_qmq.lake.catalog import CatalogAway, open_catalog
from pyspark_qmq.lake.table import open_table
from pyspark_qmq.lake.writer import LakeWriter
from pyspark_qmq.lake_reader import LakePartition, LakeReader

import qmq.blocking
from qmq.columns.options import parse
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired, UnknownSubject
from qmq.proto.v1 import meta_pb2 as pb
from qmq.schemas.declared_schema import SchemaFormat

__all__ = ["history"]

pytestmark = pytest.mark.sampled


def test_the_rows_are_those_of_the_log_with_all_columns(history: HistoryReader) -> None:
    server = history.lake.server
    send(
        server,
        "orders",
        ["a", "b", "c"],
        ["k1", "", "k3"],
        [["x"], [], ["x", "y"]],
        [{"h": b"1"}, {}, {}],
    )
    history.follow("orders")
    send(server, "orders", ["d", "e"], ["k1", "k2"], [[], ["y"]], [{}, {"h": b"2"}])
    assert history.both("orders")["body"].to_pylist() == [b"a", b"b", b"c", b"d", b"e"]
    found = history.reader(history.options("orders")).partitions()
    assert [isinstance(each, LakePartition) for each in found] == [True, False]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keys": "k1"}, "ad"),
        ({"keyFrom": "k2", "keyUntil": "k4"}, "ce"),
        ({"tags": "x,y"}, "ace"),
        ({"tagsAll": "x,y"}, "c"),
        ({"startingOffsets": '{"orders":{"0":1}}', "endingOffsets": '{"orders":{"0":4}}'}, "bcd"),
        ({"startingOffsets": '{"orders":{"0":3}}'}, "de"),
    ],
)
def test_selections_and_offsets_narrow_both_halves(
    history: HistoryReader, options: dict[str, str], expected: str
) -> None:
    server = history.lake.server
    send(server, "orders", ["a", "b", "c"], ["k1", "", "k3"], [["x"], [], ["x", "y"]])
    history.follow("orders")
    send(server, "orders", ["d", "e"], ["k1", "k2"], [[], ["y"]])
    assert history.both("orders", **options)["body"].to_pylist() == [
        each.encode() for each in expected
    ]


def test_messages_that_retention_deleted_come_from_the_lake(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/catalog.db"
    with folder_in_memory() as data:
        traffic = Traffic(data, Random(1))
        lake = Lake(open_catalog("lake", uri, f"file://{tmp_path}/warehouse"), "")
        where = {"qmq.path": str(traffic.folder), "subscribe": "a"}
        for batches in (30, 70):
            for _ in range(batches):
                traffic.send("a")
            mark(traffic.store)
            lake.drain(parse({**where, "startingOffsets": "earliest"}, is_stream=True))
        forget_old(traffic.store, retention_ms=200)
        traffic.send("a")
        mark(traffic.store)
        history = HistoryReader(lake, tmp_path)
        everything = [row for _, row in traffic.sent["a", 0]]
        read = history.rows({**where, "qmq.lake": uri}).sort_by(ORDER)
        assert read["body"].to_pylist() == everything
        assert len(history.rows(where)) < len(everything) // 2, "the log alone has the newest only"
        for at in (0, 10, 150, len(read) - 1):
            begin = read["append_time"][at].as_py()
            end = begin + timedelta(milliseconds=300)
            first, last = (str(int(each.timestamp() * 1000)) for each in (begin, end))
            times = {"startingTimestamp": first, "endingTimestamp": last}
            found = history.rows({**where, "qmq.lake": uri, **times}).sort_by(ORDER)
            assert found["sequence"].to_pylist() == [
                row["sequence"] for row in read.to_pylist() if begin <= row["append_time"] < end
            ]
        lake.close()
        traffic.store.close()


def test_after_messages_that_a_writer_skipped_the_table_counts_from_there(
    history: HistoryReader,
) -> None:
    send(history.lake.server, "orders", ["a"])
    history.follow("orders")
    send(history.lake.server, "orders", ["b"])
    history.expire_log("orders")
    send(history.lake.server, "orders", ["c"])
    history.follow("orders", failOnDataLoss="false")
    send(history.lake.server, "orders", ["d"])
    assert history.bodies("orders") == ["c", "d"]
    with pytest.raises(MessagesExpired, match="messages 0 to"):
        history.rows(history.options("orders", startingOffsets='{"orders":{"0":0}}'))


def test_without_a_table_the_log_must_have_the_beginning(history: HistoryReader) -> None:
    send(history.lake.server, "orders", ["a"])
    assert history.bodies("orders") == ["a"]
    history.expire_log("orders")
    send(history.lake.server, "orders", ["b"])
    with pytest.raises(
        UnknownSubject,
        match=r"has no table in namespace 'qmq' of the lake.*`qmq lake follow` makes a table",
    ):
        history.rows(history.options("orders"))


def test_a_key_stays_in_order_and_tasks_do_not_mix_partitions(history: HistoryReader) -> None:
    server = history.lake.server
    create_ordered(server, "bank", 2)
    send_ordered(server, "bank", [(f"k{number % 9}", str(number)) for number in range(300)])
    history.follow("bank")
    change_route(server, "bank", split=pb.SplitOperation(partition=1, at=[100]))
    send_ordered(server, "bank", [(f"k{number % 9}", str(number)) for number in range(300, 600)])
    history.follow("bank")
    send_ordered(server, "bank", [(f"k{number % 9}", str(number)) for number in range(600, 900)])
    found = history.both("bank")
    ordered = found.sort_by([("route_version", "ascending"), *ORDER])
    for key in {f"k{number}" for number in range(9)}:
        numbers = [int(row["body"]) for row in ordered.to_pylist() if row["key"] == key.encode()]
        assert numbers == [number for number in range(900) if f"k{number % 9}" == key]
    reader = history.reader(history.options("bank"))
    for each in reader.partitions():
        rows = pa.Table.from_batches(reader.read(each))
        assert len(set(rows["partition"].to_pylist())) == 1
        assert rows["sequence"].to_pylist() == sorted(rows["sequence"].to_pylist())


def test_rows_that_were_compacted_are_there_once_in_the_order_of_their_key(
    history: HistoryReader,
) -> None:
    create_ordered(history.lake.server, "bank", 2)
    for begin in range(0, 300, 100):
        send_ordered(
            history.lake.server,
            "bank",
            [(f"k{number % 9}", str(number)) for number in range(begin, begin + 100)],
        )
        history.follow("bank")
    table = open_table(history.lake.catalog, "qmq", "bank")
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    assert list(maintenance.compact(table, tomorrow))
    history.both("bank")
    reader = history.reader(history.options("bank"))
    for each in reader.partitions():
        numbers: dict[bytes, list[int]] = {}
        for row in pa.Table.from_batches(reader.read(each)).to_pylist():
            numbers.setdefault(row["key"], []).append(int(row["body"]))
        assert all(found == sorted(found) for found in numbers.values())


def test_rejected_messages_of_a_typed_lake_are_read_too(history: HistoryReader) -> None:
    """This includes the messages of a round whose second commit is missing."""
    server = history.lake.server
    with qmq.blocking.connect(server) as mq:
        send(server, "orders", ['{"id":0}'])
        mq.metadata.set_subject_schema(
            "orders",
            SchemaFormat.JSON_SCHEMA,
            '{"type": "object", "properties": {"id": {"type": "integer"}}}',
        )
        writer = LakeWriter(
            history.lake.catalog,
            history.lake.asked("orders"),
            SMALL,
            schemas=mq.metadata.subject_schemas,
        )
        for bodies in (['{"id":1}', "bad"], ["worse", '{"id":2}']):
            send(server, "orders", bodies)
            writer.drain(lambda _: None)
        history.both("orders")
        send(server, "orders", ["worst"])
        with (
            patch("pyspark_qmq.lake.typed.complete", side_effect=[None, KeyboardInterrupt]),
            pytest.raises(KeyboardInterrupt),
        ):
            list(writer.round())
        writer.close()
    send(server, "orders", ["tail"])
    assert history.both("orders")["body"].to_pylist()[-3:] == [b'{"id":2}', b"worst", b"tail"]


def test_files_that_expired_while_they_are_read_are_an_error_that_says_what_to_do(
    history: HistoryReader, tmp_path: Path
) -> None:
    send(history.lake.server, "orders", ["a"])
    history.follow("orders")
    reader = history.reader(history.options("orders"))
    planned = reader.partitions()
    for each in tmp_path.rglob("*.parquet"):
        each.unlink()
    with pytest.raises(
        MessagesExpired, match=r"snapshot of the lake .* has expired; load the DataFrame again"
    ):
        list(reader.read(planned[0]))


def test_a_damaged_file_is_named(history: HistoryReader, tmp_path: Path) -> None:
    send(history.lake.server, "orders", ["a"])
    history.follow("orders")
    for each in tmp_path.rglob("*.parquet"):
        each.write_bytes(b"PAR1" * 100)
    reader = history.reader(history.options("orders"))
    with pytest.raises(LogDamaged, match=r"\.parquet cannot be read .* restore it"):
        list(reader.read(reader.partitions()[0]))


def test_a_catalog_that_does_not_answer_is_waited_for_then_told(history: HistoryReader) -> None:
    send(history.lake.server, "orders", ["a"])
    options = history.options("orders") | {"qmq.lake": "http://127.0.0.1:1", "qmq.retryMs": "300"}
    with pytest.raises(CatalogAway, match="ConnectionError"):
        history.rows(options)


def test_a_column_that_tables_do_not_have_is_refused(history: HistoryReader) -> None:
    asked = parse(history.options("orders"), is_stream=False)
    assert asked.lake is not None
    with pytest.raises(InvalidArgument, match="no column 'entry'"):
        LakeReader(asked, asked.lake, StructType([StructField("entry", LongType())]))


def test_spark_reads_lake_and_brokers_as_it_reads_brokers_alone(
    spark: SparkSession, history: HistoryReader
) -> None:
    def read(**more: str) -> DataFrameReader:
        where = {
            "qmq.servers": history.lake.server,
            "subscribe": "orders",
            "includeHeaders": "true",
        }
        return spark.read.format("qmq").options(**where | more)

    numbers = range(20_000)
    bodies = [f"m{number}" for number in numbers]
    send(
        history.lake.server,
        "orders",
        bodies[:12_000],
        [f"k{number % 70}" for number in numbers[:12_000]],
    )
    history.follow("orders")
    send(
        history.lake.server,
        "orders",
        bodies[12_000:],
        [f"k{number % 70}" for number in numbers[12_000:]],
    )
    both, alone = read(**{"qmq.lake": history.uri}).load(), read().load()
    assert both.schema == alone.schema
    assert both.count() == alone.count() == 20_000
    shown = [
        *(name for name in both.columns if name != "headers"),
        "cast(map_entries(headers) as string) headers",
    ]
    assert both.selectExpr(*shown).exceptAll(alone.selectExpr(*shown)).count() == 0
    narrow = (
        read(**{"qmq.lake": history.uri, "keys": "k7"})
        .schema("body binary, sequence bigint")
        .load()
    )
    assert sorted(int(bytes(row["body"])[1:]) for row in narrow.collect()) == [
        number for number in numbers if number % 70 == 7
    ]
    history.expire_log("orders")
    assert read(**{"qmq.lake": history.uri, "failOnDataLoss": "false"}).load().count() == 12_000
    assert "not in the lake either, which has 0 to 11999" in refusal(
        read(**{"qmq.lake": history.uri})
    )


def refusal(reader: DataFrameReader) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark wraps ours in one of several of its own
        reader.load().count()
    return str(caught.value)
