"""Random possible histories of an ordered subject: routes change; batches are refused, cut again and sent again. No I/O.

A seed decides the steps of a history: clients put messages into their streams, streams are written to partitions, partitions are split,
merged and moved, some of them fenced. The result is the log's content, as rows; a test that needs a bad history alters them.

A second, slow implementation of the order audit in plain Python, directly from its rules. Spark must find the same violations.
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
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import Change

from qmq.columns.model import RoutePartition, Routes

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
        self.parts = {each.number: RoutePartition(each.number, each.range, each.group, 1) for each in self.route.partitions}
        self.sealed: dict[int, int] = {}
        self.rows: list[Row] = []
        self.keys = [b"key-%d-%d" % (seed, number) for number in range(keys)]
        self.now_ms = 1_000
        self._clients: list[dict[int, Stream]] = [{} for _ in range(clients)]
        self._next: dict[int, int] = {}
        self._entries = dict.fromkeys(GROUPS, 0)
        self._numbers: dict[bytes, int] = {}
        self._producers = seed * 10_000

    # --- steps ---------------------------------------------------------------------------------------------------------

    def run(self, steps: int, *, fences: bool = True) -> History:
        """Make this many random steps, then write everything that waits."""
        doings: list[tuple[Callable[[], None], int]] = [(self.send, 10), (self.write, 10), (self.change, 2), (self.renumber, 1)]
        for _ in range(steps):
            (doing,) = self.random.choices([each for each, _ in doings], [weight for _, weight in doings])
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
            self._stream(at, self._holder(key)).waiting.append(Message(key, self.number(key), self.now_ms))

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
        """Apply a change of the route. Waiting messages are divided again; if the partition was fenced, the last stored ones are sent
        again before them.
        """
        self.route = next_route(self.route, change)
        for each in change.targets:
            self.parts[each.number] = RoutePartition(each.number, each.range, each.group, self.route.version, change.sources)
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
            return merge(route, [part.number for part in route.partitions[at : at + 2]], change_id=name, group=self.random.choice(GROUPS))
        if kind == "split" and wide:
            part = self.random.choice(wide)
            cut = self.random.randrange(part.range.first + 1, part.range.end)
            return split(route, part.number, [cut], change_id=name, groups=self.random.choices(GROUPS, k=2))
        return move(route, self.random.choice(route.partitions).number, self.random.choice(GROUPS), change_id=name)

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
        self.rows = [row for row in self.rows if row.partition != partition or row.sequence >= before]

    # --- what comes of it ----------------------------------------------------------------------------------------------

    @property
    def routes(self) -> Routes:
        """The routes as in the topology."""
        return Routes(LPS, self.route.version, dict(self.parts), dict(self.sealed))

    def of(self, key: bytes) -> list[Row]:
        """A key's rows, in the order of the log."""
        found = [row for row in self.rows if row.key == key]
        return sorted(found, key=lambda row: (self.parts[row.partition].version, row.partition, row.sequence))


def side_by_side(histories: Sequence[History]) -> tuple[list[Row], Routes]:
    """Several histories joined into one. Each has its own keys, producers, partitions and versions, so that the retention of one history
    does not hide a loss in another.
    """
    rows: list[Row] = []
    parts: dict[int, RoutePartition] = {}
    sealed: dict[int, int] = {}
    for at, history in enumerate(histories):
        away = at * 1_000
        rows += [replace(row, partition=row.partition + away) for row in history.rows]
        for each in history.parts.values():
            sources = tuple(number + away for number in each.sources)
            parts[each.number + away] = replace(each, number=each.number + away, version=each.version + away, sources=sources)
        sealed |= {number + away: sequence for number, sequence in history.sealed.items()}
    return rows, Routes(LPS, max(each.version for each in parts.values()), parts, sealed)


def exchange(rows: list[Row], one: Row, other: Row) -> None:
    """Exchange the places of two messages."""
    at, where = rows.index(one), rows.index(other)
    rows[at], rows[where] = moved(other, one), moved(one, other)


def moved(row: Row, to: Row) -> Row:
    """The message of `row` at the place of `to`."""
    return replace(row, partition=to.partition, broker_group=to.broker_group, sequence=to.sequence, append_ms=to.append_ms, entry=to.entry)


def table(rows: list[Row]) -> pa.Table:
    """The rows as the data source gives them."""
    at = [EPOCH + timedelta(milliseconds=row.create_ms) for row in rows]
    found = {name: [getattr(row, name) for row in rows] for name in TYPES if name not in ("body", "headers", "create_time", "append_time")}
    found["create_time"] = at
    found["append_time"] = [EPOCH + timedelta(milliseconds=row.append_ms) for row in rows]
    found["body"] = [b"{}" if row.number is None else b'{"at": {"n": %d}}' % row.number for row in rows]
    found["headers"] = [None if row.number is None else [("n", b"%d" % row.number)] for row in rows]
    return pa.table({name: pa.array(found[name], kind) for name, kind in TYPES.items()})


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
