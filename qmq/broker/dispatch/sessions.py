"""Groups on their queues, consumers that are attached over a connection, waiting pulls, and answers
that wait for a commit. No I/O.

Rules:
* A *session* is a consumer on one connection. The consumer may come back with another session,
  under the same incarnation, and keeps its messages.
* Its *lease* counts from the last heartbeat, by a monotonic clock, and starts over when the broker
  starts. When the lease ends, the consumer's messages go to the others.
* Waiting pulls are served in the order in which they came, so that equally fast consumers get
  equally many messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from qmq import limits
from qmq.broker.config import granted_lease_ms
from qmq.broker.dispatch.pull import BatchReader, Begun, TagFilter, UnackedBytes
from qmq.broker.metrics import BrokerCounters, GroupCounters
from qmq.errors import InvalidArgument, Overloaded, QmqError
from qmq.log.group_state import GroupState
from qmq.log.queue import Queue
from qmq.wire.frame_payloads import UNSAID, Attach

K = TypeVar("K")
T = TypeVar("T")


class CheckTimes(Generic[T]):
    """When items are to be checked next, so that the cost of a tick depends on the due items only.
    Items are distinguished by identity; times are milliseconds of a monotonic clock.

    Each item has at most one time, the earliest that was requested. A due item is forgotten: the
    caller that checks it sets the next time. An item whose own deadline moved (a lease was renewed,
    a pull was answered) does not change its time here: the check comes too early, and sets a later
    time. Renewing therefore costs nothing, and an item is checked about once for each lease or wait
    that it begins.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._at: dict[int, int] = {}
        """The time of each item, by `id`; other entries of it in the heap are outdated."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._at)

    def at(self, item: T, time_ms: int) -> None:
        """Check the item at this time, unless it has an earlier time."""
        known = self._at.get(id(item))
        if known is None or time_ms < known:
            self._at[id(item)] = time_ms
            heappush(self._heap, (time_ms, next(self._numbers), item))

    def due(self, now_ms: int) -> Iterator[T]:
        """The due items, the earliest first. An item that is added meanwhile comes with the next
        call, even if it is due.
        """
        found: list[T] = []
        while self._heap and self._heap[0][0] <= now_ms:
            time_ms, _, item = heappop(self._heap)
            if self._at.get(id(item)) == time_ms:
                del self._at[id(item)]
                found.append(item)
        return iter(found)


class Peer(Protocol):
    """The connection of a session. Its answers wait in its outbox for the end of the turn."""

    @property
    def is_writable(self) -> bool:
        """False while its answers are not read."""
        ...

    @property
    def client(self) -> str:
        """The client's name."""
        ...

    def send(self, *buffers: bytes) -> None:
        """Queue bytes for the end of the turn."""
        ...

    def flush(self) -> None:
        """Write the queued bytes. Called after `BrokerTurn.register_outbox`."""
        ...

    def delivered(self, subject: str, messages: int, size: int) -> None:
        """Count messages, of `size` bytes together, that were sent."""
        ...


@dataclass(slots=True)
class PendingAnswer:
    """An answer that waits until its index is committed."""

    index: int
    peer: Peer
    request_id: int
    answer: bytes


