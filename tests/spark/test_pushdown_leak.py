"""Why the data source takes no filters: in this PySpark, those of one scan leak into another scan
of the same DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
)
from pyspark_qmq import reader

SWITCH = "spark.sql.python.filterPushdown.enabled"
MENDED = (
    "PySpark no longer leaks filters: think again about pushFilters in pyspark_qmq.source, and "
    "about docs/SPARK.md, *Filter pushdown*"
)


def ten_numbers() -> type[DataSource]:
    """A source of 0 to 9 that applies a pushed filter `number >= N`, as Spark's documentation says.
    It is defined in a function, so that executors get it by value."""

    class Reader(DataSourceReader):
        def __init__(self) -> None:
            self.first = 0

        def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
            for each in filters:
                if isinstance(each, GreaterThanOrEqual):
                    self.first = max(self.first, each.value)
                else:
                    yield each

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            return iter([(number,) for number in range(self.first, 10)])

    class Numbers(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ten_numbers"

        def schema(self) -> str:
            return "number int"

        def reader(self, schema: object) -> DataSourceReader:
            return Reader()

    return Numbers


@pytest.fixture
def numbers(spark: SparkSession) -> Iterator[DataFrame]:
    spark.dataSource.register(ten_numbers())
    spark.conf.set(SWITCH, "true")
    yield spark.read.format("ten_numbers").load()
    spark.conf.unset(SWITCH)


def test_filters_of_one_scan_leak_into_another_one_in_this_version(numbers: DataFrame) -> None:
    assert numbers.filter("number >= 7").count() == 3
    assert numbers.count() == 3, MENDED


def test_a_union_of_two_scans_is_wrong_in_this_version(numbers: DataFrame) -> None:
    both = numbers.filter("number >= 7").union(numbers.filter("number >= 2"))
    assert both.count() == 16, MENDED


def test_no_reader_of_ours_takes_filters() -> None:
    ours = [
        each
        for each in vars(reader).values()
        if isinstance(each, type) and issubclass(each, DataSourceReader)
    ]
    readers = [each for each in ours if each.__module__ == reader.__name__]
    assert reader.LogReader in readers
    assert {each.pushFilters for each in readers} == {DataSourceReader.pushFilters}
