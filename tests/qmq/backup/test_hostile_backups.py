"""Whoever can write the object store can write any manifest. A restore writes into the data folder
only, and the keys of a backup only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.backup.manifest import (
    VERSION,
    BackedUpFile,
    BackedUpGroup,
    BackedUpSchedule,
    BackedUpSegment,
    BackupManifest,
    ChunkedBytes,
    decode_items,
    decode_manifest,
    digest_of,
)
from qmq.backup.objects import BackupObjects
from qmq.errors import BackupDamaged
from qmq.log.segment_index import with_checksum
from qmq.tiering.object_store import open_objects

ID = "20261121T130000000Z-ab12"
CONTENT = ChunkedBytes(4, (digest_of(b"data"),))
SCHEDULE = BackedUpSchedule(1, CONTENT, (BackedUpFile("20261121T130000Z.log", CONTENT),))
GROUP = BackedUpGroup("d1", "", 1, 1, (BackedUpSegment(0, CONTENT, True),), (), SCHEDULE)
PATHS = st.sampled_from(
    [
        "../x",
        "/etc/passwd",
        "",
        ".",
        "20261121T130000Z.log/../x",
        "20261121T130000Z.log\n",
        "²0261121T130000Z.log",
    ]
)


def manifest_with(change: Any) -> bytes:
    """A manifest whose checksum is right, changed as its MessagePack."""
    whole = BackupManifest(VERSION, ID, 0, 1, "0.2.0", CONTENT, (GROUP,))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(whole))
    change(fields)
    return with_checksum(b"QMK1", msgspec.msgpack.encode(fields))


@given(PATHS | st.text())
def test_a_schedules_file_is_named_as_a_schedule_names_files(name: str) -> None:
    def rename(fields: Any) -> None:
        fields["groups"][0]["schedule"][2][0][0] = name

    with pytest.raises(BackupDamaged, match="no file of a schedule"):
        decode_manifest(ID, manifest_with(rename))


@given(PATHS | st.text().filter(lambda text: "/" in text or not text))
def test_a_group_has_a_groups_name(name: str) -> None:
    with pytest.raises(BackupDamaged, match="group"):
        decode_manifest(ID, manifest_with(lambda fields: fields["groups"][0].update(name=name)))


@given(st.binary().filter(lambda data: len(data) != 32))
def test_a_chunk_is_named_by_a_digest(digest: bytes) -> None:
    with pytest.raises(BackupDamaged, match="digests"):
        decode_manifest(ID, manifest_with(lambda fields: fields.update(items=[4, [digest]])))


@pytest.mark.parametrize("size", [-1, 0])
def test_chunks_have_bytes(size: int) -> None:
    with pytest.raises(BackupDamaged, match="digests"):
        decode_manifest(
            ID, manifest_with(lambda fields: fields.update(items=[size, list(CONTENT.chunks)]))
        )


def test_a_segment_has_a_position() -> None:
    def move(fields: Any) -> None:
        fields["groups"][0]["message"][0][0] = -1

    with pytest.raises(BackupDamaged, match="a segment at -1"):
        decode_manifest(ID, manifest_with(move))


def test_more_bytes_than_the_manifest_says_are_not_given_out(tmp_path: Path) -> None:
    objects = BackupObjects(open_objects(f"file://{tmp_path}"))
    written = objects.put_bytes(b"data")
    given_out: list[bytes] = []
    with pytest.raises(BackupDamaged, match="the manifest says 3"):
        given_out.extend(objects.read_chunks(ChunkedBytes(3, written.chunks)))
    assert given_out == []


@given(
    st.sampled_from(
        [
            "/qmq/replicas/x",
            "/qmq/groups/g1/epoch",
            "/qmq/groups/g1/secret",
            "/qmq/restored",
            "/other/key",
        ]
    )
    | st.text()
)
def test_only_keys_that_a_backup_contains_are_restored(key: str) -> None:
    with pytest.raises(BackupDamaged, match="which no backup of QMQ contains"):
        decode_items(msgspec.msgpack.encode([(key, b"")]))


def test_a_backup_of_today_is_read() -> None:
    assert decode_manifest(ID, manifest_with(lambda fields: None)).groups == (GROUP,)
    assert decode_items(msgspec.msgpack.encode([("/qmq/subjects/orders", b"{}")])) == {
        "/qmq/subjects/orders": b"{}"
    }
