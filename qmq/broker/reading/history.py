"""Finds a message by its id (`MessageSearch`), and reads its trail: what groups did with it, from
the action log, and where it is now, from its share or its lanes.

    message ▶ its index ▶ the last segment of the action log that was begun before ▶ its snapshot ▶
    every later action of the queue ▶ now

Rules:
* One call reads at most `SCAN_BYTES_MAX` of the log, and yields to the event loop after each
  `TURN_BYTES`. The state is in the cursor, so another master may answer the next call: replicas
  have the same bytes at the same positions.
* Only committed actions are reported. When the end of the log is reached, the shares say where the
  message is now.
* If retention deleted the part of the action log in which the trail begins, the answer says since
  when it is known.

A search may be in all queues, without reading all of them. A message id is its producer's id, the
number of a batch and a place in it (docs/FORMAT.md), and the consume logs know batches by the first
two. So the queues that had the producer lately are searched first; in each, the entries since the
producer's creation are compared, a file at a time.

Some batches have messages with their own ids under another producer's number: deliveries of delay
groups, dead letters, and resends after a fence. Their headers must be read, for the time in
question, at most `HEADS_MAX` in a call. If the message was not found and there are more such
batches, the answer says so.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.errors import CorruptBatch, InvalidArgument, MessageNotFound, NotMaster
from qmq.limits import KIB, MIB
from qmq.log.actions import (
    AnyAction,
    DropQueue,
    Forget,
    LaneAction,
    ScheduleAction,
    StepAction,
    decode_actions,
)
from qmq.log.consume_log import IndexEntry
from qmq.log.envelopes import Entry, SnapshotReader, damaged, head_at, walk
from qmq.log.group_state import GroupState
from qmq.log.history import (
    LaneMessageEvents,
    MessageEvents,
    MessagePlace,
    TrailEvent,
    holder_of,
    standing,
    where,
)
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import STEPS_STATE, Queue, birth_ms
from qmq.log.recent_writes import ACTIONS
from qmq.log.segments import Segments
from qmq.model import (
    BATCH_NUMBERS,
    MessageId,
    Partition,
    QueueId,
    dead_letter_subject,
    is_dead_letters,
)
from qmq.proto.v1 import control_pb2 as pb
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Kind, unwrap
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
            raise CorruptBatch(
                f"the entry at sequence {sequence} of {self.queue.id} is not a message: {cause}"
            ) from cause

    def _described(self, broker_group: str, message_id: str) -> pb.StoredMessage:
        view, index = self.view, self.index
        keys, tags, headers, due_times_ms = (
            view.keys(),
            view.tags(),
            view.headers(),
            view.due_times_ms(),
        )
        return pb.StoredMessage(
            subject=self.queue.id.subject,
            partition=self.queue.id.partition,
            broker_group=broker_group,
            sequence=view.base_sequence + index,
            message_id=message_id,
            body=view.bodies()[index],
            key=keys[index] if keys else b"",
            tags=tags[index] if tags else (),
            headers=[
                pb.Header(name=name, value=value)
                for name, value in (headers[index] if headers else {}).items()
            ],
            create_time_ms=view.create_times_ms()[index],
            append_time_ms=view.envelope.append_time_ms,
            due_ms=due_times_ms[index] if due_times_ms else 0,
            is_directed=view.header.is_directed,
        )


class MessageSearch:
    """Searches for messages while the broker serves."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def find(
        self, subject: str, message_id: MessageId, since_ms: int = 0
    ) -> tuple[list[FoundMessage], bool]:
        """(every place where the message is stored, at most 32; whether it may be in batches that
        were not read).

        Raises UnknownSubject, MessageNotFound, NotMaster, LogDamaged.
        """
        self._broker.require_serving()
        store = self._broker.store
        if subject:
            self._broker.subjects.settings(subject)
        queues = [queue for queue in store.queues.values() if subject in ("", queue.id.subject)]
        queues.sort(
            key=lambda queue: (message_id.producer_id not in queue.producers.windows, queue.id)
        )
        found = [
            each for queue in queues async for each in self.of_producer(store, queue, message_id)
        ]
        others, is_incomplete = await self._with_own_ids(store, queues, message_id, since_ms)
        known = {(id(each.queue), each.view.base_sequence + each.index) for each in found}
        found += [
            each
            for each in others
            if (id(each.queue), each.view.base_sequence + each.index) not in known
        ]
        if not found and not is_incomplete:
            raise MessageNotFound(
                f"no kept message of {subject or 'any subject'} has the id {message_id}: it "
                "was never stored, or retention deleted it"
            )
        return found[:PLACES_MAX], is_incomplete and not found

    async def of_producer(
        self, store: Store, queue: Queue, message_id: MessageId
    ) -> AsyncGenerator[FoundMessage]:
        """Where a queue has the message, by its producer's batch, a file at a time. Raises
        NotMaster, LogDamaged.
        """
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
        for queue in sorted(
            queues, key=lambda each: (not is_dead_letters(each.id.subject), each.id)
        ):
            number = max(queue.index.find_time(since_ms), queue.index.first)
            while number < queue.index.count and left > 0:
                entries = queue.index.entries(number, min(HEADS_AT_ONCE, left))
                number, left = number + len(entries), left - len(entries)
                for entry in entries:
                    each = await through_cold_reads(
                        _look_for_own_id, store, queue, entry, message_id
                    )
                    found += [each] if each is not None else []
                await self._give_way(store)
            if left <= 0:
                return found, True
        return found, False

    async def _give_way(self, store: Store) -> None:
        await asyncio.sleep(0)
        if self._broker.store is not store or not self._broker.is_serving:
            raise NotMaster("this broker lost the mastership during the search: ask the new master")


