"""An attachment connects a consumer to one queue. It outlives changes of the broker group's master.

An attachment keeps a session with the master, a pull under way, and the messages that the
application has not seen yet. After a broken connection, or at a new master, it attaches again with
the same incarnation and with `received`, the last pull sequence that arrived. The answer says which
messages it still holds:

    resumed, next > received     all. Messages that were handed out and did not arrive went back to
                                 the group
    resumed, next <= received    the master lost deliveries that were not committed. It will use
                                 pull sequences from `next` on again, perhaps for other messages.
                                 Messages below `next` are still held, the others are void
    not resumed                  none (the lease was lost, or the master cannot tell): all are void

Void messages that the application has not seen are dropped; for the others no verdict is ever sent
(`qmq/client/consuming/acks.py`).

`allowance` and `bytes_allowance` divide the consumer's limits of `prefetch` messages and
`prefetch_bytes` bytes among its attachments. A pull that waits at a broker reserves the messages it
asked for, so that the total is never exceeded. An idle queue must not reserve what a busy one could
use. So each attachment asks for few messages at first (`START`), for four times as many after a
full answer, and for few again after an empty one; and `START` messages stay free for each other
attachment. A single attachment asks for all, except what a second one would need to begin.

If the total is less than two messages for each attachment, the attachments take turns: a pull then
waits only briefly, so that a message in another queue waits no longer than a round.

Worked example: prefetch 2,000, three attachments. Two idle ones wait with 64 each; the busy one
grows 64, 256, 1,024, to 1,872.

A message counts for its part of its batch's bytes. The bytes of a pull are known afterwards: a
batch is never cut, so the last one may exceed the total, and then no attachment pulls until there
is room again. One half of the bytes is divided among all attachments, and idle ones reserve no more
than their part of it. An attachment that holds nothing may pull, however small the total is.

A consumer also hands in the verdicts that earlier clients left in the spool (`ack_spool.py`), in
the background (`SpoolSender`):

    a file, locked ──reach its broker group's master──▶ ATTACH as that consumer, only to resume
        known still      SETTLE what is not void, DETACH: the rest goes back to the group; the file
                         is deleted
        not known        the lease was lost, the broker has put all messages back; the file is
                         deleted
        not reached      again after a pause; other files, and the consumer's own work, continue
                         meanwhile

A consumer that restarts under its name takes over the messages of its earlier incarnation. So the
verdicts of that incarnation are handed in before the consumer attaches to the same broker group
(`inherit`); verdicts of other names can wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from qmq import limits
from qmq.client.connection.connection import Connection, pause_s
from qmq.client.connection.pool import ConnectionPool, counted
from qmq.client.consuming.ack_spool import AckSpool, SpoolOwner, SpoolRemainder, still_valid
from qmq.client.consuming.acks import PendingAcks, in_frames
from qmq.client.consuming.acks import count as messages_settled
from qmq.client.consuming.message import BatchSlice, Message, ReceivedBatches
from qmq.client.consuming.session import (
    ANSWER_S,
    ConsumerCalls,
    ConsumerSession,
    SessionLoop,
    SubscriptionOptions,
)
from qmq.errors import (
    CallerError,
    ClientClosed,
    LaneLost,
    MessagesExpired,
    NotMaster,
    OrderMismatch,
    PeerError,
    ProtocolViolation,
    QmqError,
    StorageError,
    Unavailable,
    UnknownConsumer,
)
from qmq.process.event_loop import ms_of
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Verdict

log = logging.getLogger("qmq.client")

MANY: Final = 64
"""Messages that an application needs some time for: about as long as a pull takes to be sent."""
START: Final = 64
GROWTH: Final = 4
WAIT_MS: Final = 20_000
SHORT_WAIT_MS: Final = 50


class Attachment:
    """`slices` are the messages that the application has not seen yet."""

    def __init__(
        self, links: ConnectionPool, calls: ConsumerCalls, terms: SubscriptionOptions, group: str
    ) -> None:
        self.group = group
        self.slices: deque[BatchSlice] = deque()
        self.failure: QmqError | None = None
        self.asked = self.asked_bytes = 0
        """Messages, and bytes, that the pull under way asked for; 0 without a pull."""
        self.want = 0
        """Messages that the next pull would ask for."""
        self._terms = terms
        self._links, self._calls = links, calls
        self._loop = asyncio.get_running_loop()
        self.sessions = SessionLoop[wire.Attached](
            links,
            self,
            subject=terms.subject,
            group=group,
            name=terms.name,
            lease_ms=terms.lease_ms,
        )
        """Keeps a session with the master, from `sessions.start` on."""
        self._received = -1
        self._batches = ReceivedBatches(links.arrived)
        self._knows_kept = False
        file = (
            links.store.file(self._owner, lambda: ms_of(links.now_ns()))
            if links.store is not None
            else None
        )
        self.verdicts = PendingAcks(links, calls, terms, group, self.sessions, file)
        self._has_inherited = False
        self._counters = links.counters.taking(terms.subject, terms.group)
        self._is_closed = False

    @property
    def session(self) -> ConsumerSession | None:
        """The session with the master, while there is one."""
        return self.sessions.session

    @property
    def held(self) -> int:
        """Messages of this attachment whose verdict has not been sent."""
        return self.verdicts.outstanding.messages - self.verdicts.gathered + self.verdicts.postponed

    @property
    def held_bytes(self) -> int:
        """Bytes of the held messages; each counts for its part of its batch."""
        return self.verdicts.outstanding.bytes + self.verdicts.postponed_bytes

    def may_hand_out(self) -> bool:
        """Whether this consumer still holds its messages, as far as it knows. If the last answered
        heartbeat is older than the lease (this process was stopped, or cut off), other consumers
        may have them: the answer to the next ATTACH says so.
        """
        if self._loop.time() <= self.sessions.sure_until_s:
            return True
        self.sessions.detach()
        return False

    def take(self, messages_max: int) -> BatchSlice:
        """The next messages that are consecutive in one batch; there must be some."""
        self._calls.ready.end()
        first = self.slices[0]
        if first.count <= messages_max:
            self.slices.popleft()
        else:
            first, self.slices[0] = first.split(messages_max)
        if first.attempt > 1 and self.session is not None and not self._terms.most_once:
            # Sent before the application sees them: if they crash this process, the broker must
            # know which messages the application had.
            begun = wire.pack_begun(self.session.number, first.pull, first.pull + first.count - 1)
            self.session.connection.send(FrameKind.BEGUN, begun)
        return first

    def next_ready(self) -> Message | None:
        """The next message, if it can be handed out without further checks."""
        self._calls.ready.end()
        if not self._has_ready() or self._loop.time() > self.sessions.sure_until_s:
            return None
        return self.take(1).message(0)

    def begin_run(self, messages_max: int) -> int:
        """Let `ready` hand out the next messages,
        but for the last one of their slice. Returns how many.
        """
        count = min(self.slices[0].count - 1, messages_max) if self._has_ready() else 0
        if count > 0:
            self._calls.ready.begin(self.slices[0], count, self.sessions.sure_until_s)
        return count

    def _has_ready(self) -> bool:
        return (
            bool(self.slices)
            and self.slices[0].attempt == 1
            and self.slices[0].batch.decoded is not None
        )

    # --- messages in ------------------------------------------------------------------------------

    @property
    def can_pull(self) -> bool:
        """Whether a pull may begin."""
        return (
            self.asked == 0
            and self.sessions.session is not None
            and self.failure is None
            and not self._is_closed
        )

    def pull(self, messages: int, size: int, wait_ms: int) -> None:
        """Pull up to `messages` messages and about `size` bytes (the last batch may exceed the
        limit). `can_pull` must be true.
        """
        session = self.sessions.session
        assert session is not None
        self.asked, self.asked_bytes = messages, size
        kept = self._batches.kept if self._knows_kept else -1
        request = wire.pack_pull(wire.Pull(session.number, messages, size, wait_ms, kept))
        session.connection.request(
            FrameKind.PULL,
            partial(self._pulled, session),
            request,
            timeout_s=wait_ms / 1000 + ANSWER_S,
        )

    def _pulled(self, session: ConsumerSession, answer: Frame | QmqError) -> None:
        if session is not self.sessions.session:
            return
        asked, self.asked, self.asked_bytes = self.asked, 0, 0
        try:
            if isinstance(answer, QmqError):
                raise answer
            got = self._take_delivery(answer.payload, session)
        except (MessagesExpired, StorageError, PeerError) as failure:
            self._fail(failure)
        except QmqError as failure:
            self.sessions.failed(failure)
        else:
            self._calls.answered(asked, got)
            self.want = grown(self.want, asked, got, self._calls.limit.messages)
            if got >= MANY:
                # The broker works on the next pull while the application has these messages; it may
                # take them all before it waits again.
                self._calls.pull_more()
                session.connection.stream.flush()
            else:
                # The application gets its messages first; the pull still leaves in this round.
                self._links.round.at_end(self._calls.pull_more)

    def _take_delivery(self, payload: memoryview, asked: ConsumerSession) -> int:
        session, pull, ranges, batch_count, at = wire.unpack_delivery(payload)
        if session != asked.number or not ranges:
            return 0
        if pull <= self._received:
            raise ProtocolViolation(
                f"pull sequence {pull} was handed out again, {self._received} has arrived already"
            )
        batches = self._batches.read(payload, at, batch_count, ranges, asked.connection.address)
        begin = pull
        for each in ranges:
            if each.batch >= len(batches) or not _lies_in(each, batches[each.batch].view):
                raise ProtocolViolation(f"{each} is outside its batch")
            batch = batches[each.batch]
            offset = each.first_sequence - batch.view.base_sequence
            part = BatchSlice(batch, offset, each.count, each.attempt, pull, self.verdicts.acks)
            if batch.view.header.is_directed:
                for equal in part.by_failures():
                    self._accept(equal)
            else:
                self._accept(part)
            pull += each.count
        self._received = pull - 1
        self._counters.received += pull - begin
        self._calls.notify()
        return pull - begin

    def _accept(self, part: BatchSlice) -> None:
        self.verdicts.outstanding.add(part.pull, part.count, part.batch.message_bytes)
        if not self._terms.tags_any and not self._terms.tags_all:
            self.slices.append(part)
            return
        while part.count:
            head, part = part.split(1)
            tags = head.batch.column("tags")
            if self._matches(tags[head.offset] if tags else ()):
                self.slices.append(head)
            else:
                self.verdicts.acks.settle(head.pull, head.pull, Verdict.ACK)

    def _matches(self, tags: tuple[str, ...]) -> bool:
        if self._terms.tags_any and not any(tag in tags for tag in self._terms.tags_any):
            return False
        return all(tag in tags for tag in self._terms.tags_all)

    def _fail(self, failure: QmqError) -> None:
        self.failure = failure
        self._calls.failed(self.group, failure)

    # --- staying attached -------------------------------------------------------------------------

    ask_again = ()

    @property
    def wants_session(self) -> bool:
        """True until the consumer leaves."""
        return not self._is_closed

    def _request(self, start: str) -> wire.Attach:
        terms = self._terms
        return wire.Attach(
            terms.subject,
            0,
            terms.group,
            terms.name,
            terms.incarnation,
            self._received,
            start,
            terms.lease_ms,
            terms.tags_any,
            terms.tags_all,
            terms.condition,
        )

    def _owner(self) -> SpoolOwner:
        """The data with which another process can take this consumer's place."""
        return SpoolOwner(self.group, self._request(wire.RESUME))

    async def ask(self, connection: Connection) -> wire.Attached:
        """Send ATTACH. Before the first one, hand in the verdicts of an earlier incarnation; its
        messages then go back to the group.
        """
        links = self._links
        if not self._has_inherited and links.store is not None:
            await inherit(connection, links, links.store, self._terms, self.group)
            self._has_inherited = True
        answer = await connection.call(
            FrameKind.ATTACH, self._request(self._terms.start).pack(), timeout_s=ANSWER_S
        )
        return wire.Attached.unpack(answer.payload)

    def granted(self, answer: wire.Attached) -> None:
        """Drop messages that the broker no longer counts as held,
        by the table at the top of the module.
        """
        self.verdicts.attempts_max = answer.attempts_max
        self._knows_kept = bool(answer.knows_kept)
        self._batches.forget()
        if not answer.resumed:
            self._void(0, answer.next_pull_sequence)
        elif answer.next_pull_sequence <= self._received:
            self._void(answer.next_pull_sequence, answer.next_pull_sequence)

    def attached(self, session: ConsumerSession) -> None:
        """Send everything that waited for a session."""
        self.verdicts.attached()
        self._calls.notify()
        self._calls.pull_more()

    def lease_renewed(self) -> None: ...

    def lost(self, failure: LaneLost) -> None:
        """An attachment cannot be lost to another consumer; a lane can."""
        log.debug("%s: %s", self._terms.name, failure)

    def refused(self, failure: CallerError) -> None:
        """Report the failure to the application."""
        if isinstance(failure, OrderMismatch):
            subject = self._terms.subject
            failure = OrderMismatch(
                f"subject {subject!r} is ordered: consume it with mq.ordered_consumer "
                f"({failure.message})"
            )
        self._fail(failure)

    def _void(self, before: int, following: int) -> None:
        """Messages from pull sequence `before` on are void;
        the next delivery begins at `following`.
        """
        self._calls.ready.end()
        while self.slices and self.slices[-1].pull >= before:
            self.slices.pop()
        if self.slices and self.slices[-1].pull + self.slices[-1].count > before:
            self.slices[-1] = self.slices[-1].split(before - self.slices[-1].pull)[0]
        self._received = following - 1
        self.verdicts.void(before, following)

    def detached(self) -> None:
        """The session has ended: no pull or verdict is in flight."""
        self.asked = self.asked_bytes = 0
        self.verdicts.detached()

    # --- the end ----------------------------------------------------------------------------------

    def return_unseen(self) -> None:
        """Return unseen messages to the group immediately."""
        self._calls.ready.end()
        unseen, self.slices = self.slices, deque()
        for each in unseen:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.RELEASE)

    async def close(self) -> None:
        """Send the remaining verdicts and leave the group.
        Unseen messages return to the group immediately.
        """
        self.return_unseen()
        self.verdicts.flush()
        self._is_closed = True
        left = self._leave()
        await self.sessions.end()
        self.verdicts.close(is_answered=await left)
        self.sessions.detach()

    def _leave(self) -> asyncio.Future[bool]:
        """Send DETACH together with the last verdicts, so that nothing is handed out in between.
        Returns whether the broker answered.
        """
        left: asyncio.Future[bool] = self._loop.create_future()
        session = self.session
        if session is None or not session.connection.is_open:
            left.set_result(False)
        else:
            payload = wire.pack_detach(session.number, self._received)
            session.connection.request(
                FrameKind.DETACH, partial(_detach_answered, left), payload, timeout_s=ANSWER_S
            )
        return left


