"""The client of a QMQ cluster for asyncio programs.

`Client.outbox` and `Client.outbox_watchdog` send messages in the application's own database
transactions (docs/OUTBOX.md), and `Client.browse` reads stored messages without a group
(docs/BROWSE.md). Their modules are imported at first use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.ack_spool import StateDir, store_of
from qmq.client.consuming.consumer import Consumer, ConsumerOptions, process_name
from qmq.client.consuming.ordered.consumer import OrderedConsumer, OrderedConsumerOptions
from qmq.client.consuming.ordered.lane import FailurePolicy
from qmq.client.dead_letters import DeadLetters
from qmq.client.intercepted import InterceptedConsumer, InterceptedOrderedConsumer
from qmq.client.interceptors import Chain, Interceptor, chosen
from qmq.client.listening.listeners import ForThreads, ListenerApi, no_client
from qmq.client.metadata.cache import MetadataCache, Placement, is_delayed, subject_of
from qmq.client.metrics import ClientSource, collector_of, serve
from qmq.client.producing.batch import key_bytes
from qmq.client.producing.client import SendingClient, now_by
from qmq.client.producing.delayed import Delayed, time_ms
from qmq.errors import InvalidArgument, NotConnected, PeerError, Unavailable, UnknownSubject
from qmq.model import check_name, texts
from qmq.process.address import parse_addresses
from qmq.process.event_loop import Clock
from qmq.rpc.network import NETWORK, Network

if TYPE_CHECKING:
    from qmq_ordering.lanes import Lane

    from qmq.client.browsing import BrowsedMessage, BrowsedQueue, BrowseProgress
    from qmq.client.connection.pool import ClientCounters
    from qmq.client.consuming.ordered.membership import Assigned, Member
    from qmq.client.metadata.access import AccessClient
    from qmq.client.metadata.service import MetadataClient
    from qmq.metrics.endpoint import Collector, MetricsServer
    from qmq.sql.debezium_outbox import DebeziumTable
    from qmq.sql.outbox import Outbox, Outboxes
    from qmq.sql.outbox_watchdog import Watchdogs

log = logging.getLogger("qmq.client")

GRACE: Final = timedelta(seconds=5)
LEASE: Final = timedelta(seconds=10)


class Client(SendingClient, ListenerApi):
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
        self._own_outboxes: Outboxes | None = None
        chain = Chain(interceptors)
        now_ns = now_by(clock)
        links = ConnectionPool(
            MetadataCache(
                self._locate,
                lambda: self.metadata.watch(),
                lambda: self.metadata.use_next_server(),
                locate_existing=self._locate_existing,
                timing=timing,
            ),
            self.name,
            now_ns=now_ns,
            network=network,
            timing=timing,
            on_settled=chain.settled if chain else None,
            store=store_of(
                False if state_dir is None and not network.is_machine else state_dir, self.addresses
            ),
        )
        super().__init__(links, chain, now_ns=now_ns, timing=timing)
        self._make_consumer = chosen(chain, Consumer, InterceptedConsumer)
        self._make_ordered_consumer = chosen(chain, OrderedConsumer, InterceptedOrderedConsumer)
        self._consumers: dict[Consumer | OrderedConsumer, None] = {}
        """The consumers that are not closed."""
        self._endpoints: list[MetricsServer] = []

    # --- figures ----------------------------------------------------------------------------------

    @property
    def metrics(self) -> Collector:
        """For prometheus_client: `REGISTRY.register(mq.metrics)`. Raises InvalidArgument if that is
        not installed.
        """
        return collector_of(self._figures)

    async def serve_metrics(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve the client's metrics for Prometheus at /metrics until the client is closed, and
        return the port; 0 takes a free one.

        Raises InvalidArgument if prometheus_client is not installed, OSError if the port is taken.
        """
        self._endpoints.append(await serve(self._figures, port, host))
        return self._endpoints[-1].port

    @property
    def _figures(self) -> ClientSource:
        return ClientSource(self._links, lambda: self.producers, lambda: self.consumers)

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

    # --- what else there is -----------------------------------------------------------------------

    @property
    def access(self) -> AccessClient:
        """Rules, roles, tokens and quotas of the cluster."""
        from qmq.client.metadata.access import AccessClient

        return AccessClient(self.metadata)

    @property
    def metadata(self) -> MetadataClient:
        """Administration: subjects, groups, routes and broker groups, as a metaserver sees them. It
        works in any event loop.
        """
        self._links.check_open()
        if self._metadata is None:
            from qmq.client.metadata.service import MetadataClient

            self._metadata = MetadataClient(self.addresses, self._network, self._timing)
        return self._metadata

    @property
    def delayed(self) -> Delayed:
        """Pending delayed messages: cancel, move, show and list them."""
        if self._delayed is None:
            self._delayed = Delayed(lambda: self.metadata, self._now_ns, self._timing)
        return self._delayed

    async def _locate(self, target: str) -> Placement:
        return await self.metadata.routes(
            subject_of(target), create=self._create_subjects, delayed=is_delayed(target)
        )

    async def _locate_existing(self, target: str) -> Placement:
        return await self.metadata.routes(subject_of(target), delayed=is_delayed(target))

    # --- consuming --------------------------------------------------------------------------------

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

        A new group begins at `start`: "earliest" (default) or "latest". With `broadcast` every
        consumer of the group gets every message, from "latest" on by default; a consumer that
        returns with the same `name` continues where it stopped. At most `prefetch` messages and
        `prefetch_bytes` bytes (the last batch may exceed them) are unsettled at a time. By default
        `prefetch` is 2,000, up to 16,000 while the application handles within a tenth of a second
        what it holds. With `expired="skip"` the consumer continues with the oldest stored message
        where retention deleted some; the default raises MessagesExpired. `condition` says what this
        application selects among the messages by itself. All consumers of a group have the same
        tags and the same condition; another one is refused with InvalidArgument. Raises
        InvalidName, InvalidArgument, ClientClosed.
        """
        self._links.check_usable()
        consumer = self._make_consumer(
            self._links,
            self._reset_to_earliest,
            self._send_directed,
            subject,
            group,
            ConsumerOptions(
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
            ),
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
        """A consumer of a group of an ordered subject: `run` a handler, or iterate over the
        consumer. Messages of one key come in order.

        A new group begins at `start`. `gate` says when the group reads the next version of the
        route: "lanes" for each range of keys as soon as the range is finished, "strict" when the
        whole change is; "" leaves the group's gate as it is. A failed message is tried again after
        `retry_delays_s`; with `on_failure="block"` (default) its lane waits, with "park" only its
        key, which is parked after `attempts_max` failures. At most `prefetch` messages and
        `prefetch_bytes` bytes are unsettled at once, divided among the lanes; the last batch of a
        lane may exceed its part. `lease_ms` is how long the consumer may be silent before its lanes
        go to others. `condition` is that of `consumer`.

        Raises InvalidName, InvalidArgument, ClientClosed; reading raises MessagesExpired.
        """
        self._links.check_usable()
        consumer = self._make_ordered_consumer(
            self._links,
            self._sync_member,
            subject,
            group,
            OrderedConsumerOptions(
                name=name,
                start=start,
                gate=gate,
                ack=ack,
                policy=FailurePolicy(
                    on_failure, attempts_max, tuple(int(each * 1000) for each in retry_delays_s)
                ),
                prefetch=prefetch,
                prefetch_bytes=prefetch_bytes,
                pull_bytes=pull_bytes,
                lease_ms=lease_ms,
                condition=condition,
            ),
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
        """Pause all consumers of this client, also those made later; see `Consumer.pause`. The
        client can still send.
        """
        self._links.is_paused = True
        for consumer in list(self._consumers):
            consumer.pause_changed()

    def resume(self) -> None:
        """Resume all consumers, except those that were paused by `Consumer.pause`."""
        self._links.is_paused = False
        for consumer in list(self._consumers):
            consumer.pause_changed()

    async def _sync_member(
        self,
        member: Member,
        generation: int,
        wait_ms: int,
        finished: Sequence[Lane],
        *,
        leaves: bool = False,
    ) -> Assigned:
        return await self.metadata.sync_member(member, generation, wait_ms, finished, leaves=leaves)

    async def _reset_to_earliest(self, subject: str, group: str, broker_group: str | None) -> None:
        await self.metadata.reset_group(subject, group, to="earliest", broker_group=broker_group)

    def dead_letters(self, group: str) -> DeadLetters:
        """The dead letters of a consumer group: show, replay and purge them. Raises InvalidName."""
        return DeadLetters(
            self.metadata,
            self.consumer,
            self._send_directed_now,
            self.queue_ends,
            self._directed,
            group,
        )

    # --- messages of database transactions --------------------------------------------------------

    @property
    def _outboxes(self) -> Outboxes:
        self._links.check_usable()
        if self._own_outboxes is None:
            from qmq.sql.dialects import check_installed

            check_installed()
            from qmq.sql.outbox import Outboxes
            from qmq.sql.outbox_sender import OutboxProducers, Sender

            patience = self._timing.outbox_delivery_s
            producers = OutboxProducers(
                partial(self.producer, delivery_timeout_s=patience),
                partial(self.ordered_producer, delivery_timeout_s=patience),
                partial(self.delayed_producer, delivery_timeout_s=patience),
                self._ordering,
            )
            self._own_outboxes = Outboxes(
                Sender(producers, patience), self._producer_ids(), self.interceptors, self._now_ns
            )
        return self._own_outboxes

    def outbox(
        self, connection: Any, *, table: str = "qmq_outbox", grace: timedelta = GRACE
    ) -> Outbox:
        """Send messages if, and only if, a database transaction commits: `async with
        mq.outbox(connection) as box: box.send(...)`.

        `connection` is the application's own, in its own transaction: of SQLAlchemy 2 (Connection,
        AsyncConnection, Session, AsyncSession), or of a driver (see `Outbox.committed`). With an
        Engine or AsyncEngine the outbox makes the transaction: see `box.connection`. A watchdog
        sends messages that are still unsent `grace` after the block's end. Raises InvalidArgument,
        also where SQLAlchemy is not installed (`qmq[sql]`), InvalidName, ClientClosed.
        """
        return self._outboxes.outbox(connection, table=table, grace=grace)

    def outbox_watchdog(
        self,
        engine: Any,
        *,
        tables: Iterable[str] = ("qmq_outbox",),
        lease: timedelta = LEASE,
        debezium: DebeziumTable | None = None,
    ) -> Watchdogs:
        """Send the messages that committed transactions left in outbox tables: `async with
        mq.outbox_watchdog(engine): ...`, or `await watchdog.run()`.

        `engine` is SQLAlchemy's, sync or async, or several in a list. Any number of watchdogs may
        run: one works on each table, and another takes over within `lease` after that one has died.
        With `debezium` it also sends the rows of a table in Debezium's layout, through the outbox
        table. Raises InvalidArgument, InvalidName, ClientClosed.
        """
        outboxes = self._outboxes
        from qmq.sql.outbox_watchdog import Watchdogs

        engines = list(engine) if isinstance(engine, list | tuple) else [engine]
        return Watchdogs(
            engines,
            list(texts("tables", tables)),
            outboxes.sender,
            outboxes.holder,
            lease,
            self._timing.outbox_look_s,
            debezium,
        )

    # --- reading without a group ------------------------------------------------------------------

    def browse(
        self,
        subject: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        last: int | None = None,
        key: str | bytes | None = None,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        follow: bool = False,
        partial: bool = False,
        positions: Mapping[tuple[str, int], int] | None = None,
        sequences: tuple[int, int | None] = (0, None),
        broker_group: str = "",
        content: bytes = b"",
        progress: BrowseProgress | None = None,
    ) -> AsyncIterator[BrowsedMessage]:
        """Read stored messages of a subject without a consumer group: messages stored from `start`
        on (default: the oldest) and before `end`, or, with `last`, the newest messages of each
        queue. With `follow` the iterator then waits for messages that are stored later, and does
        not end.

        Messages of one queue come in its order; those of several queues come in the order in which
        they were stored. `partial=True` skips broker groups that cannot be read. With
        `broker_group`, only what that one has. With `content`, only messages whose body holds these
        bytes. `progress` is kept up to date with how far was read.

        Raises InvalidName, InvalidArgument, UnknownSubject, AccessDenied, NotConnected, LogDamaged,
        ClientClosed.
        """
        from qmq.client.browsing import BrowseSelection, browse

        check_name("subject", subject)
        if last is not None and (last < 0 or start is not None):
            raise InvalidArgument("last is a number of messages, and cannot be given with a start")
        selection = BrowseSelection(
            start_ms=0 if start is None else max(time_ms(start, "start"), 1),
            end_ms=0 if end is None else max(time_ms(end, "end"), 1),
            last=last,
            key=None if key is None else key_bytes(key),
            tags_any=texts("tags_any", tags_any),
            tags_all=texts("tags_all", tags_all),
            first_sequence=sequences[0],
            end_sequence=sequences[1],
            content=content,
            positions=dict(positions or {}),
        )

        def queues() -> Awaitable[list[BrowsedQueue]]:
            return self._queues(subject, partial=partial, broker_group=broker_group)

        return browse(
            self._links, queues, selection, follow=follow, partial=partial, progress=progress
        )

    async def queue_ends(self, subject: str) -> dict[tuple[str, int], int]:
        """Where each queue of a subject ends: by broker group and partition, the sequence of its
        next message. Everything sent to the brokers before this call is decided: stored messages
        lie before the ends, and no other message is stored later.

        Needs `produce` and `browse` on the subject. Raises InvalidName, UnknownSubject,
        AccessDenied, NotConnected, ClientClosed.
        """
        from qmq.client.browsing import end_of

        queues = await self._queues(check_name("subject", subject), partial=False)
        ends = await asyncio.gather(*[end_of(self._links, each) for each in queues])
        return {each.key: end for each, end in zip(queues, ends, strict=True)}

    def _directed(
        self, subject: str, since_ms: int, positions: Mapping[tuple[str, int], int]
    ) -> AsyncIterator[BrowsedMessage]:
        """Messages to single consumer groups, stored since a time; in each queue from a position
        on. Raises as `browse`.
        """
        from qmq.client.browsing import BrowseSelection, browse

        selection = BrowseSelection(
            start_ms=max(since_ms, 1), positions=positions, is_directed=True
        )
        return browse(
            self._links,
            lambda: self._queues(subject, partial=False),
            selection,
            follow=False,
            partial=False,
        )

    async def _queues(
        self, subject: str, *, partial: bool, broker_group: str = ""
    ) -> list[BrowsedQueue]:
        """The queues to read. Waits for broker groups that have no master,
        except with `partial`.
        """
        from qmq.client.browsing import BrowsedQueue, ReadPatience

        patience = ReadPatience(self._links.timing)
        while True:
            found = await self.metadata.find_subject(subject)
            if found is None:
                raise UnknownSubject(
                    f"there is no subject {subject!r}: `qmq subject list` shows all"
                )
            silent = {name: why for name, why in found.silent.items() if broker_group in ("", name)}
            if not silent or partial:
                break
            missing = (
                f"messages of {', '.join(sorted(silent))} are missing: {'; '.join(silent.values())}"
            )
            if patience.is_over:
                raise NotConnected(missing)
            log.debug("%s: %s", subject, missing)
            for name in silent:
                with suppress(Unavailable, PeerError):
                    await self._links.reach(
                        subject, name
                    )  # raises NeverReached, which waiting does not mend
            await patience.pause()
        queues = [
            each for each in found.description.queues if broker_group in ("", each.broker_group)
        ]
        return [
            BrowsedQueue(subject, each.broker_group, each.partition, each.next_sequence)
            for each in queues
        ]

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Flush producers, let consumers leave, close connections. Harmless to repeat. When the
        client's event loop has ended, only its connections are left to close.
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
            if self._own_outboxes is not None:
                await self._own_outboxes.close()
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
