"""The order audit against histories: clean ones have no findings, and in damaged ones the audit
finds exactly the damage.

Random possible histories of an ordered subject: routes change; batches are refused, cut again and
sent again. No I/O.

A seed decides the steps of a history: clients put messages into their streams, streams are written
to partitions, partitions are split, merged and moved, some of them fenced. The result is the log's
content, as rows; a test that needs a bad history alters them.

A second, slow implementation of the order audit in plain Python, directly from its rules. Spark
must find the same violations.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark_qmq.jobs.order_checks import Findings, audit
from pyspark_qmq.jobs.order_rules import RULES
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import Change
from support import forms

from qmq.columns.model import QueueKey, RoutePartition, Routes, SourceQueue
from qmq.errors import InvalidArgument

LPS = 64
GROUPS = ("a", "b", "c")
EPOCH = datetime(2026, 11, 21, tzinfo=UTC)

TYPES = {
    "partition": pa.int32(),
    "broker_group": pa.string(),
    "sequence": pa.int64(),
    "key": pa.binary(),
    "body": pa.binary(),
    "headers": pa.map_(pa.string(), pa.binary()),
    "message_id": pa.string(),
    "create_time": pa.timestamp("us", "UTC"),
    "append_time": pa.timestamp("us", "UTC"),
    "producer_id": pa.string(),
    "batch_sequence": pa.int64(),
    "place": pa.int32(),
    "logical_partition": pa.int32(),
    "is_bent": pa.bool_(),
    "entry": pa.int64(),
}


@dataclass(slots=True)
class Message:
    """A message at the client. `id` is set when it is first sent."""

    key: bytes
    number: int
    create_ms: int
    id: str = ""


@dataclass(slots=True)
class Row:
    """A row of the log."""

    partition: int
    broker_group: str
    sequence: int
    key: bytes | None
    number: int | None
    message_id: str
    create_ms: int
    append_ms: int
    producer_id: str
    batch_sequence: int
    place: int
    logical_partition: int
    entry: int
    is_bent: bool = False


@dataclass(slots=True)
class Stream:
    """The batches of a client on their way to one partition."""

    producer_id: str
    next_batch: int = 0
    waiting: list[Message] = field(default_factory=list)
    stored: list[Message] = field(default_factory=list)


class History:
    """`rows` are the log, in the order in which it was written."""

    def __init__(self, seed: int, *, keys: int = 24, clients: int = 3, partitions: int = 2) -> None:
        self.random = random.Random(seed)
        self.route = first_route(LPS, partitions, GROUPS)
        self.parts = {
            each.number: RoutePartition(each.number, each.range, each.group, 1)
            for each in self.route.partitions
        }
        self.sealed: dict[int, int] = {}
        self.rows: list[Row] = []
        self.keys = [b"key-%d-%d" % (seed, number) for number in range(keys)]
        self.now_ms = 1_000
        self._clients: list[dict[int, Stream]] = [{} for _ in range(clients)]
        self._next: dict[int, int] = {}
        self._entries = dict.fromkeys(GROUPS, 0)
        self._numbers: dict[bytes, int] = {}
        self._producers = seed * 10_000

    # --- steps ------------------------------------------------------------------------------------

    def run(self, steps: int, *, fences: bool = True) -> History:
        """Make this many random steps, then write everything that waits."""
        doings: list[tuple[Callable[[], None], int]] = [
            (self.send, 10),
            (self.write, 10),
            (self.change, 2),
            (self.renumber, 1),
        ]
        for _ in range(steps):
            (doing,) = self.random.choices(
                [each for each, _ in doings], [weight for _, weight in doings]
            )
            doing()
            if fences and self.random.random() < 0.05:
                self.change(is_fenced=True)
        self.write(whole=True)
        return self

    def send(self) -> None:
        """Put messages of a client into its streams. Each client has its own keys."""
        self.now_ms += self.random.randrange(3)
        at = self.random.randrange(len(self._clients))
        mine = self.keys[at :: len(self._clients)]
        for key in self.random.choices(mine, k=self.random.randint(1, 12)):
            self._stream(at, self._holder(key)).waiting.append(
                Message(key, self.number(key), self.now_ms)
            )

    def number(self, key: bytes) -> int:
        """The next number of a key."""
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._numbers[key]

    def write(self, *, whole: bool = False) -> None:
        """Store some of the streams' batches."""
        for streams in self._clients:
            for partition in list(streams):
                stream = streams[partition]
                while stream.waiting and (whole or self.random.random() < 0.5):
                    count = self.random.randint(1, len(stream.waiting))
                    batch, stream.waiting = stream.waiting[:count], stream.waiting[count:]
                    self.append(stream, partition, batch)

    def append(self, stream: Stream, partition: int, batch: list[Message]) -> None:
        """Store one batch."""
        self.now_ms += self.random.randrange(2)
        part = self.parts[partition]
        self._entries[part.broker_group] += 1
        first = self._next.get(partition, 0)
        for place, each in enumerate(batch):
            each.id = each.id or f"{stream.producer_id}{stream.next_batch:012x}{place:04x}"
            row = Row(
                partition,
                part.broker_group,
                first + place,
                each.key,
                each.number,
                each.id,
                each.create_ms,
                self.now_ms,
                stream.producer_id,
                stream.next_batch,
                place,
                logical_partition(each.key, LPS),
                self._entries[part.broker_group],
            )
            self.rows.append(row)
            stream.stored.append(each)
        self._next[partition] = first + len(batch)
        stream.next_batch += 1

    def renumber(self) -> None:
        """Let a producer, which its broker has forgotten, continue under another id."""
        streams = self.random.choice(self._clients)
        if streams:
            stream = streams[self.random.choice(sorted(streams))]
            stream.producer_id, stream.next_batch, stream.stored = self.new_producer(), 0, []

    def say(self, key: bytes, *, number: int = 0, create_ms: int = 0, message_id: str = "") -> Row:
        """Store one message of the first client as a batch; by default later than all before."""
        self.now_ms += 1
        partition = self._holder(key)
        message = Message(key, number or self.number(key), create_ms or self.now_ms, message_id)
        self.append(self._stream(0, partition), partition, [message])
        return self.rows[-1]

    def change(self, *, is_fenced: bool = False) -> None:
        """Make a random change."""
        self.apply(self._chosen(), is_fenced=is_fenced)

    def apply(self, change: Change, *, is_fenced: bool = False) -> None:
        """Apply a change of the route. Waiting messages are divided again; if the partition was
        fenced, the last stored ones are sent again before them.
        """
        self.route = next_route(self.route, change)
        for each in change.targets:
            self.parts[each.number] = RoutePartition(
                each.number, each.range, each.group, self.route.version, change.sources
            )
        for source in change.sources:
            self.sealed[source] = self._next.get(source, 0)
            self._entries[self.parts[source].broker_group] += 1
            for at, streams in enumerate(self._clients):
                stream = streams.pop(source, None)
                if stream is not None:
                    again = self.random.randint(0, min(len(stream.stored), 6)) if is_fenced else 0
                    for message in stream.stored[len(stream.stored) - again :] + stream.waiting:
                        self._stream(at, self._holder(message.key)).waiting.append(message)

    def _chosen(self) -> Change:
        route, name = self.route, str(self.route.version)
        wide = [part for part in route.partitions if part.range.width > 1]
        kind = self.random.choice(["split", "merge", "move"])
        if kind == "merge" and len(route.partitions) > 1:
            at = self.random.randrange(len(route.partitions) - 1)
            return merge(
                route,
                [part.number for part in route.partitions[at : at + 2]],
                change_id=name,
                group=self.random.choice(GROUPS),
            )
        if kind == "split" and wide:
            part = self.random.choice(wide)
            cut = self.random.randrange(part.range.first + 1, part.range.end)
            return split(
                route, part.number, [cut], change_id=name, groups=self.random.choices(GROUPS, k=2)
            )
        return move(
            route,
            self.random.choice(route.partitions).number,
            self.random.choice(GROUPS),
            change_id=name,
        )

    def _holder(self, key: bytes) -> int:
        return self.route.holder(logical_partition(key, LPS)).number

    def _stream(self, client: int, partition: int) -> Stream:
        if partition not in self._clients[client]:
            self._clients[client][partition] = Stream(self.new_producer())
        return self._clients[client][partition]

    def new_producer(self) -> str:
        """A new producer id."""
        self._producers += 1
        return f"{self._producers << 20:016x}"

    def deliver(self, key: bytes, create_ms: int) -> Row:
        """Store an old message with a delay server's producer id."""
        self.now_ms += 1
        partition = self._holder(key)
        message = Message(key, self.number(key), create_ms, f"{self.new_producer()}{7:012x}{3:04x}")
        self.append(Stream(self.new_producer()), partition, [message])
        return self.rows[-1]

    def forget(self, partition: int, before: int) -> None:
        """Delete the oldest messages of a partition, like retention."""
        self.rows = [
            row for row in self.rows if row.partition != partition or row.sequence >= before
        ]

    # --- what comes of it -------------------------------------------------------------------------

    @property
    def routes(self) -> Routes:
        """The routes as in the topology."""
        return Routes(LPS, self.route.version, dict(self.parts), dict(self.sealed))

    def of(self, key: bytes) -> list[Row]:
        """A key's rows, in the order of the log."""
        found = [row for row in self.rows if row.key == key]
        return sorted(
            found, key=lambda row: (self.parts[row.partition].version, row.partition, row.sequence)
        )


