"""What an ordered producer has for each stream: the connection to the partition's broker group, and
the open batch; and its cache from key to logical partition. There is only one open batch while no
route is known.

A message costs three appends and an addition; keys are encoded when the batch is closed. The cache
holds numbers only: with many keys, memory accesses dominate, and encoding a key again is cheaper
than fetching its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from qmq_ordering.hashing import logical_partition

from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.ordered.membership import GroupLoad
from qmq.client.producing.batch import OpenBatch, key_bytes
from qmq.client.producing.group_sender import MasterConnection
from qmq.client.producing.ordered.stream import OrderedBatch, Stream
from qmq.client.producing.receipts import SplitTicket, Ticket
from qmq.errors import InvalidArgument, QmqError
from qmq.process.event_loop import EventLoopTick
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import Produced

Encode = Callable[[Stream, OrderedBatch], tuple[bytes, bytes]]
"""Returns the encoded batch. Raises QmqError."""


@dataclass(frozen=True, slots=True)
class StreamCalls:
    """What a stream's connection tells its producer, and asks it."""

    encode: Encode
    changed: Callable[[StreamConnection], None]
    """Batches were decided, or the stream's state changed: do what is needed, and `pump`."""
    gather: Callable[[StreamConnection], None]
    """A batch timed out: add the open batch, which must fail with it, behind it."""
    give_up: Callable[[QmqError], None]
    """Nothing can be sent: the subject is deleted, or the client is closed."""


class StreamConnection(MasterConnection[OrderedBatch]):
    """`kind` is PRODUCE, or one of the frames of other `acks`."""

    def __init__(
        self,
        links: ConnectionPool,
        subject: str,
        kind: int,
        stream: Stream,
        load: GroupLoad,
        calls: StreamCalls,
    ) -> None:
        super().__init__(
            links,
            subject,
            stream.partition.group,
            stream,
            partial(calls.encode, stream),
            partial(calls.changed, self),
        )
        self.kind = kind
        self.stream = stream
        self.load = load
        self._calls = calls

    def transmit(self, connection: Connection, batch: OrderedBatch) -> None:
        self.load.sent(batch.count, batch.size)
        super().transmit(connection, batch)

    def _answered(
        self, connection: Connection, batch: OrderedBatch, attempt: int, answer: Frame | QmqError
    ) -> None:
        self.load.answered(batch.count, batch.size)
        super()._answered(connection, batch, attempt, answer)

    def _stored(self, batch: OrderedBatch, produced: Produced, now: float) -> None:
        self.stream.stored(batch, produced, now)

    def _tick(self, now: float) -> None:
        if self.stream.is_late(now):
            self._calls.gather(self)
        super()._tick(now)

    @property
    def _is_needed(self) -> bool:
        stream = self.stream
        return (
            not self.is_closed
            and not stream.is_settled
            and bool(stream.flight or (stream.waiting and not stream.is_left))
        )

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self._calls.give_up(failure)
        self._loop.call_soon(self._changed)
        return True


Key = str | bytes

KEYS_MAX: Final = 200_000
"""The most keys in the cache, about 20 MB.
Hashing a key again costs as much as sending two messages.
"""


class Keys(dict[Key, int]):
    """The logical partition of a key as the application passed it: `keys[key]`. Raises
    InvalidArgument, MessageTooLarge.

    `count` is the subject's number of logical partitions. While it is not known, it is 0, all
    results are 0, and nothing is cached.
    """

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count
        self._numbers: dict[int, int] = {}
        """One int object for each logical partition, shared by all cached keys."""

    def begin(self, count: int) -> None:
        """The number of logical partitions is known, or has changed."""
        if self.count != count:
            self.clear()
            self.count = count

    def __missing__(self, key: Key) -> int:
        data = key_bytes(key)
        if not data:
            raise InvalidArgument(
                "a message to an ordered subject needs a key that is not empty: QMQ orders "
                "the messages of each key"
            )
        if not self.count:
            return 0
        if len(self) >= KEYS_MAX:
            self.clear()
        number = logical_partition(data, self.count)
        found = self[key] = self._numbers.setdefault(number, number)
        return found

    def of_many(self, keys: Sequence[Key]) -> list[int]:
        """The logical partitions of many keys."""
        try:
            return list(map(self.__getitem__, keys))
        except TypeError as cause:
            raise bad_key(cause) from None


def bad_key(cause: TypeError) -> InvalidArgument:
    """The error for a key of a wrong type."""
    return InvalidArgument(f"a key is str or bytes: {cause}")


