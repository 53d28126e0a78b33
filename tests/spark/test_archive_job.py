"""The archive with Spark: each message once, whatever dies, repeats or comes late; and the same for every reader."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import publishing
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark_qmq.jobs import archive_compaction, archive_files
from pyspark_qmq.jobs.archive import ArchiveJob, read_archive
from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_folder import ArchiveFolder
from pyspark_qmq.jobs.archive_stream import CheckpointNotes, Taking
from pyspark_qmq.jobs.job import main
from pyspark_qmq.source_model import QueueKey
from pyspark_qmq.source_schema import default_schema
from support import NodeProcess

pytestmark = pytest.mark.rotating

SUBJECT = "orders"
KEYS = (QueueKey(SUBJECT, 0, "g1"), QueueKey(SUBJECT, 0, "g2"))
MIDNIGHT = datetime(2026, 1, 2, tzinfo=UTC)
LATER_MS = 1_800_000_000_000
DISK = ArchiveDisk()
RUNS = itertools.count()

Row = tuple[Any, ...]


def message(key: QueueKey, sequence: int, time: datetime = MIDNIGHT) -> Row:
    headers = {"a": b"1", "b": str(sequence).encode()}
    return (*key, sequence, None, b"k", f"body {sequence}".encode(), ["t"], headers, f"{sequence:032}", time, time, 1)


def batch(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame(list(rows), default_schema(with_headers=True))


class Notes(CheckpointNotes):
    """A checkpoint that says what the test says."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def query_id(self) -> str:
        return "q"

    def ends_of(self, epoch: int) -> dict[QueueKey, int]:
        return dict.fromkeys(KEYS, self._ends[epoch])


def opened(root: Path, disk: ArchiveDisk = DISK) -> ArchiveFolder:
    return ArchiveFolder(root, disk=disk, now_ms=lambda: 1000, run=f"run{next(RUNS)}")


def give(spark: SparkSession, root: Path, epochs: Iterable[int], *ends: int) -> list[Any]:
    """Epochs of a stream over both queues, as Spark would give them; what the process added."""
    with closing(opened(root)) as folder:
        taking = Taking(folder, DISK, Notes(*ends), dict.fromkeys(KEYS, 0))
        for epoch in epochs:
            first = ends[epoch - 1] if epoch else 0
            times = [MIDNIGHT + timedelta(hours=number - 2) for number in range(5)]
            taking(batch(spark, (message(key, each, times[each % 5]) for key in KEYS for each in range(first, ends[epoch]))), epoch)
        return taking.made


def sequences(rows: DataFrame) -> list[tuple[str, int]]:
    return sorted((each[0], each[1]) for each in rows.select("broker_group", "sequence").collect())


def expected(end: int) -> list[tuple[str, int]]:
    return sorted((key.broker_group, each) for key in KEYS for each in range(end))


def everything(rows: DataFrame) -> list[str]:
    """All columns of all rows, as text, sorted: two sets of rows are the same if these are."""
    return sorted(str(each.asDict(recursive=True)) for each in rows.select(*default_schema(with_headers=True).names).collect())


def plain(spark: SparkSession, root: Path) -> DataFrame:
    return spark.read.parquet(str(root / "data"))


@pytest.mark.long
def test_a_message_belongs_to_the_day_in_utc_of_its_millisecond_whatever_the_session_thinks(spark: SparkSession, tmp_path: Path) -> None:
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        moments = [MIDNIGHT - timedelta(milliseconds=1), MIDNIGHT, MIDNIGHT + timedelta(days=1, milliseconds=-1)]
        rows = batch(spark, (message(KEYS[0], number, each) for number, each in enumerate(moments)))
        archive_files.write_rows(rows, tmp_path / "attempt=a-1")
        found = archive_files.written_files(spark, tmp_path / "attempt=a-1", DISK)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    extents = [(each.day, extent) for each in found for extent in each.queues.values()]
    held = sorted((day, number) for day, extent in extents for number in range(extent.first, extent.last + 1))
    assert held == [("2026-01-01", 0), ("2026-01-02", 1), ("2026-01-02", 2)]