def side_by_side(histories: Sequence[History]) -> tuple[list[Row], Routes]:
    """Several histories joined into one. Each has its own keys, producers, partitions and versions,
    so that the retention of one history does not hide a loss in another.
    """
    rows: list[Row] = []
    parts: dict[int, RoutePartition] = {}
    sealed: dict[int, int] = {}
    for at, history in enumerate(histories):
        away = at * 1_000
        rows += [replace(row, partition=row.partition + away) for row in history.rows]
        for each in history.parts.values():
            sources = tuple(number + away for number in each.sources)
            parts[each.number + away] = replace(
                each, number=each.number + away, version=each.version + away, sources=sources
            )
        sealed |= {number + away: sequence for number, sequence in history.sealed.items()}
    return rows, Routes(LPS, max(each.version for each in parts.values()), parts, sealed)


def exchange(rows: list[Row], one: Row, other: Row) -> None:
    """Exchange the places of two messages."""
    at, where = rows.index(one), rows.index(other)
    rows[at], rows[where] = moved(other, one), moved(one, other)


def moved(row: Row, to: Row) -> Row:
    """The message of `row` at the place of `to`."""
    return replace(
        row,
        partition=to.partition,
        broker_group=to.broker_group,
        sequence=to.sequence,
        append_ms=to.append_ms,
        entry=to.entry,
    )


