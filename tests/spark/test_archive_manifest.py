"""The chain of manifests: what it adds up to, and what it refuses."""

from __future__ import annotations

import pytest
from pyspark_qmq.jobs.archive_manifest import Archive, ArchivedFile, Extent, Manifest, numbered, parse_manifest, parse_snapshot
from pyspark_qmq.source_model import QueueKey

from qmq.errors import LogDamaged

KEY = QueueKey("orders", 3, "g1")


def file(name: str, first: int, end: int, day: str = "2026-01-01") -> ArchivedFile:
    return ArchivedFile(f"attempt=r-1/subject=orders/day={day}/{name}.parquet", 1000, {"3@g1": Extent(first, end - 1, end - first)})


def taken(number: int, name: str, first: int, end: int) -> Manifest:
    return Manifest("archive", {KEY: ((first, end),)}, {KEY: end}, (file(name, first, end),), (), "query q, epoch 1", number, 17)


FIRST, SECOND = taken(1, "a", 0, 10), taken(2, "b", 10, 25)
COMPACTED = Manifest("compact", files=(file("c", 0, 25),), gone=(FIRST.files[0].path, SECOND.files[0].path), number=3, time_ms=50)
SWEPT = Manifest("sweep", gone=COMPACTED.gone, number=4, time_ms=60)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    for each in (FIRST, COMPACTED, SWEPT, Manifest("archive", number=9)):
        assert parse_manifest(each.to_json(), "x") == each


def test_a_path_says_subject_day_and_where_plain_readers_look() -> None:
    found = file("a", 0, 10, "2026-02-28")
    assert (found.subject, found.day, found.rows) == ("orders", "2026-02-28", 10)
    assert found.plain == "subject=orders/day=2026-02-28/a.parquet"


def test_manifests_add_up_to_an_archive() -> None:
    found = Archive().after([FIRST, SECOND])
    assert (found.number, found.rows, found.covered, found.reached) == (2, 25, {KEY: ((0, 25),)}, {KEY: 25})
    assert sorted(each.path for each in found.files.values()) == [FIRST.files[0].path, SECOND.files[0].path]
    assert found.lacks({KEY: ((20, 30),)}) == {KEY: ((25, 30),)}


def test_it_is_the_same_whether_manifests_come_one_by_one_or_together() -> None:
    chain = [FIRST, SECOND, COMPACTED, SWEPT]
    step_by_step = Archive()
    for each in chain:
        step_by_step = step_by_step.after([each])
    assert step_by_step == Archive().after(chain)


def test_what_was_replaced_is_kept_until_it_is_swept_and_rows_stay_the_same() -> None:
    found = Archive().after([FIRST, SECOND, COMPACTED])
    assert list(found.files) == [COMPACTED.files[0].path]
    assert found.rows == 25
    assert found.kept == dict.fromkeys(COMPACTED.gone, 50)
    assert found.after([SWEPT]).kept == {}


def test_a_snapshot_is_the_archive() -> None:
    found = Archive().after([FIRST, SECOND, COMPACTED])
    assert parse_snapshot(found.to_json()) == found
    with pytest.raises(ValueError, match="format"):
        parse_snapshot(found.to_json().replace(b'"format": 1', b'"format": 2'))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(taken(2, "b", 9, 25), id="a range is taken twice"),
        pytest.param(taken(3, "b", 10, 25), id="a number is left out"),
        pytest.param(taken(2, "a", 10, 25), id="a file comes twice"),
        pytest.param(Manifest("compact", gone=("attempt=x/subject=orders/day=2026-01-01/x",), number=2), id="a file goes that never came"),
        pytest.param(Manifest("sweep", gone=(FIRST.files[0].path,), number=2), id="a file is deleted that is in the archive"),
    ],
)
def test_a_chain_that_does_not_hold_together_is_refused(wrong: Manifest) -> None:
    with pytest.raises(LogDamaged, match="does not follow"):
        Archive().after([FIRST, wrong])


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format":2}', FIRST.to_json()[:-40], FIRST.to_json().replace(b'"3@g1"', b'"x"')])
def test_a_manifest_that_cannot_be_read_is_named(data: bytes) -> None:
    with pytest.raises(LogDamaged, match=r"0000000007\.json"):
        parse_manifest(data, "0000000007.json")


def test_a_number_and_a_time_are_all_that_a_place_in_the_chain_changes() -> None:
    assert numbered(numbered(FIRST, 8, 9), 1, 17) == FIRST
