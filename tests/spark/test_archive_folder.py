"""An archive's folder on a real disk: a process that dies at any call leaves what the next one finishes; two writers undo nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark_qmq.jobs.archive_chain import SNAPSHOT_EVERY, ManifestChain
from pyspark_qmq.jobs.archive_disk import ArchiveDisk, walk
from pyspark_qmq.jobs.archive_folder import ArchiveFolder, local_path
from pyspark_qmq.jobs.archive_manifest import Archive, ArchivedFile, Extent, Manifest
from pyspark_qmq.source_model import QueueKey

from qmq.errors import DiskFull, FolderInUse, InvalidArgument, LogDamaged

KEY = QueueKey("orders", 0, "g1")
PARTS = (("a", 0, 10), ("b", 10, 30))
DEATH = 9
FAR_MS = 1 << 50


class DyingDisk(ArchiveDisk):
    """The process dies at the n-th call, before or behind it."""

    CALLS = ("make_folder", "create", "replace", "link", "unlink", "remove_folder", "sync_tree", "sync_folder")

    def __init__(self, fatal: int, *, is_behind: bool) -> None:
        self.calls = 0
        self._fatal = fatal
        self._is_behind = is_behind

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._counted(found) if name in DyingDisk.CALLS else found

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.calls += 1
            is_last = self.calls == self._fatal
            if is_last and not self._is_behind:
                os._exit(DEATH)
            found = call(*arguments)
            if is_last:
                os._exit(DEATH)
            return found

        return counted


def opened(root: Path, disk: ArchiveDisk | None = None, run: str = "r1") -> ArchiveFolder:
    times = iter(range(1000, 1 << 30))
    return ArchiveFolder(root, disk=disk or ArchiveDisk(), now_ms=lambda: next(times), run=run)


def staged(folder: ArchiveFolder, name: str, first: int, end: int) -> tuple[Path, ArchivedFile]:
    """A file as Spark would have left it; its content is its sequences."""
    attempt = folder.attempt()
    path = attempt / "subject=orders" / "day=2026-01-01" / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    path.write_text(" ".join(map(str, range(first, end))))
    return attempt, ArchivedFile(str(path.relative_to(folder.files)), path.stat().st_size, {"0@g1": Extent(first, end - 1, end - first)})


def take(folder: ArchiveFolder, name: str, first: int, end: int) -> Manifest | None:
    attempt, file = staged(folder, name, first, end)
    return folder.commit(attempt, Manifest("archive", {KEY: ((first, end),)}, {KEY: end}, (file,)))


def work(root: Path, disk: ArchiveDisk, run: str) -> None:
    """All that writers do; what is done already is not done again."""
    folder = opened(root, disk, run)
    folder.identify({})
    for name, first, end in PARTS:
        if folder.latest().lacks({KEY: ((first, end),)}):
            take(folder, name, first, end)
    small = [each for each in folder.latest().files if not each.endswith("/c.parquet")]
    if small:
        attempt, file = staged(folder, "c", 0, 30)
        folder.commit(attempt, Manifest("compact", files=(file,), gone=tuple(small)))
    folder.sweep(FAR_MS)
    folder.close()


def sequences(root: Path) -> list[int]:
    """What a reader of the manifests finds, at this moment."""
    archive = ManifestChain(root / "_qmq", ArchiveDisk()).latest()
    return sorted(number for path in archive.files for number in numbers(root / "_qmq" / "files" / path))


def shown(root: Path) -> list[int]:
    """What a plain reader finds, at this moment."""
    return sorted(number for path in walk(root / "data") for number in numbers(path))


def numbers(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def died(root: Path, fatal: int, *, is_behind: bool) -> bool:
    """Work in a process of its own, which ends at the given call; whether it did."""
    child = os.fork()
    if child == 0:
        try:
            work(root, DyingDisk(fatal, is_behind=is_behind), "dead")
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DEATH)
    return status == DEATH


@pytest.mark.long
@pytest.mark.parametrize("is_behind", [False, True], ids=["before", "behind"])
def test_a_process_that_dies_at_any_call_leaves_whole_changes_and_the_next_one_finishes(tmp_path: Path, is_behind: bool) -> None:
    fatal = 0
    while True:
        fatal += 1
        root = tmp_path / str(fatal)
        if not died(root, fatal, is_behind=is_behind):
            break
        if (root / "_qmq" / "manifests").is_dir():
            assert sequences(root) in ([], list(range(10)), list(range(30)))  # each change whole or not at all
        work(root, ArchiveDisk(), "next")
        assert sequences(root) == shown(root) == list(range(30))
        left = [str(each.relative_to(root / "_qmq" / "files")) for each in walk(root / "_qmq" / "files")]
        assert left == list(ManifestChain(root / "_qmq", ArchiveDisk()).latest().files)  # nothing of the dead is left
        assert not list((root / "_qmq" / "running").iterdir())
        assert not list((root / "_qmq" / "manifests").glob(".*"))
    assert fatal > 40


def test_of_two_writers_that_take_the_same_range_one_does_and_the_other_hears_of_it(tmp_path: Path) -> None:
    one, two = opened(tmp_path, run="one"), opened(tmp_path, run="two")
    assert two.latest() == Archive()
    assert take(one, "a", 0, 10) is not None
    assert take(two, "b", 5, 15) is None
    assert not list(two.files.glob("attempt=two-*"))
    assert take(two, "b", 10, 15) is not None
    assert one.latest().covered == {KEY: ((0, 15),)}
    assert sequences(tmp_path) == shown(tmp_path) == list(range(15))
    one.close()
    two.close()


def test_a_file_is_replaced_by_one_compaction_only(tmp_path: Path) -> None:
    one, two = opened(tmp_path, run="one"), opened(tmp_path, run="two")
    take(one, "a", 0, 10)
    gone = tuple(one.latest().files)
    made = []
    for folder in (one, two):
        attempt, file = staged(folder, "c", 0, 10)
        made.append(folder.commit(attempt, Manifest("compact", files=(file,), gone=gone)))
    assert made[0] is not None
    assert made[1] is None
    assert shown(tmp_path) == list(range(10))
    one.close()
    two.close()


class Meanwhile(ArchiveDisk):
    """Somebody else does something just before this process shows its file to plain readers."""

    def __init__(self, root: Path) -> None:
        self._data = root / "data"
        self.act: Callable[[], object] | None = None

    def link(self, source: Path, target: Path) -> bool:
        act = self.act
        if act is not None and target.is_relative_to(self._data):
            self.act = None
            act()
        return super().link(source, target)


def test_a_file_that_is_replaced_before_it_was_shown_is_not_shown_beside_its_successor(tmp_path: Path) -> None:
    disk = Meanwhile(tmp_path)
    slow, fast = opened(tmp_path, disk, "slow"), opened(tmp_path, run="fast")

    def compact() -> None:
        attempt, file = staged(fast, "c", 0, 10)
        assert fast.commit(attempt, Manifest("compact", files=(file,), gone=tuple(fast.latest().files))) is not None

    disk.act = compact
    assert take(slow, "a", 0, 10) is not None
    assert shown(tmp_path) == sequences(tmp_path) == list(range(10))
    slow.close()
    fast.close()


def test_replaced_files_stay_for_their_readers_until_they_are_swept(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    take(folder, "a", 0, 10)
    reading = [folder.files / path for path in folder.latest().files]
    attempt, file = staged(folder, "c", 0, 10)
    made = folder.commit(attempt, Manifest("compact", files=(file,), gone=tuple(folder.latest().files)))
    assert made is not None
    assert folder.sweep(made.time_ms) == ()
    assert numbers(reading[0]) == list(range(10))
    assert folder.sweep(made.time_ms + 1) == made.gone
    assert not reading[0].exists()
    assert sequences(tmp_path) == shown(tmp_path) == list(range(10))
    folder.close()


def test_attempts_of_living_processes_are_left_alone(tmp_path: Path) -> None:
    living, sweeping = opened(tmp_path, run="living"), opened(tmp_path, run="sweeping")
    attempt, file = staged(living, "a", 0, 10)
    dead = tmp_path / "_qmq" / "files" / "attempt=dead-1"
    dead.mkdir()
    sweeping.sweep(FAR_MS)
    assert not dead.exists()
    assert living.commit(attempt, Manifest("archive", {KEY: ((0, 10),)}, {KEY: 10}, (file,))) is not None
    living.close()
    sweeping.close()


def test_the_plain_folder_is_mended_whatever_became_of_it(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for each in PARTS:
        take(folder, *each)
    folder.close()
    for path in list(walk(tmp_path / "data"))[:1]:
        path.unlink()
    assert shown(tmp_path) != list(range(30))
    opened(tmp_path, run="r2").close()
    assert shown(tmp_path) == list(range(30))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    take(folder, "a", 0, 10)
    folder.close()
    for path in [*walk(tmp_path / "data"), *walk(tmp_path / "_qmq" / "files")]:
        path.unlink()
    with pytest.raises(LogDamaged, match=r"a\.parquet is gone"):
        opened(tmp_path, run="r2")


def test_a_missing_manifest_is_noticed_and_not_written_again(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for number in range(4):
        take(folder, f"p{number}", number, number + 1)
    folder.close()
    (tmp_path / "_qmq" / "manifests" / "0000000002.json").unlink()
    with pytest.raises(LogDamaged, match="manifest 2 is missing"):
        opened(tmp_path, run="r2")


def test_a_long_chain_is_read_from_its_snapshot_and_without_it_just_the_same(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for number in range(2 * SNAPSHOT_EVERY + 3):
        take(folder, f"p{number}", number, number + 1)
    folder.close()
    with_snapshot = ManifestChain(tmp_path / "_qmq", ArchiveDisk()).latest()
    snapshots = sorted((tmp_path / "_qmq" / "snapshots").iterdir())
    assert [each.name for each in snapshots] == [f"{SNAPSHOT_EVERY * times:010}.json" for times in (1, 2)]
    snapshots[1].write_text("torn")
    assert ManifestChain(tmp_path / "_qmq", ArchiveDisk()).latest() == with_snapshot
    for each in snapshots:
        each.unlink()
    assert ManifestChain(tmp_path / "_qmq", ArchiveDisk()).latest() == with_snapshot
    assert with_snapshot.rows == 2 * SNAPSHOT_EVERY + 3


def test_one_process_at_a_time_has_a_checkpoint(tmp_path: Path) -> None:
    one, two = opened(tmp_path, run="one"), opened(tmp_path, run="two")
    assert one.checkpoint("q").parent == two.checkpoint("other").parent
    with pytest.raises(FolderInUse, match="another process"):
        opened(tmp_path, run="three").checkpoint("q")
    one.close()
    assert opened(tmp_path, run="four").checkpoint("q").name == "q"
    two.close()


def test_an_archive_keeps_to_one_selection(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.identify({"tags": "paid"})
    folder.identify({"tags": "paid"})
    with pytest.raises(InvalidArgument, match="use another folder"):
        folder.identify({})
    assert json.loads((tmp_path / "_qmq" / "archive.json").read_text())["selection"] == {"tags": "paid"}
    folder.close()


@pytest.mark.parametrize("text", ["s3://bucket/archive", "hdfs://host/archive", "/data/arch*", "/data/[x]"])
def test_what_is_no_local_folder_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        local_path(text)


def test_a_local_folder_may_be_written_as_an_address() -> None:
    assert local_path("file:///data/archive") == Path("/data/archive")


@pytest.fixture
def failing_link(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def fail(number: int) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)

    return fail


def test_a_file_system_without_hard_links_is_refused_and_nothing_is_left(tmp_path: Path, failing_link: Callable[[int], None]) -> None:
    failing_link(errno.EOPNOTSUPP)
    with pytest.raises(InvalidArgument, match="without hard links"):
        ArchiveDisk().create(tmp_path / "x", b"data", "w")
    assert not list(tmp_path.iterdir())


def test_a_link_that_was_made_although_its_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    assert ArchiveDisk().create(tmp_path / "x", b"ours", "w")
    monkeypatch.undo()
    assert not ArchiveDisk().create(tmp_path / "x", b"theirs", "w")
    assert (tmp_path / "x").read_bytes() == b"ours"


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="free some"):
        ArchiveDisk().create(tmp_path / "x", b"data", "w")
    assert not list(tmp_path.iterdir())
