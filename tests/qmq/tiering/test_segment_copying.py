"""One segment into an object store and back: a fault at every call, real stores, other logs,
damaged files.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from google_crc32c import value as crc32c
from support.tiered_log import CHUNK_BYTES, FaultyObjects, in_memory, log_at

from qmq.errors import InvalidArgument
from qmq.log.segments import segment_name
from qmq.log.store import Store
from qmq.tiering.object_store import Objects, StoreAway, open_objects
from qmq.tiering.segment_copier import (
    Interrupted,
    SegmentConflict,
    SegmentCopying,
    SegmentDamaged,
    sealed_segments,
)
from qmq.tiering.stored_segment import ObjectNames, SealedSegment

NAMES = ObjectNames("g")


def copying(store: Store, objects: Objects) -> SegmentCopying:
    return SegmentCopying(
        objects, NAMES, store.disk, store.messages.folder, lambda: True, CHUNK_BYTES
    )


def stored_bytes(objects: Objects, segment: SealedSegment) -> bytes:
    return b"".join(
        [
            objects.get(NAMES.chunk(segment, number)) or b""
            for number in range(segment.chunk_count(CHUNK_BYTES))
        ]
    )


def file_bytes(store: Store, segment: SealedSegment) -> bytes:
    return (store.messages.folder / segment_name(segment.base)).read_bytes()


def round_trip(store: Store, objects: Objects) -> None:
    """Copy, copy again, delete, delete again."""
    segment = sealed_segments(store)[1]
    work = copying(store, objects)
    assert work.copy(segment, set()) == segment.size
    assert stored_bytes(objects, segment) == file_bytes(store, segment)
    manifest = work.manifest(segment)
    assert manifest is not None
    assert crc32c(file_bytes(store, segment)[:CHUNK_BYTES]) == manifest.checksums[0]
    assert work.copy(segment, set()) == 0
    assert not work.is_gone(segment)
    work.delete(segment)
    work.delete(segment)
    assert work.is_gone(segment)
    assert stored_bytes(objects, segment) == b""


def test_a_segment_goes_to_a_folder_and_back(tmp_path: Path) -> None:
    with log_at(tmp_path / "log") as store:
        round_trip(store, open_objects(f"file://{tmp_path}/objects"))


@pytest.mark.parametrize("loses_answers", [False, True])
def test_a_store_that_fails_at_any_call_gets_the_segment_at_the_next_try(
    tmp_path: Path, loses_answers: bool
) -> None:
    with log_at(tmp_path) as store:
        segment = sealed_segments(store)[0]
        smooth = FaultyObjects(in_memory())
        copying(store, smooth).copy(segment, set())
        for number in range(1, smooth.calls + 1):
            objects = FaultyObjects(
                in_memory(), lambda call, number=number: call == number, loses_answers=loses_answers
            )  # type: ignore[misc]
            with pytest.raises(StoreAway):
                copying(store, objects).copy(segment, set())
            copying(store, objects).copy(segment, set())
            assert stored_bytes(objects, segment) == file_bytes(store, segment)
            assert copying(store, objects).manifest(segment) == copying(store, smooth).manifest(
                segment
            )


def test_a_manifest_is_written_only_after_every_chunk_was_read_back(tmp_path: Path) -> None:
    with log_at(tmp_path) as store:
        segment, objects = sealed_segments(store)[0], FaultyObjects(in_memory())
        copying(store, objects).copy(segment, set())
        written = objects.names.index(("create", NAMES.manifest(segment)))
        read = {name for method, name in objects.names[:written] if method == "get"}
        assert read >= {
            NAMES.chunk(segment, number) for number in range(segment.chunk_count(CHUNK_BYTES))
        }


def test_two_masters_copy_one_segment_chunk_by_chunk_at_the_same_time(tmp_path: Path) -> None:
    """The second master overtakes the first after each of its calls."""
    with log_at(tmp_path / "1") as first, log_at(tmp_path / "2") as second:
        segment = sealed_segments(first)[0]
        assert file_bytes(first, segment) == file_bytes(second, segment)
        shared = in_memory()

        def overtake(call: int) -> bool:
            if call == 5:
                assert copying(second, shared).copy(segment, set()) > 0
            return False

        assert (
            0 < copying(first, FaultyObjects(shared, overtake)).copy(segment, set()) < segment.size
        )
        assert stored_bytes(shared, segment) == file_bytes(first, segment)


def test_another_log_under_the_same_prefix_is_a_conflict_and_changes_nothing(
    tmp_path: Path,
) -> None:
    with log_at(tmp_path / "1") as first, log_at(tmp_path / "2", seed=2) as second:
        segment, objects = sealed_segments(first)[0], in_memory()
        copying(first, objects).copy(segment, set())
        with pytest.raises(SegmentConflict):
            copying(second, objects).copy(segment, set())
        assert stored_bytes(objects, segment) == file_bytes(first, segment)
        objects.delete(NAMES.manifest(segment))
        with pytest.raises(SegmentConflict, match="other bytes"):
            copying(second, objects).copy(segment, set())
        assert copying(second, objects).manifest(segment) is None


def test_a_store_that_changes_bytes_does_not_count_as_a_copy(tmp_path: Path) -> None:
    class Flipping(FaultyObjects):
        def create(self, name: str, data: bytes) -> bool:
            return super().create(
                name, data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("/000002") else data
            )

    with log_at(tmp_path) as store:
        segment, objects = sealed_segments(store)[0], Flipping(in_memory())
        with pytest.raises(SegmentConflict, match="000002"):
            copying(store, objects).copy(segment, set())
        assert copying(store, objects).manifest(segment) is None


def test_a_damaged_file_is_not_copied(tmp_path: Path) -> None:
    with log_at(tmp_path) as store:
        segment, objects = sealed_segments(store)[1], FaultyObjects(in_memory())
        path = store.messages.folder / segment_name(segment.base)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(SegmentDamaged):
            copying(store, objects).copy(segment, set())
        assert objects.calls == 0


def test_a_copy_ends_soon_when_the_broker_stops(tmp_path: Path) -> None:
    with log_at(tmp_path) as store:
        segment, objects = sealed_segments(store)[0], FaultyObjects(in_memory())
        goes_on = lambda: objects.calls < 4  # noqa: E731
        with pytest.raises(Interrupted):
            SegmentCopying(
                objects, NAMES, store.disk, store.messages.folder, goes_on, CHUNK_BYTES
            ).copy(segment, set())
        assert objects.calls < segment.chunk_count(CHUNK_BYTES)


def test_an_unreachable_store_is_unavailable_and_a_wrong_url_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(StoreAway):
            open_objects("s3://segments", request_s=0.2, retry_s=0.1).create("x", b"1")
    for url in ("http://x", "file://relative", "s3://", "nonsense"):
        with pytest.raises(InvalidArgument, match="object store"):
            open_objects(url)
