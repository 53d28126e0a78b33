"""The sink's cores against a simulated cluster: each row is stored once and in order, despite
failures, moves, dead tasks and zombie tasks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pyspark_qmq.sink.left_over import WrittenRows, refuse_left_over
from pyspark_qmq.sink.packets import Load
from pyspark_qmq.sink.requests import Ask, Look, LookedUp, Prints, Where
from pyspark_qmq.sink.row_distribution import BalancedRows, PartitionedRows, SubjectCore
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from sink_node import KEYS, LPS, Attempt, Cluster, contents_of
from support import forms

from qmq.delivery.retries import ORDERED_SINK, SINK
from qmq.errors import InvalidArgument, NotConnected, NumberTaken

RULES = ORDERED_SINK._replace(backoff_s=lambda *_: 0.1)
SEEDS = 50
EPOCHS = 3
STEPS_MAX = 200_000


def key_of(row: int) -> int:
    return row * 7 % KEYS


def lp_of(row: int) -> int:
    return key_of(row) * LPS // KEYS


def loads_of(rows: int, chunk: int, skips: int = 0, messages: range | None = None) -> list[Load]:
    """Rows in chunks; every `skips`-th is another subject's. `messages`: the messages of the
    rows.
    """
    loads, whole = [], np.arange(rows) if messages is None else np.array(messages)
    for number, first in enumerate(range(0, rows, chunk)):
        mine = np.array(
            [row for row in range(first, min(first + chunk, rows)) if not skips or row % skips],
            np.int64,
        )
        if len(mine):
            loads.append(
                Load(
                    number,
                    mine,
                    10,
                    whole,
                    lps=np.array([lp_of(each) for each in whole[mine].tolist()], np.uint16),
                )
            )
    return loads


def write(
    cluster: Cluster,
    core_of: Callable[[RowWriter], SubjectCore],
    epoch: int,
    loads: list[Load],
    *,
    upheaval: Callable[[], None],
) -> None:
    """Write one epoch: attempts die, or are only declared dead, until one succeeds; the others
    continue for a while.
    """
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
    return Counter(
        row for queue in cluster.queues.values() for batch in queue.batches for row in batch.rows
    )


@pytest.mark.parametrize("block", range(6 if forms.FORM == "all" else 2))
def test_rows_are_stored_once_in_order_through_route_changes_and_crashes(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        cluster = Cluster(random.Random(seed), ["g1", "g2", "g3"], is_ordered=True)
        rows = 60

        def upheaval(cluster: Cluster = cluster) -> None:
            cluster.random.choice([cluster.change, cluster.change, cluster.hear])()

        for epoch in range(EPOCHS):
            write(cluster, partitioned_rows, epoch, loads_of(rows, 7), upheaval=upheaval)
        assert stored(cluster) == Counter(
            (epoch, row) for epoch in range(EPOCHS) for row in range(rows)
        ), seed
        assert_in_order(cluster, seed)


def assert_in_order(cluster: Cluster, seed: int) -> None:
    """Check each key's order through all its partitions, sources before targets."""
    parts = cluster.routes[-1].partitions
    for key in range(KEYS):
        lp = key * LPS // KEYS
        line = sorted(
            (part for part in parts.values() if part.lps.first <= lp < part.lps.end),
            key=lambda part: part.version,
        )
        rows = [
            row
            for part in line
            for batch in cluster.queue(RowTarget("s", part.number, part.broker_group)).batches
            for row in batch.rows
            if key_of(row[1]) == key
        ]
        assert rows == sorted(rows), (seed, key)


