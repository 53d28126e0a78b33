"""Many messages over a hundred changes of the route, through a real node: the order audit finds
nothing, and then what was planted.

In the form `all` a million, else fewer, with as many changes among them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from publishing import create_ordered
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark_qmq.jobs.job import projection
from pyspark_qmq.jobs.order_checks import COLUMNS, audit, parse_by
from support import NodeProcess, forms
from system.spark_workload import change

import qmq
from qmq.columns.servers.log import ServerAddress

MESSAGES = 1_000_000 if forms.FORM == "all" else 100_000
ROUND = MESSAGES // 500
CHANGES = 100
KEYS = MESSAGES // 100
BY = "json:n"


async def publish(server: str, subject: str) -> None:
    """Send numbered messages of each key, while the route changes again and again."""
    coin = Random(5)
    numbers = dict.fromkeys(range(KEYS), 0)
    async with qmq.connect(server) as mq:
        producer = mq.ordered_producer(subject)
        changing: asyncio.Task[bool] | None = None
        made = 0
        for at in range(0, MESSAGES, ROUND):
            chosen = [coin.randrange(KEYS) for _ in range(ROUND)]
            bodies = []
            for key in chosen:
                bodies.append(b'{"n":%d}' % numbers[key])
                numbers[key] += 1
            producer.send_many(bodies, [f"key-{key}" for key in chosen])
            await producer.drain()
            if at >= made * MESSAGES // CHANGES and made < CHANGES:
                if changing is not None:
                    await changing
                changing = asyncio.create_task(change(mq.metadata, subject, coin))
                made += 1
        await producer.flush()
        assert changing is not None
        await changing
        assert made == CHANGES


@pytest.mark.longest
def test_many_messages_over_a_hundred_changes_are_clean_and_a_planted_one_is_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    node = NodeProcess(tmp_path / "node")
    try:
        server = node.start()
        create_ordered(server, "audited", partitions=2)
        asyncio.run(publish(server, "audited"))
        log = ServerAddress(server).open()
        topology = log.topology(["audited"])
        log.close()
        schema = projection([*COLUMNS, *parse_by(BY).columns])
        reader = (
            spark.read.format("qmq")
            .option("qmq.servers", server)
            .option("subscribe", "audited")
            .schema(schema)
        )
        reader.load().write.parquet(str(tmp_path / "columns"))
    finally:
        node.kill()
    messages = spark.read.schema(schema).parquet(str(tmp_path / "columns"))
    routes, queues = topology.routes["audited"], list(topology.queues.values())
    assert (messages.count(), routes.version) == (MESSAGES, CHANGES + 1)
    found = audit(messages, routes, by=BY, is_dense=True, queues=queues)
    assert found.is_clean, found.examples[:5]
    victim = (
        messages.filter("key = cast('key-77' as binary)")
        .orderBy("partition", "sequence")
        .collect()[50]
    )
    is_it = (f.col("partition") == victim["partition"]) & (f.col("sequence") == victim["sequence"])
    planted = messages.withColumn("body", f.when(is_it, f.lit(b'{"n":3}')).otherwise(f.col("body")))
    wrong = audit(planted, routes, by=BY, is_dense=True, queues=queues)
    assert not wrong.is_clean
    assert {
        bytes(row["key"])
        for row in wrong.violations.select("key").collect()
        if row["key"] is not None
    } == {b"key-77"}