def key_column(keys: list[Key]) -> list[bytes]:
    """Keys as a batch holds them; the list itself, if all are bytes."""
    kinds = set(map(type, keys))
    if kinds == {bytes}:
        return keys  # type: ignore[return-value]
    if kinds == {str}:
        return list(map(str.encode, keys))  # type: ignore[arg-type]
    return [key.encode() if isinstance(key, str) else key for key in keys]


class BatchBuilder(OpenBatch):
    """The open batch of one stream; the object is reused for the next batch. `connection` is None
    while no route is known.
    """

    __slots__ = ("connection", "lps", "raw_keys")

    def __init__(
        self, connection: StreamConnection | None, loop_round: EventLoopTick | None = None
    ) -> None:
        super().__init__(loop_round)
        self.connection = connection
        self.raw_keys: list[Key] = []
        self.lps: list[int] = []

    def extend(self, columns: Columns, keys: Sequence[Key], size: int) -> None:
        """Add many messages; `columns` has their logical partitions, and no keys."""
        before, count = len(self.bodies), len(columns.bodies)
        self.bodies += columns.bodies
        self.raw_keys += keys
        self.lps += columns.logical_partitions or ()
        self.bytes += size
        if columns.tags is not None or self.tags is not None:
            self.tags = [*(self.tags or [()] * before), *(columns.tags or [()] * count)]
        if columns.headers is not None or self.headers is not None:
            self.headers = [*(self.headers or [{}] * before), *(columns.headers or [{}] * count)]

    def fill_with_keys(self, columns: Columns, size: int, create_time_ms: int | None) -> None:
        """Fill an empty batch with messages that have ids and create times.
        See `OpenBatch.fill`.
        """
        self.fill(columns, size, create_time_ms)
        self.raw_keys, self.lps = list(columns.keys or ()), list(columns.logical_partitions or ())

    def take(self, until: float) -> OrderedBatch:
        """Close the batch and return it; the builder is empty afterwards."""
        columns, first_ms = self.collect()
        columns.keys = key_column(self.raw_keys)
        columns.logical_partitions = self.lps
        claim = SplitTicket(self.ticket, len(columns.bodies), self.bytes)
        batch = OrderedBatch(
            columns, first_ms, claim, range(claim.count), size=self.bytes, until=until
        )
        self.bodies, self.raw_keys, self.lps, self.bytes = [], [], [], 0
        self.tags, self.headers, self.ticket, self._runs = None, None, Ticket(self._round), []
        self.keys, self.message_ids, self._created = None, None, None
        return batch


class OpenBatches:
    """`taken` is called with each batch that is closed. The collections are changed in place: the
    producer keeps references to them.
    """

    def __init__(
        self, links: ConnectionPool, timeout_s: float, taken: Callable[[OrderedBatch], None]
    ) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._taken = taken
        self.keys = Keys()
        """The logical partition of each key; 0 for all of them while the number of logical
        partitions is not known.
        """
        self.all = [self._make(None)]
        self.by_lp = list(self.all)
        """The open batch of each logical partition."""
        self.slots = [0]
        """For each logical partition, the index of its open batch in `all`."""
        self.filled: dict[BatchBuilder, float] = {}
        """Open batches that are not empty, and when the first message of each came;
        the oldest is first.
        """

    def _make(self, connection: StreamConnection | None) -> BatchBuilder:
        return BatchBuilder(connection, self._links.round)

    def take(self, builder: BatchBuilder) -> OrderedBatch | None:
        """Close an open batch; None if it holds nothing."""
        del self.filled[builder]
        if not builder.bodies:
            return None
        batch = builder.take(self._loop.time() + self._timeout_s)
        self._taken(batch)
        return batch

    def take_of(self, connection: StreamConnection | None) -> OrderedBatch | None:
        """Close the open batch of a stream, if it holds anything."""
        builder = next((each for each in self.filled if each.connection is connection), None)
        return self.take(builder) if builder is not None else None

    def rerouted(self, by_lp: Sequence[StreamConnection]) -> None:
        """The route has changed: no open batch belongs to a removed stream."""
        self.keys.begin(len(by_lp))
        known = {each.connection: each for each in self.all}
        slots: dict[StreamConnection, int] = {}
        self.slots[:] = [slots.setdefault(connection, len(slots)) for connection in by_lp]
        self.all[:] = [known.get(connection) or self._make(connection) for connection in slots]
        self.by_lp[:] = [self.all[slot] for slot in self.slots]