def table(rows: list[Row]) -> pa.Table:
    """The rows as the data source gives them."""
    at = [EPOCH + timedelta(milliseconds=row.create_ms) for row in rows]
    found = {
        name: [getattr(row, name) for row in rows]
        for name in TYPES
        if name not in ("body", "headers", "create_time", "append_time")
    }
    found["create_time"] = at
    found["append_time"] = [EPOCH + timedelta(milliseconds=row.append_ms) for row in rows]
    found["body"] = [
        b"{}" if row.number is None else b'{"at": {"n": %d}}' % row.number for row in rows
    ]
    found["headers"] = [None if row.number is None else [("n", b"%d" % row.number)] for row in rows]
    return pa.table({name: pa.array(found[name], kind) for name, kind in TYPES.items()})


Found = tuple[str, int, int]
"""A rule, and the partition and sequence at which it is broken."""


def twin(
    rows: list[Row],
    routes: Routes,
    *,
    is_exact: bool = False,
    is_dense: bool = False,
    clock_ms: int = 0,
) -> set[Found]:
    """All violations in the rows."""
    found = (
        set(_of_messages(rows, routes, is_exact))
        | set(_of_partitions(rows))
        | set(_of_seals(rows, routes))
    )
    keyed = [
        row
        for row in rows
        if row.key is not None and not row.is_bent and row.partition in routes.partitions
    ]
    keyed.sort(
        key=lambda row: (routes.partitions[row.partition].version, row.partition, row.sequence)
    )
    known = {row.message_id[:16] for row in keyed if row.message_id[:16] == row.producer_id}
    queues = _grouped(_at_home(rows, routes), lambda row: row.partition)
    oldest = {number: min(row.sequence for row in queue) for number, queue in queues.items()}
    found |= set(_of_replays(keyed, known))
    firsts = [group[0] for group in _grouped(keyed, lambda row: (row.key, row.message_id)).values()]
    for chain in _grouped(firsts, lambda row: (row.key, row.message_id[:16])).values():
        if oldest.get(chain[0].partition) and chain[0].message_id[:16] in known:
            firsts = [
                row
                for row in firsts
                if row not in chain or not is_carried(row) or row.message_id >= chain[0].message_id
            ]
    for mine in _grouped(firsts, lambda row: (row.key, row.message_id[:16])).values():
        for before, row in pairwise(mine):
            is_sent_again = is_carried(row) or is_carried(before)
            if (
                is_sent_again
                and row.message_id[:16] in known
                and row.message_id < before.message_id
            ):
                found.add(_at("id_order", row))
    if is_exact:
        kept = {
            number: oldest.get(number, routes.sealed_at.get(number, 0)) == 0
            for number in routes.partitions
        }
        lossy = {part.version for number, part in routes.partitions.items() if not kept[number]}
        return found | set(_by_number(firsts, routes, lossy, is_dense))
    return found | set(
        _by_time([row for row in firsts if row.message_id[:16] in known], rows, clock_ms)
    )


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
        if (
            row.key is not None
            and not row.is_bent
            and row.logical_partition != logical_partition(row.key, routes.logical_partitions)
        ):
            yield _at("wrong_hash", row)


