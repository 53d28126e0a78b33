"""The client without asyncio, for scripts: the same names, each call waits.

    with qmq.blocking.connect("localhost:20880") as mq:
        mq.send("flight.departed", b"...", key="N14228")
        for message in mq.consumer("flight.departed", group="ops"):
            ...

An event loop runs in its own thread; any thread may call.
"""

# Made by tools/generate_blocking.py: change the asyncio client, and run that again.
from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qmq.blocking.admin import BlockingAccess, BlockingDelayed, BlockingMetadata
from qmq.blocking.loop_thread import BlockingClientBase, BlockingConsumerBase, LoopThread
from qmq.client.client import Client
from qmq.client.connection.connection import timing_with
from qmq.client.consuming.ack_spool import StateDir
from qmq.client.interceptors import Interceptor
from qmq.rpc.tls_network import network_of
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.security.tokens import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime, timedelta

    from qmq.client.browsing import BrowsedMessage, BrowseProgress
    from qmq.client.producing.receipts import Receipt, Receipts
    from qmq.metrics.endpoint import Collector


class BlockingClient(BlockingClientBase):
    """Sends and consumes. Make it with `qmq.blocking.connect`; use it with `with`.
    Any thread may call.
    """

    def send(
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
        return self._thread.run(
            self._client.send(
                subject,
                body,
                key=key,
                tags=tags,
                headers=headers,
                delay=delay,
                at=at,
                cron=cron,
                zone=zone,
                acks=acks,
            )
        )

    def send_many(
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
        return self._thread.run(
            self._client.send_many(
                subject,
                bodies,
                keys=keys,
                tags=tags,
                headers=headers,
                delays=delays,
                ats=ats,
                acks=acks,
            )
        )

    @property
    def metrics(self) -> Collector:
        """For prometheus_client: `REGISTRY.register(mq.metrics)`. Raises InvalidArgument if that is
        not installed.
        """
        return self._client.metrics

    def serve_metrics(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve the client's metrics for Prometheus at /metrics until the client is closed, and
        return the port; 0 takes a free one.

        Raises InvalidArgument if prometheus_client is not installed, OSError if the port is taken.
        """
        return self._thread.run(self._client.serve_metrics(port, host))

    @property
    def access(self) -> BlockingAccess:
        """Rules, roles, tokens and quotas of the cluster."""
        return BlockingAccess(self._thread, self._thread.call(lambda: self._client.access))

    @property
    def metadata(self) -> BlockingMetadata:
        """Administration: subjects, groups, routes and broker groups, as a metaserver sees them. It
        works in any event loop.
        """
        return BlockingMetadata(self._thread, self._thread.call(lambda: self._client.metadata))

    @property
    def delayed(self) -> BlockingDelayed:
        """Pending delayed messages: cancel, move, show and list them."""
        return BlockingDelayed(self._thread, self._thread.call(lambda: self._client.delayed))

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
        lease_ms: int = 30000,
        expired: str = "raise",
        condition: str = "",
    ) -> BlockingConsumer:
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
        return BlockingConsumer(
            self._thread,
            self._thread.call(
                lambda: self._client.consumer(
                    subject,
                    group,
                    name=name,
                    start=start,
                    broadcast=broadcast,
                    tags_any=tags_any,
                    tags_all=tags_all,
                    ack=ack,
                    consume_most_once=consume_most_once,
                    prefetch=prefetch,
                    prefetch_bytes=prefetch_bytes,
                    pull_bytes=pull_bytes,
                    lease_ms=lease_ms,
                    expired=expired,
                    condition=condition,
                )
            ),
            self.interceptors,
        )

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called."""
        return self._client.is_paused

    def pause(self) -> None:
        """Pause all consumers of this client, also those made later; see `Consumer.pause`. The
        client can still send.
        """
        self._thread.call(lambda: self._client.pause())

    def resume(self) -> None:
        """Resume all consumers, except those that were paused by `Consumer.pause`."""
        self._thread.call(lambda: self._client.resume())

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
    ) -> Iterator[BrowsedMessage]:
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
        return self._thread.iterate(
            self._client.browse(
                subject,
                start=start,
                end=end,
                last=last,
                key=key,
                tags_any=tags_any,
                tags_all=tags_all,
                follow=follow,
                partial=partial,
                positions=positions,
                sequences=sequences,
                broker_group=broker_group,
                content=content,
                progress=progress,
            )
        )

    def queue_ends(self, subject: str) -> dict[tuple[str, int], int]:
        """Where each queue of a subject ends: by broker group and partition, the sequence of its
        next message. Everything sent to the brokers before this call is decided: stored messages
        lie before the ends, and no other message is stored later.

        Needs `produce` and `browse` on the subject. Raises InvalidName, UnknownSubject,
        AccessDenied, NotConnected, ClientClosed.
        """
        return self._thread.run(self._client.queue_ends(subject))


class BlockingConsumer(BlockingConsumerBase):
    """One consumer of a group. Make it with `BlockingClient.consumer`,
    and iterate over it, or `pull`.
    """

    def join(self) -> None:
        """Return when this consumer is a member of its group on every broker group of the subject:
        from then on, a group that begins at "latest" gets every message whose `send` begins.
        Without `join` a consumer joins when it is first asked for messages.

        Raises UnknownSubject, AccessDenied, ClientClosed.
        """
        self._thread.run(self._consumer.join())

    @property
    def held(self) -> int:
        """Messages that this consumer holds without a verdict."""
        return self._consumer.held

    @property
    def is_paused(self) -> bool:
        """Whether this consumer or its client was paused by the application. Brokers keep the
        pauses of operators; the consumer does not see them.
        """
        return self._consumer.is_paused

    def limit(self, prefetch: int) -> None:
        """Change `prefetch`. Messages handed out beyond a lower limit stay handed out.
        Raises InvalidArgument.
        """
        self._thread.call(lambda: self._consumer.limit(prefetch))

    def pause(self) -> None:
        """Hand out nothing and pull nothing until `resume`. The consumer keeps its place in the
        group, its lease and its messages: messages that were handed out may be settled, and unseen
        messages wait here. A loop that asks for more waits.
        """
        self._thread.call(lambda: self._consumer.pause())

    def resume(self) -> None:
        """Resume delivery, unless the whole client is paused (`Client.pause`)."""
        self._thread.call(lambda: self._consumer.resume())

    def close(self, error: BaseException | None = None) -> None:
        """Send the remaining verdicts and leave the group. The messages that tasks are handling
        fail (with `error`, if there is one); unseen messages return to the group immediately.

        Waits until retries with a delay of more than an hour are stored, for two minutes at most.
        If this call is cancelled, the consumer leaves without that wait; another call returns when
        it has left.
        """
        self._thread.run(self._consumer.close(error))


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
    delivery_timeout: timedelta | None = None,
) -> BlockingClient:
    """A client whose calls wait; `qmq.connect` explains the parameters and the errors."""
    thread = LoopThread()
    client = Client(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        network=network_of(tls, token),
        for_threads=beside,
        timing=timing_with(delivery_timeout),
    )
    thread.start()
    return BlockingClient(client, thread)


def beside(client: Client, loop: asyncio.AbstractEventLoop) -> BlockingClient:
    """A blocking client beside an asyncio client, for the threads of plain handlers. Its `close`
    does nothing.
    """
    return BlockingClient(client, LoopThread(loop))


__all__ = [
    "BlockingAccess",
    "BlockingClient",
    "BlockingConsumer",
    "BlockingDelayed",
    "BlockingMetadata",
    "beside",
    "connect",
]
