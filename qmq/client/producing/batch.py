"""A producer's batches, open and closed, and the checks of what an application puts into them.
Pure.

Checks are made before anything else, so that the error is raised at the caller. In the common case,
a body and nothing else, a message costs an append and an addition. The columns for keys, tags and
headers are created with the first message that has one.

The closed batches of a producer of an unordered subject are in the producer's pool, or in the
in-flight window (qmq/delivery/window.py) of one of its senders (`group_sender.py`), which leads to
one broker group. The pool has the batches that were sent to no broker group, and the outcomes that
the producer has not taken yet:

    put ─▶ waiting ──take──▶ a sender ──stored, failed──▶ decided ──▶ the producer
              ▲                 │
              └─────requeue─────┘ certainly not stored: in its place by number

The window of a sender:

    sent ─▶ on its way ──stored──▶ decided
               │ refused, certainly not stored ──▶ requeued: any group may take it
               └ outcome unknown ──▶ sent again, only to this group

Rules of a window:
* A batch whose outcome is unknown stays with its group. The group's replicas remember its number
  with the log, so sending it again to *this* group is harmless; another group could store it twice.
* The group takes batches in any order, so a refusal affects only the refused batch.
* While a batch is to be sent again, no new batch is sent; retries are sent in the order of their
  numbers.
* A batch that is refused after its timeout fails.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

from qmq import limits
from qmq.client.producing.receipts import Ticket
from qmq.delivery.retries import PRODUCER, RetryRules
from qmq.delivery.window import InFlightBatch, InFlightWindow, final
from qmq.errors import InvalidArgument, MessageTooLarge, QmqError
from qmq.model import PREFIX, texts, utf8
from qmq.process.event_loop import EventLoopTick
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Produced


def body_bytes(body: object, body_bytes_max: int) -> bytes:
    """The body as bytes. Raises InvalidArgument, MessageTooLarge."""
    if isinstance(body, bytearray | memoryview):
        body = bytes(body)
    if not isinstance(body, bytes):
        raise InvalidArgument(f"a body is bytes, not {type(body).__name__}: encode it first")
    if len(body) > body_bytes_max:
        raise too_large(len(body), body_bytes_max)
    return body


def too_large(size: int, most: int) -> MessageTooLarge:
    """The error for a body over the limit."""
    return MessageTooLarge(
        f"a body of {size} bytes exceeds the limit of {most}: send a reference to the "
        "content instead"
    )


def key_bytes(key: object) -> bytes:
    """The key as bytes; "" and None mean no key. Raises InvalidArgument, MessageTooLarge."""
    if key is None:
        return b""
    if isinstance(key, str):
        key = utf8("a key", key)
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key is str or bytes, not {type(key).__name__}")
    if len(key) > limits.KEY_BYTES_MAX:
        raise MessageTooLarge(f"a key of {len(key)} bytes; the limit is {limits.KEY_BYTES_MAX}")
    return key


def tag_tuple(tags: object) -> tuple[str, ...]:
    """The tags of one message. Raises InvalidArgument."""
    if tags is None:
        return ()
    found = texts("tags", tags)
    if len(found) > limits.TAGS_MAX:
        raise InvalidArgument(f"a message has at most {limits.TAGS_MAX} tags, not {len(found)}")
    for tag in found:
        if not 0 < len(tag.encode()) <= limits.TAG_BYTES_MAX:
            raise InvalidArgument(
                f"a tag is a str of 1 to {limits.TAG_BYTES_MAX} bytes, not of {len(tag.encode())}"
            )
    return found


def header_map(headers: object) -> dict[str, bytes]:
    """The headers of one message. Raises InvalidArgument, MessageTooLarge."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidArgument(
            f"headers are a mapping of str to bytes or str, not {type(headers).__name__}"
        )
    found: dict[str, bytes] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not name or not isinstance(value, str | bytes):
            raise InvalidArgument(f"a header is a str with bytes or str, not {name!r}: {value!r}")
        if name.startswith(PREFIX):
            raise InvalidArgument(
                f"the header {name!r}: names that begin with {PREFIX!r} are the system's "
                "own; choose another"
            )
        found[name] = utf8("a header", value) if isinstance(value, str) else value
    size = sum(len(utf8("a header's name", name)) + len(value) for name, value in found.items())
    if size > limits.HEADER_BYTES_MAX:
        raise MessageTooLarge(f"headers of {size} bytes; the limit is {limits.HEADER_BYTES_MAX}")
    return found


