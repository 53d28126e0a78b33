"""The part of `qmq.Client` that sends:
producers for applications, and the shared producers of `Client.send`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from qmq import limits
from qmq.client import payloads
from qmq.client.connection.connection import ClientTiming
from qmq.client.connection.pool import ConnectionPool
from qmq.client.intercepted import (
    InterceptedDelayedProducer,
    InterceptedOrderedProducer,
    InterceptedProducer,
)
from qmq.client.interceptors import Chain, chosen
from qmq.client.metadata.cache import Ordering, delayed_target, described
from qmq.client.producing import delayed
from qmq.client.producing.delayed import DelayedProducer
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.client.producing.producer import (
    IdleProducers,
    Producer,
    ProducerIdentity,
    ProducerIds,
    ProducerOptions,
)
from qmq.client.producing.receipts import Receipt, Receipts
from qmq.errors import DeadlineExceeded, InvalidArgument, OrderMismatch, Unavailable
from qmq.model import check_name
from qmq.process.event_loop import Clock, ms_of
from qmq.wire.batch_columns import BatchFlag, Columns, Compression


def now_by(clock: Clock | None) -> Callable[[], int]:
    """A function that returns nanoseconds since 1970, by the machine's clock if none is given."""
    return time.time_ns if clock is None else lambda: clock.time_ms() * 1_000_000


def _compression(name: str | None) -> Compression:
    if name not in (None, "zstd", "lz4"):
        raise InvalidArgument(f"compression is 'zstd' or 'lz4', not {name!r}")
    return Compression[name.upper()] if name else Compression.NONE


class _When(NamedTuple):
    """When a message is delivered. `due_ms`, in milliseconds since 1970: at the earliest;
    `recurrence` is (cron, time zone).
    """

    due_ms: int
    recurrence: tuple[str, str] | None