class PendingResponses:
    """Answers in the order of their indexes, and coroutines of this process that wait for a commit.
    An answer waits in one of three ways, and one that waits for a flush does not delay the others:

        unwritten     the index is not known yet: the entry is written at the end of the turn
        for_commit    answered when its index is committed
        for_flush     answered when its index is flushed on a majority
    """

    def __init__(self) -> None:
        self.unwritten: list[PendingAnswer] = []
        """Answers to entries that are not written yet; they get their index then."""
        self._unwritten_waiters: list[asyncio.Future[None]] = []
        self.for_commit: deque[PendingAnswer] = deque()
        self.for_flush: deque[PendingAnswer] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def wait(self, waiter: asyncio.Future[None], index: int | None) -> None:
        """Set the future when `index` is committed; None: the index of the unwritten entries."""
        if index is None:
            self._unwritten_waiters.append(waiter)
        else:
            self._waiters.append((index, waiter))

    @property
    def has_unwritten(self) -> bool:
        """Whether an answer waits for an unwritten entry."""
        return bool(self.unwritten or self._unwritten_waiters)

    def written(self, index: int) -> None:
        """All entries are in the log, up to `index`."""
        unwritten, self.unwritten = self.unwritten, []
        for held in unwritten:
            held.index = index
        self.for_commit.extend(unwritten)
        if self._unwritten_waiters:
            self._waiters.extend([(index, waiter) for waiter in self._unwritten_waiters])
            self._unwritten_waiters.clear()

    def release(self, committed_index: int, flushed_index: int) -> None:
        """Send the answers that are due."""
        if self.for_commit:
            self._answer(self.for_commit, committed_index)
        if self.for_flush:
            self._answer(self.for_flush, flushed_index)
        while self._waiters and self._waiters[0][0] <= committed_index:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    @staticmethod
    def _answer(waiting: deque[PendingAnswer], index: int) -> None:
        while waiting and waiting[0].index <= index:
            held = waiting.popleft()
            held.peer.send(held.answer)

    def abandon(self, failure: Callable[[], QmqError]) -> list[PendingAnswer]:
        """Drop everything: waiting coroutines get the failure,
        and the waiting answers are returned.
        """
        for waiter in (*self._unwritten_waiters, *[waiter for _, waiter in self._waiters]):
            if not waiter.done():
                waiter.set_exception(failure())
        left = [*self.for_commit, *self.for_flush, *self.unwritten]
        for held in (
            self._unwritten_waiters,
            self._waiters,
            self.for_commit,
            self.for_flush,
            self.unwritten,
        ):
            held.clear()
        return left


@dataclass(slots=True)
class Waiter:
    """A pull that waits for messages."""

    session: Session
    request_id: int
    messages_max: int
    bytes_max: int
    deadline_ms: int
    kept: int
    """See `wire.Pull`."""


@dataclass(slots=True)
class Session:
    """A consumer attached over a connection."""

    number: int
    peer: Peer
    group: QueueGroup
    consumer: str
    tags: TagFilter | None
    outstanding: UnackedBytes = field(default_factory=UnackedBytes)
    """The unacknowledged bytes of the consumer."""
    pulls: int = 0
    """An upper bound of its waiting pulls."""


@dataclass(slots=True)
class CacheWindow:
    """The part of the queue, in its own bytes,
    that may be read without waiting for the disk (qmq/broker/reading/cold_reads.py).
    """

    first: int = 0
    end: int = 0
    next_number: int = 0
    """The entry of the consume log at `end`."""
    is_loading: bool = False


class ConsumerFilter(NamedTuple):
    """The tags that a consumer asks for, and the condition by which it selects messages itself. All
    consumers of a group have the same, because what a filter leaves out counts as done for the
    whole group.
    """

    any_of: tuple[str, ...]
    all_of: tuple[str, ...]
    condition: str

    @classmethod
    def of(cls, request: Attach) -> ConsumerFilter:
        return cls(
            tuple(sorted({*request.tags_any})),
            tuple(sorted({*request.tags_all})),
            request.condition,
        )

    def joined(self, other: ConsumerFilter) -> ConsumerFilter | None:
        """What both ask for; None if they differ. A consumer of a release without conditions may
        have any.
        """
        if self[:2] != other[:2] or (
            self.condition != other.condition and UNSAID not in (self.condition, other.condition)
        ):
            return None
        return other if self.condition == UNSAID else self

    def __str__(self) -> str:
        each = [
            f"with {kind} of the tags {', '.join(map(repr, tags))}"
            for kind, tags in (("any", self.any_of), ("all", self.all_of))
            if tags
        ]
        if self.condition not in ("", UNSAID):
            each.append(f"where {self.condition}")
        return "messages " + " and ".join(each) if each else "all messages"


