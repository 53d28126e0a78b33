"""Batch reads by a real Spark from a real node: over its ports, and from its files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import change_route, create_ordered, send, send_ordered, until_in_files
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.readwriter import DataFrameReader
from support import NodeProcess

from qmq.proto.v1 import meta_pb2 as pb


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for all of these tests; each has its own subjects."""
    found = NodeProcess(tmp_path_factory.mktemp("node"))
    found.start()
    yield found
    found.kill()


def reader(spark: SparkSession, node: NodeProcess, subject: str, **options: Any) -> DataFrameReader:
    return (
        spark.read.format("qmq")
        .option("qmq.servers", node.address)
        .option("subscribe", subject)
        .options(**options)
    )


def bodies(frame: DataFrame) -> list[str]:
    return sorted(bytes(row["body"]).decode() for row in frame.select("body").collect())


def refusal(frame_of: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark wraps our error in one of several errors
        frame_of().collect()
    return str(caught.value)


@pytest.mark.smoke
def test_every_column_is_what_the_producer_sent_and_the_broker_noted(
    spark: SparkSession, node: NodeProcess
) -> None:
    before = time.time()
    send(
        node.address,
        "columns",
        ["one", "two"],
        keys=["k", "m"],
        tags=[["red", "blue"], []],
        headers=[{"trace": b"\x00\xff"}, {}],
    )
    rows = (
        reader(spark, node, "columns", includeHeaders="true").load().orderBy("sequence").collect()
    )
    first, second = (row.asDict() for row in rows)
    assert (first["subject"], first["partition"], first["sequence"], second["sequence"]) == (
        "columns",
        0,
        0,
        1,
    )
    assert (bytes(first["key"]), bytes(first["body"]), first["tags"]) == (
        b"k",
        b"one",
        ["red", "blue"],
    )
    assert {name: bytes(value) for name, value in first["headers"].items()} == {
        "trace": b"\x00\xff"
    }
    assert (second["tags"], second["headers"], first["route_version"]) == ([], {}, None)
    assert first["message_id"] != second["message_id"]
    assert len(first["message_id"]) == 32
    assert before - 1 <= first["create_time"].timestamp() <= first["append_time"].timestamp() + 1
    assert first["epoch"] >= 1


def test_a_schema_is_a_projection_and_may_name_more_columns(
    spark: SparkSession, node: NodeProcess
) -> None:
    send(node.address, "projected", ["a", "b", "c"])
    frame = (
        reader(spark, node, "projected")
        .schema("place int, sequence bigint, producer_id string")
        .load()
    )
    assert frame.columns == ["place", "sequence", "producer_id"]
    assert sorted((row["sequence"], row["place"]) for row in frame.collect()) == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert len({row["producer_id"] for row in frame.collect()}) == 1


def test_files_give_the_same_rows_as_brokers(spark: SparkSession, node: NodeProcess) -> None:
    send(
        node.address,
        "both",
        [f"m{number}" for number in range(5_000)],
        keys=[f"k{number % 7}" for number in range(5_000)],
    )
    over_ports = reader(spark, node, "both").load()
    until_in_files(node.data, "both", 5_000)
    from_files = spark.read.format("qmq").option("subscribe", "both").load(str(node.data))
    assert over_ports.count() == from_files.count() == 5_000
    assert over_ports.exceptAll(from_files).count() == from_files.exceptAll(over_ports).count() == 0


def test_offsets_times_and_limits_narrow_a_read(spark: SparkSession, node: NodeProcess) -> None:
    send(node.address, "narrow", [f"{number:02}" for number in range(10)])
    read = reader(
        spark,
        node,
        "narrow",
        startingOffsets='{"narrow":{"0":3}}',
        endingOffsets='{"narrow":{"0":6}}',
    )
    assert bodies(read.load()) == ["03", "04", "05"]
    times = {row["append_time"] for row in reader(spark, node, "narrow").load().collect()}
    behind = int(max(times).timestamp() * 1000) + 1
    assert bodies(reader(spark, node, "narrow", endingTimestamp=behind).load()) == [
        f"{number:02}" for number in range(10)
    ]
    assert bodies(reader(spark, node, "narrow", startingTimestamp=behind).load()) == []


def test_tags_and_keys_select(spark: SparkSession, node: NodeProcess) -> None:
    send(
        node.address,
        "select",
        list("abcd"),
        keys=["k1", "k2", "k3", "k4"],
        tags=[["x"], ["x", "y"], ["y"], []],
    )
    assert bodies(reader(spark, node, "select", tags="x,y").load()) == ["a", "b", "c"]
    assert bodies(reader(spark, node, "select", tagsAll="x,y").load()) == ["b"]
    assert bodies(reader(spark, node, "select", keys="k1,k4").load()) == ["a", "d"]
    assert bodies(reader(spark, node, "select", keyFrom="k2", keyUntil="k4").load()) == ["b", "c"]


def test_a_loaded_frame_is_a_snapshot_that_can_be_scanned_with_several_filters(
    spark: SparkSession, node: NodeProcess
) -> None:
    send(node.address, "snapshot", [str(number) for number in range(10)])
    frame = reader(spark, node, "snapshot").load()
    assert frame.filter("sequence >= 7").count() == 3
    send(node.address, "snapshot", ["later"])
    assert frame.count() == 10
    assert frame.filter("sequence >= 7").union(frame.filter("sequence >= 2")).count() == 11
    assert reader(spark, node, "snapshot").load().count() == 11


def test_tasks_never_mix_partitions_of_an_ordered_subject_and_rows_say_the_version(
    spark: SparkSession, node: NodeProcess
) -> None:
    create_ordered(node.address, "accounts", partitions=2)
    send_ordered(
        node.address, "accounts", [(f"key{number % 50}", f"{number}") for number in range(1_000)]
    )
    change_route(node.address, "accounts", split=pb.SplitOperation(partition=1, at=[100]))
    send_ordered(
        node.address,
        "accounts",
        [(f"key{number % 50}", f"{number}") for number in range(1_000, 2_000)],
    )
    frame = reader(spark, node, "accounts", minPartitions="6").load()
    rows = frame.selectExpr(
        "partition", "route_version", "key", "body", "spark_partition_id() task"
    ).collect()
    mixed: dict[int, set[int]] = {}
    for row in rows:
        mixed.setdefault(row["task"], set()).add(row["partition"])
    assert len(rows) == 2_000
    assert all(len(each) == 1 for each in mixed.values())
    assert {row["partition"]: row["route_version"] for row in rows} == {1: 1, 2: 1, 3: 2, 4: 2}
    one = reader(spark, node, "accounts", keys="key7").load()
    assert one.count() == 40
    assert one.rdd.getNumPartitions() < frame.rdd.getNumPartitions()


def test_several_subjects_by_name_or_pattern(spark: SparkSession, node: NodeProcess) -> None:
    send(node.address, "multi.a", ["1"])
    send(node.address, "multi.b", ["2"])
    assert bodies(reader(spark, node, "multi.a,multi.b").load()) == ["1", "2"]
    by_pattern = (
        spark.read.format("qmq")
        .option("qmq.servers", node.address)
        .option("subscribePattern", r"multi\..*")
        .load()
    )
    assert bodies(by_pattern) == ["1", "2"]


def test_an_unknown_subject_is_named_with_what_to_do(
    spark: SparkSession, node: NodeProcess
) -> None:
    send(node.address, "there", ["x"])
    assert "E105" in refusal(lambda: reader(spark, node, "their").load())


def test_a_misspelt_option_is_refused_before_anything_runs(
    spark: SparkSession, node: NodeProcess
) -> None:
    with pytest.raises(AnalysisException, match="did you mean 'startingOffsets'"):
        reader(spark, node, "there", startingOfsets="earliest").load().collect()


def test_a_column_that_the_log_has_not_is_refused_with_the_nearest(
    spark: SparkSession, node: NodeProcess
) -> None:
    with pytest.raises(AnalysisException, match="did you mean 'sequence'"):
        reader(spark, node, "there").schema("sequenze bigint").load().collect()


def test_a_damaged_segment_is_an_error_that_names_it(spark: SparkSession, tmp_path: Path) -> None:
    found = NodeProcess(tmp_path / "node")
    try:
        send(found.start(), "hurt", ["x" * 1000] * 100)
        found.stop()
    finally:
        found.kill()
    segment = next((tmp_path / "node").glob("broker/message/*.log"))
    data = bytearray(segment.read_bytes())
    at = data.index(b"x" * 1000) + 500
    data[at] ^= 1
    segment.write_bytes(data)
    said = refusal(
        lambda: spark.read.format("qmq").option("subscribe", "hurt").load(str(tmp_path / "node"))
    )
    assert "E401" in said
    assert segment.name in said
