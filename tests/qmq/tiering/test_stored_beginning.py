"""A new replica's log that begins with the segments in the object store, as if it had replicated
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ManualClock
from support.tiered_log import CHUNK_BYTES, CONFIG, FaultyObjects, grow, in_memory, log_at

from qmq.log import follower, retention
from qmq.log.envelopes import entry_at, with_epoch
from qmq.log.recent_writes import WriteRun
from qmq.log.recovery import CannotTake, open_store, take_segments
from qmq.log.store import PendingEntry, Store
from qmq.tiering.object_store import Objects
from qmq.tiering.segment_copier import SegmentCopying, sealed_segments
from qmq.tiering.stored_reads import StoredBeginnings, StoredReads, follow_manifests
from qmq.tiering.stored_segment import Manifest, ObjectNames, SealedSegment
from qmq.wire.batch import Kind

NAMES = ObjectNames("g")


def copied(store: Store, count: int = 100) -> Objects:
    """An object store with the first sealed segments."""
    objects = in_memory()
    copying = SegmentCopying(
        objects, NAMES, store.disk, store.messages.folder, lambda: True, CHUNK_BYTES
    )
    for segment in sealed_segments(store)[:count]:
        copying.copy(segment, set())
    return objects


def opening_of(store: Store, position: int) -> PendingEntry:
    entry = entry_at(store.messages, position)
    return PendingEntry(0, position, entry.envelope, entry.region)


def beginnings(objects: Objects) -> StoredBeginnings:
    return StoredBeginnings(objects, "g", pauses_s=(0, 0, 0))


@contextmanager
def begun(folder: Path, master: Store, objects: Objects, base: int = 0) -> Iterator[Store]:
    """A new replica's store, which has taken what the object store has."""
    reads = beginnings(objects)
    indexes = reads.find(base)
    end = indexes[-1].end
    follower.start_over(folder, (end, master.actions.start))
    stored = StoredReads(objects, "g", folder / "cache", 1 << 20)
    store = open_store(folder, CONFIG, ManualClock(), is_replicated=True, stored=stored)
    try:
        take_segments(store, indexes, reads.entries, opening_of(master, end))
        yield store
    finally:
        store.close()
        stored.close()


def test_the_messages_before_the_tail_are_there_without_a_file(tmp_path: Path) -> None:
    with log_at(tmp_path / "1") as master:
        objects = copied(master)
        with begun(tmp_path / "2", master, objects) as store:
            end = master.messages.bases[-1]
            assert store.messages.bases == master.messages.bases
            assert (store.messages.start, store.messages.local_start, store.messages.end) == (
                0,
                end,
                end,
            )
            assert [path.name for path in store.messages.folder.glob("*.log")] == [
                f"{end:020d}.log"
            ]
            ours, theirs = store.open_queue("s", 0), master.open_queue("s", 0)
            before = [entry for _, entry in theirs.index.scan(0) if entry.position < end]
            assert [entry for _, entry in ours.index.scan(0)] == before
            assert (ours.start_sequence, ours.next_sequence) == (0, before[-1].next_sequence)
            assert ours.index.tail_bytes == 0, "memory must not grow with the log"
            for entry in before:
                assert store.messages.read_waiting(
                    entry.position, entry.total_bytes
                ) == master.messages.read(entry.position, entry.total_bytes)


def test_it_begins_where_retention_lets_the_masters_log_begin(tmp_path: Path) -> None:
    with log_at(tmp_path / "1") as master:
        objects = copied(master)
        master.messages.drop_files_before(base := master.messages.bases[1])
        with begun(tmp_path / "2", master, objects, base) as store:
            assert store.messages.start == base
            queue = store.open_queue("s", 0)
            kept = [
                entry
                for _, entry in master.open_queue("s", 0).index.scan(0)
                if base <= entry.position < store.messages.end
            ]
            assert [entry for _, entry in queue.index.scan(queue.index.first)] == kept
            assert queue.start_sequence == kept[0].base_sequence


def test_a_purge_in_the_stored_part_is_obeyed(tmp_path: Path) -> None:
    with log_at(tmp_path / "1", batches=5) as master:
        retention.purge(master, master.open_queue("s", 0))
        start = master.open_queue("s", 0).start_sequence
        grow(master, 8)
        with begun(tmp_path / "2", master, copied(master)) as store:
            assert store.open_queue("s", 0).start_sequence == start > 0


def test_the_tail_follows_and_the_log_opens_again_with_everything(tmp_path: Path) -> None:
    with log_at(tmp_path / "1") as master:
        objects = copied(master)
        with begun(tmp_path / "2", master, objects) as store:
            store.begin_at(0, 0)
            end = store.messages.end
            entries, position = [], end
            while position < master.messages.end:
                entries.append(entry_at(master.messages, position))
                position = entries[-1].end
            data = b"".join([each.head + each.region for each in entries])
            runs = [WriteRun(0, end, end, len(data), follower.split_entries(data))]
            follower.take(
                store, runs, follower.check_stretch(runs, store.index, entries[-1].envelope.index)
            )
            store.commit(store.index)
            assert store.index == master.index
            assert store.epochs == [(1, 1)]
            assert store.tail.read((0, 0), 0, 1 << 20) is None, (
                "a slave without the stored part is served from the files"
            )
        stored = StoredReads(objects, "g", tmp_path / "cache", 1 << 20)
        again = open_store(tmp_path / "2", CONFIG, ManualClock(), is_replicated=True, stored=stored)
        try:
            assert again.index == master.index
            assert (
                again.open_queue("s", 0).to_snapshot()[2:5]
                == master.open_queue("s", 0).to_snapshot()[2:5]
            )
        finally:
            again.close()
            stored.close()