@dataclass(slots=True)
class QueueGroup:
    """One group on one queue in the running broker."""

    queue: Queue
    name: str
    share: GroupState
    reader: BatchReader
    counters: GroupCounters
    waiters: deque[Waiter] = field(default_factory=deque)
    window: CacheWindow = field(default_factory=CacheWindow)
    """Used while the group is far behind."""
    seen_ms: dict[str, int] = field(default_factory=dict)
    """The last heartbeat of each consumer, monotonic."""
    consumer_filter: ConsumerFilter | None = None
    """What the consumers of the group that have attached here ask for."""
    filter_users: set[str] = field(default_factory=set)
    """The consumers that asked for it; some may have left."""
    filtered: int = 0
    """Messages that the tag filter left out since this broker began to serve."""
    begun: dict[str, Begun] = field(default_factory=dict)
    """For each consumer, which failed messages it has begun to work on again."""
    idle_since_ms: int = -1
    """For a consumer of a broadcast group: since when it is away, monotonic."""
    timer: asyncio.TimerHandle | None = None
    """Fires at `wakes_ms`, when the next requeued message is due."""
    wakes_ms: int = -1

    def require_same_filter(self, asked: ConsumerFilter, consumer: str) -> None:
        """A consumer attaches. Raises InvalidArgument if another consumer of the group
        has another filter.
        """
        joined = None if self.consumer_filter is None else self.consumer_filter.joined(asked)
        if joined is not None:
            asked = joined
        else:
            other = next(
                (
                    each
                    for each in self.filter_users
                    if each != consumer and each in self.share.holders
                ),
                None,
            )
            if other is not None:
                raise InvalidArgument(
                    f"group {self.name!r} reads {self.consumer_filter} of "
                    f"{self.queue.id.subject!r} (consumer {other!r}), and {consumer!r} asks for "
                    f"{asked}: "
                    "all consumers of a group need the same filter. Use another group, "
                    "or stop the other consumers first; a lost one counts until its lease ends"
                )
            self.filter_users.clear()
        self.consumer_filter = asked
        self.filter_users.add(consumer)

    def expired(self, now_ms: int) -> list[str]:
        """Consumers whose lease has ended."""
        return [
            name
            for name, holder in self.share.holders.items()
            if now_ms - self.seen_ms.setdefault(name, now_ms) > granted_lease_ms(holder.lease_ms)
        ]

    def next_lease_end_ms(self) -> int:
        """The time at which the next lease ends if no consumer sends anything until then. There
        must be at least one consumer, and each must have sent something.
        """
        return 1 + min(
            [
                self.seen_ms[name] + granted_lease_ms(holder.lease_ms)
                for name, holder in self.share.holders.items()
            ]
        )

    def take_late(self, now_ms: int) -> list[Waiter]:
        """Pulls whose wait time has passed."""
        late = [waiter for waiter in self.waiters if waiter.deadline_ms <= now_ms]
        if late:
            self.waiters = deque([waiter for waiter in self.waiters if waiter.deadline_ms > now_ms])
        return late

    def drop_waiters(self, session: Session) -> None:
        """The session has ended: drop its waiting pulls."""
        self.waiters = deque([waiter for waiter in self.waiters if waiter.session is not session])