@pytest.mark.parametrize("block", range(4 if forms.FORM == "all" else 2))
def test_rows_to_an_unordered_subject_are_stored_once_whichever_groups_are_away(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        cluster = Cluster(random.Random(seed), ["g1", "g2", "g3"], is_ordered=False)
        for epoch in range(EPOCHS):
            chunk = cluster.random.choice([3, 7, 20])
            write(cluster, balanced_rows, epoch, loads_of(60, chunk, skips=5), upheaval=still)
        mine = [row for row in range(60) if row % 5]
        assert stored(cluster) == Counter(
            (epoch, row) for epoch in range(EPOCHS) for row in mine
        ), seed


def balanced_rows(writer: RowWriter) -> SubjectCore:
    return BalancedRows(
        "s", writer, 1e9, rules=SINK._replace(backoff_s=lambda *_: 0.1), prints_of=contents_of
    )


def partitioned_rows(_: RowWriter) -> SubjectCore:
    return PartitionedRows("s", 1e9, rules=RULES, prints_of=contents_of)


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
        write_on = Attempt(
            cluster, balanced_rows(writer), writer, loads_of(60, chance.randrange(1, 20), skips=4)
        )
        while not write_on.is_done:
            write_on.step()
        assert stored(cluster) == Counter((9, row) for row in range(60) if row % 4), seed


# --- epochs that are planned again ----------------------------------------------------------------

MESSAGES = 60
Epoch = list[range]
"""The messages of each task."""


def cut_at_random(chance: random.Random, first: int = 0) -> Epoch:
    marks = sorted(chance.sample(range(first + 1, MESSAGES), chance.randrange(4)))
    return [range(a, b) for a, b in pairwise([first, *marks, MESSAGES])]


Check = Callable[[Cluster, list[WrittenRows]], None]


def look_for_left_over(cluster: Cluster, tasks: list[WrittenRows]) -> None:
    def answer(ask: Ask, writer: RowWriter) -> Where | LookedUp:
        while True:
            with suppress(NotConnected):
                return cluster.ask(ask, writer)

    refuse_left_over(answer, tasks)


def repeat_otherwise(
    seed: int, prints_of: Callable[[Load], Prints], check: Check = look_for_left_over
) -> tuple[str, bool, Counter[int]]:
    """Tasks of an epoch die; the driver plans it again. Returns what the second plan was, whether
    it was refused, and what is stored.
    """
    chance = random.Random(seed)
    is_ordered = chance.random() < 0.5
    cluster = Cluster(chance, ["g1", "g2"], is_ordered=is_ordered)

    def attempt(number: int, messages: range, chunk: int) -> Attempt:
        writer = RowWriter("query", number, 3)
        core: SubjectCore = (
            PartitionedRows("s", 1e9, rules=RULES, prints_of=prints_of)
            if is_ordered
            else BalancedRows(
                "s", writer, 1e9, rules=SINK._replace(backoff_s=lambda *_: 0.1), prints_of=prints_of
            )
        )
        return Attempt(cluster, core, writer, loads_of(len(messages), chunk, messages=messages))

    first = cut_at_random(chance)
    for number, messages in enumerate(first):
        dying = attempt(number, messages, 5)
        for _ in range(chance.randrange(160)):
            dying.step()
        dying.die()
        while cluster.ghosts:
            cluster.process(cluster.ghosts.pop(0))
    how = chance.choice(["same", "other sizes", "retention", "more groups"])
    lost = chance.randrange(1, 20) if how == "retention" else 0
    again = cut_at_random(chance, lost) if how in ("other sizes", "retention") else first
    if how == "more groups" and not is_ordered:
        cluster.groups.append("g3")
    is_refused, written = False, list[WrittenRows]()
    for number, messages in enumerate(again):
        last = attempt(number, messages, chance.choice([5, 9]))
        try:
            while not last.is_done:
                last.step()
            last.core.end()
        except InvalidArgument:
            is_refused = True
        written.append(
            WrittenRows(RowWriter("query", number, 3), len(messages), frozenset({("s", False)}))
        )
    try:
        check(cluster, written)
    except InvalidArgument:
        is_refused = True
    batches = (batch for queue in cluster.queues.values() for batch in queue.batches)
    return (
        how,
        is_refused,
        Counter(
            message - 1
            for batch in batches
            for message in batch.contents.tolist()
            if message > lost
        ),
    )


def test_an_epoch_that_is_planned_otherwise_loses_and_repeats_nothing_or_is_refused() -> None:
    refused: Counter[str] = Counter()
    for seed in range(400):
        how, is_refused, found = repeat_otherwise(seed, contents_of)
        refused[how] += is_refused
        if not is_refused:
            missing = min(found)
            assert found == Counter(range(missing, MESSAGES)), (seed, how)
            assert missing == 0 or how == "retention", (seed, how)
    assert refused["other sizes"] > 10
    assert refused["retention"] > 10
    assert not refused["same"]
    assert not refused["more groups"]


class Blind:
    """A planted bug: fingerprints are never looked at, as in release 0.2."""

    def __eq__(self, _: object) -> Any:
        return np.True_

    def __ne__(self, other: object) -> Any:
        return np.zeros(len(other), np.bool_)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def test_a_sink_that_does_not_compare_rows_is_found_by_these_repetitions() -> None:
    losses = 0
    for seed in range(400):
        how, is_refused, found = repeat_otherwise(seed, lambda _: Blind())  # type: ignore[arg-type, return-value]
        losses += how == "other sizes" and not is_refused and len(found) < MESSAGES
    assert losses > 5


def test_rows_of_tasks_that_are_gone_are_stored_twice_if_the_driver_does_not_look() -> None:
    doubled = 0
    for seed in range(400):
        _, is_refused, found = repeat_otherwise(seed, contents_of, check=lambda *_: None)
        doubled += not is_refused and max(found.values()) > 1
    assert doubled > 5


def test_rows_of_a_subject_that_a_task_no_longer_has_are_left_over() -> None:
    cluster = Cluster(random.Random(1), ["g1", "g2"], is_ordered=False)
    writer = RowWriter("query", 1, 3)
    attempt = Attempt(cluster, balanced_rows(writer), writer, loads_of(20, 5))
    while not attempt.is_done:
        attempt.step()
    other, here = frozenset({("t", False)}), frozenset({("s", False)})
    first = WrittenRows(RowWriter("query", 0, 3), 7, here)
    look_for_left_over(cluster, [first, WrittenRows(writer, 20, here)])
    look_for_left_over(cluster, [first, WrittenRows(writer, 0, frozenset())])
    with pytest.raises(InvalidArgument, match="Spark partition 1 in 's'"):
        look_for_left_over(cluster, [first, WrittenRows(writer, 20, other)])


# --- a checkpoint that is put back ----------------------------------------------------------------


def continue_from_an_older_checkpoint(
    seed: int, *, shows_later: bool
) -> tuple[bool, bool, Counter[int]]:
    """Three epochs of 20 messages are written; then the second one is planned again, in another
    life. Returns whether it has the same messages, whether it was refused, and what is stored.
    """
    chance = random.Random(seed)
    cluster = Cluster(chance, ["g1", "g2"], is_ordered=chance.random() < 0.5)
    core_of = partitioned_rows if cluster.is_ordered else balanced_rows
    for epoch in range(3):
        write(
            cluster,
            core_of,
            epoch,
            loads_of(20, 7, messages=range(epoch * 20, epoch * 20 + 20)),
            upheaval=still,
        )
    cluster.shows_later = shows_later
    messages = range(20, chance.choice([30, 40, 50, 60]))
    writer = RowWriter("query", 4, 1)
    last = Attempt(
        cluster,
        core_of(writer),
        writer,
        loads_of(len(messages), chance.choice([5, 7]), messages=messages),
    )
    is_refused = False
    try:
        while not last.is_done:
            last.step()
        last.core.end()
    except InvalidArgument:
        is_refused = True
    batches = (batch for queue in cluster.queues.values() for batch in queue.batches)
    return (
        messages.stop == 40,
        is_refused,
        Counter(message - 1 for batch in batches for message in batch.contents.tolist()),
    )


def test_a_query_that_continues_from_an_older_checkpoint_stores_nothing_twice() -> None:
    for seed in range(100):
        is_same, is_refused, found = continue_from_an_older_checkpoint(seed, shows_later=True)
        assert found == Counter(range(60)), seed
        assert is_refused != is_same, seed


def test_a_lookup_that_hides_later_epochs_stores_their_rows_twice() -> None:
    doubled = 0
    for seed in range(100):
        _, is_refused, found = continue_from_an_older_checkpoint(seed, shows_later=False)
        doubled += not is_refused and max(found.values()) > 1
    assert doubled > 20


def test_a_batch_number_that_stays_taken_by_an_unseen_writer_ends_the_task() -> None:
    writer = RowWriter("query", 4, 0)
    core = BalancedRows(
        "s", writer, 5.0, rules=SINK._replace(backoff_s=lambda *_: 0.1), prints_of=contents_of
    )
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