class SendingClient:
    """The part of `qmq.Client` that sends messages."""

    def __init__(
        self,
        links: ConnectionPool,
        interceptors: Chain,
        *,
        now_ns: Callable[[], int],
        timing: ClientTiming,
    ) -> None:
        self._links = links
        self.interceptors = interceptors
        """The interceptors of all messages, outermost first (`interceptors.py`)."""
        self._now_ns, self._timing = now_ns, timing
        self._make_producer = chosen(interceptors, Producer, InterceptedProducer)
        self._make_ordered_producer = chosen(
            interceptors, OrderedProducer, InterceptedOrderedProducer
        )
        self._make_delayed_producer = chosen(
            interceptors, DelayedProducer, InterceptedDelayedProducer
        )
        self._identity = ProducerIdentity()
        self._producer_ids = ProducerIds()
        self._producers: dict[str, Producer | OrderedProducer] = {}
        """The producers of `send`, by subject."""
        self._idle = IdleProducers(timing.idle_producer_s)
        self._choosy_producers: dict[tuple[str, str], Producer | OrderedProducer] = {}
        """Producers for other `acks` than "quorum", by subject and `acks`."""
        self._delayed_producers: dict[tuple[str, str], DelayedProducer] = {}
        self._owned: dict[Producer | OrderedProducer, None] = {}
        """Producers that were made for others and are not closed."""

    @property
    def producers(self) -> Sequence[Producer | OrderedProducer]:
        """The producers of this client that are not closed."""
        return [
            *self._producers.values(),
            *self._choosy_producers.values(),
            *self._delayed_producers.values(),
            *self._owned,
        ]

    async def send(
        self,
        subject: str,
        body: object,
        *,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        cron: str | None = None,
        zone: str | None = None,
        acks: str = "quorum",
    ) -> Receipt:
        """Send a message and wait until it is stored. On an ordered subject it needs a key, and is
        stored behind earlier messages of the key.

        The body is bytes, or a value that `qmq.payload.encode` takes: a str, a dataclass, a model,
        anything that JSON can express.

        With `delay`, or `at` (a datetime with a time zone), the message is delivered at that time,
        or immediately if the time is past; `delayed` finds it by the receipt's `delayed_id`. With
        `cron` (five fields) and `zone` (such as "Europe/Berlin") the message is recurring; `at` is
        the earliest time of its first delivery.

        `acks` is as for `producer`. On an ordered subject, the messages of a key are in order among
        those sent with the same `acks`.

        Raises InvalidName, InvalidArgument, MessageTooLarge, UnknownSubject, DelayTooLong,
        DeadlineExceeded (see its `outcome`), ClientClosed.
        """
        if not isinstance(body, bytes):
            body = payloads.encode(body)
        if delay is not None or at is not None or cron is not None or zone is not None:
            when = self._when(delay, at, cron, zone)
            return await self._send_later(subject, body, key, tags, headers, when, acks)
        producer = (
            acks == "quorum" and self._producers.get(subject)
        ) or await self._shared_producer(subject, acks)
        if producer.full:
            await producer.drain()
        ticket = producer.send(body, key, tags, headers)  # type: ignore[arg-type]  # an ordered one refuses a message without a key
        index = producer.place_of_last(ticket)
        return (await ticket).receipt(index)

    async def send_many(
        self,
        subject: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Mapping[str, str | bytes]] | None = None,
        delays: Sequence[timedelta] | timedelta | None = None,
        ats: Sequence[datetime] | datetime | None = None,
        acks: str = "quorum",
    ) -> Receipts:
        """Send many messages and wait until all are stored. `keys`, `tags` and `headers` have one
        item for each message, if they are given.

        `delays` or `ats` (with time zones) delay the messages: one item for each message, or one
        for all. Raises as `send`.
        """
        if delays is not None or ats is not None:
            due_ms = delayed.many_of(delays, ats, len(bodies), self._now_ns())
            later = await self._ready_delayed_producer(subject, acks)
            return await later.send_many(bodies, keys, tags, headers, due_ms=due_ms)
        producer = (
            acks == "quorum" and self._producers.get(subject)
        ) or await self._shared_producer(subject, acks)
        if producer.full:
            await producer.drain()
        return await producer.send_many(bodies, keys, tags, headers)  # type: ignore[arg-type]

    async def _send_later(
        self,
        subject: str,
        body: bytes,
        key: str | bytes | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, str | bytes] | None,
        when: _When,
        acks: str,
    ) -> Receipt:
        producer = await self._ready_delayed_producer(subject, acks)
        due_ms, recurrence = when
        if recurrence is None:
            ticket = producer.send(body, key, tags, headers, due_ms=due_ms)
            index = producer.place_of_last(ticket)
        else:
            cron, zone = recurrence
            ticket, index = (
                producer.send_recurring(
                    body, cron, zone, start_ms=due_ms, key=key, tags=tags, headers=headers
                ),
                0,
            )
        return (await ticket).receipt(index)

    def _when(
        self, delay: timedelta | None, at: datetime | None, cron: str | None, zone: str | None
    ) -> _When:
        """Raises InvalidArgument, DelayTooLong."""
        now_ns = self._now_ns()
        if cron is None and zone is not None:
            raise InvalidArgument(
                "zone is the time zone of `cron`; a datetime given as `at` has its own"
            )
        if cron is not None and delay is not None:
            raise InvalidArgument(
                "a recurring message has no delay: its times are those of `cron`, from `at` "
                "on if that is given"
            )
        recurrence = None if cron is None else delayed.check_recurrence(cron, zone)
        return _When(
            ms_of(now_ns) if delay is None and at is None else delayed.due_of(delay, at, now_ns),
            recurrence,
        )

    async def _ready_delayed_producer(self, subject: str, acks: str = "quorum") -> DelayedProducer:
        """The shared delayed producer of a subject, with room in its buffer."""
        producer = self._delayed_producers.get((subject, acks))
        if producer is None:
            self._links.check_usable()
            check_name("subject", subject)
            await self._ordering(delayed_target(subject))
            producer = self._delayed_producers.get((subject, acks))
            if producer is None:
                producer = self._make_delayed_producer(
                    self._links, self._identity, subject, self._shared_options(acks)
                )
                self._delayed_producers[subject, acks] = producer
                self._idle.watch(self._delayed_producers, (subject, acks))
        if producer.full:
            await producer.drain()
        return producer

    async def _shared_producer(
        self, subject: str, acks: str = "quorum"
    ) -> Producer | OrderedProducer:
        """The shared producer of a subject.
        The first use finds out which kind the subject needs.
        """
        self._links.check_usable()
        check_name("subject", subject)
        ordering = await self._ordering(subject)
        found = (
            self._producers.get(subject)
            if acks == "quorum"
            else self._choosy_producers.get((subject, acks))
        )
        if found is not None:
            return found
        options = self._shared_options(acks)
        found = (
            self._make_ordered_producer(self._links, self._producer_ids, subject, options)
            if ordering is not None
            else self._make_producer(self._links, self._identity, subject, options)
        )
        if acks == "quorum":
            self._producers[subject] = found
            self._idle.watch(self._producers, subject)
        else:
            self._choosy_producers[subject, acks] = found
            self._idle.watch(self._choosy_producers, (subject, acks))
        return found

    async def _ordering(self, target: str) -> Ordering | None:
        cause: Unavailable | None = None
        try:
            async with asyncio.timeout(self._timing.delivery_timeout_s):
                while True:
                    try:
                        return await self._links.locator.ordering(target)
                    except Unavailable as failure:
                        cause = failure
        except TimeoutError:
            raise DeadlineExceeded(
                f"subject {described(target)} could not be located in time; the last error: {cause}"
            ) from cause

    def _shared_options(self, acks: str) -> ProducerOptions:
        return ProducerOptions(acks=acks, delivery_timeout_s=self._timing.delivery_timeout_s)

    def _timeout_s(self, given: float | None) -> float:
        return self._timing.delivery_timeout_s if given is None else given

    def producer(
        self,
        subject: str,
        *,
        batch_messages: int = 1_000,
        batch_bytes: int = 256 * 1024,
        delivery_timeout_s: float | None = None,
        compression: str | None = None,
        acks: str = "quorum",
        body_bytes_max: int = limits.LONG_BODY_BYTES_MAX,
    ) -> Producer:
        """A batching producer for one unordered subject. `compression` is "zstd" or "lz4".

        With `acks="flushed"` a message is acknowledged when a majority of the group has flushed it
        to disk, so that it survives a power cut of all replicas. With `acks="master"` it is
        acknowledged when the master has it: faster, but the last messages may be lost with the
        master. The broker refuses a body that is longer than the subject takes. One longer than
        `body_bytes_max` is refused here. Raises InvalidName, InvalidArgument. On an ordered
        subject, tickets fail with OrderMismatch: use `ordered_producer`.
        """
        self._links.check_usable()
        producer = self._make_producer(
            self._links,
            self._identity,
            check_name("subject", subject),
            ProducerOptions(
                batch_messages=batch_messages,
                batch_bytes=batch_bytes,
                delivery_timeout_s=self._timeout_s(delivery_timeout_s),
                acks=acks,
                compression=_compression(compression),
                body_bytes_max=body_bytes_max,
            ),
            on_closed=self._forget_producer,
        )
        self._owned[producer] = None
        return producer

    def delayed_producer(
        self,
        subject: str,
        *,
        batch_messages: int = 1_000,
        batch_bytes: int = 256 * 1024,
        delivery_timeout_s: float | None = None,
        acks: str = "quorum",
        is_half: bool = False,
    ) -> DelayedProducer:
        """A batching producer of delayed messages for one subject, unordered or ordered. It does
        not compress bodies.

        With `is_half` its messages are half messages, which wait for a decision until they are due:
        `delayed.move` commits one, to be delivered at the new time, and `delayed.cancel` rolls it
        back. Without a decision it is cancelled when it is due.

        Raises InvalidName, InvalidArgument.
        """
        self._links.check_usable()
        producer = self._make_delayed_producer(
            self._links,
            self._identity,
            check_name("subject", subject),
            ProducerOptions(
                batch_messages=batch_messages,
                batch_bytes=batch_bytes,
                delivery_timeout_s=self._timeout_s(delivery_timeout_s),
                acks=acks,
            ),
            is_half=is_half,
            on_closed=self._forget_producer,
        )
        self._owned[producer] = None
        return producer

    def ordered_producer(
        self,
        subject: str,
        *,
        batch_messages: int = 1_000,
        batch_bytes: int = 256 * 1024,
        delivery_timeout_s: float | None = None,
        compression: str | None = None,
        acks: str = "quorum",
        body_bytes_max: int = limits.LONG_BODY_BYTES_MAX,
        unknown: str = "resend",
    ) -> OrderedProducer:
        """A batching producer for one ordered subject: messages of one key are stored in the order
        of the calls.

        `unknown` is about messages whose broker group was fenced before it answered, so that they
        may be stored: "resend" sends them again with the same ids, so that some may be stored
        twice, in order; "fail" fails them with an unknown outcome. When a message times out, the
        messages behind it in its partition fail with it. `acks="master"` needs best-effort order;
        `acks="flushed"` works with any. `body_bytes_max` is as for `producer`. Raises InvalidName,
        InvalidArgument. On an unordered subject, tickets and the next `send` fail with
        OrderMismatch.
        """
        self._links.check_usable()
        producer = self._make_ordered_producer(
            self._links,
            self._producer_ids,
            check_name("subject", subject),
            ProducerOptions(
                batch_messages=batch_messages,
                batch_bytes=batch_bytes,
                delivery_timeout_s=self._timeout_s(delivery_timeout_s),
                acks=acks,
                compression=_compression(compression),
                body_bytes_max=body_bytes_max,
            ),
            unknown=unknown,
            on_closed=self._forget_producer,
        )
        self._owned[producer] = None
        return producer

    def _forget_producer(self, producer: Producer | OrderedProducer) -> None:
        self._owned.pop(producer, None)

    async def _send_directed(self, subject: str, columns: Columns, create_time_ms: int) -> None:
        """Send messages to one group again,
        at the end of this round of the event loop. Raises as `send`.
        """
        producer = await self._ready_delayed_producer(subject)
        await producer.put(columns, BatchFlag.DIRECTED, create_time_ms=create_time_ms)

    async def _send_directed_now(self, subject: str, columns: Columns, create_time_ms: int) -> None:
        """Send messages to one group again, now. Raises as `send`."""
        producer = await self._shared_producer(subject)
        if isinstance(producer, OrderedProducer):
            raise OrderMismatch(
                f"subject {subject!r} is ordered: its messages cannot be sent to a single group"
            )
        await producer.put(columns, BatchFlag.DIRECTED, create_time_ms=create_time_ms)
