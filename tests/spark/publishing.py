"""Sends to a node from tests that are not asynchronous.

Rows of messages, deliveries and progress for tests of jobs; missing values get the simplest
defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from pyspark_qmq.datasets import schema_of
from support import eventually_sync

import qmq
from qmq.columns.files.log import FileAddress
from qmq.errors import UnknownSubject
from qmq.model import Order, SubjectConfig


def send(
    server: str,
    subject: str,
    bodies: Sequence[str],
    keys: Sequence[str] | None = None,
    tags: Sequence[Sequence[str]] | None = None,
    headers: Sequence[Mapping[str, bytes]] | None = None,
) -> None:
    """Send messages, and wait until all are stored."""

    async def work() -> None:
        async with qmq.connect(server) as mq, mq.producer(subject) as producer:
            await producer.send_many(
                [body.encode() for body in bodies], keys=keys, tags=tags, headers=headers
            )

    asyncio.run(work())


def send_ordered(server: str, subject: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Send (key, body) pairs to an ordered subject, in order."""

    async def work() -> None:
        async with qmq.connect(server) as mq, mq.ordered_producer(subject) as producer:
            await producer.send_many(
                [body.encode() for _, body in pairs], [key for key, _ in pairs]
            )

    asyncio.run(work())


def until_in_files(folder: Path, subject: str, count: int) -> None:
    """Wait until a node's files say that so many messages of a subject are committed: within a
    second or so.
    """

    def committed() -> int:
        log = FileAddress((str(folder),)).open()
        try:
            return sum(queue.end for queue in log.topology([subject]).queues.values())
        except UnknownSubject:
            return 0
        finally:
            log.close()

    eventually_sync(lambda: committed() >= count)


def create(server: str, *subjects: str) -> None:
    """Subjects without order."""

    async def work() -> None:
        async with qmq.connect(server) as mq:
            for each in subjects:
                await mq.metadata.create_subject(SubjectConfig(each))

    asyncio.run(work())


def create_ordered(server: str, subject: str, partitions: int = 1) -> None:
    """An ordered subject of 1,024 logical partitions."""

    async def work() -> None:
        async with qmq.connect(server) as mq:
            await mq.metadata.create_subject(
                SubjectConfig(subject, order=Order.STRICT, logical_partitions=1024),
                partitions=partitions,
            )

    asyncio.run(work())


def change_route(server: str, subject: str, **change: Any) -> None:
    """Split, merge or move partitions. Returns when the new route is published."""

    async def work() -> None:
        async with qmq.connect(server) as mq:
            await mq.metadata.change_route(subject, **change)

    asyncio.run(work())


START_MS = 1_700_000_000_000
MESSAGES = StructType(
    [
        StructField("subject", StringType()),
        StructField("partition", IntegerType()),
        StructField("broker_group", StringType()),
        StructField("sequence", LongType()),
        StructField("create_time", TimestampType()),
        StructField("append_time", TimestampType()),
        StructField("logical_partition", IntegerType()),
    ]
)


def at(time_ms: int | None) -> datetime | None:
    """Milliseconds from START_MS on as Spark takes them."""
    return (
        None
        if time_ms is None
        else datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=START_MS + time_ms)
    )


def messages(
    spark: SparkSession,
    rows: Iterable[tuple[int, int, int]],
    partition: int = 0,
    lps: Iterable[int] = (),
) -> DataFrame:
    """Messages from tuples of (sequence, created, stored), in ms."""
    found = list(rows)
    numbers = list(lps) or [None] * len(found)
    return spark.createDataFrame(
        [
            ("s", partition, "g", number, at(made), at(kept), lp)
            for (number, made, kept), lp in zip(found, numbers, strict=True)
        ],
        MESSAGES,
    )


def dataset(spark: SparkSession, name: str, rows: Iterable[dict[str, Any]]) -> DataFrame:
    """A data set from dictionaries; times in ms; missing fields are null or the simplest value."""
    schema = schema_of(name)
    simplest = {
        "subject": "s",
        "partition": 0,
        "broker_group": "g",
        "consumer_group": "ops",
        "delay_ms": 0,
        "attempt": 1,
        "consumer": "c",
    }
    found = []
    for row in rows:
        whole = {field.name: (simplest | row).get(field.name) for field in schema.fields}
        times = {
            field.name: at(whole[field.name])
            for field in schema.fields
            if isinstance(field.dataType, TimestampType)
        }
        found.append(tuple((whole | times)[field.name] for field in schema.fields))
    return spark.createDataFrame(found, schema)


def delivery(
    first: int, last: int, verdict: str, pulled: int | None, settled: int | None, **others: Any
) -> dict[str, Any]:
    """A row of `deliveries`."""
    times = {"pulled_time": pulled, "settled_time": settled}
    return {"first_sequence": first, "last_sequence": last, "verdict": verdict, **times, **others}


def standing(
    time: int, done_before: int, next_sequence: int | None, **others: Any
) -> dict[str, Any]:
    """A row of `progress`."""
    none = dict.fromkeys(("held", "waiting", "parked", "expired", "consumers"), 0)
    return {
        **none,
        "time": time,
        "done_before": done_before,
        "next_sequence": next_sequence,
        **others,
    }
