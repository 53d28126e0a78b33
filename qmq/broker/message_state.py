"""The current state of a message for a group, from its share or its lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qmq.batch import BatchView
from qmq.batch_columns import UNREADABLE
from qmq.broker.message_search import FoundMessage
from qmq.log.lane_share import LaneShare
from qmq.log.lane_trail import LaneTrail, holder_of, where
from qmq.log.queue import Queue
from qmq.log.share import Share
from qmq.log.trail import MessagePlace, Trail, TrailEvent, standing
from qmq.model import dead_letter_subject
from qmq.proto.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from qmq.broker.broker import Broker

COPY_LOOK: Final = 200
"""Batches of a dead-letter queue, from the time of death on, that are searched for the copy."""


def event_of(event: TrailEvent) -> pb.MessageEvent:
    return pb.MessageEvent(**event._asdict())


def state_of_share(
    broker: Broker, broker_group: str, queue: Queue, group: str, share: Share, trail: Trail, message_id: bytes
) -> pb.MessageState:
    """The state on an unordered subject. `trail`: the message's history."""
    now = standing(share, trail.sequence)
    state = pb.MessageState(
        group=group, state=now.where.value, last=_last(trail), consumer=now.consumer, attempt=now.attempt, consumers=len(share.holders)
    )
    state.attempts_max = broker.rules.settings(queue.id.subject, group).attempts_max
    state.is_paused = broker.rules.is_paused(queue.id.subject, group, "", "")
    if now.where is MessagePlace.NEW:
        state.behind = max(trail.sequence - max(share.next_sequence, queue.start_sequence), 0)
    elif now.where is MessagePlace.HELD:
        _add_lease(broker, queue, share, state)
    elif now.where is MessagePlace.WAITING:
        state.due_ms = now.due_ms
    elif now.where is MessagePlace.DONE and trail.now.where is MessagePlace.DYING and trail.last is not None:
        state.state, state.attempt = "dead", trail.now.attempt
        letter = _letter_of(broker, dead_letter_subject(group), message_id, trail.last.time_ms)
        if letter is not None:
            state.dead_letter.CopyFrom(letter.described(broker_group, ""))
            state.dead_letter.ClearField("body")
    return state


def _last(trail: Trail | LaneTrail) -> pb.MessageEvent | None:
    return event_of(trail.last) if trail.last is not None else None


def _add_lease(broker: Broker, queue: Queue, share: Share, state: pb.MessageState) -> None:
    group = next((each for each in broker.dispatch.groups.of_queue(queue) if each.name == state.group), None)
    now_ms = broker.clock.monotonic_ms()
    seen_ms = group.seen_ms.get(state.consumer, now_ms) if group is not None else now_ms
    state.lease_left_ms = max(share.holders[state.consumer].lease_ms - (now_ms - seen_ms), 0)
    client = broker.dispatch.groups.clients().get((id(group), state.consumer), "")
    state.is_consumer_paused = broker.rules.is_paused(queue.id.subject, state.group, state.consumer, client)


def _letter_of(broker: Broker, subject: str, message_id: bytes, died_ms: int) -> FoundMessage | None:
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


def state_of_lane(broker: Broker, queue: Queue, group: str, share: LaneShare, trail: LaneTrail) -> pb.MessageState:
    """The state on a partition of an ordered subject."""
    now = where(share, trail.sequence, trail.lp)
    where_now = "parked" if now is MessagePlace.WAITING else now.value
    state = pb.MessageState(group=group, state=where_now, last=_last(trail), consumers=len(share.holders))
    state.is_paused = broker.rules.is_paused(queue.id.subject, group, "", "")
    state.attempt = share.failures.get(trail.sequence, 0)
    holder = holder_of(share, trail.lp)
    if holder is not None:
        state.consumer = holder.consumer
        state.lease_left_ms = max(holder.lease_ms - broker.lanes.seen_ms_ago(queue, group, holder.token), 0)
        client = broker.lanes.client_of(queue, group, holder.token)
        state.is_consumer_paused = broker.rules.is_paused(queue.id.subject, group, holder.consumer, client)
    if now is MessagePlace.NEW:
        state.behind = _left_before(queue, share, trail)
    for parked in share.parked.values():
        if trail.sequence in parked.sequences:
            state.parked_first = parked.sequences[0]
    return state


def _left_before(queue: Queue, share: LaneShare, trail: LaneTrail) -> int:
    """Earlier messages of the partition, in its lane's range, that are not known to be done."""
    for part in share.progress:
        if part.lps.first <= trail.lp < part.lps.end:
            begin = max(part.done_before, queue.start_sequence)
            done = sum([min(end, trail.sequence) - max(first, begin) for first, end in part.done if first < trail.sequence and end > begin])
            return max(trail.sequence - begin - done, 0)
    return trail.sequence - queue.start_sequence
