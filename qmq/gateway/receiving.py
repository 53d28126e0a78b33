"""The calls that receive and settle: ReceiveMessage, AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue.

    receive ──▶ handed out, invisible ──ack──▶ done
                        │   ├── forward ──▶ dead letters
                        │   └── change the time ──▶ handed out for that time
                        └── time over ──▶ received again, one attempt older

The gateway counts the time in memory. If the gateway is killed, the lease of its consumers ends (30 s), and the messages are delivered
again, like those of any lost consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration

from qmq.client.consuming.ordered.consumer import fail
from qmq.errors import QmqError, UnknownSubject
from qmq.gateway.call_entries import serve_entries
from qmq.gateway.client_settings import LONG_POLL_MS
from qmq.gateway.clients import ClientSessions
from qmq.gateway.config import GatewayConfig
from qmq.gateway.filters import filter_of_request
from qmq.gateway.messages import group_of_resource, length_ms, message_for_client, subject_of_topic, timestamp_of
from qmq.gateway.readers import GroupReaders, HandedOut, ReaderKey
from qmq.gateway.receipts import InvisibleMessage, InvisibleMessages
from qmq.gateway.status import OK, Refused, joined_status, status_of_failure
from qmq.gateway.topics import Topic, TopicCatalog
from qmq.process.event_loop import Clock
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls

log = logging.getLogger("qmq.gateway")

BATCH_MAX: Final = 1_024
"""Messages of one answer. This and the next two are the bounds of RocketMQ's own proxy."""
INVISIBLE_MS_MAX: Final = 12 * 3600 * 1000
RENEWAL_MS_MAX: Final = 3 * 3600 * 1000
"""How long the messages of a push consumer are renewed."""
LOOK_S: Final = 0.5
"""A receive call for a topic that does not exist yet checks at this interval if the topic exists now."""
MARGIN_S: Final = 0.3
"""An answer leaves at least this long before the client's deadline."""
TIME_OVER: Final = "the invisible time ended before the message was acknowledged"

Held = InvisibleMessage[HandedOut]


