"""An attachment: a consumer's part in one queue, over all the masters that the queue's broker group has in time.

It keeps a session with the master, a pull under way, and the messages that the application has not seen yet. It comes back after a broken
connection, or to a new master, under the same incarnation and with `received`, the last pull sequence that arrived here. The answer says
what of it is still ours:

    resumed, next > received     all of it. What was handed out and did not arrive went back to the group
    resumed, next <= received    the master forgot: it lost deliveries that were not committed. Pull sequences from `next` on will be given
                                 again, perhaps to other messages. What we hold below `next` is ours, the tail is void
    not resumed                  nothing (the lease was lost, or the master forgot more than it can tell): all of it is void

Void means: messages nobody saw are dropped; on those that were seen no verdict is ever sent (`qmq/client/verdicts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque

from qmq.batch import BatchView
from qmq.client import prefetch_limits
from qmq.client.client_timing import pause_s
from qmq.client.connection import Connection
from qmq.client.consumer_session import ANSWER_S, ConsumerSession, SessionOwner, Terms
from qmq.client.links import Links
from qmq.client.message import Decoded, Message, Slice
from qmq.client.route_book import Master
from qmq.client.verdict_store import Origin
from qmq.client.verdicts import Verdicts
from qmq.errors import (
    CallerError,
    ClientClosed,
    MessagesExpired,
    NotConnected,
    NotMaster,
    OrderMismatch,
    PeerError,
    ProtocolViolation,
    QmqError,
    StorageError,
    Unavailable,
    UnknownConsumer,
)
from qmq.targeted import is_directed
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Verdict

log = logging.getLogger("qmq.client")


class Attachment:
    """`slices` are the messages that the application has not seen yet."""

    def __init__(self, links: Links, owner: SessionOwner, terms: Terms, group: str) -> None:
        self.group = group
        self.slices: deque[Slice] = deque()
        self.session: ConsumerSession | None = None
        self.failure: QmqError | None = None
        self.asked = self.want = self.asked_bytes = 0
        self._terms = terms
        self._links, self._owner = links, owner
        self._loop = asyncio.get_running_loop()
        self._received = -1
        self._lease_ms = terms.lease_ms
        """As the broker granted it, which may be shorter than what was asked for."""
        self._alive_s = -math.inf
        """When the last sign of life was sent that a broker answered."""
        tally = links.tallies.taking(terms.subject, terms.group)
        file = links.store.file(self._origin, lambda: links.now_ns() // 1_000_000) if links.store is not None else None
        self.verdicts = Verdicts(
            owner,
            terms,
            group,
            sent_away=self._sent_away,
            come_back=self.start,
            now_ns=links.now_ns,
            tally=tally,
            file=file,
            retry_s=links.timing.session_retry_s[-1],
        )
        self._has_inherited = links.store is None
        self._tally = tally
        self._ended = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def held(self) -> int:
        """Messages here whose verdict is not on its way."""
        return self.verdicts.outstanding.messages - self.verdicts.gathered + self.verdicts.postponed

    @property
    def held_bytes(self) -> int:
        """What they take: of each its part of its batch."""
        return self.verdicts.outstanding.bytes + self.verdicts.postponed_bytes

    def may_hand_out(self) -> bool:
        """Whether what is here is ours, as far as we can tell. If the last sign of life that was answered is older than the lease (this
        process was stopped, or cut off), it may be others' by now: the answer to a new ATTACH says so.
        """
        if self._loop.time() - self._alive_s <= self._lease_ms / 1000:
            return True
        self._detach()
        return False

    def take(self, messages_max: int) -> Slice:
        """The next messages that lie together; there must be some."""
        first = self.slices[0]
        if first.count <= messages_max:
            self.slices.popleft()
        else:
            first, self.slices[0] = first.split(messages_max)
        if first.attempt > 1 and self.session is not None and not self._terms.most_once:
            # If they end this process, the broker shall know that it was them, and not those that wait here unseen.
            begun = wire.pack_begun(self.session.number, first.pull, first.pull + first.count - 1)
            self.session.connection.tell(FrameKind.BEGUN, begun)
        return first

    def next_ready(self) -> Message | None:
        """The next message, if nothing has to be looked at before it is handed out."""
        if not self.slices or self._loop.time() - self._alive_s > self._lease_ms / 1000:
            return None
        first = self.slices[0]
        if first.attempt > 1 or not first.batch.is_decoded:
            return None
        message = Message(first.settler, first.batch, first.offset, first.attempt, first.pull)
        if first.count == 1:
            self.slices.popleft()
        else:
            # In place: a new slice for each message would cost as much as the message.
            first.offset += 1
            first.pull += 1
            first.count -= 1
        return message

    # --- messages in ---------------------------------------------------------------------------------------------------

    @property
    def can_pull(self) -> bool:
        """Whether a pull may begin."""
        return self.asked == 0 and self.session is not None and self.failure is None and not self._is_closed

    def pull(self, messages: int, size: int, wait_ms: int) -> None:
        """Ask for messages, of `size` bytes or a batch more; `can_pull` must be true."""
        session = self.session
        assert session is not None
        self.asked, self.asked_bytes = messages, size
        request = wire.pack_pull(wire.Pull(session.number, messages, size, wait_ms))
        session.connection.request(
            FrameKind.PULL, lambda answer: self._pulled(session, answer), request, timeout_s=wait_ms / 1000 + ANSWER_S
        )

    def _pulled(self, session: ConsumerSession, answer: Frame | QmqError) -> None:
        if session is not self.session:
            return
        asked, self.asked, self.asked_bytes = self.asked, 0, 0
        try:
            if isinstance(answer, QmqError):
                raise answer
            got = self._take_delivery(answer.payload, session.number)
        except (MessagesExpired, StorageError, PeerError) as failure:
            self._fail(failure)
        except QmqError as failure:
            log.debug("%s: %s", self._terms.name, failure)
            self._sent_away(failure)
        else:
            self.want = prefetch_limits.grown(self.want, asked, got, self._owner.prefetch)
            self._owner.pull_more()

    def _take_delivery(self, payload: memoryview, number: int) -> int:
        session, pull, ranges, batch_count, at = wire.unpack_delivery(payload)
        if session != number or not ranges:
            return 0
        if pull <= self._received:
            raise ProtocolViolation(f"pull sequence {pull} was handed out again, {self._received} has arrived already")
        batches: list[Decoded] = []
        for _ in range(batch_count):
            view = BatchView.parse(payload, at)
            at += view.envelope.total_bytes
            batches.append(Decoded(view))
        begin = pull
        for each in ranges:
            if each.batch >= batch_count or not _lies_in(each, batches[each.batch].view):
                raise ProtocolViolation(f"{each} lies outside its batch")
            batch = batches[each.batch]
            offset = each.first_sequence - batch.view.base_sequence
            part = Slice(batch, offset, each.count, each.attempt, pull, self.verdicts.hold)
            if is_directed(batch.view.header):
                for equal in part.by_failures():
                    self._accept(equal)
            else:
                self._accept(part)
            pull += each.count
        self._received = pull - 1
        self._tally.received += pull - begin
        self._owner.notify()
        return pull - begin

    def _accept(self, part: Slice) -> None:
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
                self.verdicts.hold.settle(head.pull, head.pull, Verdict.ACK)

    def _matches(self, tags: tuple[str, ...]) -> bool:
        if self._terms.tags_any and not any(tag in tags for tag in self._terms.tags_any):
            return False
        return all(tag in tags for tag in self._terms.tags_all)

    def _fail(self, failure: QmqError) -> None:
        self.failure = failure
        self._owner.failed(self.group, failure)

    # --- staying attached ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, and stay so."""
        if (self._runner is None or self._runner.done()) and not self._is_closed:
            self._runner = self._loop.create_task(self._run())

    async def _run(self) -> None:
        """Attach, and attach again whenever the connection or the session ends."""
        attempt = 0
        while not self._is_closed:
            try:
                # The way there keeps its own pauses; those of this loop are for what a broker answers.
                master, connection = await self._links.reach(self._terms.subject, self.group)
                if await self._serve_under(master, connection):
                    attempt = 0
            except Unavailable as failure:
                log.debug("%s: %s", self._terms.name, failure)
                continue
            except OrderMismatch as failure:
                subject = self._terms.subject
                self._fail(OrderMismatch(f"subject {subject!r} is ordered: consume it with mq.ordered_consumer ({failure.message})"))
                return
            except CallerError as failure:
                if isinstance(failure, ClientClosed) or (attempt > 2 and not isinstance(failure, UnknownConsumer)):
                    self._fail(failure)
                    return
            except QmqError as failure:
                log.debug("%s: %s", self._terms.name, failure)
            self._detach()
            await asyncio.sleep(pause_s(self._links.timing.session_retry_s, attempt))
            attempt += 1

    async def _serve_under(self, master: Master, connection: Connection) -> bool:
        """One session, from attaching to its end; whether there was one. Raises what attaching raises, unless it is worth another try."""
        is_attached = False
        try:
            if not self._has_inherited:
                await self._inherit(connection)
            await self._attach(master, connection)
            is_attached = True
            await self._stay_attached()
        except NotMaster:
            self._links.locator.doubt(self.group, master)
        except (Unavailable, UnknownConsumer) as failure:
            log.debug("%s: %s", self._terms.name, failure)
        return is_attached

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
        )

    def _origin(self) -> Origin:
        """How another process comes back as us."""
        return Origin(self.group, self._request(wire.RESUME))

    async def _inherit(self, connection: Connection) -> None:
        """When we attach, what an earlier life of ours holds goes back: what it had to say comes first."""
        from qmq.client.handing_in import inherit

        links = self._links
        assert links.store is not None
        await inherit(connection, links.store, self._terms, self.group, links.now_ns() // 1_000_000, links.timing.hand_in_retry_s[0])
        self._has_inherited = True

    async def _attach(self, master: Master, connection: Connection) -> None:
        asked_s = self._loop.time()
        answer = await connection.call(FrameKind.ATTACH, self._request(self._terms.start).pack(), timeout_s=ANSWER_S)
        attached = wire.Attached.unpack(answer.payload)
        self.verdicts.attempts_max = attached.attempts_max
        if self._is_closed:
            return
        if not connection.is_open:
            raise NotConnected("the connection ended while attaching")
        if not attached.resumed:
            self._void(0, attached.next_pull_sequence)
        elif attached.next_pull_sequence <= self._received:
            self._void(attached.next_pull_sequence, attached.next_pull_sequence)
        self._links.locator.confirm(self.group)
        self.session = ConsumerSession(connection, attached.session, master)
        self._lease_ms = attached.lease_ms
        self._alive_s = asked_s
        self._ended.clear()
        connection.on_closed[self._detach] = None
        self.verdicts.attached(self.session)
        self._owner.notify()
        self._owner.pull_more()

    def _void(self, before: int, following: int) -> None:
        """What we hold from `before` on is not ours any more; the next delivery begins at `following`."""
        while self.slices and self.slices[-1].pull >= before:
            self.slices.pop()
        if self.slices and self.slices[-1].pull + self.slices[-1].count > before:
            self.slices[-1] = self.slices[-1].split(before - self.slices[-1].pull)[0]
        self._received = following - 1
        self.verdicts.void(before, following)

    async def _stay_attached(self) -> None:
        """Send signs of life until the session ends."""
        while self.session is not None and not self._is_closed:
            try:
                async with asyncio.timeout(self._lease_ms / 3000):
                    await self._ended.wait()
            except TimeoutError:
                session = self.session
                if session is not None:
                    payload, asked_s = wire.pack_session(session.number), self._loop.time()
                    await session.connection.call(FrameKind.HEARTBEAT, payload, timeout_s=ANSWER_S)
                    self._alive_s = max(self._alive_s, asked_s)

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.group)
        if self.session is not None and known is not None and known != self.session.master:
            self._detach()

    def _sent_away(self, failure: QmqError) -> None:
        if isinstance(failure, NotMaster) and self.session is not None:
            self._links.locator.doubt(self.group, self.session.master)
        self._detach()

    def _detach(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.connection.on_closed.pop(self._detach, None)
        self.asked = self.asked_bytes = 0
        self.verdicts.detached()
        self._ended.set()

    # --- the end -------------------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """The messages that nobody saw go to others at once."""
        unseen, self.slices = self.slices, deque()
        for each in unseen:
            each.settler.settle(each.pull, each.pull + each.count - 1, Verdict.RELEASE)

    async def close(self) -> None:
        """Settle what is left and leave the group: the messages that nobody saw go to others at once."""
        self.give_back()
        self.verdicts.flush()
        self._is_closed = True
        left = self._leave()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self.verdicts.close(is_told=await left)
        self._detach()

    def _leave(self) -> asyncio.Future[bool]:
        """Say so in the same write as the last verdicts, so that nothing is handed to us in between. Gives whether the broker heard."""
        left: asyncio.Future[bool] = self._loop.create_future()
        session = self.session
        if session is None or not session.connection.is_open:
            left.set_result(False)
        else:
            payload = wire.pack_detach(session.number, self._received)
            session.connection.request(FrameKind.DETACH, lambda answer: _heard(left, answer), payload, timeout_s=ANSWER_S)
        return left


def _heard(left: asyncio.Future[bool], answer: Frame | QmqError) -> None:
    if not left.done():
        left.set_result(not isinstance(answer, Unavailable))


def _lies_in(part: wire.Range, view: BatchView) -> bool:
    return 0 <= part.first_sequence - view.base_sequence <= view.count - part.count
