"""The calls that receive and settle: ReceiveMessage, AckMessage, ChangeInvisibleDuration,
ForwardMessageToDeadLetterQueue.

    receive ──▶ handed out, invisible ──ack──▶ done
                        │   ├── forward ──▶ dead letters
                        │   └── change the time ──▶ handed out for that time
                        └── time over ──▶ received again, one attempt older

The gateway counts the time in memory. If the gateway is killed, the lease of its consumers ends (30
s), and the messages are delivered again, like those of any lost consumer.

*Pull consumers:* PullMessage, UpdateOffset, GetOffset, QueryOffset read a queue from an offset on.

    queue       a broker group of an unordered topic; an ordered topic has no queues to pull,
                because its partitions split and merge
    offset      the message's sequence in its broker group
    offset of a group on a queue     everything before it is done for the group: QMQ's progress,
                                     which `qmq group list` shows

Pulling does not change the group's progress; UpdateOffset moves it, as `qmq group reset` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Final, NamedTuple

from google.protobuf.duration_pb2 import Duration

from qmq.client.browsing import BrowsedMessage
from qmq.client.client import Client
from qmq.client.consuming.ordered.consumer import fail
from qmq.errors import InvalidArgument, OrderMismatch, QmqError, UnknownGroup, UnknownSubject
from qmq.gateway.clients import ClientSessions
from qmq.gateway.config import LONG_POLL_MS, GatewayConfig
from qmq.gateway.filters import filter_of_request
from qmq.gateway.messages import (
    group_of_resource,
    length_ms,
    message_for_client,
    subject_of_topic,
    timestamp_of,
)
from qmq.gateway.readers import GroupReaders, HandedOut, ReaderKey
from qmq.gateway.receipts import InvisibleMessage, InvisibleMessages
from qmq.gateway.status import OK, Refused, joined_status, status_of_failure
from qmq.gateway.topics import Topic, TopicCatalog, serve_entries
from qmq.limits import MIB
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
"""A receive call for a topic that does not exist yet checks at this interval if
the topic exists now.
"""
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
        self._readers, self._catalog, self._invisible, self._sessions = (
            readers,
            catalog,
            invisible,
            sessions,
        )
        self._config, self._clock, self._sleep = config, clock, sleep

    # --- receiving --------------------------------------------------------------------------------

    async def receive(
        self, request: calls.ReceiveMessageRequest, client_id: str, remaining_s: float | None
    ) -> AsyncGenerator[calls.ReceiveMessageResponse, None]:
        """Yields the status, the messages and the time; without messages, a status that says why.
        The client waits for `remaining_s` seconds.
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
            yield calls.ReceiveMessageResponse(
                delivery_timestamp=timestamp_of(self._clock.time_ms())
            )
        finally:
            for each in held[sent:]:  # the client has disconnected, and never saw these
                self._release(each)

    async def _receive(
        self, request: calls.ReceiveMessageRequest, client_id: str, remaining_s: float | None
    ) -> tuple[list[Held], Topic]:
        subject, group = (
            subject_of_topic(request.message_queue.topic),
            group_of_resource(request.group),
        )
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
            reading, messages = await self._readers.receive(
                key, min(request.batch_size, BATCH_MAX), left_s
            )
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
        """Wait until the topic exists, and return it: consumers may come before the first message.
        Raises Refused.
        """
        while (found := await self._catalog.find(subject)) is None:
            if not self._catalog.creates:
                raise Refused(
                    api.TOPIC_NOT_FOUND,
                    f"there is no topic {subject!r}: create it with `qmq subject create`",
                )
            if self._clock.monotonic_ms() + LOOK_S * 1000 > until_ms:
                raise Refused(
                    api.MESSAGE_NOT_FOUND,
                    f"there is no topic {subject!r} yet: its first message creates it",
                )
            await self._sleep(LOOK_S)
        return found

    def _invisible_ms(self, request: calls.ReceiveMessageRequest) -> tuple[int, int]:
        """How long messages stay invisible,
        and for how long this time is renewed. Raises Refused.
        """
        if request.auto_renew:
            return self._config.renewed_invisible_ms, RENEWAL_MS_MAX
        return self._checked_ms(request.invisible_duration), 0

    def _checked_ms(self, duration: Duration) -> int:
        found, least, most = length_ms(duration), self._config.invisible_ms_min, INVISIBLE_MS_MAX
        if not least <= found <= most:
            raise Refused(
                api.ILLEGAL_INVISIBLE_TIME,
                f"an invisible time is {least / 1000:g} to {most / 1000:g} s, not {found / 1000} s",
            )
        return found

    def _message(
        self, held: Held, request: calls.ReceiveMessageRequest, topic: Topic
    ) -> api.Message | None:
        """The message for the client; None for one that cannot be converted. That one has failed
        this attempt, and the others go on.
        """
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

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self, request: calls.AckMessageRequest) -> calls.AckMessageResponse:
        """Acknowledge the messages of all entries. Each entry has its own status."""
        entries = await serve_entries(lambda each: self._ack(each, request), request.entries)
        return calls.AckMessageResponse(
            status=joined_status([each.status for each in entries]), entries=entries
        )

    async def _ack(
        self, entry: calls.AckMessageEntry, request: calls.AckMessageRequest
    ) -> calls.AckMessageResultEntry:
        try:
            held = self._find(entry.receipt_handle, request)
            self._settled(held)
            await held.message.message.ack_sync()
            status = OK
        except Exception as failure:
            status = status_of_failure(failure)
        return calls.AckMessageResultEntry(
            message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status
        )

    def change_time(
        self, request: calls.ChangeInvisibleDurationRequest
    ) -> calls.ChangeInvisibleDurationResponse:
        """Make a message invisible for the given time from now on;
        after that time it is delivered again.
        """
        try:
            held = self._find(request.receipt_handle, request)
            invisible_ms = min(length_ms(request.invisible_duration), INVISIBLE_MS_MAX)
            if invisible_ms < 0:
                raise Refused(api.ILLEGAL_INVISIBLE_TIME, "an invisible time is not negative")
            held.message.counts_no_attempt = request.suspend
            self._invisible.change_time(
                held, now_ms=self._clock.monotonic_ms(), invisible_ms=invisible_ms
            )
        except Exception as failure:
            return calls.ChangeInvisibleDurationResponse(status=status_of_failure(failure))
        return calls.ChangeInvisibleDurationResponse(
            status=OK, receipt_handle=str(self._invisible.handle(held))
        )

    def forward(
        self, request: calls.ForwardMessageToDeadLetterQueueRequest
    ) -> calls.ForwardMessageToDeadLetterQueueResponse:
        """Move a message to the dead letters at the client's request."""
        try:
            held = self._find(request.receipt_handle, request)
            self._settled(held)
            error = (
                f"given up by its client after attempt {request.delivery_attempt} of "
                f"{request.max_delivery_attempts}"
            )
            held.message.message.reject(error)
        except Exception as failure:
            return calls.ForwardMessageToDeadLetterQueueResponse(status=status_of_failure(failure))
        return calls.ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _find(
        self,
        handle: str,
        request: calls.AckMessageRequest
        | calls.ChangeInvisibleDurationRequest
        | calls.ForwardMessageToDeadLetterQueueRequest,
    ) -> Held:
        subject, group = subject_of_topic(request.topic), group_of_resource(request.group)
        return self._invisible.find(handle, subject, group, self._clock.monotonic_ms())

    def _settled(self, held: Held) -> None:
        self._invisible.remove(held)
        held.message.reading.settled()

    # --- time -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Release the messages whose invisible time has ended."""
        for held in self._invisible.remove_over(
            self._clock.monotonic_ms(), self._sessions.is_alive
        ):
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
            log.warning(
                "a message of %s could not be given back to group %s: %s",
                held.subject,
                held.group,
                failure,
            )

    def _release(self, held: Held) -> None:
        self._settled(held)
        held.message.message.release()

    def release_all(self) -> None:
        """Release all messages at the gateway's end. Each is delivered again when its invisible
        time ends, as if the gateway were still running.
        """
        now_ms = self._clock.monotonic_ms()
        for held in self._invisible.take_all():
            held.message.reading.settled()
            self._retry(held, timedelta(milliseconds=max(held.until_ms - now_ms, 0)))