def _look_for_own_id(
    store: Store, queue: Queue, entry: IndexEntry, message_id: MessageId
) -> FoundMessage | None:
    """The message, if it is in this batch under its own id."""
    return (
        _look_into(store, queue, entry, message_id)
        if entry.producer_id and _has_own_ids(store, entry)
        else None
    )


def _has_own_ids(store: Store, entry: IndexEntry) -> bool:
    cached = store.cache.get(entry.position)
    head = (
        cached[1]
        if cached is not None
        else store.messages.read(entry.position + ENVELOPE_BYTES, REGION_BYTES)
    )
    try:
        return parse_header(head).columns & Column.MESSAGE_ID != 0
    except CorruptBatch:
        return False  # reading the batch itself reports the damage


def _look_into(
    store: Store, queue: Queue, entry: IndexEntry, message_id: MessageId
) -> FoundMessage | None:
    """The message, if it is in this batch and committed. A batch that cannot be read holds no
    message that could be found.
    """
    if not queue.start_sequence <= entry.base_sequence < queue.visible_sequence:
        return None
    buffers = store.read(queue, entry)
    try:
        view = BatchView.parse(b"".join(buffers))
        stored = view.message_ids()
    except UNREADABLE as cause:
        log.error(
            "the batch at sequence %d of %s cannot be read and is skipped: %r",
            entry.base_sequence,
            queue.id,
            cause,
        )
        return None
    if stored is not None:
        wanted = message_id.to_bytes()
        return FoundMessage(queue, view, stored.index(wanted)) if wanted in stored else None
    is_its = (entry.producer_id, entry.batch_sequence) == (
        message_id.producer_id,
        message_id.batch_sequence,
    )
    return (
        FoundMessage(queue, view, message_id.index)
        if is_its and message_id.index < entry.count
        else None
    )


COPY_LOOK: Final = 200
"""Batches of a dead-letter queue, from the time of death on, that are searched for the copy."""


def event_of(event: TrailEvent) -> pb.MessageEvent:
    return pb.MessageEvent(**event._asdict())


def state_of_share(
    broker: Broker,
    broker_group: str,
    queue: Queue,
    group: str,
    share: GroupState,
    trail: MessageEvents,
    message_id: bytes,
) -> pb.MessageState:
    """The state on an unordered subject. `trail`: the message's history."""
    now = standing(share, trail.sequence)
    state = pb.MessageState(
        group=group,
        state=now.where.value,
        last=_last(trail),
        consumer=now.consumer,
        attempt=now.attempt,
        consumers=len(share.holders),
    )
    state.attempts_max = broker.rules.settings(queue.id.subject, group).attempts_max
    state.is_paused = broker.rules.is_paused(queue.id.subject, group, "", "")
    if now.where is MessagePlace.NEW:
        state.behind = max(trail.sequence - max(share.next_sequence, queue.start_sequence), 0)
    elif now.where is MessagePlace.HELD:
        _add_lease(broker, queue, share, state)
    elif now.where is MessagePlace.WAITING:
        state.due_ms = now.due_ms
    elif (
        now.where is MessagePlace.DONE
        and trail.now.where is MessagePlace.DYING
        and trail.last is not None
    ):
        state.state, state.attempt = "dead", trail.now.attempt
        letter = _letter_of(broker, dead_letter_subject(group), message_id, trail.last.time_ms)
        if letter is not None:
            state.dead_letter.CopyFrom(letter.described(broker_group, ""))
            state.dead_letter.ClearField("body")
    return state


