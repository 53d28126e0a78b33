"""The client's store of verdicts: it returns what was written, damage loses only the damaged
record, and one process at a time has a file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from qmq.client.consuming import ack_spool
from qmq.client.consuming.ack_spool import (
    BAD_SUFFIX,
    OLD_MS,
    AckSpool,
    SpooledAck,
    SpoolFile,
    SpoolOwner,
    folder_of,
    pack_owner,
    pack_verdicts,
    still_valid,
    store_of,
    unpack,
)
from qmq.errors import InvalidArgument
from qmq.wire.frame_payloads import BY_GROUP_MS, RESUME, Attach, Settlement, Verdict

ACK, NACK, DEAD, RELEASE = Verdict.ACK, Verdict.NACK, Verdict.DEAD, Verdict.RELEASE
NOW_MS = 1_700_000_000_000
SAID = [
    Settlement(0, 4, ACK, 0),
    Settlement(5, 5, NACK, BY_GROUP_MS, "no \N{SNOWMAN}\nat all"),
    Settlement(6, 9, NACK, 60_000, "x"),
    Settlement(10, 10, DEAD, 0, "bad"),
    Settlement(11, 12, RELEASE, 0),
]


def owner_of(
    broker_group: str = "g0", *, incarnation: str = "abc", group: str = "ops", name: str = "c1"
) -> SpoolOwner:
    return SpoolOwner(
        broker_group, Attach("s", 0, group, name, incarnation, 12, RESUME, 30_000, ["t"], [])
    )


def file_of(store: AckSpool, owner: SpoolOwner | None = None, now_ms: int = NOW_MS) -> SpoolFile:
    found = owner or owner_of()
    return store.file(lambda: found, lambda: now_ms)


def left(store: AckSpool, now_ms: int = NOW_MS) -> list[tuple[SpoolOwner, list[SpooledAck]]]:
    """The spool files that are not locked; they stay unlocked."""
    found: list[tuple[SpoolOwner, list[SpooledAck]]] = []
    for each in store.left("s", "ops", now_ms):
        found.append((each.owner, each.kept))
        each.put_back()
    return found


@pytest.fixture
def store(tmp_path: Path) -> AckSpool:
    return AckSpool(tmp_path, ["meta:1"])


# --- the format -----------------------------------------------------------------------------------


def test_what_was_written_is_read() -> None:
    data = pack_owner(owner_of()) + pack_verdicts(SAID[:2], 5) + pack_verdicts(SAID[2:], 6)
    assert unpack(data) == (
        owner_of(),
        [SpooledAck(each, 5) for each in SAID[:2]] + [SpooledAck(each, 6) for each in SAID[2:]],
    )


def test_a_file_cut_anywhere_has_all_lines_before_the_cut() -> None:
    data = pack_owner(owner_of()) + pack_verdicts(SAID, 5)
    for end in range(len(data)):
        lines = data[:end].count(b"\n")
        if lines:
            assert unpack(data[:end]) == (
                owner_of(),
                [SpooledAck(each, 5) for each in SAID[: lines - 1]],
            )
        else:
            with pytest.raises(ValueError, match=r"."):
                unpack(data[:end])


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [b"{}", *lines[1:]],
        lambda lines: [lines[0].replace(b'"version": 1', b'"version": 2'), *lines[1:]],
        lambda lines: [lines[0].replace(b'"received": 12', b'"received": "x"'), *lines[1:]],
        lambda lines: [lines[0], b"[]", *lines[1:]],
        lambda lines: [lines[0], b"\xff\xfe", *lines[1:]],
        lambda lines: [lines[0], lines[1].replace(b'"first": 0', b'"first": 9'), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b"ACK", b"MAYBE"), *lines[2:]],
        lambda lines: [b"[" * 100_000],
    ],
    ids=[
        "no-head",
        "newer",
        "no-number",
        "no-verdict",
        "no-text",
        "backwards",
        "no-such-verdict",
        "deep",
    ],
)
def test_damage_is_reported(damage: object) -> None:
    lines = (pack_owner(owner_of()) + pack_verdicts(SAID, 5)).splitlines()
    with pytest.raises(ValueError, match=r"."):
        unpack(b"\n".join(damage(lines)) + b"\n")  # type: ignore[operator]


def test_delays_begin_at_the_verdict_and_void_verdicts_are_not_sent() -> None:
    kept = [SpooledAck(each, 1000) for each in SAID]
    assert still_valid(kept, 100, 1000) == SAID
    later = still_valid(kept, 8, 21_000)
    assert later == [*SAID[:2], Settlement(6, 7, NACK, 40_000, "x")]
    assert still_valid(kept, 100, 10**9)[2].delay_ms == 0
    assert still_valid(kept, 100, 0)[2].delay_ms == 60_000, (
        "a clock that was set back makes nothing longer"
    )
    assert still_valid(kept, 0, 0) == []


# --- files ----------------------------------------------------------------------------------------


def test_nothing_is_written_until_there_is_something_to_write_and_nothing_stays(
    store: AckSpool, tmp_path: Path
) -> None:
    file = file_of(store)
    assert not list(tmp_path.iterdir())
    assert left(store) == []
    file.append(SAID)
    file.clear()
    file.leave()
    assert not list(tmp_path.iterdir())
    file.rewrite(SAID)
    assert file.exists
    file.clear()
    assert (file.exists, list((tmp_path / "verdicts").iterdir())) == (False, [])


def test_a_file_is_its_clients_while_that_lives_and_anybodys_after(store: AckSpool) -> None:
    file = file_of(store)
    file.rewrite(SAID[:3])
    file.append(SAID[3:])
    assert left(store) == []
    assert [each.broker_group for each in store.busy("s", "ops")] == ["g0"]
    file.leave()
    assert left(store) == [(owner_of(), [SpooledAck(each, NOW_MS) for each in SAID])]
    assert list(store.busy("s", "ops")) == []


def test_a_waiter_for_a_deleted_file_gets_nothing(
    store: AckSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(store)
    file.rewrite(SAID)
    file.leave()
    original = ack_spool.fcntl.flock

    def delete_first(fd: int, how: int) -> None:
        monkeypatch.setattr(ack_spool.fcntl, "flock", original)
        (other,) = store.left("s", "ops", NOW_MS)
        other.delete()
        other.put_back()
        original(fd, how)

    monkeypatch.setattr(ack_spool.fcntl, "flock", delete_first)
    assert left(store) == []


def test_files_of_other_subjects_groups_and_clusters_are_not_ours(
    store: AckSpool, tmp_path: Path
) -> None:
    for file in (file_of(store, owner_of(group="other")), file_of(AckSpool(tmp_path, ["meta:2"]))):
        file.rewrite(SAID)
        file.leave()
    assert left(store) == []
    mine = [owner_of(), owner_of("g1"), owner_of(incarnation="def")]
    for owner in mine:
        file = file_of(store, owner)
        file.rewrite(SAID)
        file.leave()
    assert sorted(map(str, mine)) == sorted(str(owner) for owner, _ in left(store))
    assert len(left(AckSpool(tmp_path, ["meta:1"]))) == 3


def test_the_addresses_may_be_in_any_order(tmp_path: Path) -> None:
    file = file_of(AckSpool(tmp_path, ["a:1", "b:1"]))
    file.rewrite(SAID)
    file.leave()
    assert len(left(AckSpool(tmp_path, ["b:1", "a:1"]))) == 1


def test_what_cannot_be_read_is_set_aside_with_a_warning(
    store: AckSpool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for incarnation in ("a", "b"):
        file = file_of(store, owner_of(incarnation=incarnation))
        file.rewrite(SAID)
        file.leave()
    path = min((tmp_path / "verdicts").iterdir())
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with caplog.at_level(logging.WARNING, "qmq.client"):
        assert len(left(store)) == 1
    assert "set aside" in caplog.text
    assert path.with_suffix(BAD_SUFFIX).exists()
    caplog.clear()
    assert len(left(store)) == 1
    assert not caplog.text


def test_verdicts_older_than_a_week_are_dropped_with_a_warning(
    store: AckSpool, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(store)
    file.rewrite(SAID)
    file.leave()
    assert len(left(store, NOW_MS + OLD_MS)) == 1
    with caplog.at_level(logging.WARNING, "qmq.client"):
        assert left(store, NOW_MS + OLD_MS + 1) == []
    assert "c1" in caplog.text
    assert left(store) == []


def test_a_full_disk_is_a_warning_and_earlier_writes_no_longer_count(
    store: AckSpool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(store)
    file.rewrite(SAID)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "qmq.client"):
        patch.setattr(ack_spool.os, "write", full)
        file.append(SAID)
        assert file.exists
        file.rewrite(SAID[:1])
        file.rewrite(SAID[:2])
    assert not file.exists
    assert len(caplog.records) == 1, "once"
    file.leave()
    assert left(store) == []
    file.rewrite(SAID[:1])
    assert file.exists
    file.clear()


def test_half_a_line_on_a_full_disk_costs_no_verdict_before_or_after(
    store: AckSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, original = file_of(store), os.write
    file.rewrite(SAID[:1])
    taken = 0

    def full(fd: int, data: bytes) -> int:
        nonlocal taken
        taken += 1
        if taken > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(fd, data[:9])

    with monkeypatch.context() as patch:
        patch.setattr(ack_spool.os, "write", full)
        file.append(SAID[1:2])
    file.append(SAID[2:])
    file.leave()
    assert [kept for _, kept in left(store)] == [
        [SpooledAck(each, NOW_MS) for each in (SAID[0], *SAID[2:])]
    ]


def test_a_write_that_takes_a_part_only_continues(
    store: AckSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.write
    monkeypatch.setattr(ack_spool.os, "write", lambda fd, data: original(fd, data[:7]))
    file = file_of(store)
    file.rewrite(SAID)
    file.leave()
    assert [kept for _, kept in left(store)] == [[SpooledAck(each, NOW_MS) for each in SAID]]


def test_other_users_cannot_read_kept_verdicts(store: AckSpool, tmp_path: Path) -> None:
    file = file_of(store)
    file.rewrite(SAID)
    (path,) = (tmp_path / "verdicts").iterdir()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    file.clear()


# --- where ----------------------------------------------------------------------------------------


def test_where_the_folder_is() -> None:
    home = Path("/home/u")
    assert folder_of(None, {}, home) == Path("/home/u/.local/state/qmq")
    assert folder_of(None, {"XDG_STATE_HOME": "/x"}, home) == Path("/x/qmq")
    assert folder_of(None, {"XDG_STATE_HOME": "/x", "QMQ_STATE_DIR": "/q"}, home) == Path("/q")
    assert folder_of(None, {"XDG_STATE_HOME": "", "QMQ_STATE_DIR": ""}, None) is None
    assert folder_of("/mine", {"QMQ_STATE_DIR": "/q"}, home) == Path("/mine")
    assert folder_of(False, {"QMQ_STATE_DIR": "/q"}, home) is None
    assert store_of(False, ["m:1"]) is None


@pytest.mark.parametrize("wrong", ["", 5, True])
def test_a_path_that_is_not_a_folder_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="state_dir"):
        folder_of(wrong, {}, None)  # type: ignore[arg-type]