class GroupReceiving:
    """Serves receiving and settling. `sleep` is `asyncio.sleep`; a test hands in its own."""

    def __init__(
        self,
        readers: GroupReaders,
        catalog: TopicCatalog,
        invisible: InvisibleMessages[HandedOut],
        sessions: ClientSessions,
        config: GatewayConfig,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._readers, self._catalog, self._invisible, self._sessions = readers, catalog, invisible, sessions
        self._config, self._clock, self._sleep = config, clock, sleep

    # --- receiving -----------------------------------------------------------------------------------------------------

    async def receive(
        self, request: calls.ReceiveMessageRequest, client_id: str, remaining_s: float | None
    ) -> AsyncGenerator[calls.ReceiveMessageResponse, None]:
        """Yields the status, the messages and the time; without messages, a status that says why. The client waits for `remaining_s`
        seconds.
        """
        try:
            held, topic = await self._receive(request, client_id, remaining_s)
        except Exception as failure:
            yield calls.ReceiveMessageResponse(status=status_of_failure(failure))
            return
        sent = 0
        try:
            yield calls.ReceiveMessageResponse(status=OK)
            for each in held:
                message = self._message(each, request, topic)
                each.message.message.body = b""  # only the verdict is to come
                if message is not None:
                    yield calls.ReceiveMessageResponse(message=message)
                sent += 1
            yield calls.ReceiveMessageResponse(delivery_timestamp=timestamp_of(self._clock.time_ms()))
        finally:
            for each in held[sent:]:  # the client has disconnected, and never saw these
                self._give_back(each)

    async def _receive(self, request: calls.ReceiveMessageRequest, client_id: str, remaining_s: float | None) -> tuple[list[Held], Topic]:
        subject, group = subject_of_topic(request.message_queue.topic), group_of_resource(request.group)
        wanted = filter_of_request(request.filter_expression)
        invisible_ms, renews_ms = self._invisible_ms(request)
        if request.batch_size < 1:
            raise Refused(api.BAD_REQUEST, f"batch_size is 1 or more, not {request.batch_size}")
        timeout = request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        until_ms = self._clock.monotonic_ms() + int(wait_s(timeout, remaining_s) * 1000)
        topic = await self._topic(subject, until_ms)
        key = ReaderKey(subject, group, wanted, topic.is_ordered)
        left_s = max(until_ms - self._clock.monotonic_ms(), 0) / 1000
        try:
            reading, messages = await self._readers.receive(key, min(request.batch_size, BATCH_MAX), left_s)
        except UnknownSubject:
            self._catalog.forget(subject)
            raise
        if not messages:
            raise Refused(api.MESSAGE_NOT_FOUND, "there is no new message")
        now_ms = self._clock.monotonic_ms()
        held = [
            self._invisible.add(
                HandedOut(reading, each),
                subject,
                group,
                client_id,
                now_ms=now_ms,
                invisible_ms=invisible_ms,
                renews_until_ms=now_ms + renews_ms if renews_ms else 0,
            )
            for each in messages
        ]
        return held, topic

    async def _topic(self, subject: str, until_ms: int) -> Topic:
        """Wait until the topic exists, and return it: consumers may come before the first message. Raises Refused."""
        while (found := await self._catalog.find(subject)) is None:
            if not self._catalog.creates:
                raise Refused(api.TOPIC_NOT_FOUND, f"there is no topic {subject!r}: create it with `qmq subject create`")
            if self._clock.monotonic_ms() + LOOK_S * 1000 > until_ms:
                raise Refused(api.MESSAGE_NOT_FOUND, f"there is no topic {subject!r} yet: its first message creates it")
            await self._sleep(LOOK_S)
        return found

    def _invisible_ms(self, request: calls.ReceiveMessageRequest) -> tuple[int, int]:
        """How long messages stay invisible, and for how long this time is renewed. Raises Refused."""
        if request.auto_renew:
            return self._config.renewed_invisible_ms, RENEWAL_MS_MAX
        return self._checked_ms(request.invisible_duration), 0

    def _checked_ms(self, duration: Duration) -> int:
        found, least, most = length_ms(duration), self._config.invisible_ms_min, INVISIBLE_MS_MAX
        if not least <= found <= most:
            raise Refused(api.ILLEGAL_INVISIBLE_TIME, f"an invisible time is {least / 1000:g} to {most / 1000:g} s, not {found / 1000} s")
        return found

    def _message(self, held: Held, request: calls.ReceiveMessageRequest, topic: Topic) -> api.Message | None:
        """The message for the client; None for one that cannot be converted. That one has failed this attempt, and the others go on."""
        handed = held.message
        try:
            message = message_for_client(
                handed.message,
                request.message_queue.topic,
                is_ordered=topic.is_ordered,
                handle=str(self._invisible.handle(held)),
                invisible_ms=held.invisible_ms,
            )
        except Exception as failure:
            log.exception("a message of %s cannot be given to group %s", held.subject, held.group)
            self._settled(held)
            fail(handed.message, timedelta(0), f"no message for RocketMQ's clients: {failure!r}")
            return None
        message.system_properties.queue_id = request.message_queue.id
        return message

    # --- settling ------------------------------------------------------------------------------------------------------

    async def ack(self, request: calls.AckMessageRequest) -> calls.AckMessageResponse:
        """Acknowledge the messages of all entries. Each entry has its own status."""
        entries = await serve_entries(lambda each: self._ack(each, request), request.entries)
        return calls.AckMessageResponse(status=joined_status([each.status for each in entries]), entries=entries)

    async def _ack(self, entry: calls.AckMessageEntry, request: calls.AckMessageRequest) -> calls.AckMessageResultEntry:
        try:
            held = self._find(entry.receipt_handle, request)
            self._settled(held)
            await held.message.message.ack_sync()
            status = OK
        except Exception as failure:
            status = status_of_failure(failure)
        return calls.AckMessageResultEntry(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status)

    def change_time(self, request: calls.ChangeInvisibleDurationRequest) -> calls.ChangeInvisibleDurationResponse:
        """Make a message invisible for the given time from now on; after that time it is delivered again."""
        try:
            held = self._find(request.receipt_handle, request)
            invisible_ms = min(length_ms(request.invisible_duration), INVISIBLE_MS_MAX)
            if invisible_ms < 0:
                raise Refused(api.ILLEGAL_INVISIBLE_TIME, "an invisible time is not negative")
            held.message.counts_no_attempt = request.suspend
            self._invisible.change_time(held, now_ms=self._clock.monotonic_ms(), invisible_ms=invisible_ms)
        except Exception as failure:
            return calls.ChangeInvisibleDurationResponse(status=status_of_failure(failure))
        return calls.ChangeInvisibleDurationResponse(status=OK, receipt_handle=str(self._invisible.handle(held)))

    def forward(self, request: calls.ForwardMessageToDeadLetterQueueRequest) -> calls.ForwardMessageToDeadLetterQueueResponse:
        """Move a message to the dead letters at the client's request."""
        try:
            held = self._find(request.receipt_handle, request)
            self._settled(held)
            error = f"given up by its client after attempt {request.delivery_attempt} of {request.max_delivery_attempts}"
            held.message.message.reject(error)
        except Exception as failure:
            return calls.ForwardMessageToDeadLetterQueueResponse(status=status_of_failure(failure))
        return calls.ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _find(
        self,
        handle: str,
        request: calls.AckMessageRequest | calls.ChangeInvisibleDurationRequest | calls.ForwardMessageToDeadLetterQueueRequest,
    ) -> Held:
        subject, group = subject_of_topic(request.topic), group_of_resource(request.group)
        return self._invisible.find(handle, subject, group, self._clock.monotonic_ms())

    def _settled(self, held: Held) -> None:
        self._invisible.remove(held)
        held.message.reading.settled()

    # --- time ----------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Release the messages whose invisible time has ended."""
        for held in self._invisible.remove_over(self._clock.monotonic_ms(), self._sessions.is_alive):
            held.message.reading.settled()
            self._retry(held)

    def client_ended(self, client_id: str, group: str) -> None:
        """Release the client's messages: they are delivered again immediately."""
        for held in self._invisible.remove_of_client(client_id, group):
            held.message.reading.settled()
            self._retry(held)

    def _retry(self, held: Held, delay: timedelta = timedelta(0)) -> None:
        handed = held.message
        try:
            if handed.counts_no_attempt and not delay:
                handed.message.release()
            else:
                fail(handed.message, delay, TIME_OVER)
        except QmqError as failure:
            log.warning("a message of %s could not be given back to group %s: %s", held.subject, held.group, failure)

    def _give_back(self, held: Held) -> None:
        self._settled(held)
        held.message.message.release()

    def give_back_all(self) -> None:
        """Release all messages at the gateway's end. Each is delivered again when its invisible time ends, as if the gateway were still
        running.
        """
        now_ms = self._clock.monotonic_ms()
        for held in self._invisible.take_all():
            held.message.reading.settled()
            self._retry(held, timedelta(milliseconds=max(held.until_ms - now_ms, 0)))


def wait_s(asked: Duration | None, remaining_s: float | None) -> float:
    """How long a long poll waits: the time that the request gives, but never longer than the client waits.

    A client that gives a time waits longer than that by itself. Of one that gives none, only the end of the call is known, and a quarter of
    the time is left for the answer's way.
    """
    asked_s = max(LONG_POLL_MS if asked is None else length_ms(asked), 0) / 1000
    if remaining_s is None:
        return asked_s
    margin_s = MARGIN_S if asked is not None else max(MARGIN_S, remaining_s / 4)
    return max(min(asked_s, remaining_s - margin_s), 0.0)
