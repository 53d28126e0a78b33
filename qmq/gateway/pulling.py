"""The calls of pull consumers: PullMessage, UpdateOffset, GetOffset, QueryOffset. They read a queue from an offset on.

    queue       a broker group of an unordered topic; an ordered topic has no queues to pull, because its partitions split and merge
    offset      the message's sequence in its broker group
    offset of a group on a queue     everything before it is done for the group: QMQ's progress, which `qmq group list` shows

Pulling does not change the group's progress; UpdateOffset moves it, as `qmq group reset` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Final, NamedTuple

from qmq.client.browsing import BrowsedMessage
from qmq.client.client import Client
from qmq.errors import InvalidArgument, OrderMismatch, UnknownGroup, UnknownSubject
from qmq.gateway.filters import filter_of_request
from qmq.gateway.messages import group_of_resource, message_for_client, subject_of_topic
from qmq.gateway.receiving import BATCH_MAX, wait_s
from qmq.gateway.status import OK, Refused, status_of_failure
from qmq.gateway.topics import TopicCatalog
from qmq.limits import MIB
from qmq.process.event_loop import Clock
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls

log = logging.getLogger("qmq.gateway")

LOOK_S: Final = 0.25
"""A long poll looks for new messages at this interval."""
ANSWER_BYTES: Final = 8 * MIB
"""An answer ends with the message whose body reaches this size: bodies may be small on disk and large when they are decompressed."""
FOUNDING_TRIES: Final = 100
FOUNDING_S: Final = 0.05
_END_MS: Final = (1 << 62) - 1


class PulledQueue(NamedTuple):
    """One queue of a topic, as pull consumers see it: a broker group of the subject."""

    subject: str
    broker_group: str


class PulledPage(NamedTuple):
    """The messages of one look at a queue that the filter wants, and the offset from which to continue."""

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

    # --- reading -------------------------------------------------------------------------------------------------------

    async def pull(self, request: calls.PullMessageRequest, remaining_s: float | None) -> AsyncGenerator[calls.PullMessageResponse, None]:
        """Yields the status, the messages and the next offset; without messages, a status that says so and the next offset."""
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
                log.exception("message %s of %s cannot be given to a pull consumer: it is left out", each.id, each.subject)
                continue
            message.system_properties.queue_id = request.message_queue.id
            yield calls.PullMessageResponse(message=message)
        yield calls.PullMessageResponse(next_offset=page.next_offset)

    async def _pull(self, request: calls.PullMessageRequest, remaining_s: float | None) -> PulledPage:
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
                self._client.browse(queue.subject, sequences=(next_offset, None), broker_group=queue.broker_group)  # type: ignore[type-var]
            ) as messages:
                async for each in messages:
                    if wanted.wants(each):
                        found.append(each)
                        size += len(each.body)
                    next_offset = each.sequence + 1
                    if len(found) >= most or size >= ANSWER_BYTES:
                        return PulledPage(found, next_offset)
            if found or self._clock.monotonic_ms() + LOOK_S * 1000 > until_ms:
                return PulledPage(found, next_offset)
            await self._sleep(LOOK_S)

    # --- offsets -------------------------------------------------------------------------------------------------------

    async def update(self, request: calls.UpdateOffsetRequest) -> calls.UpdateOffsetResponse:
        """Mark everything before the offset as done for the group, and everything from the offset on as not done."""
        try:
            queue, group = await self._queue(request.message_queue), group_of_resource(request.group)
            await self._move(queue, group, request.offset)
        except InvalidArgument as failure:
            return calls.UpdateOffsetResponse(status=api.Status(code=api.ILLEGAL_OFFSET, message=failure.message))
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
        await self._client.metadata.reset_group(queue.subject, group, sequence=offset, broker_group=queue.broker_group, directly=False)

    async def _found(self, queue: PulledQueue, group: str, offset: int) -> None:
        """Create the group if it does not exist: a group begins when its first consumer attaches, so a paused consumer attaches here."""
        consumer = self._client.consumer(queue.subject, group, ack="explicit")
        consumer.rest()
        try:
            for _ in range(FOUNDING_TRIES):
                await consumer.pull(1, timedelta(0))
                try:
                    return await self._reset(queue, group, offset)
                except UnknownGroup:
                    await self._sleep(FOUNDING_S)
            raise Refused(api.PROXY_TIMEOUT, f"group {group!r} could not start on broker group {queue.broker_group!r} in time: try again")
        finally:
            await consumer.close()

    async def get(self, request: calls.GetOffsetRequest) -> calls.GetOffsetResponse:
        """The offset of a group on a queue."""
        try:
            queue, group = await self._queue(request.message_queue), group_of_resource(request.group)
            described = await self._client.metadata.describe_groups(queue.subject, group)
            found = next((each for each in described if each.broker_group == queue.broker_group), None)
        except (UnknownGroup, OrderMismatch):
            found = None
        except Exception as failure:
            return calls.GetOffsetResponse(status=status_of_failure(failure))
        if found is None:
            return calls.GetOffsetResponse(
                status=api.Status(code=api.OFFSET_NOT_FOUND, message="the group has no offset on this queue yet")
            )
        return calls.GetOffsetResponse(status=OK, offset=found.settled_before)

    async def query(self, request: calls.QueryOffsetRequest) -> calls.QueryOffsetResponse:
        """The first offset of a queue, the offset after its last message, or the offset of the first message stored at or after a time."""
        try:
            queue = await self._queue(request.message_queue)
            found = await self._client.metadata.find_time(queue.subject, _time_ms(request))
            offset = next(each.to_sequence for each in found if each.broker_group == queue.broker_group)
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
            raise UnknownSubject(f"there is no topic {subject!r}: create it with `qmq subject create`")
        if topic.is_ordered:
            raise Refused(api.UNSUPPORTED, f"topic {subject!r} is ordered: its partitions change, so receive from it, and do not pull")
        if asked.broker.name not in topic.broker_groups:
            raise Refused(api.BAD_REQUEST, f"topic {subject!r} has no queue at {asked.broker.name!r}: ask QueryRoute for its queues")
        return PulledQueue(subject, asked.broker.name)


def _time_ms(request: calls.QueryOffsetRequest) -> int:
    if request.query_offset_policy == api.BEGINNING:
        return 0
    if request.query_offset_policy == api.END:
        return _END_MS
    if not request.HasField("timestamp"):
        raise Refused(api.BAD_REQUEST, "an offset by time needs the time: set `timestamp`")
    return request.timestamp.seconds * 1000 + request.timestamp.nanos // 1_000_000
