"""What a consumer gets: one message, or many in their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Protocol

from qmq import limits
from qmq.batch import BatchView
from qmq.errors import CorruptBatch, DelayTooLong, InvalidArgument
from qmq.model import MessageId
from qmq.targeted import failures
from qmq.wire.settle_payloads import ERROR_CHARS_MAX, Verdict


class Settler(Protocol):
    """Takes verdicts: the consumer's attachment to one queue, or something in front of it."""

    subject: str
    broker_group: str

    def ack(self, pull: int) -> None:
        """The message was worked on. Leaves soon, with others."""
        ...

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        """Leaves soon, with others."""
        ...

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        """Have them handed out again. Raises InvalidArgument, DelayTooLong."""
        ...

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        """Returns when the broker has it."""
        ...


class Decoded:
    """A batch with its columns decoded at first use, shared by all its messages."""

    __slots__ = ("_bodies", "_columns", "_unreadable", "view")

    def __init__(self, view: BatchView) -> None:
        self.view = view
        self._bodies: list[bytes] | None = None
        self._unreadable: CorruptBatch | None = None
        self._columns: dict[str, Any] = {}

    @property
    def is_decoded(self) -> bool:
        """Whether the bodies are there, and can be read."""
        return self._bodies is not None

    @property
    def readable_bodies(self) -> list[bytes] | None:
        """All bodies of the batch, None if they are `unreadable`. Raises InvalidArgument if a library is not installed."""
        if self._bodies is None and self.unreadable is None:
            self._bodies = self.view.bodies()
        return self._bodies

    @property
    def message_bytes(self) -> int:
        """What each of its messages takes, as if all were alike."""
        return -(-self.view.envelope.total_bytes // max(self.view.count, 1))

    @property
    def unreadable(self) -> CorruptBatch | None:
        """Why the bodies cannot be decompressed: the producer sent garbage. Raises InvalidArgument if a library is not installed."""
        # Asked for each message of an ordered subject: of a batch whose bodies are there, the first look is enough.
        if self._bodies is None and self._unreadable is None and self.view.header.compression:
            try:
                self._bodies = self.view.bodies()
            except CorruptBatch as failure:
                self._unreadable = failure
        return self._unreadable

    @property
    def bodies(self) -> list[bytes]:
        """All bodies of the batch. Raises CorruptBatch, and InvalidArgument if a library is not installed."""
        if self._bodies is None:
            self._bodies = self.view.bodies()
        return self._bodies

    def column(self, name: str) -> Any:
        """Another column of the view, by the name of its method."""
        if name not in self._columns:
            self._columns[name] = getattr(self.view, name)()
        return self._columns[name]


@dataclass(slots=True)
class Slice:
    """Consecutive messages of one batch, as they were handed out: `pull` is the pull sequence of the first. They have one `attempt`: of
    directed messages it counts what failed before they were sent again.
    """

    batch: Decoded
    offset: int
    count: int
    attempt: int
    pull: int
    settler: Settler

    def split(self, count: int) -> tuple[Slice, Slice]:
        """The first `count` messages, and the rest."""
        rest = self.count - count
        head = Slice(self.batch, self.offset, count, self.attempt, self.pull, self.settler)
        return head, Slice(self.batch, self.offset + count, rest, self.attempt, self.pull + count, self.settler)

    def message(self, index: int) -> Message:
        """One of these messages."""
        return Message(self.settler, self.batch, self.offset + index, self.attempt, self.pull + index)

    def by_failures(self) -> Iterator[Slice]:
        """Of a directed batch: the same messages, in slices that failed equally often before they were sent again, which their attempt
        counts from here on.
        """
        every = self.batch.column("headers") or [{}] * self.batch.view.count
        rest, offset = self, self.offset
        for count, equal in groupby(map(failures, every[offset : offset + self.count])):
            part, rest = rest.split(len(list(equal)))
            part.attempt += count
            yield part

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of these messages."""
        found = self.batch.bodies
        return found if self.count == len(found) else found[self.offset : self.offset + self.count]


class StoredMessage:
    """What a stored message says, whoever handed it out. `attempt` is 1 the first time it is handed out."""

    __slots__ = ("_batch", "_index", "attempt", "body", "is_settled")

    def __init__(self, batch: Decoded, index: int, attempt: int) -> None:
        self.body = batch.bodies[index]
        self.attempt = attempt
        self.is_settled = False
        self._batch = batch
        self._index = index

    @property
    def sequence(self) -> int:
        """Its number in its queue: the subject on its broker group."""
        return self._batch.view.base_sequence + self._index

    @property
    def id(self) -> MessageId:
        """Its name, for ever."""
        stored = self._batch.column("message_ids")
        if stored is not None:
            return MessageId.parse(stored[self._index].hex())
        header = self._batch.view.header
        return MessageId(header.producer_id, header.batch_sequence, self._index)

    @property
    def key(self) -> str | None:
        """Its key as text; None if it has none. Raises UnicodeDecodeError for a key that is no UTF-8: see `key_bytes`."""
        found = self.key_bytes
        return None if found is None else found.decode()

    @property
    def key_bytes(self) -> bytes | None:
        keys = self._batch.column("keys")
        return (keys[self._index] or None) if keys else None

    @property
    def tags(self) -> tuple[str, ...]:
        tags = self._batch.column("tags")
        return tags[self._index] if tags else ()

    @property
    def headers(self) -> Mapping[str, bytes]:
        headers = self._batch.column("headers")
        return headers[self._index] if headers else {}

    @property
    def create_time_ms(self) -> int:
        """When it was handed to the producer, milliseconds since 1970, by the producer's clock."""
        return int(self._batch.column("create_times_ms")[self._index])

    @property
    def create_time(self) -> datetime:
        """The same as a datetime in UTC."""
        return datetime.fromtimestamp(self.create_time_ms / 1000, UTC)

    @property
    def append_time_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970, by the broker's clock."""
        return self._batch.view.envelope.append_time_ms

    def json(self) -> Any:
        """The body read as JSON. Raises ValueError."""
        return json.loads(self.body)


class Message(StoredMessage):
    """One message. `attempt` is 1 the first time it is handed out."""

    __slots__ = ("_settler", "pull_sequence")

    def __init__(self, settler: Settler, batch: Decoded, index: int, attempt: int, pull: int) -> None:
        # Not by super(): this is made for every message.
        self.body = batch.bodies[index]
        self.attempt = attempt
        self.is_settled = False
        self._batch = batch
        self._index = index
        self._settler = settler
        self.pull_sequence = pull

    @property
    def subject(self) -> str:
        """What it was sent to."""
        return self._settler.subject

    @property
    def broker_group(self) -> str:
        """The broker group that has it."""
        return self._settler.broker_group

    @property
    def settler(self) -> Settler:
        """Who takes its verdicts."""
        return self._settler

    def settle_through(self, wrap: Callable[[Settler], Settler]) -> None:
        """Have its verdicts go another way."""
        self._settler = wrap(self._settler)

    # --- settling ------------------------------------------------------------------------------------------------------

    async def ack(self) -> None:
        """It was worked on: never hand it out again. Does not wait: the acknowledgement leaves within milliseconds, with others. If the
        process ends before, the message comes again. `ack_sync` waits.
        """
        self.is_settled = True
        self._settler.ack(self.pull_sequence)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        self.is_settled = True
        self._settler.ack(self.pull_sequence)

    async def ack_sync(self) -> None:
        """The same; returns when the broker has it. Raises StaleDelivery if the message went to another consumer, NotConnected if no
        answer came in time, ClientClosed.
        """
        self.is_settled = True
        await self._settler.settle_now(self.pull_sequence, self.pull_sequence, Verdict.ACK)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """It failed: hand it out again after `delay`, by default after the group's (1 s, 5 s, 10 s, 30 s, then 60 s, if nobody set others).

        Up to an hour the broker sees to it; for longer a copy is sent to a delay group, two years ahead at most, and comes back to this
        group alone, with the same id. After the group's last attempt it goes to the dead-letter queue instead, with `error`: a text, or
        the exception, 1,000 characters at most. Raises InvalidArgument, DelayTooLong.
        """
        part = Slice(self._batch, self._index, 1, self.attempt, self.pull_sequence, self._settler)
        self._settler.nack(part, delay, error_text(error))
        self.is_settled = True

    def reject(self, error: str | BaseException = "") -> None:
        """It failed, and no other attempt will help: to the group's dead-letter queue. `error` as in `nack`. Raises InvalidArgument."""
        self._settler.settle(self.pull_sequence, self.pull_sequence, Verdict.DEAD, error=error_text(error))
        self.is_settled = True

    def release(self) -> None:
        """It was not worked on: hand it out again, to whoever asks, as if it had not been handed out. No attempt is counted."""
        self.is_settled = True
        self._settler.settle(self.pull_sequence, self.pull_sequence, Verdict.RELEASE)

    def __repr__(self) -> str:
        return f"<Message {self.subject}/{self.sequence} attempt {self.attempt}, {len(self.body)} bytes>"


class Messages:
    """Messages pulled together from one broker group: a sequence of Message, made when asked for, with the bodies as a list beside it."""

    __slots__ = ("slices",)

    def __init__(self, slices: list[Slice]) -> None:
        self.slices = slices

    @property
    def broker_group(self) -> str:
        """The broker group that has them; "" if there are none."""
        return self.slices[0].settler.broker_group if self.slices else ""

    def settle_through(self, wrap: Callable[[Settler], Settler]) -> None:
        """Have the verdicts go another way."""
        for each in self.slices:
            each.settler = wrap(each.settler)

    def __len__(self) -> int:
        return sum([each.count for each in self.slices])

    def __iter__(self) -> Iterator[Message]:
        for each in self.slices:
            for index in range(each.count):
                yield each.message(index)

    def __getitem__(self, index: int) -> Message:
        place = index + len(self) if index < 0 else index
        for each in self.slices:
            if 0 <= place < each.count:
                return each.message(place)
            place -= each.count
        raise IndexError(f"{index} of {len(self)} messages")

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, without making a Message of each: the fast way."""
        if len(self.slices) == 1:
            return self.slices[0].bodies
        return [body for each in self.slices for body in each.bodies]

    async def ack(self) -> None:
        """All were worked on. Does not wait; see `Message.ack`."""
        self.ack_later()

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.ACK)

    async def ack_sync(self) -> None:
        """All were worked on; returns when the broker has it. Raises as `Message.ack_sync`."""
        for each in self.slices:
            await each.settler.settle_now(each.pull, each.pull + each.count - 1, Verdict.ACK)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """All failed: hand them out again after `delay`. See `Message.nack`."""
        text = error_text(error)
        for each in self.slices:
            each.settler.nack(each, delay, text)

    def release(self) -> None:
        """None was worked on, but for those that have a verdict. See `Message.release`."""
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.RELEASE)

    def reject(self, error: str | BaseException = "") -> None:
        """All failed, and no other attempt will help. See `Message.reject`."""
        text = error_text(error)
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.DEAD, error=text)


def error_text(error: str | BaseException) -> str:
    """What travels with a verdict: the text, or the exception's type and words; cut. Raises InvalidArgument."""
    if isinstance(error, BaseException):
        words = str(error)
        error = f"{type(error).__name__}: {words}" if words else type(error).__name__
    elif not isinstance(error, str):
        raise InvalidArgument(f"an error is a text or an exception, not {error!r}")
    # A path that is no UTF-8 has surrogates in it, which cannot be sent.
    return error[:ERROR_CHARS_MAX].encode(errors="replace").decode()


def retry_ms(delay: timedelta) -> int:
    """The delay of a retry on an unordered subject in milliseconds, rounded up.

    Raises InvalidArgument if it is negative or no timedelta, DelayTooLong if it is over two years.
    """
    if not isinstance(delay, timedelta) or delay < timedelta(0):
        raise InvalidArgument(f"a delay is a timedelta from 0 on, not {delay!r}")
    if delay > timedelta(milliseconds=limits.DELAY_MS_MAX):
        raise DelayTooLong(f"a retry after {delay.days} days is too late: the longest delay is {limits.DELAY_MS_MAX // 86_400_000} days")
    return -(-delay // timedelta(milliseconds=1))


def delay_ms(delay: timedelta) -> int:
    """A delay on an ordered subject in milliseconds. Raises InvalidArgument if it is negative, no timedelta, or over 30 days."""
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= timedelta(days=30):
        raise InvalidArgument(f"a delay is a timedelta of 0 to 30 days, not {delay!r}")
    return int(delay.total_seconds() * 1000)
