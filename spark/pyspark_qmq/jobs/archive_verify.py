"""Compares a table with the log, queue by queue, for all messages that both should have.

Both sides are counted and fingerprinted over all columns, in one action of Spark. Messages that retention deleted from the log can only be
counted: the files must have as many rows as the table says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq import offsets
from pyspark_qmq.jobs.archive_rows import snapshot_files, snapshot_rows
from pyspark_qmq.lake.lake_table import LakeTable
from pyspark_qmq.source_model import QueueKey, SourceQueue
from pyspark_qmq.source_schema import COLUMNS, default_schema

SHOWN_MAX: Final = 10
"""Sequences shown in a counterexample."""

_QUEUE: Final = ("subject", "partition", "broker_group")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A set of rows of a queue, in any order: two sums of 32-bit halves of a hash over all columns.

    Sums cannot overflow, and unlike XOR, duplicate rows do not cancel out.
    """

    rows: int = 0
    repeated: int = 0
    """Rows with a sequence that another row has."""
    high: int = 0
    low: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """One queue in the table and in the log, over the range that both should have."""

    queue: QueueKey
    first: int
    """The first compared sequence."""
    end: int
    """The end of the comparison (exclusive): the table's position, or the log's end if that is earlier."""
    in_table: Fingerprint
    in_log: Fingerprint
    is_log_shorter: bool
    """Whether the log ends before the table."""

    @property
    def is_same(self) -> bool:
        """Whether the two sides are equal."""
        return self.in_table == self.in_log and not self.in_table.repeated and not self.is_log_shorter


@dataclass(frozen=True, slots=True)
class ComparedTable:
    subject: str
    queues: list[Compared]
    rows: int
    """Rows in the table's files."""
    listed: int
    """Rows that the table's snapshot says."""
    example: list[tuple[int, str]]
    """The first differing sequences of the first queue that differs, with the difference."""

    @property
    def differing(self) -> list[Compared]:
        return [each for each in self.queues if not each.is_same]

    @property
    def is_same(self) -> bool:
        return not self.differing and self.rows == self.listed


class Comparison:
    """Compares tables with one log. `where`: the data source's options that name the log."""

    def __init__(self, spark: SparkSession, where: Mapping[str, str]) -> None:
        self._spark = spark
        self._where = where

    def compare(self, table: LakeTable, queues: Mapping[QueueKey, SourceQueue], starts: Mapping[QueueKey, int]) -> ComparedTable:
        """Compare from `starts` on. Raises what the data source raises."""
        positions = table.positions()
        first = {key: max(queue.start, starts.get(key, 0)) for key, queue in queues.items()}
        ends = {key: max(min(positions.get(key, 0), queue.end), first[key]) for key, queue in queues.items()}
        files = snapshot_files(table)
        rows = snapshot_rows(self._spark, table, files)
        ours, theirs = self._within(rows, first, ends), self._log(first, ends)
        sides = self._fingerprints(ours, theirs)
        found = [
            Compared(
                key,
                first[key],
                ends[key],
                sides.get(("table", key), Fingerprint()),
                sides.get(("log", key), Fingerprint()),
                positions.get(key, 0) > queue.end,
            )
            for key, queue in sorted(queues.items())
        ]
        wrong = next((each for each in found if each.in_table != each.in_log), None)
        listed = sum(each.file.record_count for each in files)
        return ComparedTable(table.subject, found, rows.count(), listed, _differing(ours, theirs, wrong.queue) if wrong else [])

    def _log(self, first: Mapping[QueueKey, int], ends: Mapping[QueueKey, int]) -> DataFrame:
        start, end = offsets.to_json(first), offsets.to_json(ends)
        chosen = {
            "assign": json.dumps({subject: list(queues) for subject, queues in end.items()}),
            "startingOffsets": json.dumps(start),
            "endingOffsets": json.dumps(end),
        }
        return self._spark.read.format("qmq").schema(default_schema(with_headers=True)).options(**self._where, **chosen).load()

    def _within(self, rows: DataFrame, first: Mapping[QueueKey, int], ends: Mapping[QueueKey, int]) -> DataFrame:
        listed = [(*key, first[key], ends[key]) for key in ends]
        ranges = self._spark.createDataFrame(listed, "subject string, partition int, broker_group string, w_first bigint, w_end bigint")
        held = rows.join(F.broadcast(ranges), list(_QUEUE), "inner")
        return held.where("sequence >= w_first and sequence < w_end").select(*rows.columns)

    def _fingerprints(self, ours: DataFrame, theirs: DataFrame) -> dict[tuple[str, QueueKey], Fingerprint]:
        both = _hashed(ours, "table").unionAll(_hashed(theirs, "log"))
        summed = both.groupBy("side", *_QUEUE).agg(
            F.count("*"),
            F.count("*") - F.count_distinct("sequence"),
            F.sum(F.shiftright("hash", 32)),
            F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))),
        )
        return {(each[0], QueueKey(each[1], each[2], each[3])): Fingerprint(*each[4:]) for each in summed.collect()}


def _hash() -> Column:
    """The hash of a row over all columns, independent of the order of its headers."""
    return F.xxhash64(*(F.array_sort(F.map_entries(name)) if name == "headers" else F.col(name) for name in COLUMNS)).alias("hash")


def _hashed(rows: DataFrame, side: str) -> DataFrame:
    return rows.select(F.lit(side).alias("side"), *_QUEUE, "sequence", _hash())


def _differing(ours: DataFrame, theirs: DataFrame, queue: QueueKey) -> list[tuple[int, str]]:
    both = _by_sequence(ours, queue, "ours").join(_by_sequence(theirs, queue, "theirs"), "sequence", "full")
    rows = both.where("not (ours <=> theirs)").orderBy("sequence").limit(SHOWN_MAX).collect()
    return [(each["sequence"], _how(each["ours_rows"], each["theirs_rows"])) for each in rows]


def _by_sequence(rows: DataFrame, queue: QueueKey, side: str) -> DataFrame:
    is_queue = (F.col("partition") == queue.partition) & (F.col("broker_group") == queue.broker_group)
    summed = F.sum(F.col("hash").cast("decimal(38)")).alias(side)
    return rows.where(is_queue).select("sequence", _hash()).groupBy("sequence").agg(summed, F.count("*").alias(f"{side}_rows"))


def _how(ours: int | None, theirs: int | None) -> str:
    if not ours or not theirs:
        return "only in the table" if ours else "only in the log"
    return f"{ours} times in the table" if ours > 1 else "different"
