"""Flights through three broker groups, resharded while they are sent, and read back by Spark: the
source table, row for row.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from system.spark_run import cluster, order_anomalies
from system.spark_workload import create, publish, source_rows

ROWS = 336_776
CHANGES = 12


@pytest.mark.sampled
def test_rows_published_through_three_changing_broker_groups_are_read_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = source_rows(ROWS)
    with cluster(tmp_path) as found:
        asyncio.run(create(found.server, "flights"))
        assert asyncio.run(publish(found.server, "flights", rows, CHANGES, 7)) == CHANGES
        read = (
            spark.read.format("qmq")
            .option("qmq.servers", found.server)
            .option("subscribe", "flights")
            .load()
        )
        table = read.select(
            "partition", "sequence", "route_version", "key", "tags", "body", "broker_group"
        ).toArrow()
    assert table.num_rows == len(rows)
    by_number = sorted(table.to_pylist(), key=lambda each: int(each["body"].split(b",", 1)[0]))
    for row, each in zip(rows, by_number, strict=True):
        assert (each["key"].decode(), each["tags"], each["body"].decode()) == (
            row.key,
            [row.tag],
            row.line,
        )
    assert not order_anomalies(table)
    assert set(table["broker_group"].to_pylist()) == {"g1", "g2", "g3"}
    assert len(set(table["route_version"].to_pylist())) > 3