def _detach_answered(left: asyncio.Future[bool], answer: Frame | QmqError) -> None:
    if not left.done():
        left.set_result(not isinstance(answer, Unavailable))


def _lies_in(part: wire.Range, view: BatchView) -> bool:
    return 0 <= part.first_sequence - view.base_sequence <= view.count - part.count


# --- how much an attachment may pull --------------------------------------------------------------


def start(prefetch: int, parts: int) -> int:
    """How many messages each attachment may always ask for; 0 if there are not enough for all."""
    return min(START, prefetch // (2 * parts))


def allowance(
    prefetch: int, parts: Sequence[Attachment], part: Attachment, *, has_unseen: bool
) -> int:
    """How many messages `part` may ask for now. While it has unseen messages, it waits until a
    quarter of the total is free.
    """
    free = prefetch - sum([each.held + each.asked for each in parts])
    if free <= 0 or (has_unseen and free * 4 < prefetch):
        return 0
    if len(parts) == 1:
        # A broker group that is added while this pull waits must not wait for its end.
        return min(free - START if free > 4 * START else free, limits.PULL_MESSAGES_MAX)
    least = start(prefetch, len(parts))
    reserved = sum([max(least - each.held - each.asked, 0) for each in parts if each is not part])
    return max(min(free - reserved, max(part.want, least, 1), limits.PULL_MESSAGES_MAX), 0)


def bytes_allowance(
    prefetch_bytes: int,
    pull_bytes: int,
    parts: Sequence[Attachment],
    part: Attachment,
    *,
    has_unseen: bool,
) -> int:
    """How many bytes a pull of `part` may bring now, `pull_bytes` at most; 0 if it must wait."""
    used = sum([each.held_bytes + each.asked_bytes for each in parts])
    if not used:
        least = prefetch_bytes if len(parts) == 1 else prefetch_bytes // (2 * len(parts))
        return max(min(pull_bytes, least), 1)
    free = prefetch_bytes - used
    if free <= 0 or (has_unseen and free * 4 < prefetch_bytes):
        return 0
    if len(parts) > 1:
        least = prefetch_bytes // (2 * len(parts))
        reserved = sum(
            [
                max(least - each.held_bytes - each.asked_bytes, 0)
                for each in parts
                if each is not part
            ]
        )
        free = min(free - reserved, max(least, 1))
    return max(min(free, pull_bytes), 0)


def grown(want: int, asked: int, got: int, prefetch: int) -> int:
    """How many messages an attachment asks for next,
    after a pull for `asked` messages brought `got`.
    """
    if got >= asked:
        return min(max(asked, want) * GROWTH, prefetch)
    return min(2 * got, want)


def wait_ms(prefetch: int, prefetch_bytes: int, parts: int) -> int:
    """How long a pull may wait at its broker."""
    return (
        WAIT_MS
        if parts == 1 or (start(prefetch, parts) and prefetch_bytes >= 2 * parts)
        else SHORT_WAIT_MS
    )


# --- verdicts of earlier clients ------------------------------------------------------------------

WATCH_S: Final = 60.0
INHERIT_S: Final = 3.0
"""How long a consumer waits while another process hands in the verdicts of its
earlier incarnation.
"""


async def hand_in(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> int:
    """Send the verdicts of one file to the master of its broker group. Returns the number of
    messages, 0 if the lease was lost.

    Harmless to repeat. Raises the broker's error.
    """
    attach = left.owner.attach
    answer = await connection.call(FrameKind.ATTACH, attach.pack(), timeout_s=ANSWER_S)
    attached = wire.Attached.unpack(answer.payload)
    if not attached.resumed:
        return 0
    settlements = still_valid(left.kept, attached.next_pull_sequence, _now_ms(links))
    reporter = links.settle_reporter(attach.subject, attach.group, left.owner.broker_group)
    for part in in_frames(settlements):
        told = (
            reporter.watch(connection.address, counted(part), _ignored)
            if reporter is not None
            else _ignored
        )
        try:
            told(
                await connection.call(
                    FrameKind.SETTLE, wire.pack_settle(attached.session, part), timeout_s=ANSWER_S
                )
            )
        except QmqError as failure:
            told(failure)
            raise
    await connection.call(FrameKind.DETACH, wire.pack_detach(attached.session), timeout_s=ANSWER_S)
    return messages_settled(settlements)


async def inherit(
    connection: Connection,
    links: ConnectionPool,
    store: AckSpool,
    terms: SubscriptionOptions,
    broker_group: str,
) -> None:
    """Hand in what earlier incarnations of a consumer left for a broker group. Raises Unavailable:
    then attaching would fail, too.
    """

    def is_mine(owner: SpoolOwner) -> bool:
        return (owner.broker_group, owner.attach.consumer) == (broker_group, terms.name)

    loop = asyncio.get_running_loop()
    until_s = loop.time() + INHERIT_S
    while True:
        for left in store.left(terms.subject, terms.group, _now_ms(links)):
            try:
                if is_mine(left.owner):
                    await _try(connection, left, links)
            finally:
                left.put_back()
        others = [
            each
            for each in store.busy(terms.subject, terms.group)
            if each.attach.incarnation != terms.incarnation
        ]
        if loop.time() > until_s or not any(map(is_mine, others)):
            return
        await asyncio.sleep(links.timing.hand_in_retry_s[0])


async def _try(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> None:
    """Hand in a file and delete it. A file that this broker will never accept is deleted, too.
    Raises Unavailable.
    """
    try:
        handed = await hand_in(connection, left, links)
    except (CallerError, UnknownConsumer) as failure:
        if isinstance(failure, ClientClosed):
            raise
        log.warning(
            "verdicts of consumer %s are lost, its messages will be delivered again: %s",
            left.owner.attach.consumer,
            failure,
        )
    else:
        attach = left.owner.attach
        log.info(
            "verdicts of consumer %s on %s: %d handed in to %s",
            attach.consumer,
            attach.subject,
            handed,
            left.owner.broker_group,
        )
    left.delete()


def _now_ms(links: ConnectionPool) -> int:
    return ms_of(links.now_ns())


def _ignored(_: Frame | QmqError) -> None: ...


def _put_back(left: SpoolRemainder, _: object) -> None:
    left.put_back()


class SpoolSender:
    """Periodically looks for files of one consumer's subject and group."""

    def __init__(self, links: ConnectionPool, store: AckSpool, terms: SubscriptionOptions) -> None:
        self._links, self._store, self._terms = links, store, terms
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Harmless to repeat."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            for left in self._store.left(
                self._terms.subject, self._terms.group, _now_ms(self._links)
            ):
                if left.owner.attach.consumer == self._terms.name:
                    left.put_back()
                    continue
                task = asyncio.get_running_loop().create_task(self._carry(left))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_put_back, left))
            await asyncio.sleep(WATCH_S * random.uniform(0.7, 1.3))  # noqa: S311 - jitter, not a secret

    async def _carry(self, left: SpoolRemainder) -> None:
        """Retry until the file is handed in."""
        tries = 0
        while True:
            try:
                await self._carry_once(left)
                return
            except ClientClosed:
                return
            except QmqError as failure:
                log.debug("verdicts for %s wait: %s", left.owner.broker_group, failure)
            jitter = random.uniform(0.7, 1.3)  # noqa: S311 - no secret
            await asyncio.sleep(pause_s(self._links.timing.hand_in_retry_s, tries) * jitter)
            tries += 1

    async def _carry_once(self, left: SpoolRemainder) -> None:
        group = left.owner.broker_group
        master, connection = await self._links.reach(self._terms.subject, group)
        try:
            await _try(connection, left, self._links)
        except NotMaster:
            self._links.locator.doubt(group, master)
            raise

    async def close(self) -> None:
        """Stop. Files that are not handed in stay for the next consumer."""
        tasks = [*self._tasks, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
