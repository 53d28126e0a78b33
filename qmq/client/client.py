"""The client of a QMQ cluster for asyncio programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from qmq.client.browse_entry import BrowsingClient
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.consumer import Consumer, process_name
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.settlements import StateDir, store_of
from qmq.client.dead_letters import DeadLetters
from qmq.client.intercepted import InterceptedConsumer, InterceptedOrderedConsumer
from qmq.client.interceptors import Chain, Interceptor, chosen
from qmq.client.listening.listeners import ForThreads, ListenerApi, no_client
from qmq.client.metadata.cache import MetadataCache, Placement, is_delayed, subject_of
from qmq.client.metrics import collector_of, serve
from qmq.client.outbox_entry import OutboxClient
from qmq.client.producing.client import now_by
from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.process.address import parse
from qmq.process.event_loop import Clock
from qmq.rpc.network import NETWORK, Network

if TYPE_CHECKING:
    from qmq_ordering.lanes import Lane

    from qmq.client.access_client import AccessClient
    from qmq.client.connection.pool import ClientCounters
    from qmq.client.consuming.ordered.membership import Assigned, Member
    from qmq.client.metadata.service import MetadataClient
    from qmq.client.producing.delayed import Delayed
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.exposition import Collector

DEFAULT_PORT: Final = 20880


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Addresses such as "host:port" or "unix:/path/socket", or several, as a list or with commas. Raises InvalidArgument."""
    found = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    parsed = [str(parse(each, DEFAULT_PORT)) for each in found]
    if not parsed:
        raise InvalidArgument("give at least one metaserver's address")
    return parsed


