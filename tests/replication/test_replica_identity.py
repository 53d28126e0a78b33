"""A replica's promises survive a restart, or their loss is noticed; a replica is never taken for
another one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from google_crc32c import value as crc32c
from qmq_replication import identity as identities
from qmq_replication.identity import FILE, ReplicaIdentity
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import DurableState
from support.disks import BadSectors

from qmq.errors import DiskFull, LogDamaged
from qmq.log.disk import Disk

FOUND = ReplicaIdentity(
    "g1",
    "b2",
    "0123456789abcdef",
    7,
    False,
    99,
    "boot",
    ReplicaMembership(3, ("b1", "b2")).encode().decode(),
    {"b1": "10.0.0.1:20881"},
)


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    for each in (
        FOUND,
        identities.new("g1", "b2"),
        replace(FOUND, promised=1 << 40, boot=identities.CLEAN),
    ):
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


def test_a_flipped_bit_anywhere_is_refused_and_never_read_as_another_promise(
    tmp_path: Path,
) -> None:
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
    data = path.read_bytes().rstrip()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(LogDamaged, match="the promise of this replica is lost"):
            identities.load(tmp_path, "g1", "b2")


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b"{}", b'{"crc": 0, "content": ""}', b"\xff\xfe\x00"]
)
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


def test_release_020_reads_the_file_and_drops_the_generations(tmp_path: Path) -> None:
    found = replace(FOUND, generation=7, registered=6, cluster="c1")
    found.save(Disk(), tmp_path)
    content = json.loads(json.loads((tmp_path / FILE).read_bytes())["content"])
    assert {*content} == {*asdict(FOUND)} - {"generation", "registered", "cluster"}
    encoded = json.dumps(content, sort_keys=True)
    (tmp_path / FILE).write_text(json.dumps({"crc": crc32c(encoded.encode()), "content": encoded}))
    assert identities.load(tmp_path, "g1", "b2") == FOUND


@pytest.mark.parametrize(
    ("mine", "folder", "theirs", "is_older"),
    [
        ((4, 3), FOUND.folder, 4, False),
        ((4, 3), FOUND.folder, 3, False),
        ((4, 3), FOUND.folder, 5, True),
        ((4, 3), "another", 2, True),
        ((0, 0), FOUND.folder, 0, False),
        ((0, 0), "", 0, False),
        ((0, 0), FOUND.folder, 1, True),
        ((4, 3), FOUND.folder, 0, True),
    ],
    ids=[
        "latest",
        "ahead",
        "older",
        "other folder",
        "0.2.0",
        "0.1.0",
        "copied before the upgrade",
        "copied before the downgrade",
    ],
)
def test_an_older_copy_of_a_folder_is_known(
    mine: tuple[int, int], folder: str, theirs: int, is_older: bool
) -> None:
    identity = replace(FOUND, generation=mine[0], registered=mine[1])
    assert identity.is_older_than(folder, theirs) is is_older


def test_every_copy_made_before_a_generation_was_registered_is_older() -> None:
    """Whatever the store had before, or if it had nothing: afterwards only the folder itself is not
    older.
    """
    copies, identity, registered = [FOUND], FOUND, 0
    for _ in range(5):
        identity = identity.grown(identity.folder, registered)
        assert not identity.is_older_than(identity.folder, registered)
        registered = identity.generation
        assert not identity.is_older_than(identity.folder, registered)
        assert all(copy.is_older_than(identity.folder, registered) for copy in copies)
        copies.append(identity)
    put_back = copies[1]
    assert put_back.is_older_than(identity.folder, registered)
    put_back = put_back.grown(identity.folder, registered)
    assert identity.is_older_than(put_back.folder, put_back.generation)


def test_a_store_that_forgot_a_generation_is_known() -> None:
    identity = replace(FOUND, generation=5, registered=4)
    assert identity.shows_older_store(FOUND.folder, 3)
    assert not identity.shows_older_store(FOUND.folder, 4)
    assert not identity.shows_older_store("another", 1)


def test_the_state_goes_to_the_core_and_back() -> None:
    assert FOUND.state == DurableState(7, False, 99)
    assert FOUND.with_state(DurableState(8, True, 0)).state == DurableState(8, True, 0)
    assert FOUND.with_state(DurableState(8, True, 0)).folder == FOUND.folder


def test_the_membership_is_remembered() -> None:
    assert FOUND.members() == ReplicaMembership(3, ("b1", "b2"))
    assert identities.new("g1", "b2").members() is None
