"""The consumer of an unordered subject: takes part in a group on every broker group that has the
subject's messages.

There is one attachment (`attachment.py`) for each broker group, including drained ones. Broker
groups that become known later, by push or by refreshing placements, are added. At most `prefetch`
messages and `prefetch_bytes` bytes are unsettled at once over all attachments, and
the consumer takes messages from the attachments in turn. Messages are settled by ranges of pull
sequences, in any order, through the attachment they came from.

    async for message in consumer   acknowledged when the task that got it asks for the next message
                                    (`task_messages.py`)
    ack="explicit"                  acknowledged by `await message.ack()`
    most_once=True                  acknowledged before the application sees the message: never
                                    twice, perhaps never
    broadcast=True                  every consumer of the group gets every message; progress is kept
                                    by the consumer's name
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from qmq import limits
from qmq.client.connection.connection import pause_s
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming import ReadyMessages
from qmq.client.consuming.attachment import (
    Attachment,
    SpoolSender,
    allowance,
    bytes_allowance,
    wait_ms,
)
from qmq.client.consuming.long_retries import Retries, SendDirected
from qmq.client.consuming.message import BatchSlice, Message, Messages, error_text
from qmq.client.consuming.session import (
    PREFETCH,
    ConsumerCalls,
    LoopSlice,
    PrefetchLimit,
    SubscriptionOptions,
    check_limits,
    clock_of,
)
from qmq.client.metadata.cache import shared
from qmq.client.producing.producer import ignored
from qmq.client.task_messages import Owner, TaskLoop, TaskMessages
from qmq.errors import (
    CallerError,
    ClientClosed,
    InvalidArgument,
    MessagesExpired,
    QmqError,
    StaleDelivery,
)
from qmq.model import BROADCAST, check_name, texts
from qmq.process.event_loop import TickFuture
from qmq.wire.frame_payloads import BY_GROUP_MS, Verdict

log = logging.getLogger("qmq.client")

PREFETCH_BYTES: Final = 64 * limits.MIB
LEASE_MS: Final = 30_000
PULL_BYTES: Final = limits.MIB
QUANTUM_MESSAGES: Final = 64
"""Most messages in a row that a loop gets from one broker group."""

Reset = Callable[[str, str, str | None], Awaitable[None]]
"""(subject, group, broker group or None for all): move the group to the oldest stored message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of a consumer; `Client.consumer` describes them. Raises InvalidArgument."""

    name: str | None = None
    start: str = ""
    broadcast: bool = False
    tags_any: Sequence[str] = ()
    tags_all: Sequence[str] = ()
    ack: str = "auto"
    most_once: bool = False
    prefetch: int | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    pull_bytes: int = PULL_BYTES
    lease_ms: int = LEASE_MS
    expired: str = "raise"
    condition: str = ""

    def __post_init__(self) -> None:
        if (
            self.ack not in ("auto", "explicit")
            or self.expired not in ("raise", "skip")
            or self.start not in ("", "earliest", "latest")
        ):
            raise InvalidArgument(
                "ack is 'auto' or 'explicit', expired 'raise' or 'skip', start 'earliest' or "
                "'latest'"
            )
        check_limits(PREFETCH if self.prefetch is None else self.prefetch, self.prefetch_bytes)


class Consumer:
    """One consumer of a group. Make it with `Client.consumer`.

    `stale` counts messages that this consumer lost before it settled them: they are handed out
    again.
    """

    def __init__(
        self,
        links: ConnectionPool,
        reset: Reset,
        send_directed: SendDirected,
        subject: str,
        group: str,
        options: ConsumerOptions,
        *,
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        self._limit = PrefetchLimit(options.prefetch)
        self.subject = check_name("subject", subject)
        self.group = check_name("group", group)
        self.incarnation = os.urandom(8).hex()
        self.name = (
            check_name("consumer", options.name) if options.name else default_name(self.incarnation)
        )
        self.stale = 0
        self.prefetch_bytes = options.prefetch_bytes
        own_group = self.group + BROADCAST + self.name if options.broadcast else self.group
        self._terms = SubscriptionOptions(
            self.subject,
            own_group,
            self.name,
            self.incarnation,
            options.start or ("latest" if options.broadcast else "earliest"),
            options.lease_ms,
            list(texts("tags_any", options.tags_any)),
            list(texts("tags_all", options.tags_all)),
            options.pull_bytes,
            options.most_once,
            options.condition,
        )
        self._expired, self._most_once = options.expired, options.most_once
        self._links, self._reset = links, reset
        self._retries = Retries(
            self.subject, own_group, send_directed, links.timing.delivery_timeout_s
        )
        self._spool_sender = (
            SpoolSender(links, links.store, self._terms) if links.store is not None else None
        )
        self._loop = links.round.own_loop()
        self._attachments: list[Attachment] = []
        self._loop_slice = LoopSlice(self._loop)
        self._last_index = self._next_pull = 0
        self._waiting: dict[TickFuture, None] = {}
        self._failure: QmqError | None = None
        self._has_failed = False
        self._follower: asyncio.Task[None] | None = None
        self._resetting: dict[str, asyncio.Task[None]] = {}
        self._held: TaskMessages[Message | Messages] | None = None
        """What tasks work on, with automatic acknowledgement; None without."""
        if options.ack == "auto" and not options.most_once:
            self._held = TaskMessages(
                self.name, self._loop, _ack, _abandoned, options.lease_ms / 1000
            )
        self.ready = ReadyMessages(
            Message, clock_of(self._loop), self.next_ready, self._next, self._held
        )
        self._serving: Attachment | None = None
        self._quantum_left = 0
        self._is_closed = self._is_paused = self._is_returning = self._is_draining = False
        self._closing: tuple[asyncio.Task[None], asyncio.Task[None]] | None = None
        """The wait for long retries, and the whole of `close`."""
        self._calls = ConsumerCalls(
            self.ready,
            self._limit,
            self._answered,
            self._notify,
            self._pull_more,
            self._failed,
            self._retries.add,
            self._lost,
        )
        self._on_closed = partial(on_closed, self)

    # --- for the application ----------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        self._links.round.own_loop()
        return self.ready

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        self._links.round.own_loop()
        return self.ready.__anext__()

    async def next_for(self, owner: Owner) -> Message:
        """The next message, for a thread of the blocking client instead of the running task."""
        held = self._held
        if held is None:
            return self.ready.take() or await self._next_waited()
        holding = held.holding(owner)
        held.finish(holding, holding.message)
        message = self.ready.take() or await self._next_waited()
        held.add(holding, message)
        return message

    def next_ready(self) -> Message | None:
        """The next message, if it can be handed out without waiting. `ready` then has the messages
        behind it.
        """
        attachment = self._serving
        if (
            attachment is None
            or self._most_once
            or self._has_failed
            or self.is_paused
            or self._is_draining
        ):
            return None
        if not self._quantum_left:
            if any(each.slices for each in self._attachments if each is not attachment):
                return None
            self._quantum_left = QUANTUM_MESSAGES
        message = attachment.next_ready()
        if message is not None:
            self._quantum_left -= 1
            self._begin_run(attachment)
        return message

    def _begin_run(self, attachment: Attachment) -> None:
        """Let `ready` hand out the next messages.
        Only with several broker groups there are turns.
        """
        if len(self._attachments) == 1:
            attachment.begin_run(limits.PULL_MESSAGES_MAX)
        else:
            self._quantum_left -= attachment.begin_run(self._quantum_left)

    async def _next(self) -> Message:
        return self.next_ready() or await self._next_waited()

    async def _next_waited(self) -> Message:
        attachment, part = await self._next_slice(1)
        assert attachment is not None
        assert part is not None
        message = part.message(0)
        message.is_settled = self._most_once
        self._begin_run(attachment)
        return message

    async def join(self) -> None:
        """Return when this consumer is a member of its group on every broker group of the subject:
        from then on, a group that begins at "latest" gets every message whose `send` begins.
        Without `join` a consumer joins when it is first asked for messages.

        Raises UnknownSubject, AccessDenied, ClientClosed.
        """
        self._links.round.own_loop()
        while not self._attachments or any(each.session is None for each in self._attachments):
            self._check_open()
            self._start_running()
            await self._wait(math.inf)

    async def pull(
        self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)
    ) -> Messages:
        """Up to `messages_max` messages of one broker group, and fewer if their bodies have 8 MiB;
        empty if none came within `wait`. Settle them with `Messages.ack` or one by one. Broker
        groups with messages take turns.

        Raises MessagesExpired, LogDamaged, UnknownSubject, ClientClosed.
        """
        if not 0 < messages_max <= limits.CONSUMER_UNACKED_MAX:
            raise InvalidArgument(
                f"messages_max is 1 to {limits.CONSUMER_UNACKED_MAX}, not {messages_max}"
            )
        self._links.round.own_loop()
        if self._loop_slice.clock() > self._loop_slice.until_s:
            await self._loop_slice.end()
        attachment, first = await self._next_slice(messages_max, wait.total_seconds())
        if attachment is None or first is None:
            return Messages([])
        slices = [first]
        room = messages_max - first.count
        size = (
            first.batch.view.bodies_bytes
        )  # what was pulled as a few bytes may be large when it is decompressed
        while (
            room > 0 and size < limits.PULL_BYTES_MAX and attachment.slices and not self._most_once
        ):
            part = attachment.take(room)
            if self._is_readable(part):
                slices.append(part)
                room -= part.count
                size += part.batch.view.bodies_bytes
        return Messages(slices)

    def batches(self, messages_max: int = 1000) -> AsyncIterator[Messages]:
        """Messages in batches. Each batch is acknowledged when the task that got it asks for the
        next one, unless it was settled (`ack="auto"`).
        """
        return TaskLoop(self._held, partial(self._next_batch, messages_max))

    async def _next_batch(self, messages_max: int) -> Messages:
        while True:
            found = await self.pull(messages_max)
            if found.slices:
                return found

    async def _next_slice(
        self, messages_max: int, wait_s: float = math.inf
    ) -> tuple[Attachment | None, BatchSlice | None]:
        """The next consecutive messages; None if none came within `wait_s`."""
        until = self._loop.time() + wait_s
        while True:
            if self._has_failed:
                self._check_open()
            attachment = None if self.is_paused or self._is_draining else self._next_attachment()
            if attachment is not None:
                part = attachment.take(messages_max)
                if (
                    not self._most_once or await self._is_ours_for_good(part)
                ) and self._is_readable(part):
                    self._serving, self._quantum_left = (
                        attachment,
                        0 if self._most_once else QUANTUM_MESSAGES,
                    )
                    return attachment, part
                continue
            self._check_open()
            self._start_running()
            if not await self._wait(until):
                return None, None

    def _is_readable(self, part: BatchSlice) -> bool:
        """Whether the bodies can be decompressed. Unreadable messages count as failed, so that they
        end in the dead-letter queue.
        """
        failure = part.batch.unreadable
        if failure is not None:
            log.error(
                "%d messages of %s, the first of attempt %d, cannot be read: %s",
                part.count,
                self.subject,
                part.attempt,
                failure,
            )
            if not self._most_once:
                part.settler.nack(part, None, error_text(failure))
        return failure is None

    async def _is_ours_for_good(self, part: BatchSlice) -> bool:
        """Acknowledge the messages first, at most once. False if another consumer has the messages
        by now: they must not be shown.
        """
        try:
            await part.settler.settle_now(part.pull, part.pull + part.count - 1, Verdict.ACK)
        except StaleDelivery as failure:
            log.debug("%s: %s", self.name, failure)
            return False
        return True

    def _next_attachment(self) -> Attachment | None:
        """The next attachment that has messages, in turn."""
        attachments = self._attachments
        for _ in attachments:
            at = self._last_index + 1 if self._last_index + 1 < len(attachments) else 0
            self._last_index = at
            if attachments[at].slices and attachments[at].may_hand_out():
                return attachments[at]
        return None

    async def _wait(self, until: float) -> bool:
        """Wait until something changes; False if nothing did until then.
        One waiter and one timer.
        """
        waiter = TickFuture()
        self._waiting[waiter] = None
        timer = self._loop.call_at(until, waiter.wake_soon) if until < math.inf else None
        try:
            await waiter
        finally:
            self._loop_slice.begin()
            is_changed = waiter not in self._waiting
            self._waiting.pop(waiter, None)
            if timer is not None:
                timer.cancel()
        return is_changed

    def _check_open(self) -> None:
        if self._is_closed or self._links.is_closed:
            raise ClientClosed("the consumer is closed: make a new one")
        self._links.round.own_loop()
        self.ready.end()
        failure, self._failure = self._failure, None
        for attachment in self._attachments:
            if (
                failure is None
                and not attachment.slices
                and attachment.group not in self._resetting
            ):
                failure, attachment.failure = attachment.failure, None
        self._has_failed = any(each.failure is not None for each in self._attachments)
        if failure is not None:
            raise failure

    @property
    def attachments(self) -> Sequence[Attachment]:
        """What this consumer has at each broker group of the subject that it knows: a session, a
        pull under way, messages.
        """
        return tuple(self._attachments)

    @property
    def held(self) -> int:
        """Messages that this consumer holds without a verdict."""
        return 0 if self._is_closed else sum([each.held for each in list(self._attachments)])

    @property
    def unanswered_verdicts(self) -> int:
        """Messages whose verdict no broker has answered."""
        return (
            0
            if self._is_closed
            else sum([each.verdicts.waiting for each in list(self._attachments)])
        )

    @property
    def is_paused(self) -> bool:
        """Whether this consumer or its client was paused by the application. Brokers keep the
        pauses of operators; the consumer does not see them.
        """
        return self._is_paused or self._links.is_paused

    @property
    def prefetch(self) -> int:
        """How many messages this consumer may hold without a verdict."""
        return self._limit.messages

    def limit(self, prefetch: int) -> None:
        """Change `prefetch`. Messages handed out beyond a lower limit stay handed out.
        Raises InvalidArgument.
        """
        check_limits(prefetch, self.prefetch_bytes)
        self._limit.choose(prefetch)
        self.pause_changed()

    def pause(self) -> None:
        """Hand out nothing and pull nothing until `resume`. The consumer keeps its place in the
        group, its lease and its messages: messages that were handed out may be settled, and unseen
        messages wait here. A loop that asks for more waits.
        """
        self._is_paused = True
        self.ready.end()

    def resume(self) -> None:
        """Resume delivery, unless the whole client is paused (`Client.pause`)."""
        self._is_paused = self._is_returning = False
        self.pause_changed()

    def pause_and_return(self) -> None:
        """Pause, and return unseen messages to the group: for a program that asks for messages only
        from time to time, so that other consumers of the group get them meanwhile. Messages that
        were handed out stay with this consumer. `resume` ends it.
        """
        self._is_paused = self._is_returning = True
        self.ready.end()
        self._pull_more()

    def pause_changed(self) -> None:
        """The consumer may have been paused or resumed."""
        self.ready.end()
        if not self.is_paused:
            self._notify()
            self._pull_more()

    # --- for the attachments ----------------------------------------------------------------------

    def _notify(self) -> None:
        """Something changed: wake all waiters."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            self._links.round.wake(each)

    def _pull_more(self) -> None:
        """Keep a pull under way at each broker, as far as the limits allow. The attachment that
        waited longest comes first.
        """
        if self._is_draining:
            self.drain()
            return
        if self._is_returning:
            for each in self._attachments:
                each.return_unseen()
        attachments = self._attachments
        count = 0 if self.is_paused else len(attachments)
        for step in range(count):
            each = attachments[(self._next_pull + step) % count]
            if not each.asked and each.can_pull and not self._is_closed:
                has_unseen = any(other.slices for other in attachments)
                ask = allowance(self.prefetch, attachments, each, has_unseen=has_unseen)
                size = bytes_allowance(
                    self.prefetch_bytes,
                    self._terms.pull_bytes,
                    attachments,
                    each,
                    has_unseen=has_unseen,
                )
                if not ask or not size:
                    continue
                each.pull(ask, size, wait_ms(self.prefetch, self.prefetch_bytes, count))
                self._limit.left(self._loop.time(), is_ahead=has_unseen)
                self._next_pull = (self._next_pull + step + 1) % count

    def _answered(self, asked: int, got: int) -> None:
        """A pull was answered."""
        if got >= asked and self.held <= got:
            self._limit.starved(self._loop.time())

    def _lost(self, messages: int) -> None:
        self.stale += messages

    def _failed(self, broker_group: str, failure: QmqError) -> None:
        """Report that an attachment cannot continue, unless this consumer skips such failures."""
        if isinstance(failure, MessagesExpired) and self._expired == "skip":
            log.warning("%s: %s; skipping to the oldest that are left", self.name, failure)
            if broker_group not in self._resetting:
                self._resetting[broker_group] = self._loop.create_task(self._skip(broker_group))
            return
        self._stop_handing_out()

    def _stop_handing_out(self) -> None:
        """There is a failure, which the next call for messages raises."""
        self._has_failed = True
        self.ready.end()
        self._notify()

    async def _skip(self, broker_group: str) -> None:
        """Reset the group on this queue only; its other queues are unaffected."""
        attachment = next(each for each in self._attachments if each.group == broker_group)
        try:
            await self._reset(
                self.subject,
                self._terms.group,
                broker_group if len(self._attachments) > 1 else None,
            )
            attachment.failure = None
            self._pull_more()
        except QmqError as failure:
            attachment.failure = failure
            self._stop_handing_out()
        finally:
            del self._resetting[broker_group]

    # --- which broker groups there are ------------------------------------------------------------

    def _start_running(self) -> None:
        if self._follower is None or self._follower.done():
            self._follower = self._loop.create_task(self._follow())
        if self._spool_sender is not None:
            self._spool_sender.start()
        for attachment in self._attachments:
            attachment.sessions.start()
        self._pull_more()

    async def _follow(self) -> None:
        """Find the subject's broker groups, and refresh them from time to time."""
        self._links.locator.listen(self.subject, self._rerouted)
        attempt = 0
        while self._links.locator.book.groups(self.subject) is None:
            try:
                await self._links.locator.groups(self.subject)
            except CallerError as failure:
                if isinstance(failure, ClientClosed) or attempt > 2:
                    self._failure = failure
                    self._stop_handing_out()
                    return
                await asyncio.sleep(pause_s(self._links.timing.session_retry_s, attempt))
                attempt += 1
            except QmqError as failure:
                log.debug("%s: %s", self.name, failure)
        self._rerouted()
        while True:
            await asyncio.sleep(self._links.timing.refresh_s * random.uniform(0.7, 1.3))  # noqa: S311 - jitter, not a secret
            self._links.locator.touch(self.subject)

    def _rerouted(self) -> None:
        """The subject's broker groups or their masters changed. A broker group that no longer takes
        the subject may still have messages.
        """
        if self._is_closed:
            return
        known = {each.group for each in self._attachments}
        # "latest" is relative to the moment when this consumer joined: messages of a broker group
        # that is added later were sent since.
        terms = replace(self._terms, start="earliest") if known else self._terms
        for group in self._links.locator.book.groups(self.subject) or ():
            if group not in known:
                self._attachments.append(Attachment(self._links, self._calls, terms, group))
                self._attachments[-1].sessions.start()
        for attachment in self._attachments:
            attachment.sessions.moved()

    # --- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take and hand out nothing more, for good, and return unseen messages to the group
        immediately. Settle the messages that were handed out, then `close`: until then they stay
        this consumer's.
        """
        self._is_draining = True
        for each in self._attachments:
            each.return_unseen()

    async def close(self, error: BaseException | None = None) -> None:
        """Send the remaining verdicts and leave the group. The messages that tasks are handling
        fail (with `error`, if there is one); unseen messages return to the group immediately.

        Waits until retries with a delay of more than an hour are stored, for two minutes at most.
        If this call is cancelled, the consumer leaves without that wait; another call returns when
        it has left.
        """
        if self._links.round.is_over:  # what a consumer does to leave ended with the event loop
            self._is_closed = True
            self._on_closed()
            return
        self._links.round.own_loop()
        if self._closing is None:
            self._is_closed = True
            self._notify()
            retrying = self._loop.create_task(self._retries.close())
            self._closing = retrying, self._loop.create_task(self._close(retrying, error))
        retrying, closing = self._closing
        try:
            await shared(closing)
        except asyncio.CancelledError:
            retrying.cancel()
            raise

    async def _close(self, retrying: asyncio.Task[None], error: BaseException | None) -> None:
        try:
            await asyncio.wait([retrying])
            self._fail_held(error)
            self._links.locator.unlisten(self.subject, self._rerouted)
            tasks = [
                task for task in (self._follower, *self._resetting.values()) if task is not None
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(
                *[each.close() for each in self._attachments], *tasks, return_exceptions=True
            )
            if self._spool_sender is not None:
                await self._spool_sender.close()
        finally:
            self._notify()
            self._on_closed()

    def _fail_held(self, error: BaseException | None) -> None:
        delay = BY_GROUP_MS if isinstance(error, Exception) else 0
        why = error_text(error) if error is not None else "the consumer was closed"
        for each in self._held.close() if self._held is not None else ():
            # A batch goes back with what is unseen.
            if isinstance(each, Message) and not each.is_settled:
                each.settler.settle(
                    each.pull_sequence, each.pull_sequence, Verdict.NACK, delay, why
                )

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(error)


def _ack(message: Message | Messages) -> None:
    if isinstance(message, Messages) or not message.is_settled:
        message.ack_later()


def _abandoned(message: Message | Messages, failure: BaseException | None) -> None:
    """The task that got the message has ended."""
    if isinstance(message, Message) and message.is_settled:
        return
    if failure is not None:
        message.nack(error=failure)
    else:
        message.release()


def default_name(incarnation: str) -> str:
    """The default name of a consumer: host, process, incarnation."""
    return f"{process_name()}-{incarnation[:6]}"


def process_name() -> str:
    """The default name of a client: host, process.
    Hosts may have names that `check_name` refuses.
    """
    host = "".join(
        each if (each.isascii() and each.isalnum()) or each in "_-" else "-"
        for each in socket.gethostname()
    )
    return f"{host[:60].lstrip('-.') or 'host'}-{os.getpid()}"