def _last(trail: MessageEvents | LaneMessageEvents) -> pb.MessageEvent | None:
    return event_of(trail.last) if trail.last is not None else None


def _add_lease(broker: Broker, queue: Queue, share: GroupState, state: pb.MessageState) -> None:
    group = next(
        (each for each in broker.dispatch.groups.of_queue(queue) if each.name == state.group), None
    )
    now_ms = broker.clock.monotonic_ms()
    seen_ms = group.seen_ms.get(state.consumer, now_ms) if group is not None else now_ms
    state.lease_left_ms = max(share.holders[state.consumer].lease_ms - (now_ms - seen_ms), 0)
    client = broker.dispatch.groups.clients().get((id(group), state.consumer), "")
    state.is_consumer_paused = broker.rules.is_paused(
        queue.id.subject, state.group, state.consumer, client
    )


def _letter_of(
    broker: Broker, subject: str, message_id: bytes, died_ms: int
) -> FoundMessage | None:
    """The message's copy in the dead-letter queue, if it is kept. Raises LogDamaged."""
    queue = broker.store.queue(subject, 0)
    if queue is None or queue.index.count == queue.index.first:
        return None
    number = max(queue.index.find_time(died_ms), queue.index.first)
    for entry in queue.index.entries(number, COPY_LOOK) if number < queue.index.count else ():
        buffers = broker.store.read(queue, entry)
        try:
            view = BatchView.parse(b"".join(buffers))
            ids = view.message_ids() or []
        except UNREADABLE:
            continue  # not a copy
        if message_id in ids:
            return FoundMessage(queue, view, ids.index(message_id))
    return None


def state_of_lane(
    broker: Broker, queue: Queue, group: str, share: GroupLaneState, trail: LaneMessageEvents
) -> pb.MessageState:
    """The state on a partition of an ordered subject."""
    now = where(share, trail.sequence, trail.lp)
    where_now = "parked" if now is MessagePlace.WAITING else now.value
    state = pb.MessageState(
        group=group, state=where_now, last=_last(trail), consumers=len(share.holders)
    )
    state.is_paused = broker.rules.is_paused(queue.id.subject, group, "", "")
    state.attempt = share.failures.get(trail.sequence, 0)
    holder = holder_of(share, trail.lp)
    if holder is not None:
        state.consumer = holder.consumer
        state.lease_left_ms = max(
            holder.lease_ms - broker.lanes.seen_ms_ago(queue, group, holder.token), 0
        )
        client = broker.lanes.client_of(queue, group, holder.token)
        state.is_consumer_paused = broker.rules.is_paused(
            queue.id.subject, group, holder.consumer, client
        )
    if now is MessagePlace.NEW:
        state.behind = _left_before(queue, share, trail)
    for parked in share.parked.values():
        if trail.sequence in parked.sequences:
            state.parked_first = parked.sequences[0]
    return state


def _left_before(queue: Queue, share: GroupLaneState, trail: LaneMessageEvents) -> int:
    """Earlier messages of the partition, in its lane's range, that are not known to be done."""
    for part in share.progress:
        if part.lps.first <= trail.lp < part.lps.end:
            begin = max(part.done_before, queue.start_sequence)
            done = sum(
                [
                    min(end, trail.sequence) - max(first, begin)
                    for first, end in part.done
                    if first < trail.sequence and end > begin
                ]
            )
            return max(trail.sequence - begin - done, 0)
    return trail.sequence - queue.start_sequence


SCAN_BYTES_MAX: Final = 16 * MIB
"""About half a second of work, if every entry is about the subject."""
TURN_BYTES: Final = 128 * KIB
"""About 5 ms."""
EVENTS_MAX: Final = 1_000


