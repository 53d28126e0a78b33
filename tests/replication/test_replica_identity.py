"""A replica's promises survive a restart, or their loss is noticed; a replica is never taken for another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bad_sectors import BadSectors
from qmq_replication import replica_identity as identities
from qmq_replication.ready import DurableState
from qmq_replication.replica_identity import FILE, ReplicaIdentity
from qmq_replication.replica_membership import ReplicaMembership

from qmq.errors import DiskFull, LogDamaged
from qmq.log.disk import Disk

FOUND = ReplicaIdentity(
    "g1", "b2", "0123456789abcdef", 7, False, 99, "boot", ReplicaMembership(3, ("b1", "b2")).encode().decode(), {"b1": "10.0.0.1:20881"}
)


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    for each in (FOUND, identities.new("g1", "b2"), replace(FOUND, promised=1 << 40, boot=identities.CLEAN)):
        each.save(Disk(), tmp_path)
        assert identities.load(tmp_path, "g1", "b2") == each


def test_a_new_folder_has_no_identity(tmp_path: Path) -> None:
    assert identities.load(tmp_path, "g1", "b2") is None


def test_new_folders_get_different_ids() -> None:
    assert identities.new("g1", "b2").folder != identities.new("g1", "b2").folder


@pytest.mark.parametrize(("group", "replica"), [("g1", "b1"), ("g2", "b2")])
def test_another_replicas_folder_is_refused(tmp_path: Path, group: str, replica: str) -> None:
    FOUND.save(Disk(), tmp_path)
    with pytest.raises(LogDamaged, match="belongs to replica b2 of group g1"):
        identities.load(tmp_path, group, replica)


def test_a_flipped_bit_anywhere_is_refused_and_never_read_as_another_promise(tmp_path: Path) -> None:
    FOUND.save(Disk(), tmp_path)
    path = tmp_path / FILE
    data = path.read_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            assert identities.load(tmp_path, "g1", "b2") == FOUND
        except LogDamaged:
            pass


def test_a_file_that_the_disk_cannot_read_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    FOUND.save(Disk(), tmp_path)
    disk = BadSectors()
    disk.spoil(tmp_path / FILE, 0)
    with pytest.raises(LogDamaged, match="Move its data folder away"):
        identities.load(tmp_path, "g1", "b2", disk)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    FOUND.save(Disk(), tmp_path)
    path = tmp_path / FILE
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(LogDamaged, match="the promise of this replica is lost"):
            identities.load(tmp_path, "g1", "b2")


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"{}", b'{"crc": 0, "content": ""}', b"\xff\xfe\x00"])
def test_an_invalid_identity_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(LogDamaged):
        identities.load(tmp_path, "g1", "b2")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    class Full(Disk):
        def write(self, fd: int, buffers: object, at: int) -> None:
            raise DiskFull("no space left (in this test)")

    FOUND.save(Disk(), tmp_path)
    with pytest.raises(DiskFull):
        replace(FOUND, promised=8).save(Full(), tmp_path)
    assert identities.load(tmp_path, "g1", "b2") == FOUND


def test_the_state_goes_to_the_core_and_back() -> None:
    assert FOUND.state == DurableState(7, False, 99)
    assert FOUND.with_state(DurableState(8, True, 0)).state == DurableState(8, True, 0)
    assert FOUND.with_state(DurableState(8, True, 0)).folder == FOUND.folder


def test_the_membership_is_remembered() -> None:
    assert FOUND.members() == ReplicaMembership(3, ("b1", "b2"))
    assert identities.new("g1", "b2").members() is None
