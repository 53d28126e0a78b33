"""Compaction: combines the small files of a past day into few large ones with the same rows.

Days are in UTC. Late messages of a past day are in new small files, for the next compaction. A file is small below `SMALL_BYTES`; its
replacement aims at `AIM_BYTES`. The same manifest removes the old files from the archive and adds the new ones. Old files stay on disk
until `--sweep`, for running readers.

Before that, the new files are compared with the old ones, queue by queue: rows, sequences and a fingerprint over all columns.
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
"""About how much is rewritten per manifest. Completed steps survive a crash of the process."""


@dataclass(frozen=True, slots=True)
class CompactionStep:
    """Files of one subject and day to be combined into `files` new ones."""

    old: tuple[ArchivedFile, ...]
    files: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the old files."""
        return tuple(each.path for each in self.old)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A fingerprint of a set of rows of a queue, independent of their order."""

    rows: int
    first: int
    last: int
    high: int
    low: int


def plan(archive: Archive, today: str) -> list[CompactionStep]:
    """The steps that reduce the number of files. Days from `today` (YYYY-MM-DD) on are not compacted."""
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
    """Sorts files by their first row, so that neighbours are rewritten together."""
    keys = (QueueKey.parse(file.subject, within) for within in file.queues)
    first = min(((key.partition, key.broker_group, file.queues[key.within].first) for key in keys), default=(0, "", 0))
    return first, file.path


def compact(spark: SparkSession, folder: ArchiveFolder, disk: ArchiveDisk, now_ms: int) -> list[Manifest]:
    """Carry out the plan and return the steps done. Steps whose files another process has replaced are skipped. Raises LogDamaged,
    OSError."""
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
        raise LogDamaged(
            f"{step.old[0].subject}, {step.old[0].day}: the rewritten rows differ from the original ones; the archive is unchanged"
        )
    return folder.commit(attempt, Manifest("compact", files=files, gone=step.paths, origin=f"{len(step.old)} files"))


def hash_of(columns: Iterable[str]) -> Column:
    """The column `hash` of a row over these columns, independent of the order of headers."""
    return F.xxhash64(*(F.array_sort(F.map_entries(name)) if name == "headers" else F.col(name) for name in columns)).alias("hash")


def fingerprints(rows: DataFrame) -> Mapping[QueueKey, Fingerprint]:
    """The fingerprint of each queue: two sums of 32-bit halves of a hash over all columns. Sums cannot overflow, and unlike XOR, duplicate
    rows do not cancel out."""
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