@dataclass(slots=True)
class _Scan:
    """The state of following one message."""

    queue: Queue
    sequence: int
    group: str
    lp: int
    """The logical partition on an ordered subject; else -1."""
    position: int
    message_id: bytes = b""
    index: int = 0
    """The message's index: earlier actions are not about it."""
    known_since_ms: int = 0
    trails: dict[str, MessageEvents] = field(default_factory=dict)
    lanes: dict[str, LaneMessageEvents] = field(default_factory=dict)
    _snapshot: SnapshotReader = field(default_factory=SnapshotReader)

    def load(self, payload: bytes) -> None:
        """Load the next entry of the opening snapshot."""
        for subject, partition, group, state, *kind in self._snapshot.states(payload):
            if QueueId(subject, partition) != self.queue.id or self.group not in ("", group):
                continue
            if kind == [STEPS_STATE]:
                continue
            if kind:
                self.lanes[group] = LaneMessageEvents(
                    group, self.sequence, self.lp, GroupLaneState.from_state(state)
                )
            else:
                self.trails[group] = MessageEvents(
                    group, self.sequence, GroupState.from_state(state)
                )

    def read(self, entry: Entry) -> list[TrailEvent]:
        """Apply the log's next entry. An entry that does not contain the subject's name is not
        about the message.
        """
        events: list[TrailEvent] = []
        if entry.envelope.kind == Kind.ACTIONS and self.queue.id.subject.encode() in entry.region:
            for action in decode_actions(unwrap(entry.region)):
                events += self.apply(action, entry.envelope.append_time_ms)
        self.position = entry.end
        return events if entry.envelope.index > self.index else []

    def apply(self, action: AnyAction, time_ms: int) -> list[TrailEvent]:
        """Apply one action."""
        if (
            isinstance(action, ScheduleAction | StepAction)
            or QueueId(action.subject, Partition(action.partition)) != self.queue.id
        ):
            return []
        if isinstance(action, DropQueue):
            self.trails.clear()
            self.lanes.clear()
            return []
        if self.group not in ("", action.group):
            return []
        if isinstance(action, LaneAction):
            lanes = self.lanes.get(action.group)
            if lanes is None:
                lanes = self.lanes[action.group] = LaneMessageEvents(
                    action.group, self.sequence, self.lp
                )
            return lanes.apply(action, time_ms)
        if isinstance(action, Forget) and self.lanes.pop(action.group, None) is not None:
            return [TrailEvent(time_ms, action.group, "forget")]
        trail = self.trails.get(action.group)
        if trail is None:
            trail = self.trails[action.group] = MessageEvents(action.group, self.sequence)
        return trail.apply(action, time_ms)

    def cursor(self) -> bytes:
        trails = [each.to_state() for each in self.trails.values()]
        lanes = [each.to_state() for each in self.lanes.values()]
        return msgspec.msgpack.encode(
            [
                [self.position, self.known_since_ms, self.lp, self.index, self.message_id],
                trails,
                lanes,
            ]
        )

    def resume(self, cursor: bytes) -> None:
        """Raises InvalidArgument."""
        try:
            known, trails, lanes = msgspec.msgpack.decode(cursor, strict=False)
            self.position, self.known_since_ms, self.lp, self.index, self.message_id = known
            self.trails = {
                each[0]: MessageEvents.from_state(self.sequence, each) for each in trails
            }
            self.lanes = {
                each[0]: LaneMessageEvents.from_state(self.sequence, each) for each in lanes
            }
        except (
            msgspec.MsgspecError,
            AttributeError,
            TypeError,
            ValueError,
            IndexError,
            KeyError,
        ) as cause:
            raise InvalidArgument(
                "this cursor is not from an earlier answer: begin without a cursor"
            ) from cause