def _of_partitions(rows: list[Row]) -> Iterator[Found]:
    for queue in _grouped(rows, lambda row: (row.partition, row.broker_group)).values():
        queue.sort(key=lambda row: row.sequence)
        again = {id(row) for before, row in pairwise(queue) if row.sequence == before.sequence}
        yield from (_at("sequence_repeat", row) for row in queue if id(row) in again)
        yield from (
            _at("sequence_gap", row)
            for before, row in pairwise(queue)
            if row.sequence > before.sequence + 1
        )
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
    return [
        row for row in known if routes.partitions[row.partition].broker_group == row.broker_group
    ]


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


def _by_number(
    firsts: list[Row], routes: Routes, lossy: set[int], is_dense: bool
) -> Iterator[Found]:
    for mine in _grouped(
        [row for row in firsts if row.number is not None], lambda row: row.key
    ).values():
        for before, row in pairwise(mine):
            assert row.number is not None
            assert before.number is not None
            if row.number < before.number:
                yield _at("number_order", row)
            elif row.number == before.number:
                yield _at("number_repeat", row)
            elif is_dense and row.number > before.number + 1:
                versions = range(
                    routes.partitions[before.partition].version + 1,
                    routes.partitions[row.partition].version + 1,
                )
                if not lossy & set(versions):
                    yield _at("number_gap", row)


