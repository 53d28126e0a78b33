"""Readers that are not ours: DuckDB and Polars on a table's local files, and the order of a key
over all routes as a SQL query.
"""

from __future__ import annotations

from typing import Any

import duckdb
import polars as pl
import pytest
from lake_support import Lake, lake
from publishing import change_route, create_ordered, send_ordered
from pyspark_qmq.lake.table import LakeTable, find_table

from qmq.proto.v1 import meta_pb2 as pb

__all__ = ["lake"]

pytestmark = pytest.mark.sampled

OUT_OF_ORDER = """
select count(*) from (
    select body, lag(body) over (partition by key order by route_version, partition, sequence) as before
    from messages
)
where cast(decode(body) as integer) <= cast(decode(before) as integer)
"""  # noqa: E501


@pytest.fixture
def bank(lake: Lake) -> LakeTable:
    """600 messages of seven keys through a split, a merge and a move of their route; the table is
    made after these changes.
    """
    create_ordered(lake.server, "bank", 1)
    pairs = [(f"k{number % 7}", str(number)) for number in range(600)]
    send_ordered(lake.server, "bank", pairs[:200])
    change_route(lake.server, "bank", split=pb.SplitOperation(partition=1))
    send_ordered(lake.server, "bank", pairs[200:400])
    change_route(lake.server, "bank", merge=pb.MergeOperation(partitions=[2, 3]))
    send_ordered(lake.server, "bank", pairs[400:])
    lake.drain(lake.asked("bank"))  # the sealed parents are backfilled
    return find_table(lake.catalog, "qmq", "bank")


def paths(table: LakeTable) -> list[str]:
    return [
        each.file.file_path.removeprefix("file://") for each in table.iceberg.scan().plan_files()
    ]


def in_duckdb(table: LakeTable, query: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as database:
        database.read_parquet(paths(table)).create_view("messages")
        return database.sql(query).fetchall()


def test_the_order_of_a_key_over_all_routes_is_a_query(bank: LakeTable) -> None:
    assert in_duckdb(
        bank,
        "select count(*), count(distinct route_version), count(distinct partition) from messages",
    ) == [(600, 3, 4)]
    assert in_duckdb(bank, OUT_OF_ORDER) == [(0,)]
    by_partition = OUT_OF_ORDER.replace("route_version, partition", "partition % 2, route_version")
    assert in_duckdb(bank, by_partition) != [(0,)]  # another order is none
    order = (
        "select decode(body) from messages where key = 'k3' order by route_version, partition, "
        "sequence"
    )
    assert [int(body) for (body,) in in_duckdb(bank, order)] == list(range(3, 600, 7))


def test_duckdb_reads_what_pyiceberg_scans(bank: LakeTable) -> None:
    database = bank.iceberg.scan(row_filter="partition = 1").to_duckdb("bank")
    assert database.sql(
        "select count(*), min(decode(body)::int), max(decode(body)::int) from bank"
    ).fetchall() == [(200, 0, 199)]
    database.close()


@pytest.mark.filterwarnings(
    "ignore::polars.exceptions.PerformanceWarning"
)  # it would plan faster by another package
def test_polars_reads_the_table(bank: LakeTable) -> None:
    rows = (
        pl.scan_iceberg(bank.iceberg)
        .sort("route_version", "partition", "sequence")
        .select("key", "body")
        .collect()
    )
    found = {key: group["body"].to_list() for (key,), group in rows.group_by("key")}
    assert found == {
        f"k{each}".encode(): [str(number).encode() for number in range(each, 600, 7)]
        for each in range(7)
    }
