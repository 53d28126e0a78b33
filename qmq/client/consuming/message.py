"""The messages that a consumer hands out, one, or many in columns, and the batches of a delivery,
each checked and decoded once.

Batches travel whole, because the checksum is the producer's. A pull that ends inside a batch brings
all of it. The next pull begins there: with batches of 1,000 messages and room for 250 more, each
batch would come four times. So the batch in which a delivery ended is kept until the next delivery.
The next pull names it, and the broker leaves it out. A range of the kept batch has the place behind
those that came. A batch that was handed out to its end is not kept: a consumer that waits holds
nothing.

Lanes, and older brokers, send the batch again; the kept one is used instead of its copy. A copy is
the same batch if the envelopes are equal: the index names one entry of the group's log, and the
checksum is that of the bytes. The bytes of the copy are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, groupby, repeat
from typing import Any, Final, Protocol
from weakref import ref

from qmq import limits
from qmq.client.consuming import GatheredAcks, MessageFields, cut_bodies
from qmq.errors import CorruptBatch, DelayTooLong, InvalidArgument
from qmq.model import MessageId
from qmq.process.event_loop import time_of
from qmq.rpc.channel import failures
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, parse_envelope
from qmq.wire.frame_payloads import ERROR_CHARS_MAX, Range, Verdict


class Settler(Protocol):
    """Takes verdicts: the consumer's attachment to one queue, or a wrapper around it."""

    subject: str
    broker_group: str

    def ack(self, pull: int) -> None:
        """Acknowledge a message. The verdict is sent soon, together with others."""
        ...

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        """Give a verdict, which is sent soon, together with others."""
        ...

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        """Hand the messages out again. Raises InvalidArgument, DelayTooLong."""
        ...

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        """Give a verdict. Returns when the broker has it."""
        ...