def _by_time(judged: list[Row], rows: list[Row], clock_ms: int) -> Iterator[Found]:
    for stream in _grouped(judged, lambda row: (row.key, row.message_id[:16])).values():
        yield from (
            _at("time_order", row)
            for before, row in pairwise(stream)
            if row.create_ms < before.create_ms
        )
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


pytestmark = pytest.mark.sampled

SEEDS = range(24)
CLOCK_MS = 3
DENSE = "header:n"


def found_in(findings: Findings) -> set[Found]:
    return {
        (row["rule"], row["partition"], row["sequence"]) for row in findings.violations.collect()
    }


def found_by_twin(rows: list[Row], routes: Routes, **judging: Any) -> set[Found]:
    """The findings of the twin for histories side by side, each judged alone: the twin's time grows
    with the square of the rows.
    """
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


# By numbers in bodies only what follows the reading differs: the job's own test reads them in every
# form.
@pytest.fixture(
    scope="module",
    params=["create_time", "header:n", *(["json:at.n"] if forms.FORM == "all" else [])],
)
def audited(spark: SparkSession, request: pytest.FixtureRequest) -> Audited:
    planted = [small(1_000 + number) for number in range(len(PLANTS) + 1)]
    keys = [plant(history) for history, (plant, _) in zip(planted, PLANTS.values(), strict=False)]
    histories = planted + clean() + damaged()
    rows, routes = side_by_side(histories)
    findings = audit(
        spark.createDataFrame(table(rows)),
        routes,
        by=request.param,
        is_dense=request.param == DENSE,
    )
    return Audited(
        request.param, keys, rows, routes, findings, told_by_history(findings, len(histories))
    )


# --- any history ----------------------------------------------------------------------------------


def clean() -> list[History]:
    """Splits, merges, moves and fences without an error; retention deleted the oldest messages of
    some partitions, and all of others.
    """
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
    """This holds also if retention deleted the oldest messages of some partitions, and all messages
    of others.
    """
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
    expected = found_by_twin(
        audited.rows,
        audited.routes,
        is_exact=audited.by != "create_time",
        is_dense=audited.by == DENSE,
    )
    assert found_in(audited.findings) == expected
    assert (
        {example.rule for example in audited.findings.examples}
        == set(audited.findings.counts)
        == {rule for rule, _, _ in expected}
    )


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
    assert (example.key, example.place.partition, example.place.sequence) == (
        late.keys[0],
        wrong.partition,
        wrong.sequence,
    )
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
        rows[at] = replace(
            one, create_ms=one.create_ms - chance.randrange(20), number=(one.number or 0) - 1
        )
    elif kind == 7:
        rows[at] = replace(one, partition=chance.choice([999, other.partition]))
    elif kind == 8:
        rows[at] = replace(one, key=None, number=None, entry=one.entry - 50)
    elif history.sealed:
        history.sealed[chance.choice(sorted(history.sealed))] -= 1


def behind(history: History, row: Row, partition: int) -> Row:
    """A copy of a message at a partition's end, by another producer."""
    last = max(
        (each for each in history.rows if each.partition == partition),
        key=lambda each: each.sequence,
    )
    copy = replace(moved(row, last), sequence=last.sequence + 1, entry=last.entry + 1)
    return replace(copy, producer_id="f" * 16, batch_sequence=0, place=0)


