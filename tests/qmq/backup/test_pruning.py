"""Old backups are deleted, and never a chunk that another backup needs: after a death at any call,
and beside a backup in the making.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_cluster import PLAIN, History, LiveCluster, objects_in, rest, running
from support import eventually

from qmq.backup.manifest import (
    VERSION,
    BackedUpGroup,
    BackedUpSegment,
    BackupManifest,
    ChunkedBytes,
    new_id,
    time_of_backup,
)
from qmq.backup.objects import BackupObjects
from qmq.backup.prune import HOUR_MS, BackupPruner, KeepRule, Mark, RunningMarks, Work, split_by
from qmq.backup.verify import BackupVerifier
from qmq.errors import BackupDamaged, BackupNotFound, InvalidArgument, Unavailable
from qmq.tiering.object_store import Objects, StoreAway, open_objects

DAY_MS = 24 * HOUR_MS
NOW_MS = 1_790_000_000_000


class WatchedObjects:
    """An object store that calls `before` before each call."""

    def __init__(self, inner: Objects, before: Callable[[], None]) -> None:
        self._inner, self._before = inner, before

    def create(self, name: str, data: bytes) -> bool:
        self._before()
        return self._inner.create(name, data)

    def get(self, name: str) -> bytes | None:
        self._before()
        return self._inner.get(name)

    def delete(self, name: str) -> None:
        self._before()
        self._inner.delete(name)

    def delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def names(self, prefix: str) -> list[str]:
        self._before()
        return self._inner.names(prefix)


def dying_after(calls: int) -> Callable[[], None]:
    left = iter(range(calls))

    def before() -> None:
        if next(left, None) is None:
            raise StoreAway("it died")

    return before


def at_call(number: int, act: Callable[[], None]) -> Callable[[], None]:
    calls: Iterator[int] = iter(range(1_000_000))

    def before() -> None:
        if next(calls) == number:
            act()

    return before


def put_backup(objects: BackupObjects, age_days: int, *bodies: bytes) -> BackupManifest:
    """A backup of these segments; equal ones are the same chunk."""
    return put_backup_of(objects, age_days, [objects.put_bytes(each) for each in bodies])


def put_backup_of(
    objects: BackupObjects, age_days: int, contents: list[ChunkedBytes]
) -> BackupManifest:
    time_ms = NOW_MS - age_days * DAY_MS
    segments = tuple(BackedUpSegment(at, content, True) for at, content in enumerate(contents))
    manifest = BackupManifest(
        VERSION,
        new_id(time_ms),
        time_ms,
        1,
        "0",
        objects.put_bytes(b"keys"),
        (BackedUpGroup("g1", "life", 1, 1, segments, ()),),
    )
    objects.put_manifest(manifest)
    return manifest


def is_whole(objects: BackupObjects, manifest: BackupManifest) -> bool:
    try:
        for content in objects.manifest(manifest.id).contents():
            objects.read_bytes(content)
    except (BackupDamaged, BackupNotFound):
        return False
    return True


def pruner(objects: BackupObjects) -> BackupPruner:
    return BackupPruner(objects, now_ms=lambda: NOW_MS)


@given(
    st.lists(st.integers(0, 100), min_size=1, unique=True), st.integers(0, 20), st.integers(0, 60)
)
def test_a_rule_keeps_the_newest_and_the_young(ages: list[int], count: int, days: int) -> None:
    if not count and not days:
        with pytest.raises(InvalidArgument, match="--keep"):
            KeepRule(count, days)
        return
    by_id = {new_id(NOW_MS - age * DAY_MS): age for age in ages}
    kept, deleted = split_by(KeepRule(count, days), list(by_id), NOW_MS)
    assert sorted((*kept, *deleted)) == sorted(by_id)
    newest = sorted(ages)[: max(count, 1)]
    assert {by_id[each] for each in kept} == {
        age for age in ages if age in newest or (days and age <= days)
    }


def test_an_id_says_its_time_and_a_foreign_one_is_kept() -> None:
    found = time_of_backup(new_id(NOW_MS + 123))
    assert found == datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(milliseconds=123)
    kept, deleted = split_by(KeepRule(1), ["aaa", new_id(NOW_MS - DAY_MS), new_id(NOW_MS)], NOW_MS)
    assert "aaa" in kept
    assert len(deleted) == 1


def test_only_what_no_backup_needs_is_deleted(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    old = put_backup(objects, 40, b"a", b"b")
    middle = put_backup(objects, 20, b"b", b"c")
    new = put_backup(objects, 1, b"c", b"d")
    objects.put_chunk(b"of a backup that was never finished")
    planned = pruner(objects).preview(KeepRule(days=30))
    assert is_whole(objects, old)
    done = pruner(objects).prune(KeepRule(days=30))
    assert done == planned
    assert (done.kept, done.deleted, done.chunks) == ((middle.id, new.id), (old.id,), 2)
    assert objects.ids() == [middle.id, new.id]
    assert is_whole(objects, middle)
    assert is_whole(objects, new)
    assert len(objects.chunk_names()) == 4
    assert objects.store.names("running") == []


def test_a_clock_that_is_ahead_deletes_no_backups_until_it_is_confirmed(tmp_path: Path) -> None:
    """Also when a backup was created by that clock: it is the newest, and is young."""
    objects = objects_in(tmp_path)
    old = [put_backup(objects, age, b"%d" % age) for age in (400, 3, 2, 1)]
    put_backup(objects, -365, b"created by the wrong clock")
    ahead = BackupPruner(objects, now_ms=lambda: NOW_MS + 365 * DAY_MS)
    with pytest.raises(
        InvalidArgument, match="4 backups are too old, and only 1 stay: nothing was deleted"
    ):
        ahead.prune(KeepRule(days=30))
    assert all(is_whole(objects, each) for each in old)
    assert pruner(objects).prune(KeepRule(days=30)).deleted == (old[0].id,)
    assert len(ahead.prune(KeepRule(days=30), is_clock_confirmed=True).deleted) == 3


def test_a_prune_that_dies_at_any_call_leaves_whole_backups_and_is_continued(
    tmp_path: Path,
) -> None:
    for calls in range(1_000):
        folder = tmp_path / str(calls)
        objects = objects_in(folder)
        old = put_backup(objects, 40, b"a", b"b")
        new = put_backup(objects, 1, b"b", b"c")
        dying = BackupObjects(WatchedObjects(open_objects(f"file://{folder}"), dying_after(calls)))
        try:
            pruner(dying).prune(KeepRule(1))
        except StoreAway:
            assert is_whole(objects, new)
            assert old.id not in objects.ids() or is_whole(objects, old)
            # when the mark that it left no longer counts
            later = BackupPruner(objects, now_ms=lambda: NOW_MS + HOUR_MS)
            later.prune(KeepRule(1))
            assert is_whole(objects, new)
            assert len(objects.chunk_names()) == 3
            assert objects.store.names("running") == []
            continue
        assert calls > 6
        return
    raise AssertionError("it dies always")


def test_a_backup_in_the_making_loses_no_chunk_whenever_it_begins(tmp_path: Path) -> None:
    """At each call of a prune, another process begins a backup that counts on a chunk which the
    prune would delete.
    """
    outcomes = set()
    for number in range(1_000):
        folder = tmp_path / str(number)
        objects = objects_in(folder)
        put_backup(objects, 40, b"a")
        put_backup(objects, 1, b"c")
        begun: list[Mark] = []
        counted_on: list[ChunkedBytes] = []

        def begin(
            objects: BackupObjects = objects,
            begun: list[Mark] = begun,
            counted_on: list[ChunkedBytes] = counted_on,
        ) -> None:
            marks = RunningMarks(objects.store)
            begun.append(marks.put(Work.CREATE, NOW_MS))
            if not any(each.work is Work.PRUNE for each in marks.others(begun[0])):
                counted_on.append(objects.put_bytes(b"a"))

        watched = BackupObjects(
            WatchedObjects(open_objects(f"file://{folder}"), at_call(number, begin))
        )
        try:
            pruner(watched).prune(KeepRule(1))
            outcomes.add("pruned")
        except Unavailable as refused:
            outcomes.add(refused.message.partition(" works here")[0])
        if counted_on:
            assert is_whole(objects, put_backup_of(objects, 0, counted_on)), number
        if not begun:
            assert outcomes == {"`qmq backup create`", "pruned"}
            return
    raise AssertionError("a prune makes no end of calls")


def test_the_mark_of_a_killed_backup_counts_for_a_day(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    put_backup(objects, 1, b"a")
    RunningMarks(objects.store).put(Work.CREATE, NOW_MS)
    with pytest.raises(Unavailable, match="works here since"):
        BackupPruner(objects, now_ms=lambda: NOW_MS + DAY_MS - 1).prune(KeepRule(1))
    assert len(objects.store.names("running")) == 1
    BackupPruner(objects, now_ms=lambda: NOW_MS + DAY_MS).prune(KeepRule(1))
    assert objects.store.names("running") == []


def test_a_prune_stops_before_its_mark_counts_no_more(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    put_backup(objects, 40, b"a")
    new = put_backup(objects, 1, b"c")
    seconds = iter([0.0, 1.0, 3_600.0])
    with pytest.raises(Unavailable, match="prune again"):
        BackupPruner(objects, now_ms=lambda: NOW_MS, seconds=lambda: next(seconds)).prune(
            KeepRule(1)
        )
    assert objects.ids() == [new.id]
    assert pruner(objects).prune(KeepRule(1)).chunks == 1


def test_nothing_is_deleted_while_a_backup_that_stays_cannot_be_read(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    old = put_backup(objects, 40, b"a")
    new = put_backup(objects, 1, b"c")
    path = tmp_path / "backups" / new.id / "manifest"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BackupDamaged, match=f"backups/{new.id}/manifest yourself"):
        pruner(objects).prune(KeepRule(1))
    assert is_whole(objects, old)
    path.write_bytes(data)
    assert is_whole(objects, new)


async def test_a_backup_waits_for_a_prune_and_fails_if_its_mark_was_taken(
    cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    marks = RunningMarks(objects.store)
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 5)
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    prune = marks.put(Work.PRUNE, now_ms)
    making = asyncio.ensure_future(cluster.back_up(objects))
    await eventually(lambda: len(objects.store.names("running")) >= 2)
    assert objects.ids() == []
    marks.take(prune)
    made = await making
    BackupVerifier(objects).verify(made)
    assert objects.store.names("running") == []

    def take_marks() -> None:
        for name in objects.store.names("running"):
            objects.store.delete(name)

    class TakingObjects(WatchedObjects):
        def create(self, name: str, data: bytes) -> bool:
            if name.startswith("backups/"):
                take_marks()
            return super().create(name, data)

    taking = BackupObjects(
        TakingObjects(open_objects(f"file://{tmp_path / 'backups'}"), lambda: None)
    )
    with pytest.raises(Unavailable, match="pruned meanwhile"):
        await cluster.back_up(taking)
    assert objects.ids() == [made.id]


@pytest.mark.sampled
async def test_a_cluster_is_restored_from_the_newest_after_a_prune(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        for _ in range(3):
            await history.send(mq, 20)
            newest = await cluster.back_up(objects_in(tmp_path / "backups"))
    await cluster.stop()
    words = ["backup", "prune", str(tmp_path / "backups"), "--keep", "1", "--json"]
    shown = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "qmq.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    (row,) = json.loads(shown.stdout)
    assert (row["kept"], len(row["deleted"])) == ([newest.id], 2)
    assert row["chunks"] > 0
    BackupVerifier(objects).verify(newest)
    await empty_cluster.restore(objects, newest)
    async with running(empty_cluster) as restored, restored.client() as mq:
        assert {body for _, body in await rest(mq, PLAIN, "new")} == set(history.plain)
