"""Serves consumers of unordered subjects: they attach, pull, settle and leave; groups are woken
when they have messages.

Only committed messages are delivered. A delivery is sent immediately, before its PULL is committed:
if the process dies, or the mastership is lost before that, the messages are handed out again, and
late verdicts on the first delivery are stale.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Final

from qmq import limits
from qmq.broker.config import IDLE_CHECK_MS, LEASE_MS_MAX, LEASE_MS_MIN, granted_lease_ms
from qmq.broker.dead_letters import DeadLetterWriter
from qmq.broker.dispatch.pull import (
    Begun,
    Decided,
    Failures,
    LaidOut,
    PullResult,
    SharedDelivery,
    TagFilter,
    check_tags,
    collect,
    decide,
    failures_in,
    lay_out,
    put_back,
    readable_messages,
)
from qmq.broker.dispatch.sessions import (
    CheckTimes,
    ConsumerFilter,
    Peer,
    PendingAnswer,
    QueueGroup,
    QueueGroups,
    Session,
    Waiter,
)
from qmq.broker.parts import ServingBroker
from qmq.broker.reading.cold_reads import ColdReads
from qmq.errors import (
    InvalidArgument,
    LogDamaged,
    OrderMismatch,
    Overloaded,
    QmqError,
    UnknownConsumer,
)
from qmq.log.actions import (
    Begin,
    Cause,
    Forget,
    Join,
    Leave,
    PullAction,
    Reset,
    Return,
    SettleAction,
)
from qmq.log.queue import Queue
from qmq.log.reading import ColdRead
from qmq.model import BROADCAST, GroupSettings, base_group, check_group, check_name, is_dead_letters
from qmq.process.files import refusal_of
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Verdict

log = logging.getLogger("qmq.broker")

_DUE_WAIT_MS: Final = 60_000
_FAILED: Final = (Verdict.NACK, Verdict.DEAD)
_UNLIMITED: Final = 1 << 62


class Served(Enum):
    """The result of serving a waiting pull."""

    YES = 1
    NOT = 2
    """No message is available for any consumer of the group."""
    BLOCKED = 3
    """This consumer must first acknowledge, or read its answers; or it is paused."""


class Dispatch:
    """Serves consumers while the broker serves.
    Created again each time the broker begins to serve.
    """

    def __init__(self, broker: ServingBroker) -> None:
        self._store = broker.store
        self._clock = broker.clock
        self._config = broker.config
        self._loop = broker.loop
        self._responses = broker.responses
        self._rules = broker.rules
        self._report_damage = broker.report_damage
        self._broker = broker
        self._subjects = broker.subjects
        self.groups = QueueGroups(broker.counters)
        self.to_wake: dict[int, QueueGroup] = {}
        """Groups with changes in this turn."""
        self._late_pulls: CheckTimes[QueueGroup] = CheckTimes()
        """When a waiting pull of each group is to be answered without messages."""
        self._leases: CheckTimes[QueueGroup] = CheckTimes()
        """When a lease in each group may end."""
        self.dead_letters = DeadLetterWriter(broker)
        self._shared = SharedDelivery()
        self._cold_reads = ColdReads(broker.store, broker.loop, self.wake)
        self._recent_bytes = broker.config.recent_bytes
        for queue in broker.store.queues.values():
            for group in queue.shares:
                state = self.groups.state(queue, group)
                self.dead_letters.found(state)
                self._leases.at(state, 0)

    # --- consuming --------------------------------------------------------------------------------

    def attach(self, peer: Peer, request: wire.Attach) -> wire.Attached:
        """Attach a consumer to its group. Raises UnknownSubject, InvalidName, InvalidArgument."""
        _check_attach(request)
        queue = self._subjects.find_queue(request.subject.encode(), request.partition).queue
        if queue.is_ordered:
            raise OrderMismatch(
                f"subject {request.subject!r} is ordered: consume it with mq.ordered_consumer"
            )
        if request.start == wire.RESUME and not _can_resume(queue, request):
            return wire.Attached(0, granted_lease_ms(request.lease_ms), 0, 0)
        self.groups.require_room(peer, queue.shares.get(request.group), request.consumer)
        is_new = request.group not in queue.shares
        state = self.groups.state(queue, request.group)
        if request.start != wire.RESUME:  # who resumes only hands in verdicts
            state.require_same_filter(ConsumerFilter.of(request), request.consumer)
        names = (request.subject, request.partition, request.group)
        if is_new:
            begin = queue.start_sequence if request.start == "earliest" else queue.next_sequence
            self._store.act(Begin(*names, "", begin, self._clock.time_ms()))
        holder = state.share.holders.get(request.consumer)
        is_known = holder is not None and holder.incarnation == request.incarnation
        is_resumed = is_known and holder is not None and request.received < holder.next_pull
        if not is_resumed:
            self._put_back(state, request.consumer, Cause.AGAIN)
            self._store.act(
                Join(
                    *names,
                    request.consumer,
                    request.incarnation,
                    granted_lease_ms(request.lease_ms),
                    request.received,
                )
            )
        elif holder is not None and request.received + 1 < holder.next_pull:
            self._store.act(Return(*names, request.consumer, request.received))
        state.seen_ms[request.consumer] = now_ms = self._clock.monotonic_ms()
        self._leases.at(state, now_ms + granted_lease_ms(request.lease_ms) + 1)
        session = self.groups.attach(
            peer, state, request.consumer, TagFilter.of(request.tags_any, request.tags_all)
        )
        self.wake(state)
        self._broker.schedule()
        holder = state.share.holders[request.consumer]
        attempts_max = self._settings(state).attempts_max
        return wire.Attached(
            session.number,
            granted_lease_ms(holder.lease_ms),
            holder.next_pull,
            int(is_resumed),
            attempts_max,
            knows_kept=1,
        )

    def _settings(self, state: QueueGroup) -> GroupSettings:
        """The group's retry settings. Messages of a dead-letter queue never die."""
        subject = state.queue.id.subject
        found = self._rules.settings(subject, base_group(state.name))
        return replace(found, attempts_max=0) if is_dead_letters(subject) else found

    def _failures(self, state: QueueGroup) -> Failures:
        return failures_in(self._store, state.queue, state.reader)

    def pull(self, peer: Peer, request_id: int, request: wire.Pull, deadline_ms: int) -> None:
        """Answer a PULL now, or when there are messages; waiting needs no turn. Raises
        UnknownConsumer, MessagesExpired, LogDamaged.
        """
        session = self._session(request.session, peer)
        if not 0 < request.messages_max <= limits.PULL_MESSAGES_MAX:
            raise InvalidArgument(
                f"messages_max of a pull is 1 to {limits.PULL_MESSAGES_MAX}, not "
                f"{request.messages_max}"
            )
        if session.pulls >= limits.SESSION_PULLS_MAX:
            # counted now and then only: 500 consumers of a group have 500 waiting pulls
            session.pulls = sum([each.session is session for each in session.group.waiters])
        if session.pulls >= limits.SESSION_PULLS_MAX:
            raise Overloaded(
                f"{limits.SESSION_PULLS_MAX} pulls of this session are already waiting: wait "
                "for their answers"
            )
        wait_ms = min(request.wait_ms, limits.WAIT_MS_MAX, deadline_ms or limits.WAIT_MS_MAX)
        until = self._clock.monotonic_ms() + wait_ms
        bytes_max = min(max(request.bytes_max, 1), limits.PULL_BYTES_MAX)
        waiter = Waiter(session, request_id, request.messages_max, bytes_max, until, request.kept)
        session.group.waiters.append(waiter)
        session.pulls += 1
        self._late_pulls.at(session.group, until)
        self.wake(session.group)
        if not wait_ms and waiter in session.group.waiters:
            session.group.waiters.remove(waiter)
            self._answer_empty(waiter)

    def _wake_when_due(self, state: QueueGroup) -> None:
        """A pull waits: check again when the next requeued message is due."""
        due_ms = state.share.next_due_ms()
        if due_ms is None or due_ms == state.wakes_ms:
            return
        if state.timer is not None:
            state.timer.cancel()
        state.wakes_ms = due_ms
        delay_ms = min(max(due_ms - self._clock.time_ms(), 1), _DUE_WAIT_MS)
        state.timer = self._loop.call_later(delay_ms / 1000, self._due, state)

    def _due(self, state: QueueGroup) -> None:
        state.timer, state.wakes_ms = None, -1
        self.wake(state)

    def wake(self, state: QueueGroup) -> None:
        """The group may have messages: serve its waiting pulls, the longest waiting first.

        A consumer that is paused, or must acknowledge or read its answers first, keeps its place,
        and does not keep others waiting.
        """
        if self._broker.is_paused:
            return
        blocked: list[Waiter] = []
        while state.waiters:
            waiter = state.waiters.popleft()
            try:
                served = self._serve(waiter)
            except (QmqError, OSError) as cause:
                failure = refusal_of(cause)
                if isinstance(failure, ColdRead):
                    failure.then(state, lambda failure: self._read_again(state, failure))
                    blocked.append(waiter)
                    break
                if isinstance(failure, LogDamaged) and self._report_damage(failure):
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

    def _read_again(self, state: QueueGroup, failure: QmqError | None) -> None:
        """The data that the group's pulls wait for has arrived,
        or the object store cannot provide it.
        """
        if failure is None:
            self.wake(state)
            return
        waiters, state.waiters = list(state.waiters), deque()
        for waiter in waiters:
            self._broker.answer_error(waiter.session.peer, waiter.request_id, failure)

    def _serve(self, waiter: Waiter) -> Served:
        """Hand out messages to one waiting pull. Raises UnknownConsumer, MessagesExpired,
        LogDamaged, ColdRead.
        """
        session = waiter.session
        state = session.group
        share, queue = state.share, state.queue
        holder = share.holders.get(session.consumer)
        if holder is None:
            raise UnknownConsumer(f"consumer {session.consumer!r} lost its lease: attach again")
        if share.next_sequence >= queue.visible_sequence and not share.requeued:
            return Served.NOT
        room = min(waiter.messages_max, limits.CONSUMER_UNACKED_MAX - holder.unacked)
        room_bytes = session.outstanding.room(holder, queue.index)
        if room <= 0 or room_bytes <= 0 or not session.peer.is_writable:
            return Served.BLOCKED
        if self._rules.is_paused(
            queue.id.subject, state.name, session.consumer, session.peer.client
        ):
            return Served.BLOCKED
        delivery = self._delivery(waiter, room, min(waiter.bytes_max, room_bytes))
        if delivery is None:
            return Served.NOT
        found, ranges, buffers, batches = delivery
        first = holder.next_pull
        queue_id = queue.id
        self._store.act(
            PullAction(
                queue_id.subject,
                queue_id.partition,
                state.name,
                session.consumer,
                tuple(found.pulled),
            )
        )
        state.filtered += found.filtered
        state.counters.filtered += found.filtered
        if not ranges:
            if share.next_sequence < queue.visible_sequence:
                self.to_wake[id(state)] = state
            self._broker.schedule()
            return Served.NOT
        head = wire.pack_delivery(session.number, first, ranges, batches)
        size = len(head) + sum(map(len, buffers))
        session.peer.send(
            frames.header(FrameKind.MESSAGES, waiter.request_id, size) + head, *buffers
        )
        session.peer.delivered(queue_id.subject, found.messages, size)
        session.outstanding.delivered(found.bytes)
        state.counters.handed_out(found.messages, found.bytes, found.retried)
        self._broker.schedule()
        return Served.YES

    def _delivery(self, waiter: Waiter, messages_max: int, bytes_max: int) -> LaidOut | None:
        """What a waiting pull gets; None if nothing. Raises as `_serve`."""
        session, store = waiter.session, self._store
        state = session.group
        queue, reader = state.queue, state.reader
        is_plain = session.tags is None and waiter.kept < 0
        if is_plain:
            delivery = self._shared.find(store, reader, state.share, messages_max, bytes_max)
            if delivery is not None:
                return delivery
        warm_bytes = self._warm_bytes(state)
        if not warm_bytes:
            return None
        bytes_max = min(bytes_max, warm_bytes)
        found = self._found(session, messages_max, bytes_max)
        if not found.pulled:
            return None
        try:
            delivery = LaidOut(found, *lay_out(store, queue, found, waiter.kept))
        except LogDamaged:
            readable = readable_messages(store, queue, found)
            if not readable:
                raise
            found = self._found(session, readable, bytes_max)
            delivery = LaidOut(found, *lay_out(store, queue, found, waiter.kept))
        if is_plain and len(self.groups.of_queue(queue)) > 1:
            self._shared.note(store, reader, state.share.next_sequence, delivery)
        return delivery

    def _warm_bytes(self, state: QueueGroup) -> int:
        """How many bytes of the group's new messages the event loop may read now; 0 means wait
        until the group is woken.
        """
        number = state.reader.number_of(state.share.next_sequence)
        if state.share.requeued or number >= state.queue.index.count:
            return _UNLIMITED
        entry = state.reader.entry(number)
        if self._store.messages.end - entry.position <= self._recent_bytes:
            return _UNLIMITED
        return self._cold_reads.allowance(state, number, entry.cumulative_bytes)

    def _found(self, session: Session, messages_max: int, bytes_max: int) -> PullResult:
        """The result of this consumer's next pull."""
        state, now_ms = session.group, self._clock.time_ms()
        return collect(
            self._store,
            state.reader,
            state.name,
            state.share,
            session.tags,
            messages_max,
            bytes_max,
            now_ms,
        )

    def _answer_empty(self, waiter: Waiter) -> None:
        head = wire.pack_delivery(waiter.session.number, 0, [], 0)
        waiter.session.peer.send(frames.frame(FrameKind.MESSAGES, waiter.request_id, head))

    def settle(
        self, peer: Peer, request_id: int, number: int, settlements: list[wire.Settlement]
    ) -> None:
        """Record a consumer's verdicts; the answer is sent when they are as safe as a message.
        Raises UnknownConsumer.
        """
        session = self._session(number, peer)
        state = session.group
        holder = state.share.holders.get(session.consumer)
        handed_out = holder.next_pull if holder is not None else state.share.pulls
        asked, has_later, has_failed = 0, False, False
        for first, last, verdict, *_ in settlements:
            if first < 0 or last < first:
                raise InvalidArgument(
                    "a settlement's first pull sequence must not be above its last, and "
                    "neither may be negative"
                )
            asked += last - first + 1
            has_later = has_later or last >= handed_out
            has_failed = has_failed or verdict in _FAILED
        if has_later:
            raise InvalidArgument(
                f"pull sequences before {handed_out} were handed out, but the settlement "
                "names later ones"
            )
        if has_failed:
            can_die = not is_dead_letters(state.queue.id.subject)
            held = holder.held if holder else ()
            decided = decide(
                held, settlements, self._settings(state), self._failures(state), can_die=can_die
            )
            settled = self._act_settled(state, session.consumer, decided, Cause.VERDICT)
            self._store.unwritten.hurry()
        else:
            kept = tuple([each[:4] for each in settlements])
            settled = self._act_settled(state, session.consumer, Decided(kept), Cause.VERDICT)
        state.counters.settled(settlements, asked - settled)
        answer = frames.frame(
            FrameKind.SETTLED, request_id, wire.pack_settled(settled, asked - settled)
        )
        self._responses.unwritten.append(PendingAnswer(0, peer, request_id, answer))
        if state.waiters:
            self.to_wake[id(state)] = state
        self._broker.schedule()

    def _act_settled(self, state: QueueGroup, consumer: str, decided: Decided, cause: Cause) -> int:
        """Apply the decisions. Returns the number of settled messages."""
        queue_id = state.queue.id
        deaths = state.share.deaths
        done = self._store.act(
            SettleAction(
                queue_id.subject,
                queue_id.partition,
                state.name,
                consumer,
                self._clock.time_ms(),
                decided.settlements,
                decided.errors,
                int(cause),
            )
        )
        if state.share.deaths > deaths:
            state.counters.dead += state.share.deaths - deaths
            self.dead_letters.died(state)
        return done.settled

    def _put_back(self, state: QueueGroup, consumer: str, cause: Cause) -> None:
        """Requeue, or let die, the messages of a lost consumer. Raises ColdRead, and then nothing
        was changed.
        """
        holder = state.share.holders.get(consumer)
        begun = state.begun.get(consumer, Begun())
        if holder is not None and holder.held:
            decided = put_back(
                holder.held, begun.__contains__, self._settings(state), self._failures(state)
            )
            self._act_settled(state, consumer, decided, cause)
        state.begun.pop(consumer, None)

    def begun(self, peer: Peer, number: int, first: int, last: int) -> None:
        """A consumer begins to work on messages that failed before. Raises UnknownConsumer."""
        session = self._session(number, peer)
        state, holder = session.group, session.group.share.holders.get(session.consumer)
        begun = state.begun.setdefault(session.consumer, Begun())
        begun.forget(holder.held if holder is not None else ())
        begun.add(first, last)

    def heartbeat(self, peer: Peer, number: int) -> None:
        """Renew the lease. Raises UnknownConsumer if it has ended."""
        session = self._session(number, peer)
        if session.consumer not in session.group.share.holders:
            raise UnknownConsumer(f"consumer {session.consumer!r} lost its lease: attach again")

    def detach(self, peer: Peer, number: int, received: int) -> None:
        """The consumer leaves for good: its messages go to the others. Raises UnknownConsumer.

        Messages behind `received` go back without counting an attempt. Such a delivery exists when
        a pull waited while the consumer released its unseen messages: the broker handed them out
        again before it read the DETACH.
        """
        session = self._session(number, peer)
        self.groups.detach(session)
        holder = session.group.share.holders.get(session.consumer)
        received = max(received, -1)
        if holder is not None and received + 1 < holder.next_pull:
            queue_id = session.group.queue.id
            self._store.act(
                Return(
                    queue_id.subject,
                    queue_id.partition,
                    session.group.name,
                    session.consumer,
                    received,
                )
            )
        self._leave(session.group, session.consumer, expired=False)

    def _leave(self, state: QueueGroup, consumer: str, *, expired: bool) -> None:
        self._put_back(state, consumer, Cause.LOST if expired else Cause.LEFT)
        queue_id = state.queue.id
        self._store.act(Leave(queue_id.subject, queue_id.partition, state.name, consumer, expired))
        state.seen_ms.pop(consumer, None)
        state.filter_users.discard(consumer)
        if BROADCAST in state.name:
            self._leases.at(state, self._clock.monotonic_ms())
        self.wake(state)
        self._broker.schedule()

    def _session(self, number: int, peer: Peer) -> Session:
        session = self.groups.session(number, peer)
        if session is None:
            raise UnknownConsumer(f"no consumer is attached here as session {number}: attach again")
        session.group.seen_ms[session.consumer] = self._clock.monotonic_ms()
        return session

    def reset(self, state: QueueGroup, sequence: int) -> None:
        """Move the group to `sequence`; all deliveries become void."""
        queue_id = state.queue.id
        self._store.act(Reset(queue_id.subject, queue_id.partition, state.name, "", sequence))
        self.wake(state)
        self._broker.schedule()

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer pulls that waited long enough;
        put back the messages of consumers whose lease has ended.
        """
        now_ms = self._clock.monotonic_ms()
        self.dead_letters.work()
        for state in self._late_pulls.due(now_ms):
            for waiter in state.take_late(now_ms):
                self._answer_empty(waiter)
            if state.waiters:
                self._late_pulls.at(state, min([waiter.deadline_ms for waiter in state.waiters]))
        for state in self._leases.due(now_ms):
            if self.groups.is_known(state):
                try:
                    self._check_leases(state, now_ms)
                except ColdRead as cold:
                    self._leases.at(state, now_ms + (cold.retry_after_ms or 0))

    def _check_leases(self, state: QueueGroup, now_ms: int) -> None:
        """Check a group for consumers whose lease has ended."""
        for consumer in state.expired(now_ms):
            log.info(
                "consumer %s of group %s lost its lease on %s", consumer, state.name, state.queue.id
            )
            state.counters.leases_lost += 1
            self._leave(state, consumer, expired=True)
        if state.share.holders:
            self._leases.at(state, state.next_lease_end_ms())
        if BROADCAST in state.name:
            self._forget_idle(state, now_ms)

    def _forget_idle(self, state: QueueGroup, now_ms: int) -> None:
        """Delete the progress of a broadcast group's consumer that has been away for long."""
        if state.share.holders:
            state.idle_since_ms = -1
        elif state.share.dying:
            state.idle_since_ms = -1
            self._leases.at(state, now_ms + IDLE_CHECK_MS)
        elif state.idle_since_ms < 0:
            state.idle_since_ms = now_ms
            self._leases.at(state, now_ms + self._config.broadcast_idle_ms)
        elif now_ms - state.idle_since_ms < self._config.broadcast_idle_ms:
            self._leases.at(state, state.idle_since_ms + self._config.broadcast_idle_ms)
        else:
            log.info(
                (
                    "consumer %s of a broadcast group has not read %s for too long: its progress "
                    "is deleted"
                ),
                state.name,
                state.queue.id,
            )
            self.forget(state)

    def forget(self, state: QueueGroup) -> None:
        """The group is deleted, with its progress. It has no consumers and no dying messages."""
        self._store.act(Forget(state.queue.id.subject, state.queue.id.partition, state.name, ""))
        self.groups.drop(state)

    def drop_queue(self, queue: Queue, failure: QmqError) -> None:
        """The queue's subject was deleted, and no group has a share of it:
        its consumers get the error.
        """
        for state in list(self.groups.of_queue(queue)):
            self._end(state, failure)
            self.to_wake.pop(id(state), None)
            self.groups.drop(state)

    def wake_queues(self, queues: Iterable[Queue]) -> None:
        """Consumers may see more messages of these queues."""
        by_queue = self.groups.by_queue
        for queue in queues:
            for state in by_queue.get(id(queue), ()):
                if state.waiters:
                    self.wake(state)

    def wake_due(self) -> None:
        """Serve the groups with changes in this turn."""
        to_wake, self.to_wake = self.to_wake, {}
        for state in to_wake.values():
            self.wake(state)

    def disconnected(self, peer: Peer) -> None:
        """The connection was closed. Its consumers may reconnect until their leases end."""
        for session in self.groups.of_peer(peer):
            self.groups.detach(session)

    def writable(self, peer: Peer) -> None:
        """The connection takes answers again."""
        for session in self.groups.of_peer(peer):
            self.wake(session.group)

    def stop(self, failure: QmqError) -> None:
        """Fail all waiting pulls: the broker serves no consumer any more."""
        for state in self.groups:
            self._end(state, failure)

    def _end(self, state: QueueGroup, failure: QmqError) -> None:
        if state.timer is not None:
            state.timer.cancel()
        for waiter in state.waiters:
            self._broker.answer_error(waiter.session.peer, waiter.request_id, failure)
        state.waiters.clear()


