"""Random possible histories of an ordered subject: routes change; batches are refused, cut again and sent again. No I/O.

A seed decides the steps of a history: clients put messages into their streams, streams are written to partitions, partitions are split,
merged and moved, some of them fenced. The result is the log's content, as rows; a test that needs a bad history alters them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from pyspark_qmq.source_model import RoutePartition, Routes
from qmq_ordering.algebra import first_route, merge, move, next_route, split
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import Change

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
