"""Finds a message by its id, in all queues if necessary, without reading all of them.

A message id is its producer's id, the number of a batch and a place in it (docs/FORMAT.md), and the consume logs know batches by the first
two. So the queues that had the producer lately are searched first; in each, the entries since the producer's creation are compared, a file
at a time.

Some batches have messages with their own ids under another producer's number: deliveries of delay groups, dead letters, and resends after a
fence. Their headers must be read, for the time in question, at most `HEADS_MAX` in a call. If the message was not found and there are more
such batches, the answer says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.errors import CorruptBatch, MessageNotFound, NotMaster
from qmq.log.consume_log import IndexEntry
from qmq.log.producers import birth_ms
from qmq.log.queue import Queue
from qmq.model import MessageId, is_dead_letters
from qmq.proto.v1 import control_pb2 as pb
from qmq.wire.batch import ENVELOPE_BYTES, BatchView
from qmq.wire.batch_columns import REGION_BYTES, UNREADABLE, Column, parse_header

if TYPE_CHECKING:
    from qmq.broker.broker import Broker
    from qmq.log.store import Store

log = logging.getLogger("qmq.broker")

HEADS_MAX: Final = 20_000
"""Batches whose headers one call reads, some 5 µs each."""
HEADS_AT_ONCE: Final = 500
PLACES_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A stored message: its batch, and its place there."""

    queue: Queue
    view: BatchView
    index: int

    def described(self, broker_group: str, message_id: str) -> pb.StoredMessage:
        """The message as protobuf. Raises CorruptBatch."""
        try:
            return self._described(broker_group, message_id)
        except UNREADABLE as cause:
            sequence = self.view.base_sequence + self.index
            raise CorruptBatch(f"the entry at sequence {sequence} of {self.queue.id} is not a message: {cause}") from cause

    def _described(self, broker_group: str, message_id: str) -> pb.StoredMessage:
        view, index = self.view, self.index
        keys, tags, headers, due_times_ms = view.keys(), view.tags(), view.headers(), view.due_times_ms()
        return pb.StoredMessage(
            subject=self.queue.id.subject,
            partition=self.queue.id.partition,
            broker_group=broker_group,
            sequence=view.base_sequence + index,
            message_id=message_id,
            body=view.bodies()[index],
            key=keys[index] if keys else b"",
            tags=tags[index] if tags else (),
            headers=[pb.Header(name=name, value=value) for name, value in (headers[index] if headers else {}).items()],
            create_time_ms=view.create_times_ms()[index],
            append_time_ms=view.envelope.append_time_ms,
            due_ms=due_times_ms[index] if due_times_ms else 0,
            is_directed=view.header.is_directed,
        )


class MessageSearch:
    """Searches for messages while the broker serves."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def find(self, subject: str, message_id: MessageId, since_ms: int = 0) -> tuple[list[FoundMessage], bool]:
        """(every place where the message is stored, at most 32; whether it may be in batches that were not read).

        Raises UnknownSubject, MessageNotFound, NotMaster, LogDamaged.
        """
        self._broker.require_serving()
        store = self._broker.store
        if subject:
            self._broker.subjects.settings(subject)
        queues = [queue for queue in store.queues.values() if subject in ("", queue.id.subject)]
        queues.sort(key=lambda queue: (queue.producers.window(message_id.producer_id) is None, queue.id))
        found = [each for queue in queues async for each in self.of_producer(store, queue, message_id)]
        others, is_incomplete = await self._with_own_ids(store, queues, message_id, since_ms)
        known = {(id(each.queue), each.view.base_sequence + each.index) for each in found}
        found += [each for each in others if (id(each.queue), each.view.base_sequence + each.index) not in known]
        if not found and not is_incomplete:
            raise MessageNotFound(
                f"no kept message of {subject or 'any subject'} has the id {message_id}: it was never stored, or retention deleted it"
            )
        return found[:PLACES_MAX], is_incomplete and not found

    async def of_producer(self, store: Store, queue: Queue, message_id: MessageId) -> AsyncGenerator[FoundMessage]:
        """Where a queue has the message, by its producer's batch, a file at a time. Raises NotMaster, LogDamaged."""
        index = queue.index
        first = max(index.find_time(birth_ms(message_id.producer_id)), index.first)
        before = index.count
        while before > first:
            before, sent = index.of_producer(message_id.producer_id, before)
            for entry in sent:
                if entry.batch_sequence == message_id.batch_sequence:
                    found = await through_cold_reads(_look_into, store, queue, entry, message_id)
                    if found is not None:
                        yield found
            await self._give_way(store)

    async def _with_own_ids(
        self, store: Store, queues: Sequence[Queue], message_id: MessageId, since_ms: int
    ) -> tuple[list[FoundMessage], bool]:
        """Dead-letter queues first, because they are small."""
        found: list[FoundMessage] = []
        left = HEADS_MAX
        since_ms = max(since_ms, birth_ms(message_id.producer_id))
        for queue in sorted(queues, key=lambda each: (not is_dead_letters(each.id.subject), each.id)):
            number = max(queue.index.find_time(since_ms), queue.index.first)
            while number < queue.index.count and left > 0:
                entries = queue.index.entries(number, min(HEADS_AT_ONCE, left))
                number, left = number + len(entries), left - len(entries)
                for entry in entries:
                    each = await through_cold_reads(_look_for_own_id, store, queue, entry, message_id)
                    found += [each] if each is not None else []
                await self._give_way(store)
            if left <= 0:
                return found, True
        return found, False

    async def _give_way(self, store: Store) -> None:
        await asyncio.sleep(0)
        if self._broker.store is not store or not self._broker.is_serving:
            raise NotMaster("this broker lost the mastership during the search: ask the new master")


def _look_for_own_id(store: Store, queue: Queue, entry: IndexEntry, message_id: MessageId) -> FoundMessage | None:
    """The message, if it is in this batch under its own id."""
    return _look_into(store, queue, entry, message_id) if entry.producer_id and _has_own_ids(store, entry) else None


def _has_own_ids(store: Store, entry: IndexEntry) -> bool:
    cached = store.cache.get(entry.position)
    head = cached[1] if cached is not None else store.messages.read(entry.position + ENVELOPE_BYTES, REGION_BYTES)
    try:
        return parse_header(head).columns & Column.MESSAGE_ID != 0
    except CorruptBatch:
        return False  # reading the batch itself reports the damage


def _look_into(store: Store, queue: Queue, entry: IndexEntry, message_id: MessageId) -> FoundMessage | None:
    """The message, if it is in this batch and committed. A batch that cannot be read holds no message that could be found."""
    if not queue.start_sequence <= entry.base_sequence < queue.visible_sequence:
        return None
    buffers = store.read(queue, entry)
    try:
        view = BatchView.parse(b"".join(buffers))
        stored = view.message_ids()
    except UNREADABLE as cause:
        log.error("the batch at sequence %d of %s cannot be read and is skipped: %r", entry.base_sequence, queue.id, cause)
        return None
    if stored is not None:
        wanted = message_id.to_bytes()
        return FoundMessage(queue, view, stored.index(wanted)) if wanted in stored else None
    is_its = (entry.producer_id, entry.batch_sequence) == (message_id.producer_id, message_id.batch_sequence)
    return FoundMessage(queue, view, message_id.index) if is_its and message_id.index < entry.count else None
