"""The open batch of a producer: messages that are not sent yet. No I/O.

In the common case, a body and nothing else, a message costs an append and an addition. The columns for keys, tags and headers are created
with the first message that has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qmq.batch_columns import Columns
from qmq.client import message_checks
from qmq.client.loop_round import LoopRound
from qmq.client.receipts import Ticket
from qmq.delivery.in_flight_batch import InFlightBatch


@dataclass(slots=True, eq=False)
class Batch(InFlightBatch):
    """A closed batch."""

    columns: Columns
    create_time_ms: int
    ticket: Ticket
    sequence: int
    flags: int = 0
    """See `batch_columns.BatchFlag`."""

    @property
    def count(self) -> int:
        return len(self.columns.bodies)


class OpenBatch:
    """The batch that `send` adds to."""

    __slots__ = (
        "_created",
        "_now_ns",
        "_round",
        "_runs",
        "bodies",
        "bytes",
        "due_times_ms",
        "flags",
        "headers",
        "keys",
        "message_ids",
        "tags",
        "ticket",
    )

    def __init__(self, now_ns: Callable[[], int] | None = None, loop_round: LoopRound | None = None) -> None:
        self._now_ns, self._round = now_ns or time.time_ns, loop_round
        self.bodies: list[bytes] = []
        self.bytes = 0
        self.keys: list[bytes] | None = None
        self.tags: list[tuple[str, ...]] | None = None
        self.headers: list[Mapping[str, bytes]] | None = None
        self.due_times_ms: list[int] | None = None
        """The due times of delayed messages, in milliseconds since 1970."""
        self.flags = 0
        self.message_ids: list[bytes] | None = None
        self.ticket = Ticket(loop_round)
        self._runs: list[tuple[int, int]] = []
        self._created: tuple[list[int] | None, int] | None = None
        """Explicit create times: (milliseconds relative to the first for each message, the first)."""

    def stamp(self) -> None:
        """Set the create time of the following messages to now. Once per round of the event loop is exact enough."""
        now_ms = self._now_ns() // 1_000_000
        if not self._runs or self._runs[-1][1] != now_ms:
            self._runs.append((len(self.bodies), now_ms))

    def add_columns(self, key: object, tags: object, headers: object) -> None:
        """Add the columns of the message that was just added. Raises InvalidArgument, MessageTooLarge; then the
        message is removed again.
        """
        try:
            found_key, found_tags, found_headers = (
                message_checks.key_bytes(key),
                message_checks.tag_tuple(tags),
                message_checks.header_map(headers),
            )
        except Exception:
            self.bytes -= len(self.bodies.pop())
            raise
        before = len(self.bodies) - 1
        if found_key or self.keys is not None:
            self.keys = self.keys if self.keys is not None else [b""] * before
            self.keys.append(found_key)
        if found_tags or self.tags is not None:
            self.tags = self.tags if self.tags is not None else [()] * before
            self.tags.append(found_tags)
        if found_headers or self.headers is not None:
            self.headers = self.headers if self.headers is not None else [{}] * before
            self.headers.append(found_headers)
        self.bytes += len(found_key) + 16 * len(found_tags) + sum(map(len, found_headers.values()))

    def fill(self, columns: Columns, size: int, create_time_ms: int | None = None) -> Ticket:
        """Fill an empty batch. The create time is now, or `create_time_ms` plus the columns' create deltas."""
        self.stamp()
        self.bodies, self.bytes = columns.bodies, size
        self.keys, self.tags, self.headers = columns.keys, columns.tags, columns.headers
        self.due_times_ms = columns.due_times_ms  # type: ignore[assignment]  # nothing adds to it any more
        self.message_ids = columns.message_ids
        if create_time_ms is not None:
            self._created = columns.create_deltas, create_time_ms
        return self.ticket

    def close(self, sequence: int) -> Batch:
        """Close the batch and number it."""
        columns, first_ms = self.collect()
        return Batch(columns, first_ms, self.ticket, sequence, flags=self.flags, size=self.bytes)

    def collect(self) -> tuple[Columns, int]:
        """(columns, create time of the first message in milliseconds since 1970)."""
        if not self._runs:
            self.stamp()
        columns = Columns(self.bodies, self.keys, self.tags, self.headers, None, self.message_ids, None, self.due_times_ms)
        if self._created is not None:
            columns.create_deltas, first_ms = self._created
            return columns, first_ms
        if len(self._runs) == 1:
            return columns, self._runs[0][1]
        first_ms = min([ms for _, ms in self._runs])
        columns.create_deltas = self._deltas(first_ms)
        return columns, first_ms

    def _deltas(self, first_ms: int) -> list[int]:
        deltas: list[int] = []
        ends = [begin for begin, _ in self._runs[1:]] + [len(self.bodies)]
        for (begin, ms), end in zip(self._runs, ends, strict=True):
            deltas += [ms - first_ms] * (end - begin)
        return deltas


def cut(columns: Columns, begin: int, end: int) -> Columns:
    """The columns of some of the messages."""
    return Columns(
        columns.bodies[begin:end],
        columns.keys and columns.keys[begin:end],
        columns.tags and columns.tags[begin:end],
        columns.headers and columns.headers[begin:end],
        create_deltas=columns.create_deltas and columns.create_deltas[begin:end],
        message_ids=columns.message_ids and columns.message_ids[begin:end],
        logical_partitions=columns.logical_partitions and columns.logical_partitions[begin:end],
        due_times_ms=columns.due_times_ms and columns.due_times_ms[begin:end],
    )


def size_of(columns: Columns) -> int:
    """The approximate size of the columns in bytes."""
    size = sum(map(len, columns.bodies))
    if columns.due_times_ms:
        size += 8 * len(columns.due_times_ms)
    if columns.keys:
        size += sum(map(len, columns.keys))
    if columns.tags:
        size += sum([16 + len(tag) for tags in columns.tags for tag in tags])
    if columns.headers:
        size += sum([16 + len(name) + len(value) for headers in columns.headers for name, value in headers.items()])
    return size
