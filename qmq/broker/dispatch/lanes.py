"""Serves consumers of ordered subjects: they attach to lanes, pull and settle. The counterpart of
`dispatch`.

Rules:
* One consumer at a time reads a range: attaching is refused while another live one holds any of it
  (LaneHeld), and while the group has not finished what comes before (LaneNotOpen). The answer
  leaves when the grant is committed, so that a new master knows of it.
* Every pull and verdict carries the grant's token. A consumer that lost the lane gets LaneLost,
  over any connection.
* A pull names its start. The broker does not remember what it handed out: unsettled messages are
  read again.
* A group that has parked too much of a partition gets no more of its messages, until keys are
  replayed or dropped. Nothing is lost, and the order stays; messages that its consumers have are
  settled as before.
* The lease counts from the last heartbeat, by a monotonic clock, and starts over when the broker
  begins to serve.

`LanePuller` decides what a lane gets next: the messages of its logical partitions that are not
done. A lane that covers its whole partition needs only the index for batches of which nothing is
done: it gets them whole. For any other lane or batch the columns of logical partitions are read as
vectors, and the lane gets its own runs. Whole batches are sent in any case, because their checksum
is the producer's; ranges say which messages are meant. A pull therefore ends between two batches,
so that no batch is sent twice: it gets a last batch entirely if there is room for more than half of
its messages, and otherwise ends before it. It cuts only a first batch that is at least twice as
long as the pull.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from qmq_ordering.routes import LpRange

from qmq import limits
from qmq.broker.config import LEASE_MS_MAX, LEASE_MS_MIN, granted_lease_ms
from qmq.broker.dispatch.pull import (
    BatchReader,
    PulledRange,
    PullResult,
    lay_out,
    readable_messages,
)
from qmq.broker.dispatch.sessions import CheckTimes, Peer, PendingAnswer
from qmq.broker.metrics import GroupCounters
from qmq.broker.parts import ServingBroker
from qmq.errors import (
    InvalidArgument,
    LaneHeld,
    LaneLost,
    LaneNotOpen,
    LogDamaged,
    MessagesExpired,
    OrderMismatch,
    Overloaded,
    QmqError,
    RouteChanged,
    UnknownConsumer,
)
from qmq.limits import MIB
from qmq.log.actions import LaneBegin, LaneDone, LaneFail, LaneGrant, LanePark, LaneRelease
from qmq.log.consume_log import IndexEntry
from qmq.log.lane_state import PARKED_BYTES_MAX, GroupLaneState, LaneHolder
from qmq.log.queue import Queue
from qmq.log.reading import ColdRead, logical_partitions
from qmq.log.store import Store
from qmq.model import Order, check_name
from qmq.process.files import refusal_of
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import UNREADABLE, Layout, parse_header
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import LaneVerdict

_READ_BYTES_MAX: Final = 8 * MIB
"""Bytes that one pull may read to find few messages; then others get a turn, and the next pull
continues there.
"""


@dataclass(slots=True)
class LaneRange:
    """The result of a pull: everything of the lane before `next_sequence`. If `is_end`, nothing
    will follow.
    """

    next_sequence: int
    is_end: bool = False
    delivery: PullResult = field(default_factory=PullResult)


class LaneResultReader:
    """Reads one lane forward, and remembers its place in the index."""

    def __init__(
        self, store: Store, queue: Queue, share: GroupLaneState, lps: LpRange, whole: LpRange
    ) -> None:
        self._store, self._queue, self._share = store, queue, share
        self._lps = lps
        self._is_whole = lps == whole
        self._index = BatchReader(queue)

    def read(self, sequence: int, messages_max: int, bytes_max: int) -> LaneRange:
        """The lane from `sequence` on. Raises MessagesExpired, LogDamaged."""
        queue = self._queue
        found = LaneRange(sequence)
        if sequence < queue.start_sequence:
            if queue.sealed is not None and queue.start_sequence >= queue.sealed.sequence:
                return LaneRange(queue.sealed.sequence + 1, is_end=True)
            raise MessagesExpired(
                f"messages {sequence} to {queue.start_sequence - 1} of {queue.id} "
                "were deleted by retention before this group consumed them; "
                "to continue with the oldest remaining message: qmq group reset --to earliest"
            )
        read = 0
        for entry in self._index.entries(sequence):
            if queue.sealed is not None and entry.base_sequence == queue.sealed.sequence:
                found.next_sequence, found.is_end = entry.next_sequence, True
                break
            if (
                found.delivery.messages >= messages_max
                or found.delivery.bytes >= bytes_max
                or read >= _READ_BYTES_MAX
            ):
                break
            is_all = self._is_all(entry, found.next_sequence)
            read += 0 if is_all else entry.total_bytes
            try:
                self._take(entry, found, messages_max, is_all=is_all)
            except LogDamaged:
                if not found.delivery.messages:
                    raise
                # what comes before the damage is delivered first; the next pull gets the error
                break
            if found.next_sequence < entry.next_sequence:
                break
        return found

    def _is_all(self, entry: IndexEntry, sequence: int) -> bool:
        """Whether all messages of a batch from a sequence on belong to the
        lane and are not done.
        """
        if not self._is_whole or self._share.failures:
            return False
        first = max(sequence, entry.base_sequence)
        return all(each.has_none_done(first, entry.next_sequence) for each in self._share.progress)

    def _take(
        self, entry: IndexEntry, found: LaneRange, messages_max: int, *, is_all: bool
    ) -> None:
        """Add what the pull gets of a batch."""
        first = max(found.next_sequence, entry.base_sequence)
        if is_all:
            taken = _part(entry.next_sequence - first, found.delivery.messages, messages_max)
            if taken:
                found.delivery.add(PulledRange(entry, first, taken, 1))
                found.next_sequence = first + taken
            return
        wanted = np.flatnonzero(self._mask(entry, first)) + entry.base_sequence
        taken = _part(len(wanted), found.delivery.messages, messages_max)
        failed = sorted([at for at in self._share.failures if first <= at < entry.next_sequence])
        for begin, end in _runs(wanted[:taken]):
            for a, b, attempt in self._by_attempt(begin, end, failed):
                found.delivery.add(PulledRange(entry, a, b - a, attempt))
        if taken == len(wanted):
            found.next_sequence = entry.next_sequence
        elif taken:
            found.next_sequence = int(wanted[taken - 1]) + 1

    def _mask(self, entry: IndexEntry, first: int) -> npt.NDArray[np.bool_]:
        """Which messages of a batch, from sequence `first` on, are the lane's and not done."""
        _, region = self._store.read(self._queue, entry)
        try:
            header = parse_header(region)
            lps = logical_partitions(region, Layout.walk(region, header), header.count)
        except UNREADABLE as cause:
            raise LogDamaged(
                f"cannot decide which keys messages {entry.base_sequence} to "
                f"{entry.next_sequence - 1} of {self._queue.id} belong to ({cause}); "
                f"to continue after them: qmq group reset --to {entry.next_sequence}"
            ) from cause
        base = entry.base_sequence
        mask = np.zeros(header.count, np.bool_)
        for part in self._share.progress_of(self._lps):
            own = part.lps.cut(self._lps)
            mine = (lps >= own.first) & (lps < own.end)
            mine[: max(part.done_before - base, 0)] = False
            for begin, end in part.done_in(base, entry.next_sequence):
                mine[max(begin - base, 0) : max(end - base, 0)] = False
            mask |= mine
        mask[: first - base] = False
        return mask

    def _by_attempt(
        self, begin: int, end: int, failed: list[int]
    ) -> Iterator[tuple[int, int, int]]:
        """A run, cut so that each message that failed before is separate.
        `failed` are ascending.
        """
        failures = self._share.failures
        mine = failed[bisect_left(failed, begin) : bisect_left(failed, end)]
        marks = sorted({begin, end, *[mark for at in mine for mark in (at, at + 1)]})
        for a, b in pairwise(marks):
            yield a, b, 1 + failures.get(a, 0)


