"""Runs the tasks of a round, which read messages and write files: in this process, or elsewhere (jobs/archive_tasks.py: Spark's executors).

No snapshot names the files until the writer commits them, so a task may be repeated, and its process may die.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark_qmq.committed_log import LogAddress
from pyspark_qmq.lake.data_folder import DataFolder
from pyspark_qmq.lake.day_files import DayFile, DayFiles
from pyspark_qmq.lake.lake_schema import COLUMNS
from pyspark_qmq.planning import ReadTask
from pyspark_qmq.read_ranges import read_task
from pyspark_qmq.source_model import ALL


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The log that tasks read."""

    address: LogAddress
    skips_lost: bool


class TaskRunner(Protocol):
    """Carries out the tasks of a round."""

    def __call__(self, source: TaskSource, work: Sequence[ReadTask], folder: DataFolder) -> list[DayFile]:
        """The files with all rows of the tasks, on disk. Raises MessagesExpired, NotConnected, LogDamaged, OSError."""
        ...


def write_tasks(source: TaskSource, work: Sequence[ReadTask], folder: DataFolder) -> list[DayFile]:
    """Write the rows of tasks in this process, one file for each day. It is a `TaskRunner`."""
    files = DayFiles(folder, uuid.uuid4().hex)
    try:
        for task in work:
            for batch in read_task(source.address, task, COLUMNS, ALL, skips_lost=source.skips_lost):
                files.write(batch)
        return files.close()
    finally:
        files.abandon()
