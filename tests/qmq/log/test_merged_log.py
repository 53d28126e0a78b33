"""Both logs read as one, from the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_support import Traffic, master_at

from qmq.errors import LogDamaged
from qmq.log.envelopes import Entry, walk
from qmq.log.follower import entries_of, split_entries
from qmq.log.merged_log import read_merged
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.wire.batch import ENVELOPE_BYTES


def logs(store: Store) -> tuple[Segments, Segments]:
    return store.messages, store.actions


def in_order(store: Store) -> list[tuple[int, Entry]]:
    found = [
        (log, entry)
        for log, segments in enumerate(logs(store))
        for entry in walk(segments, segments.start)
    ]
    return sorted(found, key=lambda each: each[1].envelope.index)


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    return master_at(tmp_path / "m", steps=100)


@pytest.mark.parametrize("bytes_max", [1, 700, 3_000, 1 << 20])
def test_entries_come_in_the_order_of_their_index_each_once_with_their_places(
    traffic: Traffic, bytes_max: int
) -> None:
    store = traffic.store
    expected = in_order(store)
    place, after, found = (0, 0), 0, []
    while (stretch := read_merged(logs(store), place, after, bytes_max)) and stretch.runs:
        assert stretch.size == sum(run.size for run in stretch.runs)
        assert stretch.size <= bytes_max or stretch.last == after + 1
        for run in stretch.runs:
            log = logs(store)[run.log]
            assert run.base == log.base_of(run.position)
            assert run.position + run.size <= log.segment_end(run.base)
            found += [
                (each.log, each.position, each.envelope, each.region)
                for each in entries_of(run._replace(buffers=split_entries(b"".join(run.buffers))))
            ]
        place, after = stretch.place, stretch.last
    assert found == [(log, each.position, each.envelope, each.region) for log, each in expected]
    assert (after, place) == (store.index, (store.messages.end, store.actions.end))


def test_expired_messages_are_reported_as_gone(traffic: Traffic) -> None:
    store = traffic.store
    store.messages.drop_files_before(store.messages.bases[2])
    assert read_merged(logs(store), (0, 0), 0, 100) is None
    assert read_merged(logs(store), (store.messages.start - 8, store.actions.end), 5, 100) is None
    assert read_merged(logs(store), (store.messages.start, 0), 5, 100) is not None


@pytest.mark.parametrize("offset", [3, ENVELOPE_BYTES + 1])
def test_damage_is_reported_with_its_place_and_entries_before_it_are_served(
    traffic: Traffic, offset: int
) -> None:
    store = traffic.store
    entries = in_order(store)
    for at, (log, entry) in list(enumerate(entries))[1::7]:
        segments = logs(store)[log]
        whole = segments.read(entry.position, entry.envelope.total_bytes)
        segments.mend(
            entry.position, whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :]
        )
        stretch = read_merged(logs(store), (0, 0), 0, 1 << 30)
        assert stretch is not None
        # With a damaged envelope it is unknown how its log continues, so the other log may be
        # served only up to the entry before.
        assert stretch.last == entries[at - 1][1].envelope.index or offset < ENVELOPE_BYTES
        assert stretch.last < entry.envelope.index
        with pytest.raises(LogDamaged) as found:
            read_merged(logs(store), stretch.place, stretch.last, 1 << 30)
        assert (found.value.log, found.value.position) == (log, entry.position)
        segments.mend(entry.position, whole)
