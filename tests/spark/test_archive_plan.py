"""What a compaction rewrites, where a stream goes on, and what the archive job says: without Spark."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark_qmq.jobs import archive_report
from pyspark_qmq.jobs.archive_compaction import AIM_BYTES, SMALL_BYTES, STEP_BYTES, Fingerprint, plan
from pyspark_qmq.jobs.archive_manifest import Archive, ArchivedFile, Extent, Manifest
from pyspark_qmq.jobs.archive_stream import CheckpointNotes, Taking, wait
from pyspark_qmq.jobs.archive_verify import Compared
from pyspark_qmq.source_model import QueueKey

from qmq.errors import ClientClosed, LogDamaged
from qmq.limits import MIB

KEY = QueueKey("orders", 0, "g1")
ROOT = Path("/archive")


def file(number: int, size: int = MIB, day: str = "2026-01-01", subject: str = "orders") -> ArchivedFile:
    return ArchivedFile(f"attempt=r-{number}/subject={subject}/day={day}/{number:04}.parquet", size, {"0@g1": Extent(number, number, 1)})


def holding(*files: ArchivedFile) -> Archive:
    ranges = {KEY: ((0, 1000),)}
    return Archive().after([Manifest("archive", ranges, {KEY: 1000}, files, number=1)])


def test_small_files_of_days_that_are_over_are_rewritten_day_by_day() -> None:
    found = plan(holding(file(1), file(2), file(3, day="2026-01-02"), file(4, day="2026-01-02"), file(5, day="2026-01-03")), "2026-01-02")
    assert [(step.paths, step.files) for step in found] == [((file(1).path, file(2).path), 1)]
    by_subject = plan(holding(file(1), file(2, subject="bills"), file(3), file(4, subject="bills")), "2026-01-02")
    assert [step.old[0].subject for step in by_subject] == ["bills", "orders"]


def test_nothing_is_rewritten_that_would_not_become_fewer_files() -> None:
    assert plan(holding(file(1)), "2026-02-01") == []
    assert plan(holding(file(1, SMALL_BYTES), file(2, SMALL_BYTES)), "2026-02-01") == []
    assert plan(holding(file(1, SMALL_BYTES), file(2)), "2026-02-01") == []


def test_new_files_are_about_as_large_as_they_should_be_and_a_step_is_bounded() -> None:
    size = 100 * MIB
    files = [file(number, size) for number in range(100)]
    found = plan(holding(*files), "2026-02-01")
    assert [path for step in found for path in step.paths] == [each.path for each in files]  # neighbours together, each once
    for step in found:
        total = sum(each.size for each in step.old)
        assert total <= STEP_BYTES + size
        assert AIM_BYTES / 2 < total / step.files <= AIM_BYTES


def noted(folder: Path, offsets: list[int], commits: int) -> CheckpointNotes:
    """A checkpoint as Spark leaves it."""
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text('{"id":"q-1"}')
    for epoch, end in enumerate(offsets):
        (folder / "offsets" / str(epoch)).write_text("v1\n{}\n" + json.dumps({"orders": {"0@g1": end}}))
    for epoch in range(commits):
        (folder / "commits" / str(epoch)).write_text("v1\n{}")
    return CheckpointNotes(folder)


def reaching(end: int) -> Archive:
    return replace(holding(file(1)), reached={KEY: end})


def test_a_checkpoint_says_who_the_query_is_and_where_epochs_end(tmp_path: Path) -> None:
    notes = noted(tmp_path, [100, 250], 1)
    assert notes.query_id() == "q-1"
    assert [notes.ends_of(epoch) for epoch in (0, 1)] == [{KEY: 100}, {KEY: 250}]
    with pytest.raises(LogDamaged, match="the end of epoch 2"):
        notes.ends_of(2)


@pytest.mark.parametrize(
    ("offsets", "commits", "reached", "fits"),
    [
        ([100, 250], 2, 250, True),
        ([100, 250], 1, 100, True),  # died before the manifest of epoch 1
        ([100, 250], 1, 250, True),  # died behind it
        ([100, 250], 2, 400, True),  # somebody else went on: what is there is skipped
        ([100, 250], 2, 100, False),  # manifests from an older copy
        ([100, 250], 1, 99, False),
        ([100], 0, 0, True),  # died in the first epoch
        ([], 0, 0, False),
    ],
)
def test_a_checkpoint_is_gone_on_from_if_the_archive_reaches_its_beginning(
    tmp_path: Path, offsets: list[int], commits: int, reached: int, fits: bool
) -> None:
    assert noted(tmp_path, offsets, commits).fits(reaching(reached)) is fits


@pytest.mark.parametrize("torn", ["offsets/1", "offsets/0", "commits/0", "metadata"])
def test_a_checkpoint_that_a_power_cut_tore_is_not_gone_on_from(tmp_path: Path, torn: str) -> None:
    notes = noted(tmp_path, [100, 250], 1)
    (tmp_path / torn).write_bytes(b"")
    assert not notes.fits(reaching(250))


def test_no_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    assert not CheckpointNotes(tmp_path / "none").fits(Archive())


class Running:
    """A query that goes on until it is stopped; meanwhile the process gets a signal."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.is_stopped = False

    def awaitTermination(self, timeout: int | None = None) -> bool:
        if self.number is None:
            return True
        os.kill(os.getpid(), self.number)
        return False

    def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stream_that_is_asked_to_stop_is_stopped_and_nothing_is_raised(number: int) -> None:
    before = signal.getsignal(number)
    query = Running(number)
    wait(query)
    assert query.is_stopped
    assert signal.getsignal(number) is before


