"""The order audit against histories: clean ones have no findings, and in damaged ones the audit finds exactly the damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from order_twin import GROUPS, LPS, Found, History, Message, Row, Stream, exchange, moved, side_by_side, table, twin
from pyspark.sql import SparkSession
from pyspark_qmq.jobs.order_checks import Findings, audit
from pyspark_qmq.jobs.order_rules import RULES
from qmq_ordering.changes import move
from qmq_ordering.hashing import logical_partition
from support import forms

from qmq.columns.model import QueueKey, Routes, SourceQueue
from qmq.errors import InvalidArgument

pytestmark = pytest.mark.sampled

SEEDS = range(24)
CLOCK_MS = 3
DENSE = "header:n"


def found_in(findings: Findings) -> set[Found]:
    return {(row["rule"], row["partition"], row["sequence"]) for row in findings.violations.collect()}


def found_by_twin(rows: list[Row], routes: Routes, **judging: Any) -> set[Found]:
    """The findings of the twin for histories side by side, each judged alone: the twin's time grows with the square of the rows."""
    each: dict[int, list[Row]] = {}
    for row in rows:
        each.setdefault(row.partition // 1_000, []).append(row)
    return set().union(*(twin(its, routes, **judging) for its in each.values()))


def told_by_history(findings: Findings, histories: int) -> list[set[tuple[str, bytes | None]]]:
    """(rule, key) of the findings in each of several histories side by side."""
    told: list[set[tuple[str, bytes | None]]] = [set() for _ in range(histories)]
    for row in findings.violations.collect():
        told[row["partition"] // 1_000].add((row["rule"], row["key"] and bytes(row["key"])))
    return told


@dataclass(frozen=True, slots=True)
class Audited:
    """Many histories in one audit, because an audit takes Spark seconds even for few rows."""

    by: str
    keys: list[bytes | None]
    """Those at which something was planted, in the order of PLANTS."""
    rows: list[Row]
    routes: Routes
    findings: Findings
    told: list[set[tuple[str, bytes | None]]]
    """One with each plant, a small clean one, those of any steps, and as many that were damaged."""


# By numbers in bodies only what follows the reading differs: the job's own test reads them in every form.
@pytest.fixture(scope="module", params=["create_time", "header:n", *(["json:at.n"] if forms.FORM == "all" else [])])
def audited(spark: SparkSession, request: pytest.FixtureRequest) -> Audited:
    planted = [small(1_000 + number) for number in range(len(PLANTS) + 1)]
    keys = [plant(history) for history, (plant, _) in zip(planted, PLANTS.values(), strict=False)]
    histories = planted + clean() + damaged()
    rows, routes = side_by_side(histories)
    findings = audit(spark.createDataFrame(table(rows)), routes, by=request.param, is_dense=request.param == DENSE)
    return Audited(request.param, keys, rows, routes, findings, told_by_history(findings, len(histories)))


# --- any history -------------------------------------------------------------------------------------------------------


def clean() -> list[History]:
    """Splits, merges, moves and fences without an error; retention deleted the oldest messages of some partitions, and all of others."""
    histories = [History(seed).run(80) for seed in SEEDS]
    for history in histories[::2]:
        retain(history)
    return histories


def damaged() -> list[History]:
    histories = [History(100 + seed).run(60) for seed in SEEDS]
    for history in histories:
        retain(history)
        chance = random.Random(len(history.rows))
        for _ in range(chance.randrange(1, 4)):
            damage(history, chance)
    return histories


def test_histories_of_splits_merges_moves_and_fences_are_clean(audited: Audited) -> None:
    """This holds also if retention deleted the oldest messages of some partitions, and all messages of others."""
    assert audited.told[len(PLANTS) : -len(SEEDS)] == [set()] * (1 + len(SEEDS))


def test_examined_messages_are_counted(audited: Audited) -> None:
    facts, keyed = audited.findings.facts, {row.key for row in audited.rows if row.key is not None}
    assert facts["messages"] == len(audited.rows) > 6_000
    assert facts["keys"] == facts["hashed_keys"] == len(keyed)
    assert facts["partitions"] == len({(row.partition, row.broker_group) for row in audited.rows})
    assert facts["replays"] > 20
    assert facts["replayed_messages"] > facts["replays"]
    assert facts.get("unjudged", 0) < facts["carried"] / 5


def test_of_any_history_exactly_what_the_slow_twin_finds_is_found(audited: Audited) -> None:
    expected = found_by_twin(audited.rows, audited.routes, is_exact=audited.by != "create_time", is_dense=audited.by == DENSE)
    assert found_in(audited.findings) == expected
    assert {example.rule for example in audited.findings.examples} == set(audited.findings.counts) == {rule for rule, _, _ in expected}


@pytest.mark.long
def test_clocks_of_two_producers_may_differ_by_the_documented_bound(spark: SparkSession) -> None:
    """One history has the largest allowed difference, and another one a millisecond more."""
    allowed, late = small(1), small(2)
    for history, difference in ((allowed, CLOCK_MS), (late, CLOCK_MS + 1)):
        before = history.of(history.keys[0])[2]
        alter(history, history.keys[0], 3, create_ms=before.create_ms - difference)
    wrong = late.of(late.keys[0])[3]
    histories = [late, allowed, *damaged()]
    rows, routes = side_by_side(histories)
    findings = audit(spark.createDataFrame(table(rows)), routes, clock_ms=CLOCK_MS)
    assert found_in(findings) == found_by_twin(rows, routes, clock_ms=CLOCK_MS)
    assert told_by_history(findings, len(histories))[:2] == [{("time_order", late.keys[0])}, set()]
    example = next(each for each in findings.examples if each.rule == "time_order")
    assert (example.key, example.place.partition, example.place.sequence) == (late.keys[0], wrong.partition, wrong.sequence)
    assert example.earlier is not None
    assert (example.earlier.partition, example.place.partition) == (1, 2)


def retain(history: History) -> None:
    for partition in history.random.sample(sorted(history.parts), len(history.parts) // 2):
        history.forget(partition, history.random.randrange(30))


def damage(history: History, chance: random.Random) -> None:
    """Make a random violation at a random place."""
    rows = history.rows
    one, other = chance.sample(rows, 2)
    at = rows.index(one)
    kind = chance.randrange(10)
    if kind == 0:
        exchange(rows, one, other)
    elif kind == 1:
        exchange(rows, *chance.sample(history.of(one.key or b"") * 2, 2))
    elif kind == 2:
        rows.remove(one)
    elif kind == 3:
        rows.append(replace(one))
    elif kind == 4:
        rows.append(behind(history, one, other.partition))
    elif kind == 5:
        rows[at] = replace(one, logical_partition=chance.randrange(LPS))
    elif kind == 6:
        rows[at] = replace(one, create_ms=one.create_ms - chance.randrange(20), number=(one.number or 0) - 1)
    elif kind == 7:
        rows[at] = replace(one, partition=chance.choice([999, other.partition]))
    elif kind == 8:
        rows[at] = replace(one, key=None, number=None, entry=one.entry - 50)
    elif history.sealed:
        history.sealed[chance.choice(sorted(history.sealed))] -= 1


def behind(history: History, row: Row, partition: int) -> Row:
    """A copy of a message at a partition's end, by another producer."""
    last = max((each for each in history.rows if each.partition == partition), key=lambda each: each.sequence)
    copy = replace(moved(row, last), sequence=last.sequence + 1, entry=last.entry + 1)
    return replace(copy, producer_id="f" * 16, batch_sequence=0, place=0)


# --- each rule by itself -----------------------------------------------------------------------------------------------

Plant = Callable[[History], bytes | None]
"""Breaks one thing in a history; gives the key that must be found."""


def small(seed: int) -> History:
    """Three messages of each of four keys, a move from group a to b, three more of each."""
    history = History(seed, keys=4, clients=1, partitions=1)
    three_each(history)
    history.apply(move(history.route, 1, "b", change_id="x"))
    three_each(history)
    return history


def three_each(history: History) -> None:
    for _ in range(3):
        for key in history.keys:
            history.say(key)


def index(history: History, key: bytes, nth: int) -> int:
    """The position of the n-th message of a key."""
    return history.rows.index(history.of(key)[nth])


def alter(history: History, key: bytes, nth: int, /, **changes: object) -> bytes:
    at = index(history, key, nth)
    history.rows[at] = replace(history.rows[at], **changes)  # type: ignore[arg-type]
    return key


def late_over_the_move(history: History) -> bytes:
    """Messages 3 and 4 of a key, on either side of the move, were stored in the wrong order."""
    key = history.keys[1]
    third, fourth = history.of(key)[2:4]
    alter(history, key, 2, number=fourth.number, create_ms=fourth.create_ms)
    return alter(history, key, 3, number=third.number, create_ms=third.create_ms)


def swapped_in_a_stream(history: History) -> bytes:
    one, other = history.of(history.keys[0])[1], history.of(history.keys[1])[1]
    exchange(history.rows, one, other)
    return history.keys[0]


def sent_again(history: History, key: bytes, first: int, places: list[int], *, stored: int) -> None:
    """A producer with one batch of a key's messages. A fenced partition stored so many of them; the next one got those at `places`."""
    producer = history.new_producer()
    stream = Stream(producer)
    for place in range(stored):
        history.append(stream, history.route.partitions[0].number, [message(key, first + place, f"{producer}{place:012x}0000")])
    history.apply(move(history.route, history.route.partitions[0].number, "c", change_id="y"))
    target = Stream(history.new_producer())
    for place in places:
        again = message(key, first + place, f"{producer}{place:012x}0000")
        history.append(target, history.route.partitions[0].number, [again])


def message(key: bytes, number: int, message_id: str = "") -> Message:
    return Message(key, number, 10_000 + number, message_id)


def id_order(history: History) -> bytes:
    sent_again(history, history.keys[2], 7, [2, 1], stored=1)
    return history.keys[2]


def broken_replay(history: History) -> bytes:
    sent_again(history, history.keys[2], 7, [1, 3], stored=3)
    return history.keys[2]


def stored_twice(history: History) -> bytes:
    key = history.keys[3]
    history.rows.append(behind(history, history.of(key)[-1], history.of(key)[-1].partition))
    return key


def sequence_gap(history: History) -> bytes:
    """No producer's numbers have a gap, and a sequence is missing."""
    return alter(history, history.keys[3], 5, sequence=12)


def stream_gap(history: History) -> bytes:
    return alter(history, history.keys[3], 5, batch_sequence=12)


def sequence_repeat(history: History) -> bytes:
    history.rows.append(replace(history.rows[-1]))
    return history.keys[3]


def behind_seal(history: History) -> bytes:
    history.sealed[2] = 11
    return history.keys[3]


def before_seal(history: History) -> bytes:
    """The target of a second move, on the same group, has an entry between those of its source."""
    history.apply(move(history.route, history.route.partitions[0].number, "b", change_id="y"))
    three_each(history)
    source = max(row.entry for row in history.rows if row.partition == 2)
    first = next(row for row in history.rows if row.partition == 3)
    return alter(history, first.key or b"", 6, entry=source - 1)


def no_key(history: History) -> None:
    alter(history, history.keys[0], 5, key=None)


PLANTS: dict[str, tuple[Plant, set[str]]] = {
    "reordered across the move": (late_over_the_move, {"time_order", "number_order", "number_gap"}),
    "reordered in a stream": (swapped_in_a_stream, {"stream_order", "stream_gap"}),
    "sent again out of order": (id_order, {"id_order", "time_order", "number_order", "number_gap"}),
    "a broken replay": (broken_replay, {"broken_replay"}),
    "stored twice": (stored_twice, {"stored_twice"}),
    "a gap in sequences": (sequence_gap, {"sequence_gap"}),
    "a gap in a stream": (stream_gap, {"stream_gap"}),
    "a sequence twice": (sequence_repeat, {"sequence_repeat"}),
    "behind the seal": (behind_seal, {"behind_seal"}),
    "before the seal": (before_seal, {"before_seal"}),
    "outside of the range": (lambda it: alter(it, it.keys[1], 4, logical_partition=LPS), {"outside_range", "wrong_hash"}),
    "another hash": (
        lambda it: alter(it, it.keys[1], 4, logical_partition=(logical_partition(it.keys[1], LPS) + 1) % LPS),
        {"wrong_hash"},
    ),
    "no such partition": (lambda it: alter(it, it.keys[3], 5, partition=999), {"unknown_partition"}),
    "another broker group": (lambda it: alter(it, it.keys[3], 5, broker_group="c"), {"other_group"}),
    "without a key": (no_key, {"no_key"}),
    "without a number": (lambda it: alter(it, it.keys[1], 5, number=None), {"no_number"}),
    "a number twice": (lambda it: alter(it, it.keys[1], 5, number=5), {"number_repeat"}),
    "a lost number": (lambda it: alter(it, it.keys[1], 5, number=7), {"number_gap"}),
}
BY_NUMBER = {"number_order", "number_repeat", "number_gap", "no_number"}
BY_TIME = {"time_order"}


def test_whatever_is_planted_is_found_at_exactly_its_key(audited: Audited) -> None:
    away = BY_NUMBER if audited.by == "create_time" else BY_TIME if audited.by == DENSE else BY_TIME | {"number_gap"}
    for (name, (_, rules)), key, found in zip(PLANTS.items(), audited.keys, audited.told, strict=False):
        assert {rule for rule, _ in found} == rules - away, name
        if "stream_order" not in rules:
            assert {its for _, its in found} <= {key}, name
    planted = {rule for found in audited.told[: len(PLANTS)] for rule, _ in found}
    assert planted == set(RULES) - away


def test_events_that_best_effort_order_allows_are_not_violations(audited: Audited) -> None:
    loose = replace(audited.findings, routes=replace(audited.routes, is_strict=False), counts={"time_order": 1})
    assert loose.is_clean
    assert not replace(loose, counts={"time_order": 1, "stream_gap": 1}).is_clean
    assert not replace(loose, routes=audited.routes).is_clean


# --- what is no violation ----------------------------------------------------------------------------------------------


def allowed() -> list[History]:
    """Retention's cut, a bent message, a replay that was given up, a delayed message's old time, two clients that interleave."""
    cut, bent, given_up, delayed, two = (small(1 + seed) for seed in range(5))
    cut.forget(1, 5)
    stray = bent.say(bent.keys[0], create_ms=1)
    bent.rows[-1] = replace(stray, is_bent=True, logical_partition=0)
    sent_again(given_up, given_up.keys[2], 7, [1], stored=3)
    delayed.deliver(delayed.keys[0], create_ms=3)
    delayed.say(delayed.keys[0])
    partition, other = two.route.partitions[0].number, Stream(two.new_producer())
    for at in range(3):
        two.say(two.keys[0])
        two.append(other, partition, [message(two.keys[0], at)])
        two.rows[-1] = replace(two.rows[-1], create_ms=500 + at)
    return [cut, bent, given_up, delayed, two]


@pytest.mark.long
def test_missing_ends_and_wrong_hashes_are_findings_and_allowed_ones_are_not(spark: SparkSession) -> None:
    """Keys beyond the limit are still compared with each other."""
    history = small(0)
    alter(history, history.keys[3], 4, logical_partition=(logical_partition(history.keys[3], LPS) + 1) % LPS)
    del history.rows[-2:]
    rows, routes = side_by_side([history, *allowed()])
    queues = [SourceQueue(QueueKey("s", number, group), 0, 12) for number, group in ((1, GROUPS[0]), (2, GROUPS[1]))]
    findings = audit(spark.createDataFrame(table(rows)), routes, queues=queues, keys_max=1)
    assert dict(findings.counts) == {"sequence_gap": 1, "wrong_hash": 1}
    assert (findings.facts["keys"], findings.facts["hashed_keys"]) == (len({row.key for row in rows}), 1)
    assert (findings.facts["bent"], findings.facts["unfinished_replays"], findings.facts["unjudged"]) == (1, 1, 1)
    gap = findings.examples[0]
    assert (gap.rule, gap.place.partition, gap.place.sequence) == ("sequence_gap", 2, 10)


@pytest.mark.parametrize("by", ["", "clock", "create_time:x", "header:", "json:", "json:a.", "json:a['b']"])
def test_what_cannot_say_the_order_of_sending_is_refused(by: str) -> None:
    from pyspark_qmq.jobs.order_checks import parse_by

    with pytest.raises(InvalidArgument, match="create_time, header:NAME or json:FIELD"):
        parse_by(by)