class Client(OutboxClient, ListenerApi, BrowsingClient):
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
        self._for_threads = for_threads
        self.addresses = parse_addresses(addresses)
        """The metaservers that this client asks."""
        self.name = check_name("client", name) if name else process_name()
        """The name of this client at brokers and for operators."""
        self._create_subjects = create_subjects
        self._network = network
        self._metadata: MetadataClient | None = None
        self._delayed: Delayed | None = None
        chain = Chain(interceptors)
        now_ns = now_by(clock)
        links = ConnectionPool(
            MetadataCache(self._locate, lambda: self.metadata.watch(), lambda: self.metadata.turn(), look=self._look, timing=timing),
            self.name,
            now_ns=now_ns,
            network=network,
            timing=timing,
            tell_settled=chain.settled if chain else None,
            store=store_of(False if state_dir is None and not network.is_machine else state_dir, self.addresses),
        )
        super().__init__(links, chain, now_ns=now_ns, timing=timing)
        self._make_consumer = chosen(chain, Consumer, InterceptedConsumer)
        self._make_ordered_consumer = chosen(chain, OrderedConsumer, InterceptedOrderedConsumer)
        self._consumers: dict[Consumer | OrderedConsumer, None] = {}
        """The consumers that are not closed."""
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
        """Administration: subjects, groups, routes and broker groups, as a metaserver sees them. It works in any event loop."""
        self._links.check_open()
        if self._metadata is None:
            from qmq.client.metadata.service import MetadataClient

            self._metadata = MetadataClient(self.addresses, self._network, self._timing)
        return self._metadata

    @property
    def delayed(self) -> Delayed:
        """Pending delayed messages: cancel, move, show and list them."""
        if self._delayed is None:
            from qmq.client.producing.delayed import Delayed

            self._delayed = Delayed(lambda: self.metadata, self._now_ns, self._timing)
        return self._delayed

    async def _locate(self, target: str) -> Placement:
        return await self.metadata.routes(subject_of(target), create=self._create_subjects, delayed=is_delayed(target))

    async def _look(self, target: str) -> Placement:
        return await self.metadata.routes(subject_of(target), delayed=is_delayed(target))

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
        prefetch: int | None = None,
        prefetch_bytes: int = 64 * 1024 * 1024,
        pull_bytes: int = 1024 * 1024,
        lease_ms: int = 30_000,
        expired: str = "raise",
        condition: str = "",
    ) -> Consumer:
        """A consumer of a group: iterate over it, or `pull`.

        A new group begins at `start`: "earliest" (default) or "latest". With `broadcast` every consumer of the group gets every message,
        from "latest" on by default; a consumer that returns with the same `name` continues where it stopped. At most `prefetch` messages
        and `prefetch_bytes` bytes (the last batch may exceed them) are unsettled at a time. By default `prefetch` is 2,000, up to
        16,000 while the application handles within a tenth of a second what it holds. With `expired="skip"` the consumer continues with the
        oldest stored message where retention deleted some; the default raises MessagesExpired. `condition` says what this application
        selects among the messages by itself. All consumers of a group have the same tags and the same condition; another one is refused
        with InvalidArgument. Raises InvalidName, InvalidArgument, ClientClosed.
        """
        self._links.check_usable()
        consumer = self._make_consumer(
            self._links,
            self._reset_to_earliest,
            self._send_directed,
            subject,
            group,
            name=name,
            start=start,
            broadcast=broadcast,
            tags_any=tags_any,
            tags_all=tags_all,
            ack=ack,
            most_once=consume_most_once,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            pull_bytes=pull_bytes,
            lease_ms=lease_ms,
            expired=expired,
            condition=condition,
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
        condition: str = "",
    ) -> OrderedConsumer:
        """A consumer of a group of an ordered subject: `run` a handler, or iterate over the consumer. Messages of one key come in order.

        A new group begins at `start`. `gate` says when the group reads the next version of the route: "lanes" for each range of keys as
        soon as the range is finished, "strict" when the whole change is; "" leaves the group's gate as it is. A failed message is tried
        again after `retry_delays_s`; with `on_failure="block"` (default) its lane waits, with "park" only its key, which is parked after
        `attempts_max` failures. At most `prefetch` messages and `prefetch_bytes` bytes are unsettled at once, divided among the lanes; the
        last batch of a lane may exceed its part. `lease_ms` is how long the consumer may be silent before its lanes go to others.
        `condition` is that of `consumer`.

        Raises InvalidName, InvalidArgument, ClientClosed; reading raises MessagesExpired.
        """
        self._links.check_usable()
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
            condition=condition,
            on_closed=self._forget_consumer,
        )
        self._consumers[consumer] = None
        return consumer

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
        for consumer in list(self._consumers):
            consumer.look_again()

    def resume(self) -> None:
        """Resume all consumers, except those that were paused by `Consumer.pause`."""
        self._links.is_paused = False
        for consumer in list(self._consumers):
            consumer.look_again()

    async def _sync_member(
        self, member: Member, generation: int, wait_ms: int, finished: Sequence[Lane], *, leaves: bool = False
    ) -> Assigned:
        return await self.metadata.sync_member(member, generation, wait_ms, finished, leaves=leaves)

    async def _reset_to_earliest(self, subject: str, group: str, broker_group: str | None) -> None:
        await self.metadata.reset_group(subject, group, to="earliest", broker_group=broker_group)

    def dead_letters(self, group: str) -> DeadLetters:
        """The dead letters of a consumer group: show, replay and purge them. Raises InvalidName."""
        return DeadLetters(self.metadata, self.consumer, self._send_directed_now, self.queue_ends, self._directed, group)

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Flush producers, let consumers leave, close connections. Harmless to repeat. When the client's event loop has ended, only its
        connections are left to close.
        """
        if self._links.is_closed:
            return
        if self._links.round.is_over:
            self._links.abandon()
            if self._metadata is not None:
                await self._metadata.close()
            return
        self._links.round.own_loop()
        try:
            await self._close_listeners()
            await self._close_outboxes()
            self._idle.close()
            for endpoint in self._endpoints:
                await endpoint.stop()
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