def test_a_stream_that_ends_by_itself_is_not_stopped() -> None:
    query = Running(None)
    wait(query)
    assert not query.is_stopped


def test_nothing_is_taken_behind_the_end(tmp_path: Path) -> None:
    nothing: Any = None
    taking = Taking(nothing, nothing, noted(tmp_path, [100], 0), {})
    taking.end()
    with pytest.raises(ClientClosed):
        taking(nothing, 0)


def test_the_report_says_what_was_taken_and_what_is_left() -> None:
    made = Manifest("archive", {KEY: ((0, 1000),)}, {KEY: 1000}, (file(1), file(2, day="2026-01-02")), number=1)
    found = archive_report.taken(ROOT, Archive().after([made]), [made], {KEY: 3})
    assert found.headline == "2 messages archived; 3 messages left in the log."
    assert found.is_clean
    assert found.facts["days"] == "2026-01-01 to 2026-01-02"
    assert found.tables[0].rows == (("orders", "2026-01-01", 1, MIB, 1), ("orders", "2026-01-02", 1, MIB, 1))
    assert found.tables[1].rows == (("orders", "0@g1", 1000, 3),)
    assert found.plots[0].series == {"orders": [1.0, 1.0]}


def test_many_subjects_share_a_bar() -> None:
    files = [file(number, subject=f"s{number}") for number in range(10)]
    plot = archive_report.compacted(ROOT, holding(*files), []).plots[0]
    assert list(plot.series)[-1] == "all others"
    assert sum(values[0] for values in plot.series.values()) == 10


def compared(**changed: object) -> Compared:
    same = Fingerprint(10, 0, 9, 1, 2)
    return replace(Compared(KEY, 10, 10, 0, 0, 12, same, same, False), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"in_archive": Fingerprint(9, 0, 9, 1, 2)}, "7  only in the log"),
        ({"repeated": 1}, "orders/0@g1"),
        ({"archived": 9}, "hold 9 rows, its manifests say 10"),
        ({"is_log_shorter": True}, "ends before the archive"),
    ],
)
def test_what_differs_is_a_finding_with_an_example(changed: dict[str, object], words: str) -> None:
    found = archive_report.verified(ROOT, holding(file(1)), [compared(), compared(**changed)], [], [(7, "only in the log")])
    assert not found.is_clean
    assert found.headline.startswith("1 of 2 queues")
    assert words in found.counterexample


def test_what_is_the_same_is_clean_and_gaps_are_no_finding() -> None:
    found = archive_report.verified(ROOT, holding(file(1)), [compared()], [], [])
    assert found.is_clean
    assert found.tables[0].rows[0][6] == 2
    assert not archive_report.verified(ROOT, holding(file(1)), [compared()], [("data/x", "gone")], []).is_clean
