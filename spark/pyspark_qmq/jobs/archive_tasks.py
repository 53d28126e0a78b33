"""Runs a lake writer's tasks on Spark's executors: they write Parquet files and report them to the driver, which commits."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from pyspark_qmq.lake.day_files import DayFile
from pyspark_qmq.lake.task_runner import TaskOutput, TaskSource, write_tasks
from pyspark_qmq.planning import ReadTask


class SparkTasks:
    """A `TaskRunner`. Files of attempts that failed or were superseded are in no commit."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.cores = self._context.defaultParallelism

    def __call__(self, source: TaskSource, work: Sequence[ReadTask], output: TaskOutput) -> list[DayFile]:
        """One Spark task for each core; a task makes one file for each day. Raises PySparkException."""
        count = min(len(work), self.cores)
        parts = [work[at::count] for at in range(count)]
        rows = self._context.parallelize(parts, count)
        return rows.flatMap(lambda part: write_tasks(source, part, output)).collect()
