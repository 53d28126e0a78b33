"""The state files of imports and mirrors on a disk without a byte left: a typed error, and the last
whole state stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import needs
from support.disks import fill, small_disk_at

import qmq
from qmq.cli.mirroring.cluster_mirror import MirrorSubject, read_record
from qmq.cli.mirroring.mirror_notes import MirrorNote, MirrorRecord
from qmq.cli.transfer.loading import LoadJournal, LoadState
from qmq.errors import DiskFull

LOAD = {"subject": "orders"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "small", 1) as folder:
        yield folder


def at(records: int) -> LoadState:
    return LoadState(1, records, {("g1", 0): records}, records)


@needs.mounts
def test_a_journal_on_a_full_disk_keeps_its_last_whole_line(small_disk: Path) -> None:
    journal = LoadJournal(small_disk / "journal", LOAD)
    journal.save(at(0))
    filler = fill(small_disk)
    records = 0
    with pytest.raises(DiskFull, match="free some space"):
        while True:
            journal.save(at(records + 1))
            records += 1
    assert records > 0  # the file's last block had room
    assert journal.state == at(records)
    filler.unlink()
    journal.save(at(records + 1))
    journal.close()
    again = LoadJournal(small_disk / "journal", LOAD)
    assert again.state == at(records + 1)
    again.close()


@needs.mounts
async def test_a_mirror_s_record_that_does_not_fit_stays_as_it_was(small_disk: Path) -> None:
    client = qmq.connect("localhost:1", state_dir=False)
    mirror = MirrorSubject(client, client, "orders", "east", "west", small_disk)
    known = MirrorRecord(notes=(MirrorNote({}, {}, 7),))
    mirror.keep(known)
    filler = fill(small_disk)
    with pytest.raises(DiskFull, match="free some space"):
        mirror.keep(MirrorRecord())
    assert mirror.record == read_record(small_disk, "orders") == known
    filler.unlink()
    mirror.keep(MirrorRecord())
    assert read_record(small_disk, "orders") == MirrorRecord()
    mirror.close()
    await client.close()