def test_rows_are_sorted_in_a_file_and_times_are_exact_for_other_readers(spark: SparkSession, tmp_path: Path) -> None:
    time = MIDNIGHT + timedelta(microseconds=1000)
    rows = batch(spark, (message(key, each, time) for each in (5, 3, 4) for key in reversed(KEYS))).coalesce(1)
    archive_files.write_rows(rows, tmp_path / "attempt=a-1")
    (file,) = archive_files.written_files(spark, tmp_path / "attempt=a-1", DISK)
    found = pq.read_table(tmp_path / file.path, partitioning=None)
    assert list(zip(found["broker_group"].to_pylist(), found["sequence"].to_pylist(), strict=True)) == expected(6)[3:6] + expected(6)[9:12]
    assert found["append_time"].to_pylist() == [time] * 6
    assert dict(found["headers"].to_pylist()[0]) == {"a": b"1", "b": b"3"}


class CrashingDisk(ArchiveDisk):
    """The process "dies" in one kind of call: what is behind it does not happen."""

    def __init__(self, call: str, *, is_behind: bool) -> None:
        self.is_armed = True
        real: Callable[..., Any] = getattr(self, call)

        def crash(*arguments: Any) -> Any:
            if not self.is_armed:
                return real(*arguments)
            if is_behind:
                real(*arguments)
            raise KeyboardInterrupt(call)

        setattr(self, call, crash)


CRASHES = {
    "files written": ("sync_tree", False),
    "before the manifest": ("create", False),
    "behind the manifest": ("create", True),
    "while it is shown": ("link", True),
    "before it is shown": ("make_folder", False),
}


@pytest.mark.long
def test_an_epoch_that_is_repeated_after_a_crash_is_in_the_archive_once(spark: SparkSession, tmp_path: Path) -> None:
    """One archive, in whose epochs one crash after the other happens."""
    ends = [10 * (number + 1) for number in range(len(CRASHES) + 2)]
    give(spark, tmp_path, [0], *ends)
    for epoch, (name, (call, is_behind)) in enumerate(CRASHES.items(), 1):
        before, behind, day = ends[epoch - 1], ends[epoch], MIDNIGHT - timedelta(days=9 + epoch)
        disk = CrashingDisk(call, is_behind=is_behind)
        disk.is_armed = False
        with closing(opened(tmp_path, disk)) as folder, pytest.raises(KeyboardInterrupt):
            disk.is_armed = True
            taking = Taking(folder, disk, Notes(*ends), {})
            taking(batch(spark, (message(key, each, day) for key in KEYS for each in range(before, behind))), epoch)
        assert sequences(read_archive(spark, str(tmp_path))) in (expected(before), expected(behind)), name
        give(spark, tmp_path, [epoch], *ends)
        assert sequences(read_archive(spark, str(tmp_path))) == expected(behind), name
    give(spark, tmp_path, [len(CRASHES) + 1], *ends)
    assert sequences(read_archive(spark, str(tmp_path))) == sequences(plain(spark, tmp_path)) == expected(ends[-1])


@pytest.mark.long
def test_of_a_lost_checkpoint_s_new_epochs_only_what_is_new_is_taken(spark: SparkSession, tmp_path: Path) -> None:
    give(spark, tmp_path, [0, 1], 10, 25)
    assert give(spark, tmp_path, [0], 20) == []
    made = give(spark, tmp_path, [0], 40)
    assert [each.ranges for each in made] == [dict.fromkeys(KEYS, ((25, 40),))]
    assert sequences(read_archive(spark, str(tmp_path))) == expected(40)


def test_a_stream_that_begins_behind_the_archive_s_end_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    give(spark, tmp_path, [0], 10)
    with pytest.raises(Exception, match="the archive ends at 10, the stream continues at 25"):
        give(spark, tmp_path, [1], 25, 30)


def test_rows_that_do_not_belong_to_an_epoch_s_offsets_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as folder, pytest.raises(Exception, match="nothing was archived"):
        Taking(folder, DISK, Notes(10), {})(batch(spark, [message(KEYS[0], 10)]), 0)
    assert sequences(read_archive(spark, str(tmp_path))) == []


def compacted(spark: SparkSession, root: Path) -> list[Any]:
    with closing(opened(root)) as folder:
        return archive_compaction.compact(spark, folder, DISK, LATER_MS)


