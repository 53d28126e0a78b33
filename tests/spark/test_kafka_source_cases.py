"""What the tests of Spark's own source for Kafka check of `failOnDataLoss` and
`Trigger.AvailableNow`, on QMQ's source: a real Spark, a real node. Written for QMQ;
`scripts/judges spark-kafka` runs them. Of apache/spark, connector/kafka-0-10-sql:
KafkaDontFailOnDataLossSuite, KafkaSourceStressForDontFailOnDataLossSuite and
KafkaMicroBatchSourceSuite.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from publishing import create_ordered, send, send_ordered
from pyspark.sql import DataFrame, SparkSession
from support import NodeProcess

import qmq
from qmq.model import SubjectConfig

pytestmark = pytest.mark.long
STRESS_S = 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    found = NodeProcess(tmp_path_factory.mktemp("node"))
    found.start()
    yield found
    found.kill()


@pytest.fixture
def subject() -> str:
    return f"case-{uuid4().hex}"


def admin(node: NodeProcess, work: Callable[[qmq.Client], Awaitable[Any]]) -> None:
    async def connected() -> None:
        async with qmq.connect(node.address) as mq:
            await work(mq)

    asyncio.run(connected())


def erase(node: NodeProcess, subject: str) -> None:
    """Delete a subject, and create it again."""

    async def work(mq: qmq.Client) -> None:
        await mq.metadata.delete_subject(subject)
        await mq.metadata.create_subject(SubjectConfig(subject))

    admin(node, work)


def numbers(first: int, end: int) -> list[str]:
    return [f"{number:04}" for number in range(first, end)]


def stream_of(spark: SparkSession, node: NodeProcess, subject: str, **options: str) -> DataFrame:
    chosen = {} if "subscribePattern" in options else {"subscribe": subject}
    return (
        spark.readStream.format("qmq")
        .options(**{"qmq.servers": node.address, **chosen})
        .options(**{"startingOffsets": "earliest", **options})
        .load()
    )


def available_now(
    frame: DataFrame, checkpoint: Path, each: Callable[[DataFrame, int], None]
) -> None:
    """Run a query with Trigger.AvailableNow to its end. Raises what the query raises."""
    frame.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint)).trigger(
        availableNow=True
    ).start().awaitTermination()


def bodies(frame: DataFrame) -> list[str]:
    return [bytes(row["body"]).decode() for row in frame.select("body").collect()]


@pytest.mark.parametrize("is_stream", [True, False], ids=["microbatch", "batch"])
def test_fail_on_data_loss_false_returns_no_duplicated_records(
    spark: SparkSession, node: NodeProcess, subject: str, tmp_path: Path, is_stream: bool
) -> None:
    send(node.address, subject, numbers(0, 30))
    admin(node, lambda mq: mq.metadata.purge_subject(subject))
    send(node.address, subject, numbers(30, 50))
    options = {
        "startingOffsets": f'{{"{subject}":{{"0@broker-0":0}}}}',
        "failOnDataLoss": "false",
    }
    found: list[str] = []
    if is_stream:
        frame = stream_of(spark, node, subject, **options)
        available_now(frame, tmp_path, lambda batch, _: found.extend(bodies(batch)))
    else:
        reader = spark.read.format("qmq").options(**options)
        found += bodies(
            reader.options(**{"qmq.servers": node.address, "subscribe": subject}).load()
        )
    assert sorted(found) == numbers(30, 50)


@pytest.mark.parametrize("choice", ["subscribe", "subscribePattern"])
def test_stress_for_fail_on_data_loss_false(
    spark: SparkSession, node: NodeProcess, subject: str, tmp_path: Path, choice: str
) -> None:
    """Subjects are deleted, created again and purged under a slow query, which never fails."""
    chosen = Random()
    subjects = [f"{subject}-{number}" for number in range(3)]
    for each in subjects:
        send(node.address, each, ["0"])
    counted = [0]
    chosen_by = {choice: f"{subject}-.*"} if choice == "subscribePattern" else {}

    def slowly(batch: DataFrame, _: int) -> None:
        counted[0] += batch.count()
        time.sleep(chosen.random() / 2)  # the messages of the next batch may be gone by then

    query = (
        stream_of(spark, node, ",".join(subjects), failOnDataLoss="false", **chosen_by)
        .writeStream.foreachBatch(slowly)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        end = time.monotonic() + STRESS_S
        while (time.monotonic() < end or not counted[0]) and query.isActive:
            each = chosen.choice(subjects)
            match chosen.randrange(6):
                case 0:
                    erase(node, each)
                case 1:
                    admin(node, lambda mq, each=each: mq.metadata.purge_subject(each))
                case _:
                    send(node.address, each, numbers(0, chosen.randrange(1, 20)))
        if query.exception() is not None:
            raise query.exception()
        assert counted[0] > 0
    finally:
        query.stop()


def test_available_now_takes_all_in_batches_of_the_limit_and_nothing_later(
    spark: SparkSession, node: NodeProcess, subject: str, tmp_path: Path
) -> None:
    send(node.address, subject, numbers(0, 15))
    batches: list[list[str]] = []

    def kept(batch: DataFrame, _: int) -> None:
        batches.append(bodies(batch))
        if len(batches) == 1:
            send(node.address, subject, numbers(15, 20))

    available_now(stream_of(spark, node, subject, maxOffsetsPerTrigger="5"), tmp_path, kept)
    assert batches == [numbers(0, 5), numbers(5, 10), numbers(10, 15)]


def test_available_now_fails_when_offsets_become_unavailable_between_batches(
    spark: SparkSession, node: NodeProcess, subject: str, tmp_path: Path
) -> None:
    send(node.address, subject, numbers(0, 15))

    def replaced(batch: DataFrame, _: int) -> None:
        erase(node, subject)
        send(node.address, subject, numbers(0, 10))

    with pytest.raises(Exception, match=r"E110"):
        available_now(stream_of(spark, node, subject, maxOffsetsPerTrigger="5"), tmp_path, replaced)


def test_available_now_fails_when_partitions_become_unavailable_between_batches(
    spark: SparkSession, node: NodeProcess, subject: str, tmp_path: Path
) -> None:
    create_ordered(node.address, subject, partitions=4)
    send_ordered(node.address, subject, [(f"key-{number}", f"{number}") for number in range(40)])

    def replaced(batch: DataFrame, _: int) -> None:
        admin(node, lambda mq: mq.metadata.delete_subject(subject))
        create_ordered(node.address, subject, partitions=1)
        send_ordered(node.address, subject, [(f"key-{number}", "again") for number in range(40)])

    with pytest.raises(Exception, match=r"E\d{3}"):
        available_now(stream_of(spark, node, subject, maxOffsetsPerTrigger="5"), tmp_path, replaced)
