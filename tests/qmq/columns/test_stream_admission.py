"""The size of micro-batches: a stream over random histories of an ordered subject keeps every key's
order, and gives every message once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from qmq_ordering.routes import LpRange

from qmq.columns import offsets, planning
from qmq.columns.model import QueueKey, RoutePartition, Routes, SourceQueue, Topology
from qmq.columns.planning import Limit, Minimum, admit, share_out, waiting

SUBJECT, LPS = "bank", 16
GROUPS = ("g1", "g2", "g3")


class History:
    """An ordered subject that grows and is resharded at random; messages are (key's LP, number)."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.version = 1
        self.partitions = {1: RoutePartition(1, LpRange(0, LPS), "g1", 1)}
        self.open = {1}
        self.sealed: dict[int, int] = {}
        self.fenced: set[int] = set()
        self.rows: dict[int, list[tuple[int, int]]] = {1: []}
        self.sent = 0

    def step(self) -> None:
        if self.chance.random() < 0.25:
            self.change()
        for _ in range(self.chance.randrange(8)):
            lp = self.chance.randrange(LPS)
            owner = next(
                number
                for number in self.open
                if self.partitions[number].lps.first <= lp < self.partitions[number].lps.end
            )
            self.rows[owner].append((lp, self.sent))
            self.sent += 1
        if self.fenced and self.chance.random() < 0.5:
            number = self.fenced.pop()
            self.sealed[number] = len(self.rows[number])

    def change(self) -> None:
        held = sorted(self.open, key=lambda number: self.partitions[number].lps)
        at = self.chance.randrange(len(held))
        kind = self.chance.choice(["split", "merge", "move"])
        sources = held[at : at + (2 if kind == "merge" else 1)]
        first, end = self.partitions[sources[0]].lps.first, self.partitions[sources[-1]].lps.end
        cuts = [first, end]
        if kind == "split" and end - first > 1:
            cuts = [first, self.chance.randrange(first + 1, end), end]
        self.version += 1
        for source in sources:
            self.open.discard(source)
            if self.chance.random() < 0.2:
                self.fenced.add(source)
            else:
                self.sealed[source] = len(self.rows[source])
        for begin, stop in pairwise(cuts):
            number = max(self.partitions) + 1
            group = self.chance.choice(GROUPS)
            self.partitions[number] = RoutePartition(
                number, LpRange(begin, stop), group, self.version, tuple(sources)
            )
            self.open.add(number)
            self.rows[number] = []

    def key(self, number: int) -> QueueKey:
        return QueueKey(SUBJECT, number, self.partitions[number].broker_group)

    def topology(self) -> Topology:
        queues = {
            self.key(number): SourceQueue(
                self.key(number), 0, len(rows), 100 * len(rows), is_sealed=number in self.sealed
            )
            for number, rows in self.rows.items()
        }
        return Topology(
            queues, {SUBJECT: Routes(LPS, self.version, dict(self.partitions), dict(self.sealed))}
        )


def read(
    history: History, start: dict[QueueKey, int], end: dict[QueueKey, int]
) -> list[tuple[int, int]]:
    return [row for key in end for row in history.rows[key.partition][start.get(key, 0) : end[key]]]


def micro_batches(history: History, limits: Iterator[Limit]) -> Iterator[list[tuple[int, int]]]:
    """Run a stream beside a growing history, then to the history's end."""
    at: dict[QueueKey, int] = {}
    for turn in range(400):
        if turn < 60:
            history.step()
        while turn >= 60 and history.fenced:
            number = history.fenced.pop()
            history.sealed[number] = len(history.rows[number])
        end = admit(history.topology(), at, next(limits))
        assert offsets.of_json(offsets.to_json(end)) == end
        if end == at and turn >= 60:
            return
        yield read(history, at, end)
        at = end
    raise AssertionError("the stream came to no end")


@pytest.mark.parametrize("seed", range(60))
def test_a_stream_gives_every_message_once_and_each_key_in_order_over_micro_batches(
    seed: int,
) -> None:
    history = History(seed)
    chance = random.Random(seed)

    def limits() -> Iterator[Limit]:
        while True:
            yield chance.choice(
                [Limit(), Limit(chance.randrange(1, 20)), Limit(None, chance.randrange(1, 2000))]
            )

    newest: dict[int, int] = {}
    seen: set[int] = set()
    for rows in micro_batches(history, limits()):
        for lp in {lp for lp, _ in rows}:
            numbers = [number for each, number in rows if each == lp]
            assert min(numbers) > newest.get(lp, -1), f"LP {lp} went back"
            newest[lp] = max(numbers)
        assert not seen & {number for _, number in rows}
        seen |= {number for _, number in rows}
    assert len(seen) == history.sent


@pytest.mark.parametrize("seed", range(20))
def test_within_a_micro_batch_the_messages_of_a_key_are_of_one_partition(seed: int) -> None:
    history = History(seed)
    at: dict[QueueKey, int] = {}
    for _ in range(80):
        history.step()
        end = admit(history.topology(), at)
        owners: dict[int, set[int]] = {}
        for key in end:
            for lp, _ in history.rows[key.partition][at.get(key, 0) : end[key]]:
                owners.setdefault(lp, set()).add(key.partition)
        assert all(len(each) == 1 for each in owners.values())
        at = end


def split_topology(sealed_at: dict[int, int]) -> Topology:
    parts = {
        1: RoutePartition(1, LpRange(0, 16), "g1", 1),
        2: RoutePartition(2, LpRange(0, 8), "g1", 2, (1,)),
        3: RoutePartition(3, LpRange(8, 16), "g2", 2, (1,)),
    }
    keys = [QueueKey(SUBJECT, number, part.broker_group) for number, part in parts.items()]
    queues = {key: SourceQueue(key, 0, end) for key, end in zip(keys, (100, 10, 20), strict=True)}
    return Topology(queues, {SUBJECT: Routes(16, 2, parts, sealed_at)})


@pytest.mark.parametrize(
    ("count", "waited_ms", "is_met"),
    [(9, 0, False), (10, 0, True), (1, 4999, False), (1, 5000, True)],
)
def test_a_micro_batch_begins_with_enough_messages_or_after_the_longest_wait(
    count: int, waited_ms: int, is_met: bool
) -> None:
    assert Minimum(10, 5000).is_met(count, waited_ms) is is_met


def test_messages_wait_also_where_a_partition_is_not_open_but_deleted_ones_do_not() -> None:
    topology = split_topology({1: 100})
    one, two, three = topology.queues
    assert waiting(topology, {}) == 130
    assert waiting(topology, {one: 98}) == 32
    assert waiting(topology, {one: 100, two: 10, three: 25}) == 0
    purged = Topology({one: SourceQueue(one, 95, 100)}, {})
    assert waiting(purged, {one: 3}) == 5


def test_an_unassigned_source_holds_up_no_target() -> None:
    topology = split_topology({1: 100})
    _, two, three = topology.queues
    assigned = Topology({key: topology.queues[key] for key in (two, three)}, topology.routes)
    assert admit(assigned, {}) == {two: 10, three: 20}


def test_an_end_that_was_noted_is_not_passed_though_more_came() -> None:
    topology = split_topology({1: 100})
    one, two, _ = topology.queues
    done = {one: 100}
    assert admit(topology, done, until={one: 100, two: 4}) == {one: 100, two: 4}


def test_a_limit_is_shared_in_proportion_and_starves_no_queue() -> None:
    keys = [QueueKey("s", 0, f"g{number}") for number in range(3)]
    queues = {key: SourceQueue(key, 0, 1000, 100_000) for key in keys}
    shared = share_out(dict(zip(keys, (900, 99, 1), strict=True)), queues, Limit(100))
    assert shared == dict(zip(keys, (90, 9, 1), strict=True))
    by_bytes = share_out(dict(zip(keys, (900, 99, 1), strict=True)), queues, Limit(None, 10_000))
    assert by_bytes == shared
    assert share_out({keys[0]: 5}, queues, Limit(100)) == {keys[0]: 5}


def test_an_empty_source_does_not_let_its_targets_pass_the_source_before_it() -> None:
    parts = {
        1: RoutePartition(1, LpRange(0, 16), "g1", 1),
        2: RoutePartition(2, LpRange(0, 16), "g2", 2, (1,)),
        3: RoutePartition(3, LpRange(0, 16), "g1", 3, (2,)),
    }
    keys = [QueueKey(SUBJECT, number, part.broker_group) for number, part in parts.items()]
    queues = {key: SourceQueue(key, 0, end) for key, end in zip(keys, (100, 0, 20), strict=True)}
    topology = Topology(queues, {SUBJECT: Routes(16, 3, parts, {1: 100, 2: 0})})
    assert admit(topology, {keys[0]: 50}) == {keys[0]: 100}
    assert planning.open_partitions(SUBJECT, topology.routes[SUBJECT], {}, {keys[1], keys[2]}) == {
        1,
        2,
        3,
    }