def wait_s(asked: Duration | None, remaining_s: float | None) -> float:
    """How long a long poll waits: the time that the request gives, but never longer than the client
    waits.

    A client that gives a time waits longer than that by itself. Of one that gives none, only the
    end of the call is known, and a quarter of the time is left for the answer's way.
    """
    asked_s = max(LONG_POLL_MS if asked is None else length_ms(asked), 0) / 1000
    if remaining_s is None:
        return asked_s
    margin_s = MARGIN_S if asked is not None else max(MARGIN_S, remaining_s / 4)
    return max(min(asked_s, remaining_s - margin_s), 0.0)


PULL_LOOK_S: Final = 0.25
"""A long poll looks for new messages at this interval."""
ANSWER_BYTES: Final = 8 * MIB
"""An answer ends with the message whose body reaches this size: bodies may be small on disk and
large when they are decompressed.
"""
FOUNDING_TRIES: Final = 100
FOUNDING_S: Final = 0.05
_END_MS: Final = (1 << 62) - 1


class PulledQueue(NamedTuple):
    """One queue of a topic, as pull consumers see it: a broker group of the subject."""

    subject: str
    broker_group: str


class PulledPage(NamedTuple):
    """The messages of one look at a queue that the filter wants,
    and the offset from which to continue.
    """

    messages: list[BrowsedMessage]
    next_offset: int