class MessageHistory:
    def __init__(self, broker: Broker, broker_group: str) -> None:
        self._broker = broker
        self._group = broker_group

    async def follow(
        self, subject: str, partition: int, sequence: int, group: str = "", cursor: bytes = b""
    ) -> pb.TraceMessageResponse:
        """The next page of a message's trail; the last one if its `cursor` is empty.

        Raises UnknownSubject, MessageNotFound, InvalidArgument (also if retention was faster than
        the cursor), NotMaster, LogDamaged.
        """
        self._broker.require_serving()
        queue = self._broker.store.queue(subject, partition)
        if queue is None:
            self._broker.subjects.settings(subject)
            raise MessageNotFound(
                f"no message was ever stored in partition {partition} of {subject!r} here"
            )
        scan = _Scan(queue, sequence, group, lp=-1, position=0)
        if cursor:
            scan.resume(cursor)
        else:
            await through_cold_reads(self._begin, scan)
        events, is_whole = await self._scan(scan)
        return pb.TraceMessageResponse(
            events=[event_of(each) for each in events],
            cursor=b"" if is_whole else scan.cursor(),
            states=await through_cold_reads(lambda: list(self._states(scan))) if is_whole else (),
            known_since_ms=scan.known_since_ms,
        )

    def _begin(self, scan: _Scan) -> None:
        """The start of the trail in the action log, and the state at that position."""
        store, queue = self._broker.store, scan.queue
        if not queue.start_sequence <= scan.sequence < queue.visible_sequence:
            raise MessageNotFound(
                f"{queue.id} holds {queue.start_sequence} to {queue.visible_sequence - 1}, "
                f"not {scan.sequence}"
            )
        entry = queue.index.entry(queue.index.find_sequence(scan.sequence))
        buffers = store.read(queue, entry)
        try:
            view = BatchView.parse(b"".join(buffers))
            lps = view.logical_partitions()
            place = scan.sequence - entry.base_sequence
            if lps is not None:
                scan.lp = int(lps[place])
            ids = view.message_ids()
            number = (
                view.header.batch_sequence % BATCH_NUMBERS
            )  # an older version accepted larger ones
            scan.message_id = (
                bytes(ids[place])
                if ids is not None
                else MessageId(view.header.producer_id, number, place).to_bytes()
            )
        except UNREADABLE as cause:
            raise CorruptBatch(
                f"the entry at sequence {scan.sequence} of {queue.id} is not a message: {cause}"
            ) from cause
        actions = store.actions
        scan.index = view.envelope.index
        scan.position, index = segment_before(actions, scan.index)
        if index > scan.index:
            head = head_at(actions, scan.position)
            scan.known_since_ms = head.append_time_ms if head is not None else store.last_time_ms
        for snapshot in _snapshots(actions, scan.position):
            scan.load(unwrap(snapshot.region))
            scan.position = snapshot.end

    async def _scan(self, scan: _Scan) -> tuple[list[TrailEvent], bool]:
        """(events, whether the end of the log at the start of this call was reached)."""
        store = self._broker.store
        actions, end, begin, paused = store.actions, store.actions.end, scan.position, scan.position
        events: list[TrailEvent] = []
        _require_kept(scan, actions)
        try:
            for entry in walk(actions, scan.position):
                if entry.position >= end or entry.envelope.index > store.committed_index:
                    return events, True
                events += scan.read(entry)
                if scan.position - begin >= SCAN_BYTES_MAX or len(events) >= EVENTS_MAX:
                    return events, False
                if scan.position - paused >= TURN_BYTES:
                    paused = scan.position
                    await asyncio.sleep(0)
                    if self._broker.store is not store or not self._broker.is_serving:
                        raise NotMaster(
                            "this broker lost the mastership during the search: ask the new master"
                        )
                    _require_kept(scan, actions)
        except CorruptBatch as cause:
            raise damaged(actions, scan.position, cause, ACTIONS) from cause
        return events, True

    def _states(self, scan: _Scan) -> Iterator[pb.MessageState]:
        queue = scan.queue
        for name, share in sorted(queue.shares.items()):
            if scan.group in ("", name):
                trail = scan.trails.get(name) or MessageEvents(name, scan.sequence, share)
                yield state_of_share(
                    self._broker, self._group, queue, name, share, trail, scan.message_id
                )
        for name, lanes in sorted(queue.lanes.items()):
            if scan.group in ("", name):
                lane_trail = scan.lanes.get(name) or LaneMessageEvents(
                    name, scan.sequence, scan.lp, lanes
                )
                yield state_of_lane(self._broker, queue, name, lanes, lane_trail)


def _require_kept(scan: _Scan, actions: Segments) -> None:
    """Raises InvalidArgument."""
    if scan.position < actions.start:
        raise InvalidArgument(
            "retention deleted the part of the action log at the cursor: begin without a cursor"
        )


def segment_before(segments: Segments, index: int) -> tuple[int, int]:
    """(base of the last segment that begins before that index, its first index); the oldest segment
    if all begin later.
    """

    def first_index(base: int) -> int:
        head = head_at(segments, base)
        return head.index if head is not None else 1 << 63

    at = max(bisect_right(segments.bases, index, key=first_index) - 1, 0)
    base = segments.bases[at]
    return base, first_index(base) if base else 0


def _snapshots(segments: Segments, position: int) -> Iterator[Entry]:
    """The snapshots at the beginning of a segment."""
    try:
        for entry in walk(segments, position):
            if entry.envelope.kind != Kind.SNAPSHOT:
                return
            yield entry
    except CorruptBatch as cause:
        raise damaged(segments, position, cause, ACTIONS) from cause