class DecodedBatch:
    """A batch that decodes each column at its first use. All messages of the batch share it."""

    __slots__ = ("__weakref__", "_columns", "_unreadable", "decoded", "server", "view")

    def __init__(self, view: BatchView, server: str | None = None) -> None:
        self.view = view
        self.server = server
        """The address of the broker that the batch was read from."""
        self.decoded: list[bytes] | None = None
        """The bodies, once they were decoded; `bodies` decodes them."""
        self._unreadable: CorruptBatch | None = None
        self._columns: dict[str, Any] = {}

    @property
    def readable_bodies(self) -> list[bytes] | None:
        """All bodies of the batch, None if they are `unreadable`. Raises InvalidArgument if a
        library is not installed.
        """
        if self.decoded is None and self.unreadable is None:
            self.decoded = self._decode()
        return self.decoded

    @property
    def message_bytes(self) -> int:
        """The average bytes of its messages."""
        return -(-self.view.envelope.total_bytes // max(self.view.count, 1))

    @property
    def unreadable(self) -> CorruptBatch | None:
        """Why the bodies cannot be decompressed; None if they can. Raises InvalidArgument if a
        library is not installed.
        """
        # Called for each message of an ordered subject: if the bodies are decoded, the first check
        # is enough.
        if self.decoded is None and self._unreadable is None and self.view.header.compression:
            try:
                self.decoded = self.view.bodies()
            except CorruptBatch as failure:
                self._unreadable = failure
        return self._unreadable

    @property
    def bodies(self) -> list[bytes]:
        """All bodies of the batch. Raises CorruptBatch,
        and InvalidArgument if a library is not installed.
        """
        if self.decoded is None:
            self.decoded = self._decode()
        return self.decoded

    def _decode(self) -> list[bytes]:
        view = self.view
        if view.header.compression:
            return view.bodies()
        return cut_bodies(view.region, view.layout.body, view.layout.body_data, view.header.count)

    def column(self, name: str) -> Any:
        """Another column of the batch, by the name of its method in `BatchView`."""
        if name not in self._columns:
            self._columns[name] = getattr(self.view, name)()
        return self._columns[name]


@dataclass(slots=True)
class BatchSlice:
    """Consecutive messages of one batch with one `attempt`; `pull` is the pull sequence of the
    first. On directed messages `attempt` includes the failures before they were sent again.
    """

    batch: DecodedBatch
    offset: int
    count: int
    attempt: int
    pull: int
    settler: Settler

    def split(self, count: int) -> tuple[BatchSlice, BatchSlice]:
        """The first `count` messages, and the rest."""
        rest = self.count - count
        head = BatchSlice(self.batch, self.offset, count, self.attempt, self.pull, self.settler)
        return head, BatchSlice(
            self.batch, self.offset + count, rest, self.attempt, self.pull + count, self.settler
        )

    def message(self, index: int) -> Message:
        """One of these messages."""
        return Message(
            self.settler, self.batch, self.offset + index, self.attempt, self.pull + index
        )

    def messages(self) -> Iterator[Message]:
        """These messages; each object is made when it is requested."""
        places, pulls = (
            range(self.offset, self.offset + self.count),
            range(self.pull, self.pull + self.count),
        )
        return map(
            Message, repeat(self.settler), repeat(self.batch), places, repeat(self.attempt), pulls
        )

    def by_failures(self) -> Iterator[BatchSlice]:
        """The messages of a directed batch in slices with the same number of earlier failures;
        `attempt` includes these.
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


class AckRange(GatheredAcks):
    """Acknowledgements of consecutive messages, settled as one range: when the next one does not
    join it, before another verdict, or at the end of this round of the event loop.
    """

    __slots__ = ()

    def gather_from(
        self, pull: int, count: int, at_end: Callable[[Callable[[], None]], None]
    ) -> None:
        """Acknowledge a message, and gather those behind it: `count` together at most."""
        self.ack_first = self.ack_last = pull
        self.ack_limit = pull + count - 1
        at_end(self.settle_acks)

    def settle_acks(self) -> None:
        """Settle the gathered acknowledgements."""
        first, last = self.ack_first, self.ack_last
        if first <= last:
            self.ack_first, self.ack_last, self.ack_limit = 0, -1, -1
            self.settle_range(first, last)

    def settle_range(self, first: int, last: int) -> None:
        raise NotImplementedError


CONTENT: Final = ("_batch", "_index", "attempt", "body", "is_settled")
"""The fields that the methods of `StoredMessage` need."""


class StoredMessage:
    """The content of a stored message. `attempt` is 1 at the first delivery."""

    __slots__ = ()

    body: bytes
    attempt: int
    is_settled: bool
    _batch: DecodedBatch
    _index: int

    @property
    def sequence(self) -> int:
        """The message's number in its queue (the subject on its broker group)."""
        return self._batch.view.base_sequence + self._index

    @property
    def id(self) -> MessageId:
        """The message's id, which never changes."""
        stored = self._batch.column("message_ids")
        if stored is not None:
            return MessageId.parse(stored[self._index].hex())
        header = self._batch.view.header
        return MessageId(header.producer_id, header.batch_sequence, self._index)

    @property
    def key(self) -> str | None:
        """The message's key as text; None if it has none. Raises UnicodeDecodeError for a key that
        is not UTF-8: see `key_bytes`.
        """
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
        """When the producer got the message, milliseconds since 1970, by the producer's clock."""
        return int(self._batch.column("create_times_ms")[self._index])

    @property
    def create_time(self) -> datetime:
        """`create_time_ms` as a datetime in UTC."""
        return time_of(self.create_time_ms)

    @property
    def server(self) -> str | None:
        """The address of the broker that this message came from, if a consumer received it: another
        broker may be the master by now.
        """
        return self._batch.server

    @property
    def append_time_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970, by the broker's clock."""
        return self._batch.view.envelope.append_time_ms

    def json(self) -> Any:
        """The body read as JSON. Raises ValueError."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("too many arrays or objects inside each other") from None


class Message(MessageFields, StoredMessage):
    """One message. `attempt` is 1 at the first delivery."""

    __slots__ = ()

    body: bytes
    _batch: DecodedBatch
    _settler: Settler

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self._settler.subject

    @property
    def broker_group(self) -> str:
        """The broker group that stores the message."""
        return self._settler.broker_group

    @property
    def settler(self) -> Settler:
        """The receiver of the message's verdicts."""
        return self._settler

    def settle_through(self, wrap: Callable[[Settler], Settler]) -> None:
        """Send the message's verdicts through a wrapper around the settler."""
        self._settler = wrap(self._settler)

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge: the message is never handed out again. Does not wait: acknowledgements are
        sent within milliseconds, together. If the process ends before that, the message is
        delivered again. `ack_sync` waits.
        """
        self.is_settled = True
        self._settler.ack(self.pull_sequence)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        self.is_settled = True
        self._settler.ack(self.pull_sequence)

    async def ack_sync(self) -> None:
        """Acknowledge, and return when the broker has the acknowledgement. Raises StaleDelivery if
        the message went to another consumer, NotConnected if no answer came in time, ClientClosed.
        """
        self.is_settled = True
        await self._settler.settle_now(self.pull_sequence, self.pull_sequence, Verdict.ACK)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: hand it out again after `delay`. The default is the group's setting
        (1 s, 5 s, 10 s, 30 s, then 60 s, unless it was changed).

        Delays up to an hour are kept by the broker. For a longer one, two years at most, a copy
        with the same id goes to a delay group and is delivered again to this group only. After the
        group's last attempt the message goes to the dead-letter queue instead, with `error`: a text
        or an exception, 1,000 characters at most. Raises InvalidArgument, DelayTooLong.
        """
        part = BatchSlice(
            self._batch, self._index, 1, self.attempt, self.pull_sequence, self._settler
        )
        self._settler.nack(part, delay, error_text(error))
        self.is_settled = True

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: it goes to the group's dead-letter
        queue. `error` as in `nack`. Raises InvalidArgument.
        """
        self._settler.settle(
            self.pull_sequence, self.pull_sequence, Verdict.DEAD, error=error_text(error)
        )
        self.is_settled = True

    def release(self) -> None:
        """Give the message back unprocessed: it is handed out again to any consumer, and no attempt
        is counted.
        """
        self.is_settled = True
        self._settler.settle(self.pull_sequence, self.pull_sequence, Verdict.RELEASE)

    def __repr__(self) -> str:
        return (
            f"<Message {self.subject}/{self.sequence} attempt {self.attempt}, {len(self.body)} "
            "bytes>"
        )


class Messages:
    """Messages pulled together from one broker group: a sequence whose `Message` objects are made
    on access, with the bodies as a list.
    """

    __slots__ = ("slices",)

    def __init__(self, slices: list[BatchSlice]) -> None:
        self.slices = slices

    @property
    def broker_group(self) -> str:
        """The broker group that stores them; "" if there are none."""
        return self.slices[0].settler.broker_group if self.slices else ""

    def settle_through(self, wrap: Callable[[Settler], Settler]) -> None:
        """Send the verdicts through a wrapper around the settler."""
        for each in self.slices:
            each.settler = wrap(each.settler)

    def __len__(self) -> int:
        return sum([each.count for each in self.slices])

    def __iter__(self) -> Iterator[Message]:
        return chain.from_iterable(map(BatchSlice.messages, self.slices))

    def __getitem__(self, index: int) -> Message:
        place = index + len(self) if index < 0 else index
        for each in self.slices:
            if 0 <= place < each.count:
                return each.message(place)
            place -= each.count
        raise IndexError(f"{index} of {len(self)} messages")

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, without making a `Message` for each: the fast way."""
        if len(self.slices) == 1:
            return self.slices[0].bodies
        return [body for each in self.slices for body in each.bodies]

    async def ack(self) -> None:
        """Acknowledge all. Does not wait; see `Message.ack`."""
        self.ack_later()

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.ACK)

    async def ack_sync(self) -> None:
        """Acknowledge all, and return when the broker has the acknowledgement.
        Raises as `Message.ack_sync`.
        """
        for each in self.slices:
            await each.settler.settle_now(each.pull, each.pull + each.count - 1, Verdict.ACK)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """All failed: hand them out again after `delay`. See `Message.nack`."""
        text = error_text(error)
        for each in self.slices:
            each.settler.nack(each, delay, text)

    def release(self) -> None:
        """Give back all messages that have no verdict, unprocessed. See `Message.release`."""
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.RELEASE)

    def reject(self, error: str | BaseException = "") -> None:
        """All failed, and no other attempt will help. See `Message.reject`."""
        text = error_text(error)
        for each in self.slices:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.DEAD, error=text)