def _can_resume(queue: Queue, request: wire.Attach) -> bool:
    """Whether the consumer still holds what it had received."""
    share = queue.shares.get(request.group)
    holder = share.holders.get(request.consumer) if share is not None else None
    return (
        holder is not None
        and holder.incarnation == request.incarnation
        and request.received < holder.next_pull
    )


def _check_attach(request: wire.Attach) -> None:
    check_name("subject", request.subject)
    check_group(request.group)
    check_name("consumer", request.consumer)
    if BROADCAST in request.group and not request.group.endswith(BROADCAST + request.consumer):
        raise InvalidArgument(
            f"{request.group!r} belongs to another consumer of the broadcast group, not to "
            f"{request.consumer!r}"
        )
    check_name("incarnation", request.incarnation)
    if request.start not in ("earliest", "latest", wire.RESUME):
        raise InvalidArgument(
            f"start is 'earliest', 'latest' or '{wire.RESUME}', not "
            f"{request.start[: limits.ERROR_VALUE_CHARS_MAX]!r}"
        )
    if not LEASE_MS_MIN <= request.lease_ms <= LEASE_MS_MAX:
        raise InvalidArgument(
            f"lease_ms is {LEASE_MS_MIN} to {LEASE_MS_MAX}, not {request.lease_ms}"
        )
    check_tags([*request.tags_any, *request.tags_all])
    if not -1 <= request.received < 1 << 62:
        raise InvalidArgument(f"received is a pull sequence or -1, not {request.received}")
