"""QMQ as a broker of Dramatiq.

    dramatiq.set_broker(DramatiqBroker("localhost:20880"))

A queue is a subject, and all workers are one group. docs/integrations/dramatiq.md is the tutorial.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import dramatiq
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.common import iter_queue
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound

import qmq
from qmq.errors import ClientClosed, NotConnected, Unavailable
from qmq.integrations.cluster_link import ClusterLink

log = logging.getLogger("qmq.integrations")

CONNECT_S: Final = 10.0
_FIELDS: Final = {
    "queue_name": str,
    "actor_name": str,
    "args": tuple,
    "kwargs": dict,
    "options": dict,
    "message_id": str,
    "message_timestamp": int,
}


@contextmanager
def _as_dramatiq_says() -> Iterator[None]:
    """Convert errors: Dramatiq's workers retry only after its own connection errors."""
    try:
        yield
    except (Unavailable, NotConnected, ClientClosed) as error:
        raise ConnectionClosed(error) from error


class DramatiqBroker(dramatiq.Broker):
    """A message with a delay becomes a delayed message, which no worker holds. A message that
    Dramatiq rejects goes to the group's dead-letter queue, as does a task whose workers vanished at
    each attempt of the group.

    The broker connects when it is first used, separately in each process, so it may be created
    before a fork.
    """

    def __init__(
        self,
        addresses: str | None = None,
        *,
        group: str = "dramatiq",
        prefix: str = "dramatiq.",
        middleware: list[dramatiq.Middleware] | None = None,
        **connect: Any,
    ) -> None:
        """The subject of a queue is `prefix` and its name;
        `connect` are options of `qmq.connect`.
        """
        super().__init__(middleware=middleware)
        self.add_middleware(_Stopping())
        self.group, self._prefix = group, prefix
        self._addresses, self._connect = addresses, connect
        self._link: ClusterLink | None = None
        self._linking = threading.Lock()

    @property
    def link(self) -> ClusterLink:
        """This process's connection to the cluster. Raises ConnectionClosed."""
        with self._linking, _as_dramatiq_says():
            if self._link is None or not self._link.is_usable:
                self._link = ClusterLink(
                    lambda: qmq.connect(self._addresses, **self._connect), CONNECT_S, None
                )
            return self._link

    def subject(self, queue_name: str) -> str:
        """The subject of a queue."""
        return self._prefix + queue_name

    def close(self) -> None:
        """Disconnect. The broker connects again when it is used again."""
        with self._linking:
            if self._link is not None:
                self._link.close()
                self._link = None

    def declare_queue(self, queue_name: str) -> None:
        """Remember a queue. Its subject is created with its first message or consumer."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def enqueue(
        self, message: dramatiq.Message[Any], *, delay: int | None = None
    ) -> dramatiq.Message[Any]:
        """Store a message on a majority of the replicas; with a delay (milliseconds, two years at
        most) it is handed out later.

        Raises ConnectionClosed, and as `Client.send`.
        """
        self.emit_before("enqueue", message, delay)
        later = None if delay is None else timedelta(milliseconds=delay)
        link = self.link
        with _as_dramatiq_says():
            link.run(
                link.client.send(
                    self.subject(message.queue_name),
                    message.encode(),
                    key=message.message_id,
                    delay=later,
                )
            )
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """Messages of a queue; `timeout` is in milliseconds.
        Raises QueueNotFound, ConnectionClosed.
        """
        self._check_declared(queue_name)
        with _as_dramatiq_says():
            return QueueConsumer(
                self.link,
                self.subject(queue_name),
                self.group,
                queue_name,
                prefetch,
                timedelta(milliseconds=timeout),
            )

    def flush(self, queue_name: str) -> None:
        """Delete the messages of a queue, including delayed ones.
        Raises QueueNotFound, ConnectionClosed.
        """
        self._check_declared(queue_name)
        link, subject = self.link, self.subject(queue_name)
        with _as_dramatiq_says():
            link.cancel_all(subject)
            link.purge(subject)

    def flush_all(self) -> None:
        """Delete the messages of all declared queues. Raises ConnectionClosed."""
        for each in self.queues:
            self.flush(each)

    def join(self, queue_name: str, *, interval: int = 50, timeout: int | None = None) -> None:
        """Wait until no message of a queue waits, runs or is delayed: for tests. Both times are
        milliseconds. Raises QueueNotFound, QueueJoinTimeout, ConnectionClosed.
        """
        self._check_declared(queue_name)
        deadline_s = None if timeout is None else time.monotonic() + timeout / 1000
        while self._is_busy(self.subject(queue_name)):
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    def _is_busy(self, subject: str) -> bool:
        link = self.link

        async def is_delayed() -> bool:
            return bool([each async for each in link.client.delayed.list(subject, limit=1)])

        with _as_dramatiq_says():
            # A running task may become a delayed one, and the reverse, so both are checked twice.
            return (
                link.run(is_delayed())
                or bool(link.unfinished(subject, self.group))
                or link.run(is_delayed())
            )

    def _check_declared(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)


class _Stopping(dramatiq.Middleware):
    """A worker that is asked to stop takes no more messages, and returns those that it has not
    begun. Dramatiq's own would do both only after the last running task, for which other workers
    would wait.
    """

    def before_worker_shutdown(self, broker: dramatiq.Broker, worker: dramatiq.Worker) -> None:
        for each in worker.consumers.values():
            if isinstance(each.consumer, QueueConsumer):
                each.consumer.drain()
        for item in iter_queue(worker.work_queue):
            worker.consumers[item.message.queue_name].requeue_messages([item.message])


class ReceivedMessage(MessageProxy):
    """Dramatiq's message, with the QMQ message that carried it."""

    def __init__(self, message: dramatiq.Message[Any], received: qmq.Message) -> None:
        super().__init__(message)
        self.received = received