class QueueGroups:
    """All groups of the broker, and all sessions."""

    def __init__(self, counters: BrokerCounters) -> None:
        self._counters = counters
        self._states: dict[tuple[int, str], QueueGroup] = {}
        self.by_queue: dict[int, list[QueueGroup]] = {}
        """The groups that consume each queue, by its `id`."""
        self._sessions: dict[int, Session] = {}
        self._by_peer: dict[Peer, dict[int, Session]] = {}
        self._by_group: dict[int, dict[int, Session]] = {}
        """The sessions of each group, by `id` of the group's state."""
        self._by_consumer: dict[tuple[int, str], Session] = {}
        """The session of each consumer, by `id` of the group's state and consumer."""
        self._next_session = 1

    def state(self, queue: Queue, group: str) -> QueueGroup:
        """The group on the queue; its share is made if absent."""
        key = (id(queue), group)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = QueueGroup(
                queue,
                group,
                queue.share(group),
                BatchReader(queue),
                self._counters.group(queue.id.subject, group),
            )
            self.by_queue.setdefault(id(queue), []).append(state)
        return state

    def drop(self, state: QueueGroup) -> None:
        """The group is deleted; its consumers attach again."""
        for session in list(self._by_group.get(id(state), {}).values()):
            self.detach(session)
        self._states.pop((id(state.queue), state.name), None)
        self.by_queue[id(state.queue)].remove(state)

    def is_known(self, state: QueueGroup) -> bool:
        """Whether the group has not been deleted meanwhile."""
        return self._states.get((id(state.queue), state.name)) is state

    def of_queue(self, queue: Queue) -> list[QueueGroup]:
        """The groups that consume the queue."""
        return self.by_queue.get(id(queue), [])

    def of_queues(self, queues: Iterable[Queue]) -> list[QueueGroup]:
        """The groups that consume any of the queues."""
        by_queue = self.by_queue
        if not by_queue:
            return []
        return [state for queue in queues if id(queue) in by_queue for state in by_queue[id(queue)]]

    def __iter__(self) -> Iterator[QueueGroup]:
        return iter(list(self._states.values()))

    def require_room(self, peer: Peer, share: GroupState | None, consumer: str) -> None:
        """Raises Overloaded if the group has too many consumers on the queue, or the connection too
        many sessions.
        """
        holders = share.holders if share is not None else {}
        if consumer not in holders and len(holders) >= limits.GROUP_CONSUMERS_MAX:
            raise Overloaded(
                f"the group has {len(holders)} consumers, the limit: a lost consumer counts "
                "until its lease ends"
            )
        if len(self._by_peer.get(peer, ())) >= limits.CONNECTION_SESSIONS_MAX:
            raise Overloaded(
                f"this connection reads {limits.CONNECTION_SESSIONS_MAX} queues, the limit: "
                "use several clients"
            )

    def attach(
        self, peer: Peer, state: QueueGroup, consumer: str, tags: TagFilter | None
    ) -> Session:
        """A new session; an earlier one of the consumer ends."""
        old = self._by_consumer.get((id(state), consumer))
        if old is not None:
            self.detach(old)
        session = Session(self._next_session, peer, state, consumer, tags)
        self._next_session += 1
        self._sessions[session.number] = session
        self._by_peer.setdefault(peer, {})[session.number] = session
        self._by_group.setdefault(id(state), {})[session.number] = session
        self._by_consumer[id(state), consumer] = session
        return session

    def session(self, number: int, peer: Peer) -> Session | None:
        """The session, if it belongs to this connection."""
        session = self._sessions.get(number)
        return session if session is not None and session.peer is peer else None

    def detach(self, session: Session) -> None:
        """The session has ended; the consumer's lease continues."""
        if self._sessions.pop(session.number, None) is not None:
            del self._by_consumer[id(session.group), session.consumer]
            _remove(self._by_peer, session.peer, session.number)
            _remove(self._by_group, id(session.group), session.number)
        session.group.drop_waiters(session)

    def clients(self) -> dict[tuple[int, str], str]:
        """The clients' names of all attached consumers,
        by `id` of the group's state and consumer.
        """
        return {
            (id(each.group), each.consumer): each.peer.client for each in self._sessions.values()
        }

    def of_peer(self, peer: Peer) -> list[Session]:
        """The sessions of a connection."""
        return list(self._by_peer.get(peer, {}).values())


def _remove(sessions: dict[K, dict[int, Session]], key: K, number: int) -> None:
    mine = sessions[key]
    del mine[number]
    if not mine:
        del sessions[key]
