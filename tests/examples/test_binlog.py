"""The generated binary log: a replica that applies it in order equals the source, byte for byte; a
replica that does not reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from binlog import Change, MemoryReplica, OutOfOrder, Source, SqliteReplica

COUNT = 20_000


@contextmanager
def replica_of(kind: str, folder: Path) -> Iterator[MemoryReplica | SqliteReplica]:
    if kind == "memory":
        yield MemoryReplica()
        return
    found = SqliteReplica(folder / "replica.db")
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def log() -> tuple[list[Change], bytes]:
    source = Source(seed=7, keys=500)
    return list(source.changes(COUNT)), source.dump()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_replica_that_applies_every_change_in_order_is_the_source(
    kind: str, log: tuple[list[Change], bytes], tmp_path: Path
) -> None:
    changes, expected = log
    with replica_of(kind, tmp_path) as replica:
        assert all(replica.apply(Change.decode(change.encode())) for change in changes)
        assert replica.dump() == expected
        assert not any(replica.apply(change) for change in changes), (
            "what comes again changes nothing"
        )
        assert replica.dump() == expected


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_only_the_order_of_each_key_matters(
    kind: str, log: tuple[list[Change], bytes], tmp_path: Path
) -> None:
    changes, expected = log
    coin = Random(3)
    place = {change.key: coin.random() for change in changes}
    with replica_of(kind, tmp_path) as replica:
        for change in sorted(changes, key=lambda each: place[each.key]):
            replica.apply(change)
        assert replica.dump() == expected


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_missing_change_is_noticed_at_the_next_one_of_its_key(kind: str, tmp_path: Path) -> None:
    one, two, three = list(Source(seed=1, keys=1).changes(3))
    with replica_of(kind, tmp_path) as replica:
        replica.apply(one)
        with pytest.raises(OutOfOrder, match="when change 2 was to come"):
            replica.apply(three)
        replica.apply(two)
        with pytest.raises(OutOfOrder, match="but the row is"):
            replica.apply(three._replace(before=["Noether", 0, ""]))


def test_a_deleted_row_does_not_come_back_with_its_insert() -> None:
    replica = MemoryReplica()
    changes = [Change("a", 1, None, ["Ada", 0, ""]), Change("a", 2, ["Ada", 0, ""], None)]
    for change in changes + changes:
        replica.apply(change)
    assert replica.dump() == b""


def test_the_log_is_the_same_for_a_seed_and_a_few_keys_change_most(
    log: tuple[list[Change], bytes],
) -> None:
    changes, _ = log
    assert list(Source(seed=7, keys=500).changes(COUNT)) == changes
    assert list(Source(seed=8, keys=500).changes(COUNT)) != changes
    counts = Counter(change.key for change in changes)
    (_, most), (_, second) = counts.most_common(2)
    assert most > 1.5 * second
    assert {"insert", "update", "delete"} == {kind_of(change) for change in changes}


def test_uncommitted_entries_are_invisible_to_others(tmp_path: Path) -> None:
    with replica_of("sqlite", tmp_path) as one, replica_of("sqlite", tmp_path) as other:
        assert isinstance(one, SqliteReplica)
        for change in Source(seed=1, keys=3).changes(10):
            one.apply(change)
        assert other.dump() == b""
        one.commit()
        assert other.dump() == one.dump() != b""


def kind_of(change: Change) -> str:
    return "insert" if change.before is None else "delete" if change.after is None else "update"