def _part(count: int, messages: int, messages_max: int) -> int:
    """How many of a batch's `count` messages a pull gets that has `messages` and asked for
    `messages_max`: all, or none. A batch that is at least twice as long as the pull is cut, if it
    is the first.
    """
    room = messages_max - messages
    if count < 2 * room:
        return count
    return 0 if messages else room


def _runs(sequences: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, end) runs."""
    if not len(sequences):
        return []
    breaks = np.flatnonzero(np.diff(sequences) != 1) + 1
    marks = [0, *breaks.tolist(), len(sequences)]
    return [(int(sequences[a]), int(sequences[b - 1]) + 1) for a, b in pairwise(marks)]


log = logging.getLogger("qmq.broker")

FIRST_SESSION: Final = 1 << 31
"""Session numbers of lanes begin here,
so that HEARTBEAT and DETACH can tell the kinds of session apart.
"""
_REPLAY: Final = "replay or skip keys (`qmq dlq list`)"
IDLE_MS: Final = 1_000
"""A lane without new messages gets an answer at least so often, so that its progress keeps up."""


@dataclass(slots=True)
class LanePuller:
    """A waiting pull, from `sequence` on."""

    request_id: int
    sequence: int
    messages_max: int
    bytes_max: int
    deadline_ms: int


@dataclass(slots=True)
class LaneSession:
    """A lane that is attached over a connection."""

    number: int
    peer: Peer
    queue: Queue
    group: str
    consumer: str
    token: int
    reader: LaneResultReader
    counters: GroupCounters
    waiting: LanePuller | None = None


class Lanes:
    """Serves lanes. Created again each time the broker begins to serve."""

    def __init__(self, broker: ServingBroker) -> None:
        self._store = broker.store
        self._clock = broker.clock
        self._config = broker.config
        self._counters = broker.counters
        self._responses = broker.responses
        self._rules = broker.rules
        self._report_damage = broker.report_damage
        self._broker = broker
        self._subjects = broker.subjects
        self._routing = broker.routing
        self.sessions: dict[int, LaneSession] = {}
        """The sessions that consumers have with lanes here, by number."""
        self.by_queue: dict[int, dict[int, LaneSession]] = {}
        """The sessions of each queue, by its `id`."""
        self._by_peer: dict[Peer, dict[int, LaneSession]] = {}
        self._next_session = FIRST_SESSION
        self._leases: CheckTimes[Queue] = CheckTimes()
        """When a lease on each queue may end."""
        for queue in broker.store.queues.values():
            if queue.lanes:
                self._leases.at(queue, 0)
        self._late_pulls: CheckTimes[LaneSession] = CheckTimes()
        """When the waiting pull of each session is to be answered without messages."""
        self._seen_ms: dict[tuple[int, str, int], int] = {}
        """The last heartbeat of each grant (monotonic), by queue, group and token."""

    # --- attaching --------------------------------------------------------------------------------

    def attach(self, peer: Peer, request_id: int, request: wire.LaneAttach) -> None:
        """Grant a lane to a consumer; answered when the grant is committed.

        Raises OrderMismatch, LaneNotOpen, LaneHeld, InvalidArgument, InvalidName, UnknownSubject.
        """
        lps = _check_attach(request)
        if len(self._by_peer.get(peer, ())) >= limits.CONNECTION_SESSIONS_MAX:
            raise Overloaded(
                f"this connection reads {limits.CONNECTION_SESSIONS_MAX} lanes, the limit: "
                "use several clients"
            )
        queue, whole = self._find(request, lps)
        share = self.share(queue, request.group, whole)
        mine, others = _divide(share.holders_of(lps), request)
        if others:
            names = ", ".join(sorted({each.consumer for each in others}))
            raise LaneHeld(
                f"{names} of group {request.group!r} still holds part of {lps} of "
                f"{queue.id}: try again soon"
            )
        parked = [key.hex() for key in share.parked_in(lps)]
        if sum(map(len, parked)) > limits.ANSWER_BYTES_MAX - limits.MIB:
            raise Overloaded(
                f"group {request.group!r} has parked too many keys of {queue.id} for one "
                f"answer: {_REPLAY}"
            )
        kept = next(
            (each for each in mine if each.token == request.token and each.lps == lps), None
        )
        token = kept.token if kept is not None else self._grant(queue, request, mine)
        self._seen_ms[id(queue), request.group, token] = now_ms = self._clock.monotonic_ms()
        self._leases.at(queue, now_ms + granted_lease_ms(request.lease_ms) + 1)
        session = self._open(
            peer, queue, request, token, LaneResultReader(self._store, queue, share, lps, whole)
        )
        lease_ms = granted_lease_ms(kept.lease_ms if kept is not None else request.lease_ms)
        attached = wire.LaneAttached(
            session.number, token, lease_ms, share.position(lps), int(kept is not None), parked
        )
        answer = frames.frame(FrameKind.LANE_ATTACHED, request_id, attached.pack())
        if kept is not None:
            peer.send(
                answer
            )  # the consumer had the token from an answer like this one: it is committed
        else:
            self._responses.unwritten.append(PendingAnswer(0, peer, request_id, answer))
        self._broker.schedule()

    def _find(self, request: wire.LaneAttach, lps: LpRange) -> tuple[Queue, LpRange]:
        config = self._subjects.settings(request.subject)
        if config.order is Order.NONE:
            raise OrderMismatch(
                f"subject {request.subject!r} is not ordered: consume it with mq.consumer"
            )
        routing = self._routing
        found = routing.partition(request.subject, request.partition)
        if found is None or not routing.is_open(
            request.subject, request.group, request.partition, lps, request.version
        ):
            raise LaneNotOpen(
                f"{lps} of partition {request.partition} of {request.subject!r} is "
                f"not open for group {request.group!r} in version {request.version}, "
                f"as far as {self._config.name} knows"
            )
        try:
            return self._subjects.find_queue(
                request.subject.encode(), request.partition
            ).queue, found.range
        except RouteChanged as failure:
            raise LaneNotOpen(failure.message) from failure

    def share(self, queue: Queue, group: str, whole: LpRange) -> GroupLaneState:
        """The group's lane share; a new one begins at the oldest kept message."""
        share = queue.lanes.get(group)
        if share is None or not share.progress:
            start = queue.start_sequence
            if start:
                log.warning(
                    "group %s begins on %s at %d: the earlier messages were deleted, by retention, "
                    "a purge or with an earlier subject of this name",
                    group,
                    queue.id,
                    start,
                )
            self._store.act(
                LaneBegin(queue.id.subject, queue.id.partition, group, "", *whole, start, start)
            )
            share = queue.lanes[group]
        return share

    def _grant(self, queue: Queue, request: wire.LaneAttach, mine: Iterable[LaneHolder]) -> int:
        for each in mine:
            self._release(queue, request.group, each)
        self._counters.group(queue.id.subject, request.group).lanes_granted += 1
        return self._store.act(
            LaneGrant(
                queue.id.subject,
                queue.id.partition,
                request.group,
                request.consumer,
                request.first,
                request.end,
                request.incarnation,
                granted_lease_ms(request.lease_ms),
            )
        )

    def _open(
        self,
        peer: Peer,
        queue: Queue,
        request: wire.LaneAttach,
        token: int,
        reader: LaneResultReader,
    ) -> LaneSession:
        group = request.group
        for old in [
            each for each in self._of_queue(queue) if each.group == group and each.token == token
        ]:
            self._close(old, LaneLost("the consumer attached again elsewhere"))
        session = LaneSession(
            self._next_session,
            peer,
            queue,
            group,
            request.consumer,
            token,
            reader,
            self._counters.group(queue.id.subject, group),
        )
        self._next_session = (
            self._next_session + 1 if self._next_session < 0xFFFF_FFFF else FIRST_SESSION
        )
        self.sessions[session.number] = session
        self._by_peer.setdefault(peer, {})[session.number] = session
        self.by_queue.setdefault(id(queue), {})[session.number] = session
        return session

    def _of_queue(self, queue: Queue) -> list[LaneSession]:
        return list(self.by_queue.get(id(queue), {}).values())

    def _close(self, session: LaneSession, failure: QmqError | None = None) -> None:
        """The session has ended; the lane's lease continues."""
        waiting, session.waiting = session.waiting, None
        if waiting is not None and failure is not None:
            self._broker.answer_error(session.peer, waiting.request_id, failure)
        self.sessions.pop(session.number, None)
        mine = self._by_peer.get(session.peer, {})
        mine.pop(session.number, None)
        if not mine:
            self._by_peer.pop(session.peer, None)
        self.by_queue.get(id(session.queue), {}).pop(session.number, None)

    # --- pulling ----------------------------------------------------------------------------------

    def pull(self, peer: Peer, request_id: int, request: wire.LanePull, deadline_ms: int) -> None:
        """Answer a LANE_PULL now, or when there is something; waiting needs no turn. Raises
        LaneLost, UnknownConsumer, InvalidArgument, MessagesExpired.
        """
        session, _ = self._held(request.session, request.token, peer)
        if not 0 < request.messages_max <= limits.PULL_MESSAGES_MAX or request.sequence < 0:
            raise InvalidArgument(
                f"a pull is for 1 to {limits.PULL_MESSAGES_MAX} messages from a sequence on, "
                f"not {request}"
            )
        if session.waiting is not None:
            raise InvalidArgument(f"a pull of lane session {session.number} is under way already")
        wait_ms = min(request.wait_ms, IDLE_MS, deadline_ms or limits.WAIT_MS_MAX)
        until = self._clock.monotonic_ms() + wait_ms
        session.waiting = LanePuller(
            request_id,
            request.sequence,
            request.messages_max,
            min(max(request.bytes_max, 1), limits.PULL_BYTES_MAX),
            until,
        )
        self._late_pulls.at(session, until)
        self._wake(session)
        if not wait_ms and session.waiting is not None:
            self._answer_empty(session)

    def _wake(self, session: LaneSession) -> None:
        """Serve a waiting pull if there are messages, the consumer is not paused, and its client
        reads its answers.
        """
        waiting, peer = session.waiting, session.peer
        if waiting is None or self._broker.is_paused or not peer.is_writable:
            return
        if self._rules.is_paused(
            session.queue.id.subject, session.group, session.consumer, peer.client
        ):
            return
        if session.queue.lanes[session.group].is_full:
            return
        try:
            found = session.reader.read(waiting.sequence, waiting.messages_max, waiting.bytes_max)
            if not found.delivery.messages and not found.is_end:
                waiting.sequence = found.next_sequence
                return
            try:
                ranges, buffers, batches = lay_out(self._store, session.queue, found.delivery)
            except LogDamaged:
                readable = readable_messages(self._store, session.queue, found.delivery)
                if not readable:
                    raise
                found = session.reader.read(waiting.sequence, readable, waiting.bytes_max)
                ranges, buffers, batches = lay_out(self._store, session.queue, found.delivery)
        except (QmqError, OSError) as cause:
            failure = refusal_of(cause)
            if isinstance(failure, ColdRead):
                failure.then(session, lambda failure: self._read_again(session, failure))
            elif not isinstance(failure, LogDamaged) or not self._report_damage(failure):
                session.waiting = None
                self._broker.answer_error(session.peer, waiting.request_id, failure)
            return
        session.waiting = None
        head = wire.pack_lane_delivery(
            wire.LaneDelivery(session.number, found.next_sequence, found.is_end, ranges, batches)
        )
        size = len(head) + sum(map(len, buffers))
        session.peer.send(
            frames.header(FrameKind.LANE_MESSAGES, waiting.request_id, size) + head, *buffers
        )
        session.peer.delivered(session.queue.id.subject, found.delivery.messages, size)
        session.counters.handed_out(found.delivery.messages, found.delivery.bytes, 0)
        self._broker.schedule()

    def _read_again(self, session: LaneSession, failure: QmqError | None) -> None:
        """The data that the session's pull waits for has arrived, or the object store cannot
        provide it.
        """
        if failure is None:
            self._wake(session)
        elif session.waiting is not None:
            waiting, session.waiting = session.waiting, None
            self._broker.answer_error(session.peer, waiting.request_id, failure)

    def _answer_empty(self, session: LaneSession) -> None:
        """Answer without messages. The answer says up to where all messages count as done."""
        waiting, session.waiting = session.waiting, None
        if waiting is not None:
            head = wire.pack_lane_delivery(
                wire.LaneDelivery(session.number, waiting.sequence, False, [], 0)
            )
            session.peer.send(frames.frame(FrameKind.LANE_MESSAGES, waiting.request_id, head))

    # --- settling ---------------------------------------------------------------------------------

    def settle(
        self,
        peer: Peer,
        request_id: int,
        number: int,
        token: int,
        settlements: list[wire.LaneSettlement],
    ) -> None:
        """Record verdicts; the answer is sent when they are committed.

        Raises LaneLost, UnknownConsumer, InvalidArgument, LogDamaged, ColdRead; then nothing was
        recorded.
        """
        session, holder = self._held(number, token, peer)
        queue = session.queue
        if any(not 0 <= each.first <= each.last < queue.visible_sequence for each in settlements):
            raise InvalidArgument(
                f"a settlement must name sequences 0 to {queue.visible_sequence - 1} of "
                f"{queue.id}, first to last"
            )
        names = (queue.id.subject, queue.id.partition, session.group, holder.consumer, token)
        share = queue.lanes[session.group]
        keys = self._keys_at(
            queue, [each.first for each in settlements if each.verdict == LaneVerdict.PARKED]
        )
        if keys and share.parked_bytes + share.more_bytes(keys.values()) > 2 * PARKED_BYTES_MAX:
            raise Overloaded(
                f"group {session.group!r} has parked too many messages of {queue.id}: {_REPLAY}"
            )
        was_full, act = share.is_full, self._store.act
        done = tuple(
            [(each.first, each.last) for each in settlements if each.verdict == LaneVerdict.DONE]
        )
        if done:
            act(LaneDone(*names, done))
        for each in settlements:
            if each.verdict == LaneVerdict.FAILED:
                act(LaneFail(*names, each.first, each.argument))
                session.counters.nacked += 1
            elif each.verdict == LaneVerdict.PARKED:
                act(LanePark(*names, each.first, *keys[each.first]))
        if share.is_full and not was_full:
            log.warning(
                "group %s has parked too many messages of %s, and gets no more of them: %s",
                session.group,
                queue.id,
                _REPLAY,
            )
        answer = frames.frame(FrameKind.SETTLED, request_id, wire.pack_settled(len(settlements), 0))
        self._responses.unwritten.append(PendingAnswer(0, peer, request_id, answer))
        self._broker.schedule()

    def _keys_at(self, queue: Queue, sequences: Iterable[int]) -> dict[int, tuple[int, bytes]]:
        """(logical partition, key) of each message. Each batch is read once. Raises
        InvalidArgument, LogDamaged.
        """
        found: dict[int, tuple[int, bytes]] = {}
        begin = end = 0
        keys: Sequence[bytes] = ()
        lps: Sequence[int] = ()
        for sequence in sorted(sequences):
            if not begin <= sequence < end:
                entry = queue.index.entry(queue.index.find_sequence(sequence))
                buffers = self._store.read(queue, entry)
                try:
                    view = BatchView.parse(b"".join(buffers))
                    keys, lps = view.keys() or (), view.logical_partitions() or ()
                except UNREADABLE as cause:
                    raise InvalidArgument(
                        f"the entry at sequence {sequence} of {queue.id} is not a message: {cause}"
                    ) from cause
                begin, end = view.base_sequence, view.base_sequence + view.count
            if not keys or not lps or not begin <= sequence < end:
                raise InvalidArgument(
                    f"sequence {sequence} of {queue.id} is not a message with a key"
                )
            found[sequence] = lps[sequence - begin], keys[sequence - begin]
        return found

    # --- staying, leaving -------------------------------------------------------------------------

    def heartbeat(self, peer: Peer, number: int) -> None:
        """Renew the lease. Raises LaneLost, UnknownConsumer."""
        session = self._session(number, peer)
        self._held(number, session.token, peer)

    def detach(self, peer: Peer, number: int) -> None:
        """The consumer gives the lane up. Raises UnknownConsumer."""
        session = self._session(number, peer)
        self._close(session)
        holder = session.queue.lanes[session.group].holder(session.token)
        if holder is not None:
            self._release(session.queue, session.group, holder)
            self._broker.schedule()

    def _release(self, queue: Queue, group: str, holder: LaneHolder) -> None:
        self._store.act(
            LaneRelease(queue.id.subject, queue.id.partition, group, holder.consumer, holder.token)
        )
        self.forget(queue, group, holder.token)

    def forget(self, queue: Queue, group: str, token: int) -> None:
        """A token is void: pulls with it get the error."""
        self._seen_ms.pop((id(queue), group, token), None)
        for session in self._of_queue(queue):
            if session.group == group and session.token == token:
                self._close(session, _lost(queue, group))

    def forget_group(self, queue: Queue, group: str, tokens: Iterable[int]) -> None:
        """The group was deleted: end all its sessions, with any token."""
        for token in tokens:
            self._seen_ms.pop((id(queue), group, token), None)
        for session in self._of_queue(queue):
            if session.group == group:
                self._close(session, _lost(queue, group))

    def _session(self, number: int, peer: Peer) -> LaneSession:
        session = self.sessions.get(number)
        if session is None or session.peer is not peer:
            raise UnknownConsumer(f"no lane is attached here as session {number}: attach again")
        return session

    def _held(self, number: int, token: int, peer: Peer) -> tuple[LaneSession, LaneHolder]:
        """The session and its grant, if the token is still valid; renews the lease. Raises
        LaneLost, UnknownConsumer.
        """
        session = self._session(number, peer)
        holder = session.queue.lanes[session.group].holder(token)
        if holder is None or token != session.token:
            self._close(session)
            raise _lost(session.queue, session.group)
        self._seen_ms[id(session.queue), session.group, token] = self._clock.monotonic_ms()
        return session, holder

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer pulls that waited long enough; take lanes from consumers whose lease has ended."""
        now_ms = self._clock.monotonic_ms()
        for session in self._late_pulls.due(now_ms):
            waiting = session.waiting
            if waiting is None:
                continue
            if waiting.deadline_ms > now_ms or not session.peer.is_writable:
                self._late_pulls.at(session, max(waiting.deadline_ms, now_ms + 1))
            else:
                self._answer_empty(session)
        for queue in self._leases.due(now_ms):
            if self._store.queues.get((queue.id.subject.encode(), queue.id.partition)) is queue:
                self._expire(queue, now_ms)

    def _expire(self, queue: Queue, now_ms: int) -> None:
        for group, share in queue.lanes.items():
            for holder in list(share.holders):
                seen_ms = self._seen_ms.setdefault((id(queue), group, holder.token), now_ms)
                ends_ms = seen_ms + granted_lease_ms(holder.lease_ms)
                if now_ms <= ends_ms:
                    self._leases.at(queue, ends_ms + 1)
                else:
                    log.info(
                        "consumer %s of group %s lost its lane %s of %s",
                        holder.consumer,
                        group,
                        holder.lps,
                        queue.id,
                    )
                    self._counters.group(queue.id.subject, group).leases_lost += 1
                    self._release(queue, group, holder)
                    self._broker.schedule()

    def waiting(self) -> list[tuple[str, str]]:
        """The subject and group of each waiting pull."""
        return [
            (each.queue.id.subject, each.group)
            for each in self.sessions.values()
            if each.waiting is not None
        ]

    def seen_ms_ago(self, queue: Queue, group: str, token: int) -> int:
        """How long ago the holder sent a heartbeat."""
        now_ms = self._clock.monotonic_ms()
        return now_ms - self._seen_ms.get((id(queue), group, token), now_ms)

    def client_of(self, queue: Queue, group: str, token: int) -> str:
        """The name of the holder's client; empty while it is not connected."""
        return next(
            (
                each.peer.client
                for each in self._of_queue(queue)
                if each.group == group and each.token == token
            ),
            "",
        )

    def wake_queues(self, queues: Iterable[Queue]) -> None:
        """Consumers may see more messages of these queues."""
        for queue in queues:
            for session in self.by_queue.get(id(queue), {}).values():
                if session.waiting is not None:
                    self._wake(session)

    def wake_all(self) -> None:
        """Serve all waiting pulls that can be served."""
        for session in list(self.sessions.values()):
            self._wake(session)

    def disconnected(self, peer: Peer) -> None:
        """The connection was closed. Its consumers may reconnect until their leases end."""
        for session in list(self._by_peer.get(peer, {}).values()):
            self._close(session)

    def writable(self, peer: Peer) -> None:
        """The connection takes answers again."""
        for session in list(self._by_peer.get(peer, {}).values()):
            self._wake(session)

    def drop_queue(self, queue: Queue, failure: QmqError) -> None:
        """The queue's subject was deleted: readers of its lanes get the error."""
        self._seen_ms = {
            key: seen_ms for key, seen_ms in self._seen_ms.items() if key[0] != id(queue)
        }
        for session in self._of_queue(queue):
            self._close(session, failure)

    def stop(self, failure: QmqError) -> None:
        """This broker serves no consumers any more."""
        for session in list(self.sessions.values()):
            self._close(session, failure)