class QueueConsumer(Consumer):
    """Reads a queue for one worker. One thread iterates; others may settle."""

    def __init__(
        self,
        link: ClusterLink,
        subject: str,
        group: str,
        queue_name: str,
        prefetch: int,
        timeout: timedelta,
    ) -> None:
        self._link, self._queue_name, self._prefetch, self._timeout = (
            link,
            queue_name,
            prefetch,
            timeout,
        )
        self._ready: deque[qmq.Message] = deque()
        self._is_draining = False
        link.ensure(subject)
        self._consumer: qmq.Consumer = link.call(
            lambda: link.client.consumer(
                subject, group, ack="explicit", prefetch=prefetch, expired="skip"
            )
        )

    def __next__(self) -> MessageProxy | None:
        if not self._ready:
            with _as_dramatiq_says():
                self._ready.extend(
                    self._link.run(self._consumer.pull(self._prefetch, self._timeout))
                )
        while self._ready:
            received = self._ready.popleft()
            if self._is_draining:
                self._link.call_soon(received.release)
                continue
            try:
                return ReceivedMessage(decoded(received.body, self._queue_name), received)
            except DecodeError as error:
                log.error("%r goes to the dead-letter queue: %s", received, error)
                self._link.call_soon(received.reject, str(error))
        return None

    def ack(self, message: MessageProxy) -> None:
        self._link.call_soon(_received(message).ack_later)

    def nack(self, message: MessageProxy) -> None:
        """Send the message to the dead-letter queue, with the error that the task raised."""
        self._link.call_soon(
            _received(message).reject, message._exception or "the task was rejected"
        )

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Return messages whose tasks have not begun. No attempt is counted."""
        for each in messages:
            self._link.call_soon(_received(each).release)

    def drain(self) -> None:
        """Take no more messages. From any thread."""
        self._is_draining = True
        self._link.call_soon(self._consumer.drain)

    def close(self) -> None:
        """Return the messages that the worker has not taken, and leave the group."""

        async def leave() -> None:
            while self._ready:
                self._ready.popleft().release()
            await self._consumer.close()

        with _as_dramatiq_says():
            self._link.run(leave())


def decoded(body: bytes, queue_name: str) -> dramatiq.Message[Any]:
    """A message of this queue. Raises DecodeError, also for what a worker reads where an error
    would end its thread.
    """
    message: dramatiq.Message[Any] = dramatiq.Message.decode(body)
    for name, kind in _FIELDS.items():
        if not isinstance(getattr(message, name), kind):
            raise DecodeError(f"{name} is no {kind.__name__}", body, None)
    # a worker looks for the consumer of the message's queue when the task has ended
    if message.queue_name != queue_name:
        raise DecodeError("queue_name is not the queue that the message is in", body, None)
    try:
        isinstance(None, message.options.get("throws") or ())
    except TypeError:  # a worker compares what a task raised with it
        raise DecodeError("throws is no class of exceptions", body, None) from None
    return message


def _received(message: MessageProxy) -> qmq.Message:
    assert isinstance(message, ReceivedMessage)
    return message.received