@pytest.mark.long
def test_compaction_keeps_every_row_for_every_reader_and_late_messages_are_taken_in(spark: SparkSession, tmp_path: Path) -> None:
    give(spark, tmp_path, [0, 1, 2], 10, 25, 30)
    before = read_archive(spark, str(tmp_path))
    rows, files = everything(before), len(list((tmp_path / "data").rglob("*.parquet")))
    assert len(compacted(spark, tmp_path)) == 2
    assert len(list((tmp_path / "data").rglob("*.parquet"))) == 2 < files
    for found in (read_archive(spark, str(tmp_path)), plain(spark, tmp_path), before):  # who reads still has the old files
        assert everything(found) == rows
    assert compacted(spark, tmp_path) == []
    give(spark, tmp_path, [3], 10, 25, 30, 37)  # into days that are over
    assert len(compacted(spark, tmp_path)) == 2
    assert sequences(read_archive(spark, str(tmp_path))) == sequences(plain(spark, tmp_path)) == expected(37)
    with closing(opened(tmp_path)) as folder:
        assert len(folder.sweep(LATER_MS)) > files
    assert sequences(read_archive(spark, str(tmp_path))) == expected(37)
    assert len(list((tmp_path / "_qmq" / "files").rglob("*.parquet"))) == 2


@pytest.mark.long
def test_a_compaction_that_would_change_rows_changes_nothing(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(spark, tmp_path, [0, 1], 10, 25)
    rewrite = archive_files.rewrite_rows
    monkeypatch.setattr(archive_files, "rewrite_rows", lambda rows, *rest: rewrite(rows.where("sequence != 7"), *rest))
    with pytest.raises(Exception, match="the archive is unchanged"):
        compacted(spark, tmp_path)
    monkeypatch.undo()
    assert sequences(read_archive(spark, str(tmp_path))) == sequences(plain(spark, tmp_path)) == expected(25)


def archived(spark: SparkSession, node: Path, out: Path, *more: str) -> int:
    return main(ArchiveJob(), ["--path", str(node), "--pattern", "orders|pay", "--out", str(out), *more], spark)


def test_the_job_takes_what_is_new_once_and_verify_finds_it_the_same_as_the_log(
    spark: SparkSession, node_process: NodeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "out", node_process.data
    _send(node_process, 120)
    assert archived(spark, folder, out, "-o", "maxOffsetsPerTrigger=100") == 0
    first = everything(read_archive(spark, str(out)))
    assert len(first) == 240
    assert archived(spark, folder, out) == 0
    assert everything(read_archive(spark, str(out))) == first == everything(plain(spark, out))

    _send(node_process, 30)
    shutil.rmtree(next((out / "_qmq" / "checkpoint").glob("*/")))  # without its checkpoint it goes on where the manifests end
    assert archived(spark, folder, out, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["facts"]["archived now"] == 60
    assert archived(spark, folder, out, "--verify") == 0

    log = spark.read.format("qmq").options(**{"qmq.path": str(folder), "subscribePattern": "orders|pay", "includeHeaders": "true"}).load()
    assert everything(log) == everything(read_archive(spark, str(out)))

    _drop_a_row(out)
    assert archived(spark, folder, out, "--verify") == 1
    assert "only in the log" in capsys.readouterr().out


def _send(node: NodeProcess, count: int) -> None:
    address = node.start()
    for subject in ("orders", "pay"):
        numbers = range(count)
        publishing.send(
            address,
            subject,
            [f"{subject} {each}" for each in numbers],
            [f"k{each % 7}" for each in numbers],
            tags=[["t", "é"] for _ in numbers],
            headers=[{"number": bytes([each % 256])} for each in numbers],
        )
    assert node.stop() == 0


def _drop_a_row(out: Path) -> None:
    """Somebody rewrites a file of the archive."""
    path = next(path for path in (out / "_qmq" / "files").rglob("*.parquet") if "subject=orders" in str(path))
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.slice(1), path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--path", "/nowhere", "--subject", "orders"], "--out"),
        (["--path", "/nowhere", "--subject", "orders", "--out", "s3://bucket/x"], "is not a local folder"),
        (["--path", "/nowhere", "--subject", "orders", "--out", "OUT", "--until", "2026-01-01"], "--until"),
        (["--subject", "orders", "--out", "OUT"], "give the log"),
        (["--path", "/nowhere", "--out", "OUT"], "give the subjects"),
        (["--path", "/nowhere", "--subject", "orders", "--out", "OUT"], "[E"),
        (["--path", "/nowhere", "--subject", "orders", "--out", "OUT", "--verify"], "no archive"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    spark: SparkSession, tmp_path: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ArchiveJob(), [each.replace("OUT", str(tmp_path / "out")) for each in argv], spark) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: [E")
    assert words in printed
    assert printed.count("\n") == 1


def test_there_is_no_archive_where_nobody_made_one(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no archive"):
        read_archive(spark, str(tmp_path))
