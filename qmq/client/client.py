"""The client of a QMQ cluster for asyncio programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final

from qmq.batch_columns import BatchFlag, Columns
from qmq.client import due_times, payloads
from qmq.client.browse_entry import BrowsingClient
from qmq.client.client_timing import TIMING, ClientTiming
from qmq.client.consumer import Consumer, process_name
from qmq.client.dead_letter_queue import DeadLetters
from qmq.client.delayed_producer import DelayedProducer
from qmq.client.handling import InterceptedConsumer, InterceptedOrderedConsumer
from qmq.client.idle_producers import IdleProducers
from qmq.client.intercepted import InterceptedDelayedProducer, InterceptedOrderedProducer, InterceptedProducer
from qmq.client.interceptors import Chain, Interceptor, chosen
from qmq.client.links import Links
from qmq.client.listening.listener_api import ListenerApi
from qmq.client.listening.listeners import ForThreads, no_client
from qmq.client.locator import Locator
from qmq.client.metrics import collector_of, serve
from qmq.client.ordered.ordered_consumer import OrderedConsumer
from qmq.client.ordered.ordered_producer import OrderedProducer
from qmq.client.outbox_entry import OutboxClient
from qmq.client.producer import Producer, ProducerIdentity, ProducerIds
from qmq.client.receipts import Receipt, Receipts
from qmq.client.route_book import Ordering, Placement, delayed_target, is_delayed, spoken, subject_of
from qmq.client.state_folder import StateDir, store_of
from qmq.clock import Clock, ms_of
from qmq.compression import Compression
from qmq.errors import ClientClosed, DeadlineExceeded, InvalidArgument, OrderMismatch, Unavailable
from qmq.model import check_name
from qmq.network import NETWORK, Network, parse

if TYPE_CHECKING:
    from qmq_ordering.lane import Lane

    from qmq.client.access_client import AccessClient
    from qmq.client.client_counters import ClientCounters
    from qmq.client.delayed import Delayed
    from qmq.client.metadata import MetadataClient
    from qmq.client.ordered.lane_membership import Assigned, Member
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.exposition import Collector

DEFAULT_PORT: Final = 20880
DELIVERY_TIMEOUT_S: Final = TIMING.delivery_timeout_s


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Addresses such as "host:port" or "unix:/path/socket", or several, as a list or with commas. Raises InvalidArgument."""
    found = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    parsed = [str(parse(each, DEFAULT_PORT)) for each in found]
    if not parsed:
        raise InvalidArgument("give at least one metaserver's address")
    return parsed


def _compression(name: str | None) -> Compression:
    if name not in (None, "zstd", "lz4"):
        raise InvalidArgument(f"compression is 'zstd' or 'lz4', not {name!r}")
    return Compression[name.upper()] if name else Compression.NONE