def test_requests_that_fail_a_few_times_do_not_matter(tmp_path: Path) -> None:
    with log_at(tmp_path / "1") as master:
        objects = FaultyObjects(copied(master), lambda call: call % 3 != 0)
        with begun(tmp_path / "2", master, objects) as store:
            assert store.messages.bases == master.messages.bases


@pytest.mark.parametrize("answered", [0, 1, 6, 9])
def test_a_store_that_stays_away_is_given_up(tmp_path: Path, answered: int) -> None:
    with log_at(tmp_path / "1") as master:
        objects = FaultyObjects(copied(master), lambda call: call > answered)
        with (
            pytest.raises(CannotTake, match="does not answer"),
            begun(tmp_path / "2", master, objects),
        ):
            pass


@pytest.mark.parametrize("damage", [b"", b"QMG1", b"half"])
def test_the_stored_part_ends_before_a_manifest_that_cannot_be_read(
    tmp_path: Path, damage: bytes
) -> None:
    with log_at(tmp_path / "1") as master:
        objects, second = copied(master), sealed_segments(master)[1]
        whole = objects.get(NAMES.manifest(second))
        assert whole is not None
        objects.delete(NAMES.manifest(second))
        objects.create(NAMES.manifest(second), whole[:-3] if damage == b"half" else damage)
        assert [each.base for each in beginnings(objects).find(0)] == [0]
        with begun(tmp_path / "2", master, objects) as store:
            assert store.messages.bases == master.messages.bases[:2]


@pytest.mark.parametrize("changed", [None, b"other bytes"])
def test_a_chunk_that_is_gone_or_changed_is_refused(tmp_path: Path, changed: bytes | None) -> None:
    with log_at(tmp_path / "1") as master:
        objects, name = copied(master), NAMES.chunk(sealed_segments(master)[1], 2)
        objects.delete(name)
        if changed is not None:
            objects.create(name, changed)
        with (
            pytest.raises(CannotTake, match=r"does not have|other bytes"),
            begun(tmp_path / "2", master, objects),
        ):
            pass


def test_segments_of_another_log_are_refused(tmp_path: Path) -> None:
    """A new cluster with the name of an older one, whose objects are still there."""
    old = open_store(tmp_path / "old", CONFIG, ManualClock(1_600_000_000_000))
    grow(old, 13)
    with log_at(tmp_path / "1") as master, closing(old):
        assert old.messages.bases == master.messages.bases
        reads = beginnings(copied(old))
        indexes = reads.find(0)
        follower.start_over(tmp_path / "2", (indexes[-1].end, 0))
        store = open_store(tmp_path / "2", CONFIG, ManualClock(), is_replicated=True)
        opening = opening_of(master, indexes[-1].end)
        try:
            with pytest.raises(CannotTake, match="another log"):
                take_segments(store, indexes, reads.entries, opening)
            with pytest.raises(CannotTake, match="does not continue"):
                take_segments(store, indexes, reads.entries, opening_of(master, 0))
        finally:
            store.close()


async def test_a_process_that_ends_does_not_wait_for_the_store(tmp_path: Path) -> None:
    with log_at(tmp_path / "1") as master:
        reads = StoredBeginnings(
            FaultyObjects(copied(master), lambda _: True), "g", pauses_s=(3600,)
        )
        finding = asyncio.create_task(asyncio.to_thread(reads.find, 0))
        await asyncio.sleep(0)
        reads.stop()
        with pytest.raises(CannotTake, match=r"stops|answer"):
            await finding


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 10))
def test_segments_follow_each_other_up_to_the_first_that_is_missing(
    sizes: list[int], missing: int
) -> None:
    found, base = {}, 0
    for number, size in enumerate(sizes):
        if number != missing:
            found[base] = Manifest(SealedSegment(base, size), 1, (0,) * size)
        base += size
    followed = [each.segment.size for each in follow_manifests(found.get, 0)]
    assert followed == sizes[:missing]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.data())
def test_epochs_are_the_same_however_the_two_logs_entries_arrive(
    lengths: list[int], data: st.DataObject
) -> None:
    """The message log's entries are known first, and those of the action log come later."""
    epochs = [epoch for epoch, length in enumerate(lengths, 1) for _ in range(length)]
    whole: list[tuple[int, int]] = []
    for index, epoch in enumerate(epochs, 1):
        if not whole or whole[-1][0] != epoch:
            whole.append((epoch, index))
    is_message = data.draw(st.lists(st.booleans(), min_size=len(epochs), max_size=len(epochs)))
    found: list[tuple[int, int]] = []
    for wanted in (True, False):
        for index, epoch in enumerate(epochs, 1):
            if is_message[index - 1] is wanted:
                found = with_epoch(found, epoch, index)
    assert found == whole


def test_every_segment_but_the_first_opens_with_a_snapshot(tmp_path: Path) -> None:
    with log_at(tmp_path) as store:
        kinds = {entry_at(store.messages, base).envelope.kind for base in store.messages.bases[1:]}
        assert kinds == {Kind.SNAPSHOT}
