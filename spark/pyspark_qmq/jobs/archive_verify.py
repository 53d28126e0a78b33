"""Compares an archive with the log, queue by queue, for all archived messages that the log still has.

Both sides are counted and fingerprinted over all columns. The archive is also checked for duplicate sequences, for files that differ from
their manifests, and for a plain folder that differs from the archive. Messages deleted from the log can only be compared with the
manifests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq import offsets
from pyspark_qmq.jobs import archive_files
from pyspark_qmq.jobs.archive_compaction import Fingerprint, fingerprints, hash_of
from pyspark_qmq.jobs.archive_disk import walk
from pyspark_qmq.jobs.archive_manifest import Archive
from pyspark_qmq.jobs.archive_ranges import Ranges, ends, overlap
from pyspark_qmq.jobs.archive_stream import SELECTING, queues_of
from pyspark_qmq.source_model import QueueKey
from pyspark_qmq.source_schema import COLUMNS, default_schema

SHOWN_MAX: Final = 10
"""Sequences shown in a counterexample."""

_NOTHING: Final = Fingerprint(0, -1, -1, 0, 0)


@dataclass(frozen=True, slots=True)
class Compared:
    """One queue in the archive and in the log, over the range that both should have."""

    queue: QueueKey
    archived: int
    """The queue's rows in the archive."""
    listed: int
    """The queue's rows according to the manifests."""
    repeated: int
    """Rows with a duplicate sequence."""
    first: int
    """The first compared sequence."""
    end: int
    """The end of the comparison (exclusive): the archive's end, or the log's if that is earlier."""
    in_archive: Fingerprint
    in_log: Fingerprint
    is_log_shorter: bool
    """Whether the log ends before the archive."""

    @property
    def gaps(self) -> int:
        """Sequences without a row in the archive: unused sequences, directed copies, messages excluded by `-o tags`."""
        return self.end - self.first - self.in_archive.rows

    @property
    def is_same(self) -> bool:
        """Whether the two sides are equal."""
        return self.in_archive == self.in_log and not self.repeated and self.archived == self.listed and not self.is_log_shorter


def compare(spark: SparkSession, archive: Archive, files: Path, options: Mapping[str, str]) -> list[Compared]:
    """Compare all queues that are selected and archived. Raises what the data source raises."""
    known = {key: queue for key, queue in queues_of(options).items() if key in archive.covered}
    kept = {key: ((queue.start, queue.end),) for key, queue in known.items()}
    shared = overlap({key: archive.covered[key] for key in known}, kept)
    rows = archive_files.read_files(spark, files, archive.files)
    counts = _counts(rows)
    in_archive = fingerprints(archive_files.within(rows, shared)) if shared else {}
    in_log = fingerprints(log_rows(spark, options, shared)) if shared else {}
    listed = _listed(archive)
    found = []
    for key, queue in sorted(known.items()):
        both = shared.get(key, ((queue.end, queue.end),))
        archived, repeated = counts.get(key, (0, 0))
        found.append(
            Compared(
                key,
                archived,
                listed.get(key, 0),
                repeated,
                both[0][0],
                both[-1][1],
                in_archive.get(key, _NOTHING),
                in_log.get(key, _NOTHING),
                ends(archive.covered)[key] > queue.end,
            )
        )
    return found


def log_rows(spark: SparkSession, options: Mapping[str, str], wanted: Ranges) -> DataFrame:
    """The rows of these ranges in the log, with all columns."""
    where = {name: value for name, value in options.items() if name.lower().startswith("qmq.") or name.lower() in (*SELECTING, "path")}
    first = offsets.to_json({key: found[0][0] for key, found in wanted.items()})
    end = offsets.to_json(ends(wanted))
    chosen = json.dumps({subject: list(queues) for subject, queues in end.items()})
    reading = {**where, "assign": chosen, "startingOffsets": json.dumps(first), "endingOffsets": json.dumps(end)}
    rows = spark.read.format("qmq").schema(default_schema(with_headers=True)).options(**reading).load()
    has_holes = any(len(found) > 1 for found in wanted.values())
    return archive_files.within(rows, wanted) if has_holes else rows


def _counts(rows: DataFrame) -> dict[QueueKey, tuple[int, int]]:
    counted = rows.groupBy("subject", "partition", "broker_group").agg(F.count("*"), F.count("*") - F.count_distinct("sequence"))
    return {QueueKey(each[0], each[1], each[2]): (each[3], each[4]) for each in counted.collect()}


def _listed(archive: Archive) -> dict[QueueKey, int]:
    found: dict[QueueKey, int] = {}
    for file in archive.files.values():
        for within, extent in file.queues.items():
            key = QueueKey.parse(file.subject, within)
            found[key] = found.get(key, 0) + extent.rows
    return found


def wrong_files(archive: Archive, latest: Callable[[], Archive], files: Path, data: Path) -> list[tuple[str, str]]:
    """Files that differ from their manifests, with the difference. `latest`: reads the archive again, because others may be writing."""
    found = []
    for file in archive.files.values():
        path = files / file.path
        if not path.is_file():
            found.append((file.path, "gone"))
        elif path.stat().st_size != file.size:
            found.append((file.path, f"{path.stat().st_size} bytes, not {file.size}"))
    shown = {str(each.relative_to(data)) for each in walk(data)}
    before, behind = ({each.plain for each in seen.files.values()} for seen in (archive, latest()))
    found += [(f"data/{each}", "not shown to plain readers") for each in sorted((before & behind) - shown)]
    found += [(f"data/{each}", "shown to plain readers, but not in the archive") for each in sorted(shown - before - behind)]
    return found


def differing(spark: SparkSession, archive: Archive, files: Path, options: Mapping[str, str], wrong: Compared) -> list[tuple[int, str]]:
    """The first differing sequences of a queue, with the difference."""
    wanted: Ranges = overlap({wrong.queue: archive.covered[wrong.queue]}, {wrong.queue: ((wrong.first, wrong.end),)})
    if not wanted:
        return []
    ours = archive_files.within(archive_files.read_files(spark, files, archive.files), wanted)
    both = _by_sequence(ours, "ours").join(_by_sequence(log_rows(spark, options, wanted), "theirs"), "sequence", "full")
    rows = both.where("not (ours <=> theirs)").orderBy("sequence").limit(SHOWN_MAX).collect()
    return [(each["sequence"], _how(each["ours_rows"], each["theirs_rows"])) for each in rows]


def _by_sequence(rows: DataFrame, side: str) -> DataFrame:
    summed = F.sum(F.col("hash").cast("decimal(38)")).alias(side)
    return rows.select("sequence", hash_of(COLUMNS)).groupBy("sequence").agg(summed, F.count("*").alias(f"{side}_rows"))


def _how(ours: int | None, theirs: int | None) -> str:
    if not ours or not theirs:
        return "only in the archive" if ours else "only in the log"
    return f"{ours} times in the archive" if ours > 1 else "different"