# --- each rule by itself --------------------------------------------------------------------------

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
    """A producer with one batch of a key's messages. A fenced partition stored so many of them; the
    next one got those at `places`.
    """
    producer = history.new_producer()
    stream = Stream(producer)
    for place in range(stored):
        history.append(
            stream,
            history.route.partitions[0].number,
            [message(key, first + place, f"{producer}{place:012x}0000")],
        )
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
    "outside of the range": (
        lambda it: alter(it, it.keys[1], 4, logical_partition=LPS),
        {"outside_range", "wrong_hash"},
    ),
    "another hash": (
        lambda it: alter(
            it, it.keys[1], 4, logical_partition=(logical_partition(it.keys[1], LPS) + 1) % LPS
        ),
        {"wrong_hash"},
    ),
    "no such partition": (
        lambda it: alter(it, it.keys[3], 5, partition=999),
        {"unknown_partition"},
    ),
    "another broker group": (
        lambda it: alter(it, it.keys[3], 5, broker_group="c"),
        {"other_group"},
    ),
    "without a key": (no_key, {"no_key"}),
    "without a number": (lambda it: alter(it, it.keys[1], 5, number=None), {"no_number"}),
    "a number twice": (lambda it: alter(it, it.keys[1], 5, number=5), {"number_repeat"}),
    "a lost number": (lambda it: alter(it, it.keys[1], 5, number=7), {"number_gap"}),
}
BY_NUMBER = {"number_order", "number_repeat", "number_gap", "no_number"}
BY_TIME = {"time_order"}


def test_whatever_is_planted_is_found_at_exactly_its_key(audited: Audited) -> None:
    away = (
        BY_NUMBER
        if audited.by == "create_time"
        else BY_TIME
        if audited.by == DENSE
        else BY_TIME | {"number_gap"}
    )
    for (name, (_, rules)), key, found in zip(
        PLANTS.items(), audited.keys, audited.told, strict=False
    ):
        assert {rule for rule, _ in found} == rules - away, name
        if "stream_order" not in rules:
            assert {its for _, its in found} <= {key}, name
    planted = {rule for found in audited.told[: len(PLANTS)] for rule, _ in found}
    assert planted == set(RULES) - away


def test_events_that_best_effort_order_allows_are_not_violations(audited: Audited) -> None:
    loose = replace(
        audited.findings, routes=replace(audited.routes, is_strict=False), counts={"time_order": 1}
    )
    assert loose.is_clean
    assert not replace(loose, counts={"time_order": 1, "stream_gap": 1}).is_clean
    assert not replace(loose, routes=audited.routes).is_clean


# --- what is no violation -------------------------------------------------------------------------


def allowed() -> list[History]:
    """Retention's cut, a bent message, a replay that was given up, a delayed message's old time,
    two clients that interleave.
    """
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
def test_missing_ends_and_wrong_hashes_are_findings_and_allowed_ones_are_not(
    spark: SparkSession,
) -> None:
    """Keys beyond the limit are still compared with each other."""
    history = small(0)
    alter(
        history,
        history.keys[3],
        4,
        logical_partition=(logical_partition(history.keys[3], LPS) + 1) % LPS,
    )
    del history.rows[-2:]
    rows, routes = side_by_side([history, *allowed()])
    queues = [
        SourceQueue(QueueKey("s", number, group), 0, 12)
        for number, group in ((1, GROUPS[0]), (2, GROUPS[1]))
    ]
    findings = audit(spark.createDataFrame(table(rows)), routes, queues=queues, keys_max=1)
    assert dict(findings.counts) == {"sequence_gap": 1, "wrong_hash": 1}
    assert (findings.facts["keys"], findings.facts["hashed_keys"]) == (
        len({row.key for row in rows}),
        1,
    )
    assert (
        findings.facts["bent"],
        findings.facts["unfinished_replays"],
        findings.facts["unjudged"],
    ) == (1, 1, 1)
    gap = findings.examples[0]
    assert (gap.rule, gap.place.partition, gap.place.sequence) == ("sequence_gap", 2, 10)


@pytest.mark.parametrize(
    "by", ["", "clock", "create_time:x", "header:", "json:", "json:a.", "json:a['b']"]
)
def test_what_cannot_say_the_order_of_sending_is_refused(by: str) -> None:
    from pyspark_qmq.jobs.order_checks import parse_by

    with pytest.raises(InvalidArgument, match="create_time, header:NAME or json:FIELD"):
        parse_by(by)