def _lost(queue: Queue, group: str) -> LaneLost:
    return LaneLost(
        f"the lane of group {group!r} on {queue.id} no longer belongs to this consumer: "
        "its lease ended, it was assigned to another, or an operator moved or deleted the group"
    )


def _divide(
    holders: list[LaneHolder], request: wire.LaneAttach
) -> tuple[list[LaneHolder], list[LaneHolder]]:
    """(holders of the asking consumer, of this or an earlier incarnation,
    which has ended; other holders).
    """
    mine = [each for each in holders if each.consumer == request.consumer]
    return mine, [each for each in holders if each.consumer != request.consumer]


def _check_attach(request: wire.LaneAttach) -> LpRange:
    check_name("subject", request.subject)
    check_name("group", request.group)
    check_name("consumer", request.consumer)
    check_name("incarnation", request.incarnation)
    if not LEASE_MS_MIN <= request.lease_ms <= LEASE_MS_MAX:
        raise InvalidArgument(
            f"lease_ms is {LEASE_MS_MIN} to {LEASE_MS_MAX}, not {request.lease_ms}"
        )
    if not 0 <= request.first < request.end <= limits.LOGICAL_PARTITIONS_MAX:
        raise InvalidArgument(
            f"a lane is logical partitions first to end - 1, not {request.first} to "
            f"{request.end} - 1"
        )
    return LpRange(request.first, request.end)
