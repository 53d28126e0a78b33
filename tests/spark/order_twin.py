"""A second, slow implementation of the order audit in plain Python, directly from its rules. Spark must find the same violations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from order_history import Row
from pyspark_qmq.source_model import Routes
from qmq_ordering.hashing import logical_partition

Found = tuple[str, int, int]
"""A rule, and the partition and sequence at which it is broken."""


def twin(rows: list[Row], routes: Routes, *, is_exact: bool = False, is_dense: bool = False, clock_ms: int = 0) -> set[Found]:
    """All violations in the rows."""
    found = set(_of_messages(rows, routes, is_exact)) | set(_of_partitions(rows)) | set(_of_seals(rows, routes))
    keyed = [row for row in rows if row.key is not None and not row.is_bent and row.partition in routes.partitions]
    keyed.sort(key=lambda row: (routes.partitions[row.partition].version, row.partition, row.sequence))
    known = {row.message_id[:16] for row in keyed if row.message_id[:16] == row.producer_id}
    queues = _grouped(_at_home(rows, routes), lambda row: row.partition)
    oldest = {number: min(row.sequence for row in queue) for number, queue in queues.items()}
    found |= set(_of_replays(keyed, known))
    firsts = [group[0] for group in _grouped(keyed, lambda row: (row.key, row.message_id)).values()]
    for chain in _grouped(firsts, lambda row: (row.key, row.message_id[:16])).values():
        if oldest.get(chain[0].partition) and chain[0].message_id[:16] in known:
            firsts = [row for row in firsts if row not in chain or not is_carried(row) or row.message_id >= chain[0].message_id]
    for mine in _grouped(firsts, lambda row: (row.key, row.message_id[:16])).values():
        for before, row in pairwise(mine):
            is_sent_again = is_carried(row) or is_carried(before)
            if is_sent_again and row.message_id[:16] in known and row.message_id < before.message_id:
                found.add(_at("id_order", row))
    if is_exact:
        kept = {number: oldest.get(number, routes.sealed_at.get(number, 0)) == 0 for number in routes.partitions}
        lossy = {part.version for number, part in routes.partitions.items() if not kept[number]}
        return found | set(_by_number(firsts, routes, lossy, is_dense))
    return found | set(_by_time([row for row in firsts if row.message_id[:16] in known], rows, clock_ms))


def is_carried(row: Row) -> bool:
    """Whether the message has another producer's id."""
    return row.message_id[:16] != row.producer_id


def _at(rule: str, row: Row) -> Found:
    return rule, row.partition, row.sequence


