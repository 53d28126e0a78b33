"""The channel of kombu: AMQP's queues, exchanges and acknowledgements on QMQ's subjects, groups and
verdicts.

queue                       a subject; its consumers are one group
direct and topic exchange   the sender puts a copy into each queue that this connection bound, as
                            kombu's tables say
stream exchange             a subject, and each bound queue is a group of it, from the moment of its
                            binding on: fan-outs, Celery's remote control and its replies, Celery's
                            events. A queue that is deleted with its consumer is a broadcast
                            consumer, which brokers forget when it stays away
ack, reject, requeue        ack, dead-letter queue, retry with one attempt more
eta of a task               a delayed message; `revoke` cancels it
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from fnmatch import fnmatchcase
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from kombu.transport import virtual
from kombu.transport.virtual.base import queue_declare_ok_t  # type: ignore[attr-defined]

import qmq
from qmq.integrations.kombu import envelope
from qmq.integrations.kombu.arrivals import UNLIMITED, Arrivals, StreamQueues
from qmq.integrations.kombu.envelope import name_of

if TYPE_CHECKING:
    from qmq.integrations.cluster_link import ClusterLink

log = logging.getLogger("qmq.integrations")

DEFAULT_LEASE: Final = timedelta(seconds=30)
STREAMS: Final = ("celeryev*", "*.pidbox")


class Channel(virtual.Channel):
    """A channel; one thread reads from it, and any thread may settle."""

    supports_fanout = True
    do_restore = False  # the broker keeps unsettled messages
    body_encoding = None  # type: ignore[assignment]
    from_transport_options = (
        *virtual.Channel.from_transport_options,
        "group",
        "priority_steps",
        "stream_exchanges",
        "lease",
        "prefix",
    )  # type: ignore[assignment]
    group: str = ""
    priority_steps: tuple[int, ...] = ()
    stream_exchanges: tuple[str, ...] = STREAMS
    lease: timedelta = DEFAULT_LEASE
    prefix: str = ""

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._readers: dict[str, list[Arrivals]] = {}
        """The readers by queue. For a queue with priorities, the highest comes first."""
        self._leaving: list[Arrivals] = []
        """Readers of cancelled consumers whose messages may have no verdict yet."""
        self._streams: StreamQueues = connection.streams
        self._held: dict[str, qmq.Message] = {}
        """Messages without a verdict, by delivery tag."""

    @property
    def link(self) -> ClusterLink:
        found = self.connection.link
        if found is None:
            raise qmq.errors.ClientClosed("the connection is closed")
        return found  # type: ignore[no-any-return]

    # --- queues -----------------------------------------------------------------------------------

    def _subject(self, queue: str, step: int = 0) -> str:
        return name_of(f"{self.prefix}{queue}.p{step}" if step else self.prefix + queue)

    def _subjects(self, queue: str) -> list[str]:
        """The subjects of a queue, the highest priority first."""
        return [
            self._subject(queue, step) for step in sorted({0, *self.priority_steps}, reverse=True)
        ]

    def _group(self, subject: str) -> str:
        return self.group or subject

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return queue in self._streams or self.link.exists(self._subject(queue))

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        if kwargs.get("auto_delete") or kwargs.get("exclusive"):
            self._streams.passes(queue)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        """Remember a queue. Its subject is created with its first message or consumer: a queue that
        only reads a stream needs none.
        """
        return (
            queue_declare_ok_t(queue, 0, 0)
            if queue in self._streams
            else super().queue_declare(queue, passive, **kwargs)
        )

    def _size(self, queue: str) -> int:
        return sum(self.link.waiting(each, self._group(each)) for each in self._subjects(queue))

    def _purge(self, queue: str) -> int:
        if queue in self._streams:
            return 0
        size = self._size(queue)
        for each in self._subjects(queue):
            self.link.purge(each)
        return size

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete a queue with its messages and bindings."""
        if if_empty and queue not in self._streams and self._size(queue):
            return
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self.queue_unbind(queue, exchange, routing_key, arguments)
        self.state.queue_bindings_delete(queue)
        if self._streams.delete(self.link, queue):
            return
        for reader in self._readers.pop(queue, []):
            reader.close()
        for each in self._subjects(queue):
            self.link.delete(each)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        if not self._is_stream(exchange) or queue in self._streams:
            return
        subject = self._stream(exchange)
        self.link.ensure(subject)
        is_direct = self.typeof(exchange).type == "direct"
        group = (
            name_of(f"{self.prefix}kombu")
            if self._streams.is_passing(queue)
            else self._group(name_of(queue))
        )
        tags = [name_of(routing_key)] if is_direct else []
        self._streams.bind(
            self.link,
            queue,
            subject,
            group,
            name=name_of(queue),
            tags=tags,
            lease_ms=self._lease_ms,
        )
        if pattern is not None:
            self._streams.accept(queue, pattern)

    def _is_stream(self, exchange: str) -> bool:
        known = self.state.exchanges.get(exchange)
        return (known is not None and known["type"] == "fanout") or any(
            fnmatchcase(exchange, each) for each in self.stream_exchanges
        )

    def _stream(self, exchange: str) -> str:
        return name_of(f"{self.prefix}kombu.exchange.{exchange}")

    # --- sending ----------------------------------------------------------------------------------

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        """Send a message, and return when it is stored. Raises as `Client.send`."""
        if not exchange or not self._is_stream(exchange):
            return super().basic_publish(message, exchange, routing_key, **kwargs)
        self._inplace_augment_message(message, exchange, routing_key)
        return self._put_fanout(exchange, message, routing_key)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        priority = self._get_message_priority(message) if self.priority_steps else 0
        subject = self._subject(
            queue, max((step for step in self.priority_steps if step <= priority), default=0)
        )
        self.link.ensure(subject)
        body, headers = envelope.packed(message)
        self.link.send(
            subject, body, headers, key=envelope.task_of(message), at=envelope.due_of(message)
        )

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None:
        subject = self._stream(exchange)
        self.link.ensure(subject)
        body, headers = envelope.packed(message)
        if exchange.endswith(".pidbox") and (revoked := envelope.revoked_tasks(body)):
            self.link.cancel(revoked)  # a worker does not have a task yet that waits for its time
        self.link.send(
            subject,
            body,
            headers,
            key=None,
            tags=[name_of(routing_key)] if routing_key else (),
            at=None,
        )

    # --- receiving --------------------------------------------------------------------------------

    @property
    def _lease_ms(self) -> int:
        return int(self.lease.total_seconds() * 1000)

    def _readers_of(self, queue: str) -> list[Arrivals]:
        stream = self._streams.reader(queue)
        if stream is not None:
            return [stream]
        if queue not in self._readers:
            subjects = self._subjects(queue)
            for each in subjects:
                self.link.ensure(each)
            prefetch = self.qos.prefetch_count or UNLIMITED
            self._readers[queue] = [
                Arrivals(
                    self.link, each, self._group(each), prefetch=prefetch, lease_ms=self._lease_ms
                )
                for each in subjects
            ]
        return self._readers[queue]

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[..., object],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        """Consume from a queue."""
        readers = self._readers_of(queue)

        def checked(message: virtual.Message) -> object:
            if _is_of_a_worker(callback):
                consumer: Any = callback.__self__  # type: ignore[attr-defined]
                message.accept = consumer.accept
                envelope.check_payload(message)
            return callback(message)

        super().basic_consume(queue, no_ack, checked, consumer_tag, **kwargs)
        deliver = self.connection._callbacks[queue]

        def handed_over(raw: dict[str, Any]) -> object:
            tag = raw["properties"]["delivery_tag"]
            if no_ack:
                self._settle(tag, qmq.Message.ack_later)
            try:
                return deliver(raw)
            except (*self.connection.connection_errors, *self.connection.channel_errors):
                raise
            except Exception:
                if (
                    "task" not in raw["headers"] and not _is_of_a_worker(callback)
                ) or tag not in self._held:
                    raise
                # Celery reads a task where nothing catches an error: such a message would end one
                # worker after another.
                log.exception(
                    "a task of %s goes to the dead-letter queue: the worker could not read it",
                    queue,
                )
                self.basic_reject(tag)
                return None

        self.connection._callbacks[queue] = handed_over
        for each in readers:
            each.start()
        self.link.wake()

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer. Received and undelivered messages go back immediately."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues:
            self._leave(queue)

    def _leave(self, queue: str) -> None:
        """The readers of a queue receive no more. Those whose messages all have a verdict leave the
        group; the others stay in it, because it would hand out their messages again.
        """
        readers = self._readers.pop(queue, [])
        for each in readers:
            each.drain()
        self._leaving += readers
        unsettled = {each.subject for each in self._held.values()}
        for each in [each for each in self._leaving if each.subject not in unsettled]:
            self._leaving.remove(each)
            each.close()

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """Hold at most `prefetch_count` messages of each queue without a verdict."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        for readers in self._readers.values():
            for each in readers:
                each.limit(prefetch_count or UNLIMITED)
        self.link.wake()

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """The next received message. Raises Empty."""
        for reader in self._readers_of(queue):
            while (message := reader.take()) is not None:
                if (found := self._accept(queue, message)) is not None:
                    return found
            if not reader.has_looked:
                break  # do not deliver a message of lower priority before this one
        raise Empty

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """The next message of a queue; None if there is none."""
        is_consumed = queue in self._active_queues
        for reader in self._readers_of(queue):
            while (message := reader.take() if is_consumed else reader.get()) is not None:
                if (raw := self._accept(queue, message)) is None:
                    continue
                found = self.Message(raw, channel=self)
                if no_ack:
                    self._settle(found.delivery_tag, qmq.Message.ack_later)
                else:
                    self.qos.append(found, found.delivery_tag)
                return found
        return None

    def _accept(self, queue: str, message: qmq.Message) -> dict[str, Any] | None:
        """The message in kombu's form; None if it has expired, or is not for this queue."""
        tag = self._next_delivery_tag()
        try:
            found = envelope.unpacked(
                message.body,
                message.headers.get(envelope.HEADER, b""),
                tag=tag,
                attempt=message.attempt,
            )
        except envelope.NotKombu as failure:
            warnings.warn(
                (
                    f"a message of {message.subject} was not sent by kombu and goes to the "
                    "dead-letter queue"
                ),
                stacklevel=1,
            )
            self.link.call_soon(message.reject, f"no message of kombu: {failure}")
            return None
        pattern = self._streams.pattern(queue)
        is_wanted = pattern is None or self.typeof_topic._match(
            pattern, found["properties"]["delivery_info"].get("routing_key") or ""
        )
        if not is_wanted or envelope.expired(found, message.create_time_ms, self.link.now_ms):
            self.link.call_soon(message.ack_later)
            return None
        self._held[tag] = message
        return found

    @property
    def typeof_topic(self) -> Any:
        return self.exchange_types["topic"]

    # --- verdicts ---------------------------------------------------------------------------------

    def _settle(self, tag: str, verdict: Callable[..., object], *arguments: object) -> None:
        message = self._held.pop(tag, None)
        if message is not None:
            self.link.call_soon(verdict, message, *arguments)
            self.link.wake()  # the consumer may get another message now

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message; with `multiple`, also all earlier ones."""
        tags = [delivery_tag]
        if multiple:
            tags = list(self._held)
            tags = tags[: tags.index(delivery_tag) + 1]
        for each in tags:
            super().basic_ack(each)
            self._settle(each, qmq.Message.ack_later)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message. With `requeue` it is handed out again and the attempt counts: after the
        group's last attempt it goes to the dead-letter queue. Without `requeue` it goes there
        immediately.
        """
        self.qos.ack(delivery_tag)
        if requeue:
            self._settle(delivery_tag, qmq.Message.nack, timedelta(0), "requeued")
        else:
            self._settle(delivery_tag, qmq.Message.reject, "rejected")

    def basic_recover(self, requeue: bool = False) -> None:
        """Give back all messages without a verdict; no attempt is counted."""
        for tag in list(self._held):
            self.qos.ack(tag)
            self._settle(tag, qmq.Message.release)

    def close(self) -> None:
        """Give back messages without a verdict, and leave all groups."""
        if not self.closed and self.connection is not None and self.connection.link is not None:
            self.basic_recover(requeue=True)
            self._close_readers()
        super().close()

    def _close_readers(self) -> None:
        while self._readers:
            self._leaving += self._readers.popitem()[1]
        while self._leaving:
            self._leaving.pop().close()


def _is_of_a_worker(callback: Callable[..., object]) -> bool:
    """Whether a worker of Celery reads what this consumer of kombu gets: for other programs, `task`
    in a body is a word like any other.
    """
    handler = getattr(getattr(callback, "__self__", None), "on_message", None)
    return str(getattr(handler, "__module__", None)).startswith("celery.worker.")
