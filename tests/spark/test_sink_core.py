"""The sink's cores against a simulated cluster: each row is stored once and in order, despite failures, moves, dead tasks and zombie
tasks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from pyspark_qmq.sink.balanced_rows import BalancedRows
from pyspark_qmq.sink.core_requests import Look, LookedUp, SubjectCore
from pyspark_qmq.sink.packets import Load
from pyspark_qmq.sink.partitioned_rows import PartitionedRows
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from sink_cluster import KEYS, LPS, Attempt, Cluster

from qmq.delivery.retries import ORDERED_SINK, SINK
from qmq.errors import NumberTaken

RULES = ORDERED_SINK._replace(rest_s=lambda *_: 0.1)
SEEDS = 50
EPOCHS = 3
STEPS_MAX = 200_000


def key_of(row: int) -> int:
    return row * 7 % KEYS


def lp_of(row: int) -> int:
    return key_of(row) * LPS // KEYS


def loads_of(rows: int, chunk: int, skips: int = 0) -> list[Load]:
    """Rows in chunks; every `skips`-th is another subject's."""
    loads = []
    for number, first in enumerate(range(0, rows, chunk)):
        mine = np.array([row for row in range(first, min(first + chunk, rows)) if not skips or row % skips], np.int64)
        if len(mine):
            loads.append(Load(number, mine, 10, lps=np.array([lp_of(row) for row in mine.tolist()], np.uint16)))
    return loads


def write(
    cluster: Cluster, core_of: Callable[[RowWriter], SubjectCore], epoch: int, loads: list[Load], *, upheaval: Callable[[], None]
) -> None:
    """Write one epoch: attempts die, or are only declared dead, until one succeeds; the others continue for a while."""
    chance = cluster.random
    writer = RowWriter("query", 4, epoch)
    living: list[Attempt] = [Attempt(cluster, core_of(writer), writer, loads)]
    deaths = chance.randrange(4)
    for _ in range(STEPS_MAX):
        newest = living[-1]
        if newest.is_done:
            break
        chance.choice(living).step()
        if chance.random() < 0.02:
            upheaval()
        if chance.random() < 0.02 and cluster.ghosts:
            cluster.process(cluster.ghosts.pop(0))
        if deaths and chance.random() < 0.01:
            deaths -= 1
            if chance.random() < 0.5:
                newest.die()
                living.pop()
            living.append(Attempt(cluster, core_of(writer), writer, loads))
    else:
        raise AssertionError("it does not come to an end")
    for _ in range(100):
        chance.choice(living).step()
    for each in living:
        each.die()
    while cluster.ghosts:
        cluster.process(cluster.ghosts.pop(0))


def still() -> None:
    return


def stored(cluster: Cluster) -> Counter[tuple[int, int]]:
    return Counter(row for queue in cluster.queues.values() for batch in queue.batches for row in batch.rows)


@pytest.mark.parametrize("block", range(6))
def test_rows_are_stored_once_in_order_through_route_changes_and_crashes(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        cluster = Cluster(random.Random(seed), ["g1", "g2", "g3"], is_ordered=True)
        rows = 60

        def upheaval(cluster: Cluster = cluster) -> None:
            cluster.random.choice([cluster.change, cluster.change, cluster.hear])()

        for epoch in range(EPOCHS):
            write(cluster, lambda _: PartitionedRows("s", 1e9, rules=RULES), epoch, loads_of(rows, 7), upheaval=upheaval)
        assert stored(cluster) == Counter((epoch, row) for epoch in range(EPOCHS) for row in range(rows)), seed
        assert_in_order(cluster, seed)


def assert_in_order(cluster: Cluster, seed: int) -> None:
    """Check each key's order through all its partitions, sources before targets."""
    parts = cluster.routes[-1].partitions
    for key in range(KEYS):
        lp = key * LPS // KEYS
        line = sorted((part for part in parts.values() if part.lps.first <= lp < part.lps.end), key=lambda part: part.version)
        rows = [
            row
            for part in line
            for batch in cluster.queue(RowTarget("s", part.number, part.broker_group)).batches
            for row in batch.rows
            if key_of(row[1]) == key
        ]
        assert rows == sorted(rows), (seed, key)


@pytest.mark.parametrize("block", range(4))
def test_rows_to_an_unordered_subject_are_stored_once_whichever_groups_are_away(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        cluster = Cluster(random.Random(seed), ["g1", "g2", "g3"], is_ordered=False)
        for epoch in range(EPOCHS):
            chunk = cluster.random.choice([3, 7, 20])
            write(cluster, balanced_rows, epoch, loads_of(60, chunk, skips=5), upheaval=still)
        mine = [row for row in range(60) if row % 5]
        assert stored(cluster) == Counter((epoch, row) for epoch in range(EPOCHS) for row in mine), seed


def balanced_rows(writer: RowWriter) -> SubjectCore:
    return BalancedRows("s", writer, 1e9, rules=SINK._replace(rest_s=lambda *_: 0.1))


def test_a_drained_broker_group_gets_no_more_rows_and_each_row_is_stored_once() -> None:
    for seed in range(SEEDS):
        cluster = Cluster(random.Random(seed), ["g1", "g2"], is_ordered=False)

        def drain(cluster: Cluster = cluster) -> None:
            cluster.queue(RowTarget("s", 0, "g1")).is_drained = True

        write(cluster, balanced_rows, 0, loads_of(60, 4), upheaval=drain)
        assert stored(cluster) == Counter((0, row) for row in range(60)), seed


def test_an_attempt_that_cuts_its_rows_otherwise_still_repeats_none() -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed)
        cluster = Cluster(chance, ["g1", "g2"], is_ordered=False)
        writer = RowWriter("query", 0, 9)
        for chunk in (chance.randrange(1, 20), chance.randrange(1, 20)):
            attempt = Attempt(cluster, balanced_rows(writer), writer, loads_of(60, chunk, skips=4))
            for _ in range(chance.randrange(200)):
                attempt.step()
            attempt.die()
            while cluster.ghosts:
                cluster.process(cluster.ghosts.pop(0))
        write_on = Attempt(cluster, balanced_rows(writer), writer, loads_of(60, chance.randrange(1, 20), skips=4))
        while not write_on.is_done:
            write_on.step()
        assert stored(cluster) == Counter((9, row) for row in range(60) if row % 4), seed


def test_a_batch_number_that_stays_taken_by_an_unseen_writer_ends_the_task() -> None:
    writer = RowWriter("query", 4, 0)
    core = BalancedRows("s", writer, 5.0, rules=SINK._replace(rest_s=lambda *_: 0.1))
    (load,) = loads_of(3, 3)
    core.put(load)
    now = 0.0
    with pytest.raises(NumberTaken):
        while now < 60.0:
            now += 0.2
            for ask in core.asks(now):
                if isinstance(ask, Look):
                    core.looked(ask.target, LookedUp(), now)
                else:
                    core.located({"g1": True}, now)
            packet = core.next(now)
            if packet is not None:
                core.answered(packet, packet.attempts, NumberTaken("other content"), now)
    assert 5.0 <= now < 6.0