def _grouped(rows: Iterable[Row], of: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[of(row)].append(row)
    return found


def _of_messages(rows: list[Row], routes: Routes, is_exact: bool) -> Iterator[Found]:
    for row in rows:
        part = routes.partitions.get(row.partition)
        if row.key is None:
            yield _at("no_key", row)
        if is_exact and row.number is None:
            yield _at("no_number", row)
        if part is None:
            yield _at("unknown_partition", row)
            continue
        if row.sequence >= routes.sealed_at.get(row.partition, row.sequence + 1):
            yield _at("behind_seal", row)
        if not part.lps.first <= row.logical_partition < part.lps.end:
            yield _at("outside_range", row)
        if row.broker_group != part.broker_group:
            yield _at("other_group", row)
        if row.key is not None and not row.is_bent and row.logical_partition != logical_partition(row.key, routes.logical_partitions):
            yield _at("wrong_hash", row)


def _of_partitions(rows: list[Row]) -> Iterator[Found]:
    for queue in _grouped(rows, lambda row: (row.partition, row.broker_group)).values():
        queue.sort(key=lambda row: row.sequence)
        again = {id(row) for before, row in pairwise(queue) if row.sequence == before.sequence}
        yield from (_at("sequence_repeat", row) for row in queue if id(row) in again)
        yield from (_at("sequence_gap", row) for before, row in pairwise(queue) if row.sequence > before.sequence + 1)
        for stream in _grouped(queue, lambda row: row.producer_id).values():
            if queue[0].sequence == 0 and not _begins_session(stream[0]):
                yield _at("stream_gap", stream[0])
            for before, row in pairwise(stream):
                if id(row) in again:
                    continue
                if (row.batch_sequence, row.place) <= (before.batch_sequence, before.place):
                    yield _at("stream_order", row)
                elif (row.batch_sequence, row.place) not in (
                    (before.batch_sequence, before.place + 1),
                    (before.batch_sequence + 1, 0),
                ) and not _begins_session(row):
                    yield _at("stream_gap", row)


def _begins_session(row: Row) -> bool:
    return row.batch_sequence % 2**24 == 0 and row.place == 0


def _at_home(rows: list[Row], routes: Routes) -> list[Row]:
    known = [row for row in rows if row.partition in routes.partitions]
    return [row for row in known if routes.partitions[row.partition].broker_group == row.broker_group]


def _of_seals(rows: list[Row], routes: Routes) -> Iterator[Found]:
    queues = _grouped(_at_home(rows, routes), lambda row: row.partition)
    for target in routes.partitions.values():
        for source in target.sources:
            if target.number in queues and source in queues:
                first = min(queues[target.number], key=lambda row: (row.entry, row.sequence))
                last = max(queues[source], key=lambda row: (row.entry, row.sequence))
                if first.broker_group == last.broker_group and last.entry > first.entry:
                    yield _at("before_seal", first)


def _of_replays(keyed: list[Row], streams: set[str]) -> Iterator[Found]:
    for (_, sender), chain in _grouped(keyed, lambda row: (row.key, row.message_id[:16])).items():
        ids = list(dict.fromkeys(row.message_id for row in chain))
        if len(ids) == len(chain):
            continue
        known = sorted(ids) if sender in streams else ids
        seen: dict[str, set[int]] = defaultdict(set)
        at = len(known)
        places: set[tuple[int, int]] = set()
        for row in chain:
            if (row.partition, row.sequence) in places:
                continue
            places.add((row.partition, row.sequence))
            if row.partition in seen[row.message_id]:
                yield _at("stored_twice", row)
                continue
            seen[row.message_id].add(row.partition)
            if known.index(row.message_id) > at + 1:
                yield _at("broken_replay", row)
            at = known.index(row.message_id)


def _by_number(firsts: list[Row], routes: Routes, lossy: set[int], is_dense: bool) -> Iterator[Found]:
    for mine in _grouped([row for row in firsts if row.number is not None], lambda row: row.key).values():
        for before, row in pairwise(mine):
            assert row.number is not None
            assert before.number is not None
            if row.number < before.number:
                yield _at("number_order", row)
            elif row.number == before.number:
                yield _at("number_repeat", row)
            elif is_dense and row.number > before.number + 1:
                versions = range(routes.partitions[before.partition].version + 1, routes.partitions[row.partition].version + 1)
                if not lossy & set(versions):
                    yield _at("number_gap", row)


def _by_time(judged: list[Row], rows: list[Row], clock_ms: int) -> Iterator[Found]:
    for stream in _grouped(judged, lambda row: (row.key, row.message_id[:16])).values():
        yield from (_at("time_order", row) for before, row in pairwise(stream) if row.create_ms < before.create_ms)
    for mine in _grouped(judged, lambda row: row.key).values():
        for before, row in pairwise(mine):
            if row.message_id[:16] == before.message_id[:16]:
                continue
            slack = 0 if row.producer_id == before.producer_id else clock_ms
            if row.create_ms + slack < before.create_ms and not _are_concurrent(before, row, rows):
                yield _at("time_order", row)


def _are_concurrent(one: Row, other: Row, rows: list[Row]) -> bool:
    if one.partition != other.partition or one.producer_id == other.producer_id:
        return False
    here = [row for row in rows if row.partition == one.partition]
    mine = [row.sequence for row in here if row.producer_id == one.producer_id]
    its = [row.sequence for row in here if row.producer_id == other.producer_id]
    return min(mine) < max(its) and min(its) < max(mine)
