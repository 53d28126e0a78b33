"""The broker's turns: what came in during one round of the event loop is done together.

    frames in -> produce: checked, staged            \\
                 pull, settle, attach: done at once   } -> end of turn: one write to the message log, consumers woken,
                                                      /    one write to the action log, answers out, a flush begun if it is due

An answer leaves only when what it promises is true: with `Flush.ASYNC` when it is written, with `Flush.SYNC` when it is flushed. A full
disk refuses messages at once; consumption goes on, and the answers to SETTLE wait until their actions are written. A delivery promises
nothing and leaves first: if the process dies before its PULL is written, the messages are handed out again, and the late verdicts on the
first delivery are stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from qmq import limits
from qmq.broker.config import LEASE_MS_MAX, LEASE_MS_MIN, BrokerConfig
from qmq.broker.delivery import TagFilter, collect, lay_out
from qmq.broker.intake import read_batches
from qmq.broker.sessions import Groups, GroupState, Peer, Session, Waiter
from qmq.clock import Clock
from qmq.errors import DiskFull, InvalidArgument, QmqError, Stopping, UnknownConsumer, UnknownSubject
from qmq.log.actions import Begin, Join, Leave, PullAction, Reset, Return, SettleAction
from qmq.log.config import Flush
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.model import SubjectConfig, check_name
from qmq.wire import frame as frames
from qmq.wire import messages as wire
from qmq.wire.frame import FrameKind

log = logging.getLogger("qmq.broker")

_DUE_WAIT_MS: Final = 60_000

LookUpSubject = Callable[[str], SubjectConfig | None]


class Served(Enum):
    """What became of a waiting pull."""

    YES = 1
    NOT = 2
    """There is nothing for anybody."""
    BLOCKED = 3
    """This consumer must acknowledge, or read its answers, first."""


@dataclass(slots=True)
class _Staged:
    """A PRODUCE that waits for the end of the turn."""

    peer: Peer
    request_id: int
    batches: list[Intake]


@dataclass(slots=True)
class _Held:
    """An answer that waits until the logs are flushed, or written, up to its positions."""

    message_position: int
    action_position: int
    peer: Peer
    answer: bytes


class Broker:
    """One broker on one store, in one event loop. `flusher` is set by whoever runs it (see `qmq.broker.upkeep`)."""

    def __init__(
        self, store: Store, look_up: LookUpSubject, clock: Clock, config: BrokerConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.store = store
        self.config = config
        self.clock = clock
        self.groups = Groups()
        self.on_turn_end: Callable[[], None] = lambda: None
        self.fatal: Callable[[BaseException], None] = _raise
        """Stops the process: an invariant is broken, or storage failed in a way that must not be worked around."""
        self.is_stopping = False
        self._look_up = look_up
        self._loop = loop
        self._routes: dict[tuple[bytes, int], tuple[Queue, int]] = {}
        self._staged: list[_Staged] = []
        self._settled: list[tuple[Peer, bytes]] = []
        self._held: deque[_Held] = deque()
        self._full: dict[Flushable, None] = {}
        self.leisurely: dict[Flushable, None] = {}
        """Outboxes that may wait for the next tick."""
        self._to_wake: dict[int, GroupState] = {}
        self._is_scheduled = False
        for queue in store.queues.values():
            for group in queue.shares:
                self.groups.state(queue, group)

    # --- producing -----------------------------------------------------------------------------------------------------

    def produce(self, peer: Peer, request_id: int, payload: memoryview) -> None:
        """Check the batches of a PRODUCE and stage them. Raises as `intake.read_batches`, and Stopping."""
        if self.is_stopping:
            raise Stopping("the broker is shutting down: send again to its successor")
        self._staged.append(_Staged(peer, request_id, read_batches(payload, self._find_queue)))
        self.schedule()

    def _find_queue(self, subject: bytes, partition: int) -> tuple[Queue, int]:
        found = self._routes.get((subject, partition))
        if found is None:
            found = self._routes[(subject, partition)] = self._open_route(subject, partition)
        return found

    def _open_route(self, subject: bytes, partition: int) -> tuple[Queue, int]:
        try:
            name = check_name("subject", subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject is UTF-8") from None
        config = self.subject(name)
        if partition != 0:
            raise InvalidArgument(f"subject {name!r} has partition 0 only, not {partition}")
        return self.store.open_queue(name, partition), config.body_bytes_max

    def subject(self, name: str) -> SubjectConfig:
        """The subject's settings. Raises UnknownSubject."""
        config = self._look_up(name)
        if config is None:
            raise UnknownSubject(f"there is no subject {name!r}: create it with `qmq subject create {name}`")
        return config

    def subject_or_none(self, name: str) -> SubjectConfig | None:
        """The subject's settings, if it is known."""
        return self._look_up(name)

    def forget_routes(self) -> None:
        """Settings of subjects may have changed: look them up again."""
        self._routes.clear()

    # --- consuming -----------------------------------------------------------------------------------------------------

    def attach(self, peer: Peer, request: wire.Attach) -> wire.Attached:
        """Let a consumer take part in its group. Raises UnknownSubject, InvalidName, InvalidArgument."""
        _check_attach(request)
        queue, _ = self._find_queue(request.subject.encode(), request.partition)
        is_new = request.group not in queue.shares
        state = self.groups.state(queue, request.group)
        names = (request.subject, request.partition, request.group)
        if is_new:
            begin = queue.start_sequence if request.start == "earliest" else queue.next_sequence
            self.store.act(Begin(*names, "", begin))
        holder = state.share.holders.get(request.consumer)
        is_known = holder is not None and holder.incarnation == request.incarnation
        is_resumed = is_known and holder is not None and request.received < holder.next_pull
        if not is_resumed:
            self.store.act(Join(*names, request.consumer, request.incarnation, request.lease_ms, request.received))
        elif holder is not None and request.received + 1 < holder.next_pull:
            self.store.act(Return(*names, request.consumer, request.received))
        state.seen_ms[request.consumer] = self.clock.monotonic_ms()
        session = self.groups.attach(peer, state, request.consumer, TagFilter.of(request.tags_any, request.tags_all))
        self.wake(state)
        self.schedule()
        holder = state.share.holders[request.consumer]
        return wire.Attached(session.number, holder.lease_ms, holder.next_pull, int(is_resumed))

    def pull(self, peer: Peer, request_id: int, request: wire.Pull, deadline_ms: int) -> None:
        """Answer a PULL now or when there is something. Raises UnknownConsumer, MessagesExpired, LogDamaged."""
        session = self._session(request.session, peer)
        if not 0 < request.messages_max <= limits.PULL_MESSAGES_MAX:
            raise InvalidArgument(f"messages_max of a pull is 1 to {limits.PULL_MESSAGES_MAX}, not {request.messages_max}")
        wait_ms = min(request.wait_ms, limits.WAIT_MS_MAX, deadline_ms or limits.WAIT_MS_MAX)
        until = self.clock.monotonic_ms() + wait_ms
        bytes_max = min(max(request.bytes_max, 1), limits.PULL_BYTES_MAX)
        waiter = Waiter(session, request_id, request.messages_max, bytes_max, until)
        session.group.waiters.append(waiter)
        self.wake(session.group)
        if not wait_ms and waiter in session.group.waiters:
            session.group.waiters.remove(waiter)
            self._answer_empty(waiter)
        self.schedule()

    def _wake_when_due(self, state: GroupState) -> None:
        """Somebody waits: look again when the next message that came back may go out."""
        due_ms = state.share.next_due_ms()
        if due_ms is None or due_ms == state.wakes_ms:
            return
        if state.timer is not None:
            state.timer.cancel()
        state.wakes_ms = due_ms
        delay_ms = min(max(due_ms - self.clock.time_ms(), 1), _DUE_WAIT_MS)
        state.timer = self._loop.call_later(delay_ms / 1000, self._due, state)

    def _due(self, state: GroupState) -> None:
        state.timer, state.wakes_ms = None, -1
        self.wake(state)

    def wake(self, state: GroupState) -> None:
        """The group may have messages: serve its waiting pulls, the longest waiting first.

        A consumer that must acknowledge or read its answers first keeps its place, and does not keep others waiting.
        """
        blocked: list[Waiter] = []
        while state.waiters:
            waiter = state.waiters.popleft()
            try:
                served = self._serve(waiter)
            except QmqError as failure:
                self.answer_error(waiter.session.peer, waiter.request_id, failure)
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
            self.store, queue, share, state.reader, session.tags, room, waiter.bytes_max, self.clock.time_ms()
        )
        if not found.pulled:
            return Served.NOT
        ranges, buffers, batches = lay_out(self.store, queue, found)
        first = holder.next_pull
        queue_id = queue.id
        self.store.act(
            PullAction(queue_id.subject, queue_id.partition, state.name, session.consumer, tuple(found.pulled))
        )
        if not ranges:
            if share.next_sequence < queue.visible_sequence:
                self._to_wake[id(state)] = state
            self.schedule()
            return Served.NOT
        head = wire.pack_delivery(session.number, first, ranges, batches)
        size = len(head) + sum(map(len, buffers))
        session.peer.send(frames.header(FrameKind.MESSAGES, waiter.request_id, size) + head, *buffers)
        self.schedule()
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
        done = self.store.act(
            SettleAction(
                queue_id.subject, queue_id.partition, state.name, session.consumer, self.clock.time_ms(),
                tuple([(each.first, each.last, each.verdict, each.delay_ms) for each in settlements]),
            )
        )  # fmt: skip
        answer = frames.frame(FrameKind.SETTLED, request_id, wire.pack_settled(*done))
        self._settled.append((peer, answer))
        if state.waiters:
            self._to_wake[id(state)] = state
        self.schedule()

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
        self.store.act(Leave(queue_id.subject, queue_id.partition, state.name, consumer, expired))
        state.seen_ms.pop(consumer, None)
        self.wake(state)
        self.schedule()

    def _session(self, number: int, peer: Peer) -> Session:
        session = self.groups.session(number, peer)
        if session is None:
            raise UnknownConsumer(f"no consumer is attached here as session {number}: attach again")
        session.group.seen_ms[session.consumer] = self.clock.monotonic_ms()
        return session

    def reset(self, state: GroupState, sequence: int) -> None:
        """Move the group to `sequence`; everything handed out is void."""
        queue_id = state.queue.id
        self.store.act(Reset(queue_id.subject, queue_id.partition, state.name, "", sequence))
        self.wake(state)
        self.schedule()

    def fetch(self, request: wire.Fetch) -> list[bytes]:
        """Committed batches from a sequence on, `bytes_max` or so. Raises UnknownSubject, LogDamaged."""
        self.subject(request.subject)
        queue, found, size = self.store.queue(request.subject, request.partition), list[bytes](), 0
        if queue is None or request.sequence >= queue.visible_sequence or queue.index.count == queue.index.first:
            return found
        number = queue.index.find_sequence(max(request.sequence, queue.start_sequence))
        for entry in queue.index.entries(number, 1024):
            if size >= min(request.bytes_max, limits.PULL_BYTES_MAX) or entry.next_sequence > queue.visible_sequence:
                break
            if entry.next_sequence > request.sequence:
                found += self.store.read(queue, entry)
                size += entry.total_bytes
        return found

    # --- the turn ------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Have a turn at the end of this round of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.turn)

    def turn(self) -> None:
        """Write what was staged and done, wake consumers, let answers go. Any failure that is not a client's is fatal."""
        self._is_scheduled = False
        try:
            self._turn()
        except Exception as cause:
            self.fatal(cause)

    def _turn(self) -> None:
        if self._staged:
            self._append()
        to_wake, self._to_wake = self._to_wake, {}
        for state in to_wake.values():
            self.wake(state)
        self.flush_outboxes()
        if self.store.unwritten:
            self._write_actions()
            self.flush_outboxes()
        self.on_turn_end()

    def _append(self) -> None:
        staged, self._staged = self._staged, []
        batches = [batch for each in staged for batch in each.batches]
        try:
            results = self.store.append(batches)
        except DiskFull as failure:
            for each in staged:
                self.answer_error(each.peer, each.request_id, failure)
            return
        if self.store.config.flush is Flush.ASYNC:
            self.wake_queues([batch.queue for batch in batches])
        at, end = 0, self.store.messages.end
        for each in staged:
            produced = results[at : at + len(each.batches)]
            at += len(each.batches)
            answer = frames.frame(FrameKind.PRODUCED, each.request_id, wire.pack_produced(produced))
            self._answer_when_safe(each.peer, answer, end, 0)

    def wake_queues(self, queues: list[Queue]) -> None:
        """Consumers may see more of these queues."""
        for queue in dict.fromkeys(queues):
            for state in self.groups.of_queue(queue):
                if state.waiters:
                    self.wake(state)

    def _write_actions(self) -> None:
        try:
            self.store.write_actions()
        except DiskFull as failure:
            log.warning("consumption goes on in memory: %s", failure)
            return
        settled, self._settled = self._settled, []
        for peer, answer in settled:
            self._answer_when_safe(peer, answer, 0, self.store.actions.end)

    def _answer_when_safe(self, peer: Peer, answer: bytes, message_position: int, action_position: int) -> None:
        if self.store.config.flush is Flush.ASYNC:
            peer.send(answer)
        else:
            self._held.append(_Held(message_position, action_position, peer, answer))

    @property
    def awaits_flush(self) -> bool:
        """Whether an answer waits for a flush."""
        return bool(self._held)

    def flushed(self, grown: list[Queue]) -> None:
        """A flush is done: let go the answers that waited for it, wake the consumers of what became visible."""
        messages, actions = self.store.messages.flushed, self.store.actions.flushed
        kept: deque[_Held] = deque()
        for held in self._held:
            if held.message_position <= messages and held.action_position <= actions:
                held.peer.send(held.answer)
            else:
                kept.append(held)
        self._held = kept
        self.wake_queues(grown)
        self.turn()

    def answer_error(self, peer: Peer, request_id: int, failure: QmqError) -> None:
        """Tell the asker what went wrong."""
        peer.send(frames.frame(FrameKind.ERROR, request_id, wire.pack_error(failure)))
        self.schedule()

    def register_outbox(self, outbox: Flushable) -> None:
        """`outbox` has something to write at the end of the turn."""
        self._full[outbox] = None
        self.schedule()

    def flush_outboxes(self) -> None:
        """Write what the connections have to say."""
        full, self._full = self._full, {}
        for outbox in full:
            outbox.flush()

    # --- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer pulls that waited long enough; take from consumers whose lease has ended."""
        now_ms = self.clock.monotonic_ms()
        for state in self.groups:
            for waiter in state.take_late(now_ms):
                self._answer_empty(waiter)
            for consumer in state.expired(now_ms):
                log.info("consumer %s of group %s lost its lease on %s", consumer, state.name, state.queue.id)
                self._leave(state, consumer, expired=True)
        self._full.update(self.leisurely)
        self.leisurely.clear()
        if self._full or self._settled or self.store.unwritten:
            self.schedule()

    def disconnected(self, peer: Peer) -> None:
        """The connection is gone; its consumers have until their lease ends to come back."""
        for session in self.groups.of_peer(peer):
            self.groups.detach(session)

    def writable(self, peer: Peer) -> None:
        """The connection takes answers again."""
        for session in self.groups.of_peer(peer):
            self.wake(session.group)
        self.schedule()


class Flushable:
    """Something with an outbox."""

    def flush(self) -> None:
        """Write the outbox."""
        raise NotImplementedError


def _raise(cause: BaseException) -> None:
    raise cause


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
