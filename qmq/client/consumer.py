"""The consumer: takes part in a group, keeps messages coming, and tells the broker what became of them.

It attaches to the subject's queue and keeps a pull under way while fewer than `prefetch` messages are unsettled, so that the next delivery
travels while this one is worked on. Messages are settled by ranges of pull sequences, in any order. If the connection ends it comes back
under the same incarnation, and the broker goes on where it was: what arrived here is not handed out again while the lease lasts.

    async for message in consumer   acknowledged when the loop comes back for the next one
    ack="explicit"                  acknowledged when you say `await message.ack()`
    most_once=True                  acknowledged before you see it: never twice, perhaps never
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import Final

from qmq import limits
from qmq.batch import BatchView
from qmq.client.connection import Connection
from qmq.client.link import Links
from qmq.client.message import Decoded, Message, Messages, Slice, delay_ms
from qmq.client.settlements import Outstanding, Settlements
from qmq.errors import (
    CallerError,
    ClientClosed,
    InvalidArgument,
    MessagesExpired,
    NotConnected,
    PeerError,
    ProtocolViolation,
    QmqError,
    StaleDelivery,
    StorageError,
    UnknownConsumer,
)
from qmq.model import check_name
from qmq.wire import messages as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.messages import Verdict

log = logging.getLogger("qmq.client")

PREFETCH: Final = 2_000
LEASE_MS: Final = 30_000
PULL_BYTES: Final = limits.MIB
WAIT_MS: Final = 20_000
SETTLE_DELAY_S: Final = 0.005
_ANSWER_S: Final = 10.0
_RETRY_S: Final = (0.02, 0.1, 0.3, 1.0)
BACKOFF_MS: Final = (1_000, 5_000, 10_000, 30_000, 60_000)

Reset = Callable[[str, str], Awaitable[None]]


class Consumer:
    """One consumer of a group. Make it with `Client.consumer`."""

    def __init__(
        self, links: Links, reset: Reset, subject: str, group: str, *, name: str | None = None, start: str = "earliest",
        tags_any: list[str] | None = None, tags_all: list[str] | None = None, ack: str = "auto", most_once: bool = False,
        prefetch: int = PREFETCH, pull_bytes: int = PULL_BYTES, lease_ms: int = LEASE_MS, expired: str = "raise",
    ) -> None:  # fmt: skip
        if ack not in ("auto", "explicit") or expired not in ("raise", "skip") or start not in ("earliest", "latest"):
            raise InvalidArgument("ack is 'auto' or 'explicit', expired 'raise' or 'skip', start 'earliest' or 'latest'")
        if not 0 < prefetch <= limits.CONSUMER_UNACKED_MAX:
            raise InvalidArgument(f"prefetch is 1 to {limits.CONSUMER_UNACKED_MAX}, not {prefetch}")
        self.subject = check_name("subject", subject)
        self.group = check_name("group", group)
        self.incarnation = os.urandom(8).hex()
        self.name = check_name("consumer", name) if name else f"{_host()}-{os.getpid()}-{self.incarnation[:6]}"
        self.stale = 0
        self._tags_any = list(tags_any or [])
        self._tags_all = list(tags_all or [])
        self._start, self._lease_ms, self._expired = start, lease_ms, expired
        self._is_auto, self._most_once = ack == "auto", most_once
        self._prefetch, self._pull_bytes = prefetch, pull_bytes
        self._links, self._reset = links, reset
        self._loop = asyncio.get_running_loop()
        self._slices: deque[Slice] = deque()
        self._settlements = Settlements()
        self._received = -1
        self._lost_before = 0
        """Pull sequences before it went back to the group, settled or not."""
        self._outstanding = Outstanding()
        self._resetting: asyncio.Task[None] | None = None
        self._session = -1
        self._is_pulling = False
        self._connection: Connection | None = None
        self._runner: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        self._ended = asyncio.Event()
        self._failure: QmqError | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._current: Message | None = None
        self._is_closed = False

    # --- for the application -------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        self._finish_current()
        part = await self._next_slice(1)
        assert part is not None
        message = Message(self, part.batch, part.offset, part.attempt, part.pull)
        if self._most_once:
            message.is_settled = True
        self._current = message
        return message

    def _finish_current(self) -> None:
        current, self._current = self._current, None
        if current is not None and self._is_auto and not current.is_settled:
            self.settle(current.pull_sequence, current.pull_sequence, Verdict.ACK)

    async def pull(self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)) -> Messages:
        """Up to `messages_max` messages; none if there were none for `wait`. Settle them with `Messages.ack` or one by one.

        Raises MessagesExpired, LogDamaged, UnknownSubject, ClientClosed.
        """
        if not 0 < messages_max <= limits.CONSUMER_UNACKED_MAX:
            raise InvalidArgument(f"messages_max is 1 to {limits.CONSUMER_UNACKED_MAX}, not {messages_max}")
        first = await self._next_slice(messages_max, wait.total_seconds())
        if first is None:
            return Messages(self, [])
        slices = [first]
        room = messages_max - slices[0].count
        while room > 0 and self._slices and not self._most_once:
            slices.append(self._take(room))
            room -= slices[-1].count
        return Messages(self, slices)

    async def batches(self, messages_max: int = 1000) -> AsyncIterator[Messages]:
        """Messages in batches; each is acknowledged when the loop comes back, unless it was settled (`ack="auto"`)."""
        while True:
            found = await self.pull(messages_max)
            if not found.slices:
                continue
            yield found
            if self._is_auto and not self._most_once:
                found.ack_later()

    async def _next_slice(self, messages_max: int, wait_s: float = math.inf) -> Slice | None:
        """The next messages that lie together; None if there were none for `wait_s`."""
        until = self._loop.time() + wait_s
        while not self._slices:
            self._check_open()
            self._start_running()
            if not await self._wait(until):
                return None
        part = self._take(messages_max)
        if self._most_once:
            await self.settle_now(part.pull, part.pull + part.count - 1, Verdict.ACK)
        return part

    async def _wait(self, until: float) -> bool:
        """Wait until something changes; False if it did not until then. Cheap: one future, one timer."""
        waiting: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append(waiting)
        timer = self._loop.call_at(until, _set_result, waiting, False) if until < math.inf else None
        try:
            is_changed: bool = await waiting
        finally:
            if timer is not None:
                timer.cancel()
        return is_changed

    def _notify(self) -> None:
        """Something changed: whoever waits looks again."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            _set_result(each, True)

    def _take(self, messages_max: int) -> Slice:
        first = self._slices[0]
        if first.count <= messages_max:
            return self._slices.popleft()
        head, self._slices[0] = first.split(messages_max)
        return head

    def _check_open(self) -> None:
        if self._is_closed or self._links.is_closed:
            raise ClientClosed("the consumer is closed: make a new one")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # --- settling ------------------------------------------------------------------------------------------------------

    def settle(self, first: int, last: int, verdict: int, delay: int = 0) -> None:
        """Give a verdict on pull sequences; it leaves soon, with others. What has a verdict already keeps it."""
        for begin, end in self._outstanding.remove(first, last):
            self._settlements.add(begin, end, verdict, delay)
        if self._settlements.messages * 4 >= self._prefetch:
            self._loop.call_soon(self._flush_settlements)
        elif self._flush_timer is None:
            self._flush_timer = self._loop.call_later(SETTLE_DELAY_S, self._flush_settlements)
        if not self._is_pulling:
            self._pull_more()

    def nack(self, first: int, last: int, attempt: int, delay: timedelta | None) -> None:
        """Have messages handed out again."""
        waits_ms = BACKOFF_MS[min(attempt, len(BACKOFF_MS)) - 1] if delay is None else delay_ms(delay)
        self.settle(first, last, Verdict.NACK, waits_ms)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        """Give a verdict and wait until the broker has it. Raises StaleDelivery, NotConnected, ClientClosed."""
        connection = await self._attached()
        if not self._outstanding.remove(first, last):
            if first < self._lost_before:
                raise self._stale(last - first + 1)
            return
        payload = wire.pack_settle(self._session, [wire.Settlement(first, last, verdict, 0)])
        answer = await connection.call(FrameKind.SETTLE, payload, timeout_s=_ANSWER_S, deadline_ms=10_000)
        self._pull_more()
        _, stale = wire.unpack_settled(answer.payload)
        if stale:
            raise self._stale(stale)

    def _stale(self, count: int) -> StaleDelivery:
        return StaleDelivery(
            f"{count} of the messages were handed to another consumer since: the lease of {self._lease_ms} ms was lost, "
            "or the group was reset"
        )

    async def _attached(self) -> Connection:
        """The connection, waited for if it is just being made again. Raises NotConnected, ClientClosed."""
        until = self._loop.time() + _ANSWER_S
        while self._connection is None:
            self._check_open()
            self._start_running()
            if not await self._wait(until):
                raise NotConnected(f"consumer {self.name} could not come back to its broker: the messages will come again")
        return self._connection

    def _flush_settlements(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        connection = self._connection
        if connection is None or not self._settlements.messages:
            return
        taken = self._settlements.take()
        payload = wire.pack_settle(self._session, taken)
        connection.request(
            FrameKind.SETTLE, lambda answer: self._settled(taken, answer), payload, timeout_s=_ANSWER_S
        )

    def _settled(self, taken: list[wire.Settlement], answer: Frame | QmqError) -> None:
        if isinstance(answer, QmqError):
            self._settlements.lost(taken)
            if self._flush_timer is None and not self._is_closed:
                self._flush_timer = self._loop.call_later(_RETRY_S[-1], self._flush_settlements)
            return
        _, stale = wire.unpack_settled(answer.payload)
        if stale:
            self.stale += stale
            log.warning("%s: %d messages were handed to another consumer before they were settled", self.name, stale)
        self._notify()

    # --- messages in ---------------------------------------------------------------------------------------------------

    def _pull_more(self) -> None:
        room = self._prefetch - self._outstanding.messages
        connection = self._connection
        if self._is_pulling or connection is None or self._is_closed or self._failure is not None:
            return
        if room <= 0 or (room * 4 < self._prefetch and self._slices):
            return
        self._is_pulling = True
        request = wire.pack_pull(wire.Pull(self._session, min(room, limits.PULL_MESSAGES_MAX), self._pull_bytes, WAIT_MS))
        connection.request(FrameKind.PULL, self._pulled, request, timeout_s=WAIT_MS / 1000 + _ANSWER_S)

    def _pulled(self, answer: Frame | QmqError) -> None:
        self._is_pulling = False
        try:
            if isinstance(answer, QmqError):
                raise answer
            self._take_delivery(answer.payload)
        except (MessagesExpired, StorageError, PeerError) as failure:
            self._fail(failure)
            return
        except QmqError as failure:
            log.debug("%s: %s", self.name, failure)
            self._detached()
            return
        self._pull_more()

    def _take_delivery(self, payload: memoryview) -> None:
        session, pull, ranges, count, at = wire.unpack_delivery(payload)
        if session != self._session or not ranges:
            return
        batches: list[Decoded] = []
        for _ in range(count):
            view = BatchView.parse(payload, at)
            at += view.envelope.total_bytes
            batches.append(Decoded(view))
        for each in ranges:
            if each.batch >= count or not _lies_in(each, batches[each.batch].view):
                raise ProtocolViolation(f"{each} lies outside its batch")
            batch = batches[each.batch]
            self._accept(Slice(batch, each.first_sequence - batch.view.base_sequence, each.count, each.attempt, pull))
            pull += each.count
        self._received = max(self._received, pull - 1)
        self._notify()

    def _accept(self, part: Slice) -> None:
        self._outstanding.add(part.pull, part.count)
        if not self._tags_any and not self._tags_all:
            self._slices.append(part)
            return
        while part.count:
            head, part = part.split(1)
            tags = head.batch.column("tags")
            if self._matches(tags[head.offset] if tags else ()):
                self._slices.append(head)
            else:
                self.settle(head.pull, head.pull, Verdict.ACK)

    def _matches(self, tags: tuple[str, ...]) -> bool:
        if self._tags_any and not any(tag in tags for tag in self._tags_any):
            return False
        return all(tag in tags for tag in self._tags_all)

    def _fail(self, failure: QmqError) -> None:
        if isinstance(failure, MessagesExpired) and self._expired == "skip":
            log.warning("%s: %s; skipping to the oldest that are left", self.name, failure)
            if self._resetting is None:
                self._resetting = self._loop.create_task(self._skip())
            return
        self._failure = failure
        self._notify()

    async def _skip(self) -> None:
        try:
            await self._reset(self.subject, self.group)
            self._pull_more()
        except QmqError as failure:
            self._failure = failure
            self._notify()
        finally:
            self._resetting = None

    # --- staying attached ----------------------------------------------------------------------------------------------

    def _start_running(self) -> None:
        if self._runner is None or self._runner.done():
            self._runner = self._loop.create_task(self._run())
        elif self._connection is not None:
            self._pull_more()

    async def _run(self) -> None:
        """Attach, and attach again whenever the connection or the session ends."""
        attempt = 0
        while not self._is_closed:
            try:
                await self._attach()
                attempt = 0
                await self._stay_attached()
            except CallerError as failure:
                if isinstance(failure, ClientClosed) or (attempt > 2 and not isinstance(failure, UnknownConsumer)):
                    self._fail(failure)
                    return
            except QmqError as failure:
                log.debug("%s: %s", self.name, failure)
            self._detached()
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1

    async def _attach(self) -> None:
        connection = await self._links.connection(self.subject)
        request = wire.Attach(
            self.subject, 0, self.group, self.name, self.incarnation, self._received, self._start, self._lease_ms,
            self._tags_any, self._tags_all,
        )  # fmt: skip
        answer = await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=_ANSWER_S)
        attached = wire.Attached.unpack(answer.payload)
        if self._is_closed:
            return
        if not connection.is_open:
            raise NotConnected("the connection ended while attaching")
        self._session, self._connection, self._is_pulling = attached.session, connection, False
        self._ended.clear()
        if not attached.resumed:
            self._forget_unseen()
            self._lost_before = attached.next_pull_sequence
        connection.on_closed.append(self._detached)
        self._notify()
        self._flush_settlements()
        self._pull_more()

    def _forget_unseen(self) -> None:
        """What we hold went back to the group: hand none of it to the application."""
        self._outstanding.clear()
        self._slices.clear()
        self._settlements.take()

    async def _stay_attached(self) -> None:
        """Send signs of life until the session ends."""
        while self._connection is not None and not self._is_closed:
            try:
                async with asyncio.timeout(self._lease_ms / 3000):
                    await self._ended.wait()
            except TimeoutError:
                if self._connection is not None:
                    payload = wire.pack_session(self._session)
                    await self._connection.call(FrameKind.HEARTBEAT, payload, timeout_s=_ANSWER_S)

    def _detached(self) -> None:
        self._connection = None
        self._is_pulling = False
        self._ended.set()

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self, error: BaseException | None = None) -> None:
        """Settle what is left and leave the group: a message that was being worked on fails, the unseen ones go to others at once."""
        if self._is_closed:
            return
        current, self._current = self._current, None
        if current is not None and self._is_auto and not current.is_settled:
            self.nack(current.pull_sequence, current.pull_sequence, current.attempt, timedelta(0))
        self._is_closed = True
        for each in self._slices:
            self.settle(each.pull, each.pull + each.count - 1, Verdict.RELEASE)
        self._slices.clear()
        self._flush_settlements()
        if self._resetting is not None:
            self._resetting.cancel()
        left = self._leave()
        self._connection = None
        self._notify()
        self._ended.set()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        await left

    def _leave(self) -> asyncio.Future[bool]:
        """Say so in the same write as the last verdicts, so that nothing is handed to us in between."""
        left: asyncio.Future[bool] = self._loop.create_future()
        if self._connection is None or not self._connection.is_open:
            left.set_result(False)
        else:
            payload = wire.pack_session(self._session)
            self._connection.request(FrameKind.DETACH, lambda _: _set_result(left, True), payload, timeout_s=_ANSWER_S)
        return left

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(error)


def _host() -> str:
    name = "".join(each if each.isalnum() or each in "_-" else "-" for each in socket.gethostname())
    return name[:60].lstrip("-.") or "host"


def _set_result(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


def _lies_in(part: wire.Range, view: BatchView) -> bool:
    return 0 <= part.first_sequence - view.base_sequence <= view.count - part.count