def check_length(name: str, column: Sized | None, count: int) -> None:
    """Raises InvalidArgument if a column has not exactly one item for each of `count` messages."""
    if isinstance(column, str | bytes):
        raise InvalidArgument(
            f"{name} are a list with one item for each message, not {type(column).__name__}"
        )
    if column is not None and len(column) != count:
        raise InvalidArgument(
            f"{count} bodies, but {len(column)} {name}: give one for each message"
        )


def columns_of(
    bodies: Sequence[object],
    tags: Sequence[object] | None,
    headers: Sequence[object] | None,
    body_bytes_max: int,
) -> Columns:
    """The columns of many messages, without keys. Raises InvalidArgument, MessageTooLarge."""
    found = list(bodies)
    check_length("tags", tags, len(found))
    check_length("headers", headers, len(found))
    if found and (set(map(type, found)) != {bytes} or max(map(len, found)) > body_bytes_max):  # type: ignore[arg-type]
        found = [body_bytes(body, body_bytes_max) for body in found]
    return Columns(
        found,  # type: ignore[arg-type]
        None,
        [tag_tuple(each) for each in tags] if tags else None,
        [header_map(each) for each in headers] if headers else None,
    )


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

    def __init__(self, loop_round: EventLoopTick | None = None, now_ms: int | None = None) -> None:
        """`now_ms` is the create time of the first messages, if it is known: see `stamp`."""
        self._round = loop_round
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
        self._runs: list[tuple[int, int]] = [] if now_ms is None else [(0, now_ms)]
        """(first message, create time of the messages from there on)"""
        self._created: tuple[list[int] | None, int] | None = None
        """Explicit create times: (milliseconds relative to the first for each
        message, the first).
        """

    def stamp(self, now_ms: int) -> None:
        """Set the create time of the following messages, in milliseconds since 1970. Once per round
        of the event loop is exact enough.
        """
        if not self._runs or self._runs[-1][1] != now_ms:
            self._runs.append((len(self.bodies), now_ms))

    def add_columns(self, key: object, tags: object, headers: object) -> None:
        """Add the columns of the message that was just added. Raises InvalidArgument,
        MessageTooLarge; then the message is removed again.
        """
        try:
            found_key, found_tags, found_headers = (
                key_bytes(key),
                tag_tuple(tags),
                header_map(headers),
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
        """Fill an empty batch, whose time is set. With `create_time_ms` the create time is that,
        plus the columns' create deltas.
        """
        self.bodies, self.bytes = columns.bodies, size
        self.keys, self.tags, self.headers = columns.keys, columns.tags, columns.headers
        self.due_times_ms = columns.due_times_ms  # type: ignore[assignment]  # nothing adds to it any more
        self.message_ids = columns.message_ids
        if create_time_ms is not None:
            self._created = columns.create_deltas, create_time_ms
        return self.ticket

    def collect(self) -> tuple[Columns, int]:
        """(columns, create time of the first message in milliseconds since 1970)."""
        columns = Columns(
            self.bodies,
            self.keys,
            self.tags,
            self.headers,
            None,
            self.message_ids,
            None,
            self.due_times_ms,
        )
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
        size += sum(
            [
                16 + len(name) + len(value)
                for headers in columns.headers
                for name, value in headers.items()
            ]
        )
    return size


class DecidedBatch(NamedTuple):
    """The outcome of a batch."""

    batch: Batch
    outcome: Produced | QmqError
    group: str = ""
    """The broker group that stored it."""


class BatchPool:
    """The senders of one producer share it."""

    def __init__(self) -> None:
        self.waiting: deque[Batch] = deque()
        self.decided: list[DecidedBatch] = []
        """Senders add what is stored; the producer takes all of it out."""

    def requeue(self, batch: Batch) -> None:
        """The batch is certainly not stored at its group:
        any sender may send it, in the order of the numbers.
        """
        place = bisect_left(self.waiting, batch.sequence, key=lambda each: each.sequence)
        self.waiting.insert(place, batch)

    def failed(self, batch: Batch, failure: QmqError) -> None:
        self.decided.append(DecidedBatch(batch, failure))

    def expire(self, now: float, trouble: QmqError | None) -> None:
        """Fail the waiting batches that have timed out, with `trouble` as the reason of those that
        no group refused.
        """
        while self.waiting and self.waiting[0].until <= now:
            batch = self.waiting.popleft()
            self.failed(batch, final(batch.failure or trouble, batch))

    def give_up(self, failure: QmqError) -> None:
        """Fail the waiting batches: no group can take them."""
        while self.waiting:
            batch = self.waiting.popleft()
            self.failed(batch, final(failure, batch))


class SenderWindow(InFlightWindow[Batch]):
    def __init__(self, window: int, rules: RetryRules = PRODUCER) -> None:
        super().__init__(window, rules)
        self._failed: list[tuple[Batch, QmqError]] = []
        self._requeued: list[Batch] = []

    # --- out --------------------------------------------------------------------------------------

    @property
    def has_retries(self) -> bool:
        """Whether batches are to be sent again; no new one is sent before them."""
        return self._sent < len(self.flight)

    def send(self, batch: Batch) -> None:
        """Send a new batch; the window must have room."""
        self.flight.append(batch)
        self._depart(batch)

    @property
    def is_sending(self) -> bool:
        """Whether any batch is in flight over the current connection."""
        return self._sent > 0

    @property
    def on_way(self) -> list[Batch]:
        """The unanswered batches sent over the current connection."""
        return self.flight[: self._sent]

    @property
    def retries(self) -> list[Batch]:
        """The batches to be sent again."""
        return self.flight[self._sent :]

    def take_failed(self) -> list[tuple[Batch, QmqError]]:
        """The batches that failed for good since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_requeued(self) -> list[Batch]:
        """The batches that are certainly not stored here: any group may take them."""
        requeued, self._requeued = self._requeued, []
        return requeued

    # --- in ---------------------------------------------------------------------------------------

    def refused(self, batch: Batch, attempt: int, failure: QmqError, now: float) -> None:
        super().refused(batch, attempt, failure, now)
        if batch.is_gone or batch in self.on_way:
            return
        if batch.until <= now:
            self._fail(batch, failure)
        elif batch.is_certain:
            self._remove(batch)
            batch.is_gone = False
            self._requeued.append(batch)

    def _hold_back(self, at: int) -> None:
        batch = self.flight.pop(at)
        self._sent -= 1
        insort(self.flight, batch, lo=self._sent, key=_number)

    def _begin_again(self) -> None:
        super()._begin_again()
        self.flight.sort(key=_number)

    def _retry_later(self, batch: Batch, failure: QmqError, now: float) -> None:
        """Put the batch aside for a retry.
        Batches that are refused together count as one failure.
        """
        self.trouble = failure
        if now >= self._backoff_until:
            super()._retry_later(batch, failure, now)

    def _reject(self, batch: Batch, failure: QmqError) -> None:
        self._fail(batch, failure)

    def _fail(self, batch: Batch, failure: QmqError | None) -> None:
        batch.is_uncertain = not batch.is_certain
        self._remove(batch)
        self._failed.append((batch, final(failure, batch)))

    def expire(self, now: float) -> None:
        """Fail batches that were to be sent again and have timed out."""
        for batch in [each for each in self.retries if each.until <= now]:
            self._fail(batch, self.trouble or batch.failure)

    def fail_retries(self, failure: QmqError) -> None:
        """Fail all batches that were to be sent again, because they cannot be sent."""
        for batch in self.retries:
            self._fail(batch, failure)

    def drop(self) -> list[Batch]:
        """Remove all batches: late answers are ignored."""
        dropped, self.flight, self._sent = self.flight, [], 0
        for batch in dropped:
            batch.is_gone = True
        return dropped


def _number(batch: Batch) -> int:
    return batch.sequence
