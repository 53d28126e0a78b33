"""The open batch of one stream of an ordered producer, and the cache from key to logical partition.

A message costs three appends and an addition; keys are encoded when the batch is closed. The cache holds numbers only: with many keys,
memory accesses dominate, and encoding a key again is cheaper than fetching its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qmq_ordering.hashing import logical_partition

from qmq import limits
from qmq.batch_columns import Columns
from qmq.client import message_checks
from qmq.client.loop_round import LoopRound
from qmq.client.open_batch import OpenBatch
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.split_ticket import SplitTicket
from qmq.client.ordered.stream_connection import StreamConnection
from qmq.client.receipts import Ticket
from qmq.errors import InvalidArgument

Key = str | bytes

KEYS_MAX: Final = 200_000
"""The most keys in the cache, about 20 MB. Hashing a key again costs as much as sending two messages."""

NUMBERS: Final = list(range(limits.LOGICAL_PARTITIONS_MAX))
"""One int object for each logical partition, shared by all cached keys."""


class Keys(dict[Key, int]):
    """The logical partition of a key as the application passed it: `keys[key]`. Raises InvalidArgument, MessageTooLarge.

    `count` is the subject's number of logical partitions. While it is not known, it is 0, all results are 0, and nothing is cached.
    """

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def begin(self, count: int) -> None:
        """The number of logical partitions is known, or has changed."""
        if self.count != count:
            self.clear()
            self.count = count

    def __missing__(self, key: Key) -> int:
        data = message_checks.key_bytes(key)
        if not data:
            raise InvalidArgument("a message to an ordered subject needs a key that is not empty: QMQ orders the messages of each key")
        if not self.count:
            return 0
        if len(self) >= KEYS_MAX:
            self.clear()
        found = self[key] = NUMBERS[logical_partition(data, self.count)]
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
    """The open batch of one stream; the object is reused for the next batch. `connection` is None while no route is known."""

    __slots__ = ("connection", "lps", "raw_keys")

    def __init__(
        self,
        connection: StreamConnection | None,
        now_ns: Callable[[], int] | None = None,
        loop_round: LoopRound | None = None,
    ) -> None:
        super().__init__(now_ns, loop_round)
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

    def hold(self, columns: Columns, size: int, create_time_ms: int | None) -> None:
        """Fill an empty batch with messages that have ids and create times. See `OpenBatch.fill`."""
        self.fill(columns, size, create_time_ms)
        self.raw_keys, self.lps = list(columns.keys or ()), list(columns.logical_partitions or ())

    def take(self, until: float) -> OrderedBatch:
        """Close the batch and return it; the builder is empty afterwards."""
        columns, first_ms = self.collect()
        columns.keys = key_column(self.raw_keys)
        columns.logical_partitions = self.lps
        claim = SplitTicket(self.ticket, len(columns.bodies), self.bytes)
        batch = OrderedBatch(columns, first_ms, claim, range(claim.count), size=self.bytes, until=until)
        self.bodies, self.raw_keys, self.lps, self.bytes = [], [], [], 0
        self.tags, self.headers, self.ticket, self._runs = None, None, Ticket(self._round), []
        self.keys, self.message_ids, self._created = None, None, None
        return batch