def error_text(error: str | BaseException) -> str:
    """The error text of a verdict: the text, or the exception's type and text, cut to the limit.
    Raises InvalidArgument.
    """
    if isinstance(error, BaseException):
        words = str(error)
        error = f"{type(error).__name__}: {words}" if words else type(error).__name__
    elif not isinstance(error, str):
        raise InvalidArgument(f"an error must be a str or an exception, not {error!r}")
    # A path that is not UTF-8 contains surrogates, which cannot be encoded.
    return error[:ERROR_CHARS_MAX].encode(errors="replace").decode()


def retry_ms(delay: timedelta) -> int:
    """The delay of a retry on an unordered subject in milliseconds, rounded up.

    Raises InvalidArgument if the delay is negative or not a timedelta, DelayTooLong if it exceeds
    two years.
    """
    if not isinstance(delay, timedelta) or delay < timedelta(0):
        raise InvalidArgument(f"a delay is a timedelta from 0 on, not {delay!r}")
    if delay > timedelta(milliseconds=limits.DELAY_MS_MAX):
        raise DelayTooLong(
            f"a retry after {delay.days} days is too long: the longest delay is "
            f"{limits.DELAY_MS_MAX // 86_400_000} days"
        )
    return -(-delay // timedelta(milliseconds=1))


def delay_ms(delay: timedelta) -> int:
    """A delay on an ordered subject in milliseconds. Raises InvalidArgument if it is negative, not
    a timedelta, or over 30 days.
    """
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= timedelta(days=30):
        raise InvalidArgument(f"a delay is a timedelta of 0 to 30 days, not {delay!r}")
    return int(delay.total_seconds() * 1000)


class ArrivedBatches:
    """The batches that arrived in this round of the event loop, for all consumers of a client: a
    batch that several of them get, in the same bytes, is checked and decoded once. With 50 groups
    of one subject that halves what a message costs when it arrives.
    """

    __slots__ = ("_at_end", "_batches")

    def __init__(self, at_end: Callable[[Callable[[], object]], object]) -> None:
        """`at_end` calls at the end of the round."""
        self._at_end = at_end
        self._batches: dict[tuple[str | None, bytes], ref[DecodedBatch]] = {}
        """Weak, because tasks run before the end of the round, and may drop a batch that is large
        when it is decompressed.
        """

    def read(self, payload: bytes | memoryview, at: int, server: str | None) -> DecodedBatch:
        """The batch that begins at byte `at` of a payload from `server`. Raises CorruptBatch."""
        place = server, bytes(payload[at : at + ENVELOPE_BYTES])
        known = self._batches.get(place)
        found = None if known is None else known()
        if found is None or len(payload) - at < found.view.envelope.total_bytes:
            found = DecodedBatch(BatchView.parse(payload, at), server)
            self._batches[place] = ref(found)
            if len(self._batches) == 1:
                self._at_end(self._batches.clear)
        return found


class ReceivedBatches:
    """Reads the batches of one session's deliveries, in their order."""

    __slots__ = ("_arrived", "_cut")

    def __init__(self, arrived: ArrivedBatches) -> None:
        self._arrived = arrived
        self._cut: DecodedBatch | None = None

    @property
    def kept(self) -> int:
        """The base sequence of the batch that is kept; -1: none."""
        return -1 if self._cut is None else self._cut.view.base_sequence

    def forget(self) -> None:
        """Keep nothing: another session begins."""
        self._cut = None

    def read(
        self,
        payload: bytes | memoryview,
        at: int,
        count: int,
        ranges: Sequence[Range],
        server: str | None = None,
    ) -> list[DecodedBatch]:
        """Read the `count` batches that begin at byte `at` of a payload from `server`; the delivery
        hands out `ranges` of them, and of the kept batch, which is the last one of the result then.
        Raises CorruptBatch.
        """
        batches: list[DecodedBatch] = []
        cut, self._cut = self._cut, None
        for _ in range(count):
            batch = cut
            if (
                batch is None
                or batch.server != server
                or parse_envelope(payload, at) != batch.view.envelope
            ):
                batch = self._arrived.read(payload, at, server)
            at += batch.view.envelope.total_bytes
            batches.append(batch)
        if cut is not None and any([each.batch == count for each in ranges]):  # noqa: C419 - faster than a generator
            batches.append(cut)
        last = ranges[-1] if ranges else None
        if last is not None and last.batch < len(batches):
            view = batches[last.batch].view
            if last.first_sequence + last.count < view.base_sequence + view.count:
                self._cut = batches[last.batch]
        return batches
