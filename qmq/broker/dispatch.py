"""Handing out: consumers attach, pull, settle and leave; groups are woken when there is something for them.

Deliveries hold what is committed, and nothing else. A delivery promises nothing and leaves at once: if the process dies, or the mastership
is lost, before its PULL is committed, the messages are handed out again, and late verdicts on the first delivery are stale.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, Final

from qmq import limits
from qmq.broker.config import LEASE_MS_MAX, LEASE_MS_MIN
from qmq.broker.delivery import TagFilter, collect, lay_out
from qmq.broker.sessions import Groups, GroupState, Held, Peer, Session, Waiter
from qmq.errors import InvalidArgument, LogDamaged, OrderMismatch, QmqError, UnknownConsumer
from qmq.log.actions import Begin, Join, Leave, PullAction, Reset, Return, SettleAction
from qmq.log.queue import Queue
from qmq.model import check_name
from qmq.wire import frame as frames
from qmq.wire import messages as wire
from qmq.wire.frame import FrameKind

if TYPE_CHECKING:
    from qmq.broker.broker import Broker

log = logging.getLogger("qmq.broker")

_DUE_WAIT_MS: Final = 60_000


class Served(Enum):
    """What became of a waiting pull."""

    YES = 1
    NOT = 2
    """There is nothing for anybody."""
    BLOCKED = 3
    """This consumer must acknowledge, or read its answers, first."""


class Dispatch:
    """Consumption on one broker while it serves. Made anew whenever the broker begins to serve."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.groups = Groups()
        self.to_wake: dict[int, GroupState] = {}
        """Groups that something happened to during this turn."""
        for queue in broker.store.queues.values():
            for group in queue.shares:
                self.groups.state(queue, group)

    # --- consuming -----------------------------------------------------------------------------------------------------

    def attach(self, peer: Peer, request: wire.Attach) -> wire.Attached:
        """Let a consumer take part in its group. Raises UnknownSubject, InvalidName, InvalidArgument."""
        _check_attach(request)
        queue = self._broker.find_queue(request.subject.encode(), request.partition).queue
        if queue.is_ordered:
            raise OrderMismatch(f"subject {request.subject!r} is ordered: consume it with mq.ordered_consumer")
        is_new = request.group not in queue.shares
        state = self.groups.state(queue, request.group)
        names = (request.subject, request.partition, request.group)
        if is_new:
            begin = queue.start_sequence if request.start == "earliest" else queue.next_sequence
            self._broker.store.act(Begin(*names, "", begin))
        holder = state.share.holders.get(request.consumer)
        is_known = holder is not None and holder.incarnation == request.incarnation
        is_resumed = is_known and holder is not None and request.received < holder.next_pull
        if not is_resumed:
            self._broker.store.act(Join(*names, request.consumer, request.incarnation, request.lease_ms, request.received))
        elif holder is not None and request.received + 1 < holder.next_pull:
            self._broker.store.act(Return(*names, request.consumer, request.received))
        state.seen_ms[request.consumer] = self._broker.clock.monotonic_ms()
        session = self.groups.attach(peer, state, request.consumer, TagFilter.of(request.tags_any, request.tags_all))
        self.wake(state)
        self._broker.schedule()
        holder = state.share.holders[request.consumer]
        return wire.Attached(session.number, holder.lease_ms, holder.next_pull, int(is_resumed))

    def pull(self, peer: Peer, request_id: int, request: wire.Pull, deadline_ms: int) -> None:
        """Answer a PULL now or when there is something. Raises UnknownConsumer, MessagesExpired, LogDamaged."""
        session = self._session(request.session, peer)
        if not 0 < request.messages_max <= limits.PULL_MESSAGES_MAX:
            raise InvalidArgument(f"messages_max of a pull is 1 to {limits.PULL_MESSAGES_MAX}, not {request.messages_max}")
        wait_ms = min(request.wait_ms, limits.WAIT_MS_MAX, deadline_ms or limits.WAIT_MS_MAX)
        until = self._broker.clock.monotonic_ms() + wait_ms
        bytes_max = min(max(request.bytes_max, 1), limits.PULL_BYTES_MAX)
        waiter = Waiter(session, request_id, request.messages_max, bytes_max, until)
        session.group.waiters.append(waiter)
        self.wake(session.group)
        if not wait_ms and waiter in session.group.waiters:
            session.group.waiters.remove(waiter)
            self._answer_empty(waiter)
        self._broker.schedule()

    def _wake_when_due(self, state: GroupState) -> None:
        """Somebody waits: look again when the next message that came back may go out."""
        due_ms = state.share.next_due_ms()
        if due_ms is None or due_ms == state.wakes_ms:
            return
        if state.timer is not None:
            state.timer.cancel()
        state.wakes_ms = due_ms
        delay_ms = min(max(due_ms - self._broker.clock.time_ms(), 1), _DUE_WAIT_MS)
        state.timer = self._broker.loop.call_later(delay_ms / 1000, self._due, state)

    def _due(self, state: GroupState) -> None:
        state.timer, state.wakes_ms = None, -1
        self.wake(state)

    def wake(self, state: GroupState) -> None:
        """The group may have messages: serve its waiting pulls, the longest waiting first.

        A consumer that must acknowledge or read its answers first keeps its place, and does not keep others waiting.
        """
        if self._broker.is_paused:
            return
        blocked: list[Waiter] = []
        while state.waiters:
            waiter = state.waiters.popleft()
            try:
                served = self._serve(waiter)
            except QmqError as failure:
                if isinstance(failure, LogDamaged) and self._broker.mends(failure):
                    blocked.append(waiter)
                    break
                self._broker.answer_error(waiter.session.peer, waiter.request_id, failure)
                continue
            if served is Served.NOT:
                blocked.append(waiter)
                self._wake_when_due(state)
                break
            if served is Served.BLOCKED:
                blocked.append(waiter)
        state.waiters.extendleft(reversed(blocked))

    def _serve(self, waiter: Waiter) -> Served:
        """Hand out what there is. Raises UnknownConsumer, MessagesExpired, LogDamaged."""
        session = waiter.session
        state = session.group
        share, queue = state.share, state.queue
        holder = share.holders.get(session.consumer)
        if holder is None:
            raise UnknownConsumer(f"consumer {session.consumer!r} lost its lease: attach again")
        room = min(waiter.messages_max, limits.CONSUMER_UNACKED_MAX - holder.unacked)
        if room <= 0 or not waiter.session.peer.is_writable:
            return Served.BLOCKED
        if share.next_sequence >= queue.visible_sequence and not share.requeued:
            return Served.NOT
        found = collect(
            self._broker.store, queue, state.name, share, state.reader, session.tags, room, waiter.bytes_max, self._broker.clock.time_ms()
        )
        if not found.pulled:
            return Served.NOT
        ranges, buffers, batches = lay_out(self._broker.store, queue, found)
        first = holder.next_pull
        queue_id = queue.id
        self._broker.store.act(
            PullAction(queue_id.subject, queue_id.partition, state.name, session.consumer, tuple(found.pulled))
        )
        if not ranges:
            if share.next_sequence < queue.visible_sequence:
                self.to_wake[id(state)] = state
            self._broker.schedule()
            return Served.NOT
        head = wire.pack_delivery(session.number, first, ranges, batches)
        size = len(head) + sum(map(len, buffers))
        session.peer.send(frames.header(FrameKind.MESSAGES, waiter.request_id, size) + head, *buffers)
        self._broker.schedule()
        return Served.YES

    def _answer_empty(self, waiter: Waiter) -> None:
        head = wire.pack_delivery(waiter.session.number, 0, [], 0)
        waiter.session.peer.send(frames.frame(FrameKind.MESSAGES, waiter.request_id, head))

    def settle(self, peer: Peer, request_id: int, number: int, settlements: list[wire.Settlement]) -> None:
        """Note a consumer's verdicts; the answer leaves when they are as safe as a message. Raises UnknownConsumer."""
        session = self._session(number, peer)
        state = session.group
        if any(each.first < 0 or each.last < each.first for each in settlements):
            raise InvalidArgument("a settlement's first pull sequence is at most its last, and neither is negative")
        queue_id = state.queue.id
        done = self._broker.store.act(
            SettleAction(
                queue_id.subject, queue_id.partition, state.name, session.consumer, self._broker.clock.time_ms(),
                tuple([(each.first, each.last, each.verdict, each.delay_ms) for each in settlements]),
            )
        )  # fmt: skip
        answer = frames.frame(FrameKind.SETTLED, request_id, wire.pack_settled(*done))
        self._broker.settled.append(Held(0, peer, request_id, answer))
        if state.waiters:
            self.to_wake[id(state)] = state
        self._broker.schedule()

    def heartbeat(self, peer: Peer, number: int) -> None:
        """A sign of life. Raises UnknownConsumer if the lease is over."""
        session = self._session(number, peer)
        if session.consumer not in session.group.share.holders:
            raise UnknownConsumer(f"consumer {session.consumer!r} lost its lease: attach again")

    def detach(self, peer: Peer, number: int) -> None:
        """The consumer leaves for good: what it holds goes to the others. Raises UnknownConsumer."""
        session = self._session(number, peer)
        self.groups.detach(session)
        self._leave(session.group, session.consumer, expired=False)

    def _leave(self, state: GroupState, consumer: str, *, expired: bool) -> None:
        queue_id = state.queue.id
        self._broker.store.act(Leave(queue_id.subject, queue_id.partition, state.name, consumer, expired))
        state.seen_ms.pop(consumer, None)
        self.wake(state)
        self._broker.schedule()

    def _session(self, number: int, peer: Peer) -> Session:
        session = self.groups.session(number, peer)
        if session is None:
            raise UnknownConsumer(f"no consumer is attached here as session {number}: attach again")
        session.group.seen_ms[session.consumer] = self._broker.clock.monotonic_ms()
        return session

    def reset(self, state: GroupState, sequence: int) -> None:
        """Move the group to `sequence`; everything handed out is void."""
        queue_id = state.queue.id
        self._broker.store.act(Reset(queue_id.subject, queue_id.partition, state.name, "", sequence))
        self.wake(state)
        self._broker.schedule()

    # --- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer pulls that waited long enough; take from consumers whose lease has ended."""
        now_ms = self._broker.clock.monotonic_ms()
        for state in self.groups:
            for waiter in state.take_late(now_ms):
                self._answer_empty(waiter)
            for consumer in state.expired(now_ms):
                log.info("consumer %s of group %s lost its lease on %s", consumer, state.name, state.queue.id)
                self._leave(state, consumer, expired=True)

    def wake_queues(self, queues: list[Queue]) -> None:
        """Consumers may see more of these queues."""
        for queue in dict.fromkeys(queues):
            for state in self.groups.of_queue(queue):
                if state.waiters:
                    self.wake(state)

    def wake_due(self) -> None:
        """Serve the groups that something happened to during this turn."""
        to_wake, self.to_wake = self.to_wake, {}
        for state in to_wake.values():
            self.wake(state)

    def disconnected(self, peer: Peer) -> None:
        """The connection is gone; its consumers have until their lease ends to come back."""
        for session in self.groups.of_peer(peer):
            self.groups.detach(session)

    def writable(self, peer: Peer) -> None:
        """The connection takes answers again."""
        for session in self.groups.of_peer(peer):
            self.wake(session.group)

    def stop(self, failure: QmqError) -> None:
        """Nobody is served here any more: tell those who wait."""
        for state in self.groups:
            if state.timer is not None:
                state.timer.cancel()
            for waiter in state.waiters:
                self._broker.answer_error(waiter.session.peer, waiter.request_id, failure)
            state.waiters.clear()


def _check_attach(request: wire.Attach) -> None:
    check_name("subject", request.subject)
    check_name("group", request.group)
    check_name("consumer", request.consumer)
    check_name("incarnation", request.incarnation)
    if request.start not in ("earliest", "latest"):
        raise InvalidArgument(f"start is 'earliest' or 'latest', not {request.start!r}")
    if not LEASE_MS_MIN <= request.lease_ms <= LEASE_MS_MAX:
        raise InvalidArgument(f"lease_ms is {LEASE_MS_MIN} to {LEASE_MS_MAX}, not {request.lease_ms}")
    tags = [*request.tags_any, *request.tags_all]
    if len(tags) > 2 * limits.TAGS_MAX or not all(isinstance(tag, str) and 0 < len(tag) <= 255 for tag in tags):
        raise InvalidArgument(f"a filter has up to {limits.TAGS_MAX} tags of 1 to {limits.TAG_BYTES_MAX} bytes each way")
    if request.received < -1:
        raise InvalidArgument(f"received is a pull sequence or -1, not {request.received}")
