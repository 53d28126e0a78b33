"""Operators see a streaming query by its name, and what it lost: a real Spark, a real node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import send
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark_qmq.stream import lost
from support import NodeProcess

import qmq
from qmq.proto.v1 import control_pb2 as control


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    found = NodeProcess(tmp_path_factory.mktemp("node"))
    found.start()
    yield found
    found.kill()


def readers(node: NodeProcess, subject: str) -> list[control.Reader]:
    async def asked() -> list[control.Reader]:
        async with qmq.connect(node.address) as mq:
            return (await mq.metadata.describe_groups(subject)).readers

    return asyncio.run(asked())


def purge(node: NodeProcess, subject: str) -> None:
    async def purged() -> None:
        async with qmq.connect(node.address) as mq:
            await mq.metadata.purge_subject(subject)

    asyncio.run(purged())


def run(
    spark: SparkSession, node: NodeProcess, subject: str, folder: Path, **options: Any
) -> StreamingQuery:
    """Run a query until it has read everything. Raises what ends it."""
    query = (
        spark.readStream.format("qmq")
        .options(**{"qmq.servers": node.address, "subscribe": subject})
        .options(**{"startingOffsets": "earliest", **options})
        .load()
        .writeStream.foreachBatch(lambda frame, _: frame.collect())
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def test_a_query_is_seen_by_its_name_with_what_it_has_committed(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "named", [str(number) for number in range(20)])
    run(spark, node, "named", tmp_path / "a", **{"qmq.reader": "copy"})
    (found,) = readers(node, "named")
    assert (found.reader, found.done_before, found.waiting, found.lost) == ("copy", 20, 0, 0)
    send(node.address, "named", ["later"] * 5)
    (found,) = readers(node, "named")
    assert found.waiting == 5, "its lag grows without it"
    run(spark, node, "named", tmp_path / "b")
    others = {each.reader for each in readers(node, "named")} - {"copy"}
    assert [each.startswith("spark-") for each in others] == [True]


def test_what_a_query_lost_is_in_its_error_its_progress_and_its_row(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "purged", [str(number) for number in range(8)])
    options = {"qmq.reader": "copy", "maxOffsetsPerTrigger": "5"}
    run(spark, node, "purged", tmp_path, **options)
    send(node.address, "purged", ["unread"] * 6)
    purge(node, "purged")
    send(node.address, "purged", ["kept"])
    with pytest.raises(Exception, match=r"reader copy: 6 messages.*8 to 13 of purged/0@broker-0"):
        run(spark, node, "purged", tmp_path, **options)
    progress = run(
        spark, node, "purged", tmp_path, failOnDataLoss="false", **options
    ).recentProgress
    assert max(map(lost, progress)) == 6
    (found,) = readers(node, "purged")
    assert (found.waiting, found.lost) == (0, 6)