class GroupPulling:
    """Serves pull consumers. `sleep` is `asyncio.sleep`; a test hands in its own."""

    def __init__(
        self,
        client: Client,
        catalog: TopicCatalog,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._catalog, self._clock, self._sleep = client, catalog, clock, sleep

    # --- reading ----------------------------------------------------------------------------------

    async def pull(
        self, request: calls.PullMessageRequest, remaining_s: float | None
    ) -> AsyncGenerator[calls.PullMessageResponse, None]:
        """Yields the status, the messages and the next offset; without messages, a status that says
        so and the next offset.
        """
        try:
            page = await self._pull(request, remaining_s)
        except Exception as failure:
            yield calls.PullMessageResponse(status=status_of_failure(failure))
            return
        nothing = api.Status(code=api.MESSAGE_NOT_FOUND, message="there is no new message")
        yield calls.PullMessageResponse(status=OK if page.messages else nothing)
        for each in page.messages:
            try:
                message = message_for_client(each, request.message_queue.topic, is_ordered=False)
            except Exception:
                log.exception(
                    "message %s of %s cannot be given to a pull consumer: it is left out",
                    each.id,
                    each.subject,
                )
                continue
            message.system_properties.queue_id = request.message_queue.id
            yield calls.PullMessageResponse(message=message)
        yield calls.PullMessageResponse(next_offset=page.next_offset)

    async def _pull(
        self, request: calls.PullMessageRequest, remaining_s: float | None
    ) -> PulledPage:
        group_of_resource(request.group)
        wanted = filter_of_request(request.filter_expression)
        if request.batch_size < 1:
            raise Refused(api.BAD_REQUEST, f"batch_size is 1 or more, not {request.batch_size}")
        if request.offset < 0:
            raise Refused(api.ILLEGAL_OFFSET, f"an offset is 0 or more, not {request.offset}")
        queue = await self._queue(request.message_queue)
        most = min(request.batch_size, BATCH_MAX)
        timeout = request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        until_ms = self._clock.monotonic_ms() + int(wait_s(timeout, remaining_s) * 1000)
        found: list[BrowsedMessage] = []
        next_offset, size = request.offset, 0
        while True:
            async with aclosing(
                self._client.browse(
                    queue.subject, sequences=(next_offset, None), broker_group=queue.broker_group
                )  # type: ignore[type-var]
            ) as messages:
                async for each in messages:
                    if wanted.wants(each):
                        found.append(each)
                        size += len(each.body)
                    next_offset = each.sequence + 1
                    if len(found) >= most or size >= ANSWER_BYTES:
                        return PulledPage(found, next_offset)
            if found or self._clock.monotonic_ms() + PULL_LOOK_S * 1000 > until_ms:
                return PulledPage(found, next_offset)
            await self._sleep(PULL_LOOK_S)

    # --- offsets ----------------------------------------------------------------------------------

    async def update(self, request: calls.UpdateOffsetRequest) -> calls.UpdateOffsetResponse:
        """Mark everything before the offset as done for the group, and everything from the offset
        on as not done.
        """
        try:
            queue, group = (
                await self._queue(request.message_queue),
                group_of_resource(request.group),
            )
            await self._move(queue, group, request.offset)
        except InvalidArgument as failure:
            return calls.UpdateOffsetResponse(
                status=api.Status(code=api.ILLEGAL_OFFSET, message=failure.message)
            )
        except Exception as failure:
            return calls.UpdateOffsetResponse(status=status_of_failure(failure))
        return calls.UpdateOffsetResponse(status=OK)

    async def _move(self, queue: PulledQueue, group: str, offset: int) -> None:
        if offset < 0:
            raise InvalidArgument(f"an offset is 0 or more, not {offset}")
        try:
            await self._reset(queue, group, offset)
        except UnknownGroup:
            await self._found(queue, group, offset)

    async def _reset(self, queue: PulledQueue, group: str, offset: int) -> None:
        await self._client.metadata.reset_group(
            queue.subject, group, sequence=offset, broker_group=queue.broker_group, directly=False
        )

    async def _found(self, queue: PulledQueue, group: str, offset: int) -> None:
        """Create the group if it does not exist: a group begins when its first consumer attaches,
        so a paused consumer attaches here.
        """
        consumer = self._client.consumer(queue.subject, group, ack="explicit")
        consumer.pause_and_return()
        try:
            for _ in range(FOUNDING_TRIES):
                await consumer.pull(1, timedelta(0))
                try:
                    return await self._reset(queue, group, offset)
                except UnknownGroup:
                    await self._sleep(FOUNDING_S)
            raise Refused(
                api.PROXY_TIMEOUT,
                (
                    f"group {group!r} could not start on broker group {queue.broker_group!r} in "
                    "time: try again"
                ),
            )
        finally:
            await consumer.close()

    async def get(self, request: calls.GetOffsetRequest) -> calls.GetOffsetResponse:
        """The offset of a group on a queue."""
        try:
            queue, group = (
                await self._queue(request.message_queue),
                group_of_resource(request.group),
            )
            described = await self._client.metadata.describe_groups(queue.subject, group)
            found = next(
                (each for each in described if each.broker_group == queue.broker_group), None
            )
        except (UnknownGroup, OrderMismatch):
            found = None
        except Exception as failure:
            return calls.GetOffsetResponse(status=status_of_failure(failure))
        if found is None:
            return calls.GetOffsetResponse(
                status=api.Status(
                    code=api.OFFSET_NOT_FOUND, message="the group has no offset on this queue yet"
                )
            )
        return calls.GetOffsetResponse(status=OK, offset=found.settled_before)

    async def query(self, request: calls.QueryOffsetRequest) -> calls.QueryOffsetResponse:
        """The first offset of a queue, the offset after its last message, or the offset of the
        first message stored at or after a time.
        """
        try:
            queue = await self._queue(request.message_queue)
            found = await self._client.metadata.find_time(queue.subject, _time_ms(request))
            offset = next(
                each.to_sequence for each in found if each.broker_group == queue.broker_group
            )
        except StopIteration:
            return calls.QueryOffsetResponse(status=OK, offset=0)  # nothing was stored there yet
        except Exception as failure:
            return calls.QueryOffsetResponse(status=status_of_failure(failure))
        return calls.QueryOffsetResponse(status=OK, offset=offset)

    async def _queue(self, asked: api.MessageQueue) -> PulledQueue:
        """The broker group that a request's queue names. Raises Refused."""
        subject = subject_of_topic(asked.topic)
        topic = await self._catalog.find(subject)
        if topic is None:
            raise UnknownSubject(
                f"there is no topic {subject!r}: create it with `qmq subject create`"
            )
        if topic.is_ordered:
            raise Refused(
                api.UNSUPPORTED,
                (
                    f"topic {subject!r} is ordered: its partitions change, so receive from it, "
                    "and do not pull"
                ),
            )
        if asked.broker.name not in topic.broker_groups:
            raise Refused(
                api.BAD_REQUEST,
                (
                    f"topic {subject!r} has no queue at {asked.broker.name!r}: ask QueryRoute "
                    "for its queues"
                ),
            )
        return PulledQueue(subject, asked.broker.name)


def _time_ms(request: calls.QueryOffsetRequest) -> int:
    if request.query_offset_policy == api.BEGINNING:
        return 0
    if request.query_offset_policy == api.END:
        return _END_MS
    if not request.HasField("timestamp"):
        raise Refused(api.BAD_REQUEST, "an offset by time needs the time: set `timestamp`")
    return request.timestamp.seconds * 1000 + request.timestamp.nanos // 1_000_000