class Client(ListenerApi, OutboxClient, BrowsingClient):
    """Sends and consumes messages. Make it with `qmq.connect`, and use it with `async with`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        create_subjects: bool = True,
        interceptors: Iterable[Interceptor] = (),
        name: str | None = None,
        clock: Clock | None = None,
        network: Network = NETWORK,
        state_dir: StateDir = None,
        for_threads: ForThreads = no_client,
        timing: ClientTiming = TIMING,
    ) -> None:
        self._for_threads, self._timing = for_threads, timing
        self._addresses = parse_addresses(addresses)
        self.name = check_name("client", name) if name else process_name()
        """The name of this client at brokers and for operators."""
        self._create_subjects = create_subjects
        self.interceptors = chain = Chain(interceptors)
        """The interceptors of all messages, outermost first (`interceptors.py`)."""
        self._make_producer = chosen(chain, Producer, InterceptedProducer)
        self._make_ordered_producer = chosen(chain, OrderedProducer, InterceptedOrderedProducer)
        self._make_delayed_producer = chosen(chain, DelayedProducer, InterceptedDelayedProducer)
        self._make_consumer = chosen(chain, Consumer, InterceptedConsumer)
        self._make_ordered_consumer = chosen(chain, OrderedConsumer, InterceptedOrderedConsumer)
        self._metadata: MetadataClient | None = None
        self._now_ns = time.time_ns if clock is None else lambda: clock.time_ms() * 1_000_000
        self._network = network
        self._links = Links(
            Locator(self._locate, lambda: self.metadata.watch(), lambda: self.metadata.turn(), look=self._look, timing=timing),
            self.name,
            now_ns=self._now_ns,
            network=network,
            timing=timing,
            tell_settled=chain.settled if chain else None,
            store=store_of(False if state_dir is None and not network.is_machine else state_dir, self._addresses),
        )
        self._identity = ProducerIdentity()
        self._producer_ids = ProducerIds()
        self._producers: dict[str, Producer | OrderedProducer] = {}
        self._idle = IdleProducers(self._producers, timing.idle_producer_s)
        self._choosy_producers: dict[tuple[str, str], Producer | OrderedProducer] = {}
        """Producers for other `acks` than "quorum", by subject and `acks`."""
        self._delayed_producers: dict[tuple[str, str], DelayedProducer] = {}
        self._delayed: Delayed | None = None
        self._owned: dict[Producer | OrderedProducer, None] = {}
        """Producers that are not closed; consumers likewise."""
        self._consumers: dict[Consumer | OrderedConsumer, None] = {}
        self._endpoints: list[MetricsServer] = []

    # --- figures -------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> Collector:
        """For prometheus_client: `REGISTRY.register(mq.metrics)`. Raises InvalidArgument if that is not installed."""
        return collector_of(self)

    async def serve_metrics(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve the client's metrics for Prometheus at /metrics until the client is closed, and return the port; 0 takes a free one.

        Raises InvalidArgument if prometheus_client is not installed, OSError if the port is taken.
        """
        self._endpoints.append(await serve(self, port, host))
        return self._endpoints[-1].port

    @property
    def counters(self) -> ClientCounters:
        """Counts of the messages that this client sent and consumed since it was made."""
        return self._links.counters

    @property
    def connections(self) -> int:
        """How many connections to brokers are open."""
        return self._links.connections

    @property
    def producers(self) -> Sequence[Producer | OrderedProducer]:
        """The producers of this client that are not closed."""
        return [*self._producers.values(), *self._choosy_producers.values(), *self._delayed_producers.values(), *self._owned]

    @property
    def consumers(self) -> Sequence[Consumer | OrderedConsumer]:
        """The consumers of this client that are not closed."""
        return tuple(self._consumers)

    # --- what else there is --------------------------------------------------------------------------------------------

    @property
    def access(self) -> AccessClient:
        """Rules, roles, tokens and quotas of the cluster."""
        from qmq.client.access_client import AccessClient

        return AccessClient(self.metadata)

    @property
    def metadata(self) -> MetadataClient:
        """Administration: subjects, groups, routes and broker groups, as a metaserver sees them."""
        self._check_open()
        if self._metadata is None:
            from qmq.client.metadata import MetadataClient

            self._metadata = MetadataClient(self._addresses, self._network, self._timing)
        return self._metadata

    @property
    def delayed(self) -> Delayed:
        """Pending delayed messages: cancel, move, show and list them."""
        if self._delayed is None:
            from qmq.client.delayed import Delayed

            self._delayed = Delayed(lambda: self.metadata, self._now_ns, self._timing)
        return self._delayed

    async def _locate(self, target: str) -> Placement:
        return await self.metadata.routes(subject_of(target), create=self._create_subjects, delayed=is_delayed(target))

    async def _look(self, target: str) -> Placement:
        return await self.metadata.routes(subject_of(target), delayed=is_delayed(target))

    # --- sending -------------------------------------------------------------------------------------------------------

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
        """Send a message and wait until it is stored. On an ordered subject it needs a key, and is stored behind earlier messages of the
        key.

        The body is bytes, or a value that `qmq.payload.encode` takes: a str, a dataclass, a model, anything that JSON can express.

        With `delay`, or `at` (a datetime with a time zone), the message is delivered at that time, or at once if the time is past;
        `delayed` finds it by the receipt's `delayed_id`. With `cron` (five fields) and `zone` (such as "Europe/Berlin") the message is
        recurring; `at` is the earliest time of its first delivery.

        `acks` is as for `producer`. On an ordered subject, the messages of a key are in order among those sent with the same `acks`.

        Raises InvalidName, InvalidArgument, MessageTooLarge, UnknownSubject, DelayTooLong, DeadlineExceeded (see its `outcome`),
        ClientClosed.
        """
        if not isinstance(body, bytes):
            body = payloads.encode(body)
        if delay is not None or at is not None or cron is not None or zone is not None:
            return await self._send_later(subject, body, key, tags, headers, delay, at, cron, zone, acks)
        producer = (acks == "quorum" and self._producers.get(subject)) or await self._shared_producer(subject, acks)
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
        """Send many messages and wait until all are stored. `keys`, `tags` and `headers` have one item for each message, if they are given.

        `delays` or `ats` (with time zones) delay the messages: one item for each message, or one for all. Raises as `send`.
        """
        if delays is not None or ats is not None:
            due_ms = due_times.many_of(delays, ats, len(bodies), self._now_ns())
            later = await self._ready_delayed_producer(subject, acks)
            return await later.send_many(bodies, keys, tags, headers, due_ms=due_ms)
        producer = (acks == "quorum" and self._producers.get(subject)) or await self._shared_producer(subject, acks)
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
        delay: timedelta | None,
        at: datetime | None,
        cron: str | None,
        zone: str | None,
        acks: str,
    ) -> Receipt:
        now_ns = self._now_ns()
        if cron is None and zone is not None:
            raise InvalidArgument("zone is the time zone of `cron`; a datetime given as `at` has its own")
        if cron is not None and delay is not None:
            raise InvalidArgument("a recurring message has no delay: its times are those of `cron`, from `at` on if that is given")
        if cron is not None:
            cron, zone = due_times.check_recurrence(cron, zone)
        due_ms = ms_of(now_ns) if delay is None and at is None else due_times.due_of(delay, at, now_ns)
        producer = await self._ready_delayed_producer(subject, acks)
        if cron is None or zone is None:
            ticket = producer.send(body, key, tags, headers, due_ms=due_ms)
            index = producer.place_of_last(ticket)
        else:
            ticket, index = producer.send_recurring(body, cron, zone, start_ms=due_ms, key=key, tags=tags, headers=headers), 0
        return (await ticket).receipt(index)

    async def _ready_delayed_producer(self, subject: str, acks: str = "quorum") -> DelayedProducer:
        """The shared delayed producer of a subject, with room in its buffer."""
        producer = self._delayed_producers.get((subject, acks))
        if producer is None:
            self._check_open()
            check_name("subject", subject)
            await self._ordering(delayed_target(subject))
            producer = self._delayed_producers.get((subject, acks))
            if producer is None:
                producer = self._make_delayed_producer(self._links, self._identity, subject, acks=acks)
                self._delayed_producers[subject, acks] = producer
        if producer.full:
            await producer.drain()
        return producer

    async def _shared_producer(self, subject: str, acks: str = "quorum") -> Producer | OrderedProducer:
        """The shared producer of a subject. The first use finds out which kind the subject needs."""
        self._check_open()
        check_name("subject", subject)
        ordering = await self._ordering(subject)
        found = self._producers.get(subject) if acks == "quorum" else self._choosy_producers.get((subject, acks))
        if found is not None:
            return found
        found = (
            self._make_ordered_producer(self._links, self._producer_ids, subject, acks=acks)
            if ordering is not None
            else self._make_producer(self._links, self._identity, subject, acks=acks)
        )
        if acks == "quorum":
            self._producers[subject] = found
            self._idle.watch(subject)
        else:
            self._choosy_producers[subject, acks] = found
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
            raise DeadlineExceeded(f"subject {spoken(target)} could not be located in time; the last error: {cause}") from cause

    def _check_open(self) -> None:
        if self._links.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")

    def producer(
        self,
        subject: str,
        *,
        batch_messages: int = 1_000,
        batch_bytes: int = 256 * 1024,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        compression: str | None = None,
        acks: str = "quorum",
    ) -> Producer:
        """A batching producer for one unordered subject. `compression` is "zstd" or "lz4".

        With `acks="flushed"` a message is acknowledged when a majority of the group has flushed it to disk, so that it survives a power cut
        of all replicas. With `acks="master"` it is acknowledged when the master has it: faster, but the last messages may be lost with the
        master. Raises InvalidName, InvalidArgument. On an ordered subject, tickets fail with OrderMismatch: use `ordered_producer`.
        """
        self._check_open()
        producer = self._make_producer(
            self._links,
            self._identity,
            check_name("subject", subject),
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            delivery_timeout_s=delivery_timeout_s,
            compression=_compression(compression),
            acks=acks,
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
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        acks: str = "quorum",
        is_half: bool = False,
    ) -> DelayedProducer:
        """A batching producer of delayed messages for one subject, unordered or ordered. It does not compress bodies.

        With `is_half` its messages are half messages, which wait for a decision until they are due: `delayed.move` commits one, to be
        delivered at the new time, and `delayed.cancel` rolls it back. Without a decision it is cancelled when it is due.

        Raises InvalidName, InvalidArgument.
        """
        self._check_open()
        producer = self._make_delayed_producer(
            self._links,
            self._identity,
            check_name("subject", subject),
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            delivery_timeout_s=delivery_timeout_s,
            acks=acks,
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
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        compression: str | None = None,
        acks: str = "quorum",
        unknown: str = "resend",
    ) -> OrderedProducer:
        """A batching producer for one ordered subject: messages of one key are stored in the order of the calls.

        `unknown` is about messages whose broker group was fenced before it answered, so that they may be stored: "resend" sends them again
        with the same ids, so that some may be stored twice, in order; "fail" fails them with an unknown outcome. When a message times out,
        the messages behind it in its partition fail with it. `acks="master"` needs best-effort order; `acks="flushed"` works with any.
        Raises InvalidName, InvalidArgument. On an unordered subject, tickets and the next `send` fail with OrderMismatch.
        """
        self._check_open()
        producer = self._make_ordered_producer(
            self._links,
            self._producer_ids,
            check_name("subject", subject),
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            delivery_timeout_s=delivery_timeout_s,
            compression=_compression(compression),
            acks=acks,
            unknown=unknown,
            on_closed=self._forget_producer,
        )
        self._owned[producer] = None
        return producer

    # --- consuming -----------------------------------------------------------------------------------------------------

    def consumer(
        self,
        subject: str,
        group: str,
        *,
        name: str | None = None,
        start: str = "",
        broadcast: bool = False,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        ack: str = "auto",
        consume_most_once: bool = False,
        prefetch: int = 2_000,
        prefetch_bytes: int = 64 * 1024 * 1024,
        pull_bytes: int = 1024 * 1024,
        lease_ms: int = 30_000,
        expired: str = "raise",
    ) -> Consumer:
        """A consumer of a group: iterate over it, or `pull`.

        A new group begins at `start`: "earliest" (default) or "latest". With `broadcast` every consumer of the group gets every message,
        from "latest" on by default; a consumer that returns with the same `name` continues where it stopped. At most `prefetch` messages
        and `prefetch_bytes` bytes (the last batch may exceed them) are unsettled at once. With `expired="skip"` the consumer continues with
        the oldest stored message where retention deleted some; the default raises MessagesExpired. Raises InvalidName, InvalidArgument,
        ClientClosed.
        """
        self._check_open()
        consumer = self._make_consumer(
            self._links,
            self._reset_to_earliest,
            self._send_directed,
            subject,
            group,
            name=name,
            start=start,
            broadcast=broadcast,
            tags_any=list(tags_any),
            tags_all=list(tags_all),
            ack=ack,
            most_once=consume_most_once,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            pull_bytes=pull_bytes,
            lease_ms=lease_ms,
            expired=expired,
            on_closed=self._forget_consumer,
        )
        self._consumers[consumer] = None
        return consumer

    def ordered_consumer(
        self,
        subject: str,
        group: str,
        *,
        name: str | None = None,
        start: str = "earliest",
        gate: str = "",
        ack: str = "auto",
        on_failure: str = "block",
        prefetch: int = 8_000,
        prefetch_bytes: int = 64 * 1024 * 1024,
        pull_bytes: int = 1024 * 1024,
        lease_ms: int = 10_000,
        attempts_max: int = 5,
        retry_delays_s: Sequence[float] = (1.0, 5.0, 10.0, 30.0, 60.0),
    ) -> OrderedConsumer:
        """A consumer of a group of an ordered subject: `run` a handler, or iterate over the consumer. Messages of one key come in order.

        A new group begins at `start`. `gate` says when the group reads the next version of the route: "lanes" for each range of keys as
        soon as the range is finished, "strict" when the whole change is; "" leaves the group's gate as it is. A failed message is tried
        again after `retry_delays_s`; with `on_failure="block"` (default) its lane waits, with "park" only its key, which is parked after
        `attempts_max` failures. At most `prefetch` messages and `prefetch_bytes` bytes are unsettled at once, divided among the lanes.
        `lease_ms` is how long the consumer may be silent before its lanes go to others. Raises InvalidName, InvalidArgument, ClientClosed;
        reading raises MessagesExpired.
        """
        self._check_open()
        consumer = self._make_ordered_consumer(
            self._links,
            self._sync_member,
            subject,
            group,
            name=name,
            start=start,
            gate=gate,
            ack=ack,
            on_failure=on_failure,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            pull_bytes=pull_bytes,
            lease_ms=lease_ms,
            attempts_max=attempts_max,
            retry_delays_s=retry_delays_s,
            on_closed=self._forget_consumer,
        )
        self._consumers[consumer] = None
        return consumer

    def _forget_producer(self, producer: Producer | OrderedProducer) -> None:
        self._owned.pop(producer, None)

    def _forget_consumer(self, consumer: Consumer | OrderedConsumer) -> None:
        if consumer in self._consumers:
            del self._consumers[consumer]
            self.counters.taking(consumer.subject, consumer.group).stale += consumer.stale

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called."""
        return self._links.is_paused

    def pause(self) -> None:
        """Pause all consumers of this client, also those made later; see `Consumer.pause`. The client can still send."""
        self._links.is_paused = True

    def resume(self) -> None:
        """Resume all consumers, except those that were paused one by one."""
        self._links.is_paused = False
        for consumer in list(self._consumers):
            consumer.look_again()

    async def _sync_member(
        self, member: Member, generation: int, wait_ms: int, finished: Sequence[Lane], *, leaves: bool = False
    ) -> Assigned:
        return await self.metadata.sync_member(member, generation, wait_ms, finished, leaves=leaves)

    async def _reset_to_earliest(self, subject: str, group: str, broker_group: str | None) -> None:
        await self.metadata.reset_group(subject, group, to="earliest", broker_group=broker_group)

    async def _send_directed(self, subject: str, columns: Columns, create_time_ms: int) -> None:
        """Send messages to one group again, at the end of this round of the event loop. Raises as `send`."""
        producer = await self._ready_delayed_producer(subject)
        await producer.put(columns, BatchFlag.DIRECTED, create_time_ms=create_time_ms)

    async def _send_directed_now(self, subject: str, columns: Columns, create_time_ms: int) -> None:
        """Send messages to one group again, now. Raises as `send`."""
        producer = await self._shared_producer(subject)
        if isinstance(producer, OrderedProducer):
            raise OrderMismatch(f"subject {subject!r} is ordered: its messages cannot be sent to a single group")
        await producer.put(columns, BatchFlag.DIRECTED, create_time_ms=create_time_ms)

    def dead_letters(self, group: str) -> DeadLetters:
        """The dead letters of a consumer group: show, replay and purge them. Raises InvalidName."""
        return DeadLetters(self.metadata, self.consumer, self._send_directed_now, self.queue_ends, self._directed, group)

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Flush producers, let consumers leave, close connections. Harmless to repeat."""
        if self._links.is_closed:
            return
        await self._close_listeners()
        await self._close_outboxes()
        self._idle.close()
        for endpoint in self._endpoints:
            await endpoint.stop()
        try:
            for consumer in list(self._consumers):
                await consumer.close()
            for producer in self.producers:
                await producer.close()
        finally:
            for producer in self.producers:
                producer.abort()
            await self._links.close()
            if self._metadata is not None:
                await self._metadata.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
