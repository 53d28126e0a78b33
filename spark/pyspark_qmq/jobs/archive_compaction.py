"""Compaction: many small files of a day that is over become few, with the same rows.

A day is over when it is not today any more (UTC); what comes late into it is small files again, for the next compaction. Files are small
below `SMALL_BYTES`; what replaces them aims at `AIM_BYTES`. The old files leave the archive in the moment in which the new ones come in,
and stay on disk until `--sweep`, for those who are reading them.

Before that moment the new files are compared with the old ones: rows, sequences and a fingerprint over all columns, queue by queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs import archive_files
from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_folder import ArchiveFolder
from pyspark_qmq.jobs.archive_manifest import Archive, ArchivedFile, Manifest
from pyspark_qmq.source_model import QueueKey
from pyspark_qmq.source_schema import COLUMNS
from qmq.errors import LogDamaged
from qmq.limits import MIB

SMALL_BYTES: Final = 128 * MIB
AIM_BYTES: Final = 192 * MIB
STEP_BYTES: Final = 4096 * MIB
"""At most about so much is rewritten for one manifest: what is done stays done if the process dies."""


@dataclass(frozen=True, slots=True)
class CompactionStep:
    """Files of one subject and day that become `files` new ones."""

    old: tuple[ArchivedFile, ...]
    files: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the old ones."""
        return tuple(each.path for each in self.old)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells two sets of rows of a queue apart, in whatever order they are."""

    rows: int
    first: int
    last: int
    high: int
    low: int


def plan(archive: Archive, today: str) -> list[CompactionStep]:
    """What is worth rewriting: steps that leave fewer files. Days from `today` (YYYY-MM-DD) on are left alone."""
    by_day: dict[tuple[str, str], list[ArchivedFile]] = {}
    for file in archive.files.values():
        if file.day < today and file.size < SMALL_BYTES:
            by_day.setdefault((file.subject, file.day), []).append(file)
    return [step for _, files in sorted(by_day.items()) for step in _steps(sorted(files, key=_place))]


def _steps(files: list[ArchivedFile]) -> Iterator[CompactionStep]:
    for part in _parts(files):
        count = max(-(-sum(each.size for each in part) // AIM_BYTES), 1)
        if count < len(part):
            yield CompactionStep(tuple(part), count)


def _parts(files: list[ArchivedFile]) -> Iterator[list[ArchivedFile]]:
    part: list[ArchivedFile] = []
    size = 0
    for file in files:
        part.append(file)
        size += file.size
        if size >= STEP_BYTES:
            yield part
            part, size = [], 0
    yield part


def _place(file: ArchivedFile) -> tuple[tuple[int, str, int], str]:
    """By where a file begins in the order of rows: neighbours are rewritten together."""
    keys = (QueueKey.parse(file.subject, within) for within in file.queues)
    first = min(((key.partition, key.broker_group, file.queues[key.within].first) for key in keys), default=(0, "", 0))
    return first, file.path


def compact(spark: SparkSession, folder: ArchiveFolder, disk: ArchiveDisk, now_ms: int) -> list[Manifest]:
    """Do what is planned; gives what was made. What another process took out meanwhile is left. Raises LogDamaged, OSError."""
    today = datetime.fromtimestamp(now_ms / 1000, UTC).date().isoformat()
    made = (_rewrite(spark, folder, disk, step) for step in plan(folder.latest(), today))
    return [each for each in made if each is not None]


def _rewrite(spark: SparkSession, folder: ArchiveFolder, disk: ArchiveDisk, step: CompactionStep) -> Manifest | None:
    attempt = folder.attempt()
    old = archive_files.read_files(spark, folder.files, step.paths)
    archive_files.rewrite_rows(old, attempt, step.files)
    files = archive_files.written_files(spark, attempt, disk)
    new = archive_files.read_files(spark, folder.files, (each.path for each in files))
    if fingerprints(old) != fingerprints(new):
        folder.discard(attempt)
        raise LogDamaged(f"{step.old[0].subject}, {step.old[0].day}: the rewritten rows are not those that were read; nothing was changed")
    return folder.commit(attempt, Manifest("compact", files=files, gone=step.paths, origin=f"{len(step.old)} files"))


def hash_of(columns: Iterable[str]) -> Column:
    """Of a row, over these columns; headers in whatever order. Its name is `hash`."""
    return F.xxhash64(*(F.array_sort(F.map_entries(name)) if name == "headers" else F.col(name) for name in columns)).alias("hash")


def fingerprints(rows: DataFrame) -> Mapping[QueueKey, Fingerprint]:
    """Of each queue; two sums of 32 bits of a hash over all columns cannot overflow, nor does a row that comes twice undo itself."""
    queue = ("subject", "partition", "broker_group")
    sums = (
        rows.select(*queue, "sequence", hash_of(COLUMNS))
        .groupBy(*queue)
        .agg(
            F.count("*"),
            F.min("sequence"),
            F.max("sequence"),
            F.sum(F.shiftright("hash", 32)),
            F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))),
        )
    )
    return {QueueKey(each[0], each[1], each[2]): Fingerprint(*each[3:]) for each in sums.collect()}
