"""Handles one message, or many at a time: interceptors, decoding, transaction, handler, verdict.

    interceptors ( timeout ( decode, transaction ( dependencies ( handler ))))
    ──▶ outcome ──▶ decide ──▶ verdict

Rules:
* The verdict comes last: after the transaction of `idempotent` is committed, and after every
  interceptor has seen how the handler ended. A crash before that leaves the message unacknowledged;
  if its effect was committed, the next attempt finds it.
* A message has one verdict. If the handler settles it, through the context or the message, a later
  exception is only logged.
* A plain `def` handler runs in a thread, with its transaction and dependencies, in a copy of the
  context that interceptors see. A thread cannot be cancelled: after `timeout` its message is nacked
  and the thread's result is ignored. Writes that it still makes are the application's concern; with
  `idempotent` the next attempt finds them. The thread keeps its place until it returns. Its
  verdicts are passed to the event loop's thread.
* A verdict is refused while the message's transaction is open: a crash between it and the commit
  would lose the effect.

A handler may take a list of payloads (`BatchHandling`):
* All messages are acknowledged when the handler returns, and all fail when it raises, each with the
  delay of its own attempt. The handler may settle single messages by `context.messages[3].nack()`.
* A message that cannot be decoded is not in the list, and is settled separately. On an ordered
  subject, later messages would overtake it, so the whole batch fails, unless undecodable messages
  are skipped.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

from qmq.client.consuming.message import BatchSlice, Message, Settler, retry_ms
from qmq.client.consuming.ordered.consumer import AnyMessage
from qmq.client.consuming.ordered.message import LaneMessage, OrderedMessage, OrderedMessages
from qmq.client.consuming.ordered.message import LaneSettler as OrderedSettler
from qmq.client.interceptors import Chain
from qmq.client.listening.context import (
    VERDICT_OF_TRANSACTION,
    WHEN_CANCELLED,
    Act,
    Binding,
    Context,
    HandlerDecision,
    Providers,
    Reject,
    Retry,
    SettleMessages,
    TimedOut,
    decide,
)
from qmq.client.listening.listener_options import Idempotent, Options
from qmq.client.metadata.cache import is_cancelled_from_outside
from qmq.client.payloads import Undecodable, UndecodableBody, checked, same
from qmq.errors import InvalidArgument, Unavailable
from qmq.process.event_loop import ms_of


@contextmanager
def verdicts_refused(message: AnyMessage) -> Iterator[None]:
    """Inside the block, settling the message raises InvalidArgument, and the message has no
    verdict.

    Only in the handler's thread: if the handler times out, the event loop settles the message
    meanwhile.
    """
    before_verdicts(message, _VerdictGuard(message).check)
    try:
        yield
    finally:
        message.settle_through(lambda refusing: refusing.settler)  # type: ignore[attr-defined]  # ours, from above


def before_verdicts(message: AnyMessage, check: Callable[[], object]) -> None:
    """Call `check` before each verdict on a message; if it raises, the verdict is not given."""
    if isinstance(message, OrderedMessage):
        message.settle_through(lambda settler: _GuardedLaneSettler(settler, check))
    else:
        message.settle_through(lambda settler: _GuardedSettler(settler, check))


class _VerdictGuard:
    """Refuses verdicts in the thread that made it."""

    def __init__(self, message: AnyMessage) -> None:
        self._home = threading.get_ident()
        self._message = message

    def check(self) -> None:
        if threading.get_ident() == self._home:
            self._message.is_settled = False  # the caller has set it already
            raise InvalidArgument(VERDICT_OF_TRANSACTION)


class _GuardedSettler:
    def __init__(self, settler: Settler, check: Callable[[], object]) -> None:
        self.settler, self._check = settler, check
        self.subject, self.broker_group = settler.subject, settler.broker_group

    def ack(self, pull: int) -> None:
        self._check()
        self.settler.ack(pull)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._check()
        self.settler.settle(first, last, verdict, delay, error)

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        self._check()
        self.settler.nack(part, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        self._check()
        await self.settler.settle_now(first, last, verdict)


class _GuardedLaneSettler:
    def __init__(self, settler: OrderedSettler, check: Callable[[], object]) -> None:
        self.settler, self._check = settler, check
        self.run = settler.run

    def ack(self, sequence: int) -> None:
        self._check()
        self.settler.ack(sequence)

    def fail(self, sequence: int, pause_ms: int | None) -> None:
        self._check()
        self.settler.fail(sequence, pause_ms)

    def reject(self, sequence: int) -> None:
        self._check()
        self.settler.reject(sequence)

    def release(self, sequence: int) -> None:
        self._check()
        self.settler.release(sequence)


def settle_from_threads(message: AnyMessage, loop: asyncio.AbstractEventLoop) -> None:
    """Let the message take verdicts from any thread. Called in the event loop's thread."""
    home = threading.get_ident()

    def call(function: Callable[..., None], *arguments: Any) -> None:
        if threading.get_ident() == home:
            function(*arguments)
        else:
            loop.call_soon_threadsafe(function, *arguments)

    if isinstance(message, OrderedMessage):
        message.settle_through(lambda settler: _ThreadLaneSettler(settler, call))
    else:
        message.settle_through(lambda settler: _ThreadSettler(settler, call))


class _ThreadSettler:
    def __init__(self, settler: Settler, call: Callable[..., None]) -> None:
        self._settler, self._call = settler, call
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def ack(self, pull: int) -> None:
        self._call(self._settler.ack, pull)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._call(self._settler.settle, first, last, verdict, delay, error)

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        if delay is not None:
            retry_ms(delay)  # an invalid delay raises here, not in the loop
        self._call(self._settler.nack, part, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)


class _ThreadLaneSettler:
    def __init__(self, settler: OrderedSettler, call: Callable[..., None]) -> None:
        self._settler, self._call = settler, call
        self.run = settler.run

    def ack(self, sequence: int) -> None:
        self._call(self._settler.ack, sequence)

    def fail(self, sequence: int, pause_ms: int | None) -> None:
        self._call(self._settler.fail, sequence, pause_ms)

    def reject(self, sequence: int) -> None:
        self._call(self._settler.reject, sequence)

    def release(self, sequence: int) -> None:
        self._call(self._settler.release, sequence)


log = logging.getLogger("qmq.client")

_UNSEEN: Final = nullcontext()
_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before asking a store again that cannot be reached; the last one repeats."""


class _NotYet(Exception):
    """The store does not know yet whether the message is done."""


def _pauses() -> Iterator[float]:
    return chain(_PAUSES_S, repeat(_PAUSES_S[-1]))


@contextmanager
def _nothing_known() -> Iterator[None]:
    """Wraps calls to the store: an unreachable store is not a failure of the message."""
    try:
        yield
    except Unavailable as failure:
        raise _NotYet(str(failure)) from failure


_ORDERED_DELAY_MAX: Final = timedelta(days=30)


class _Unlimited:
    """Takes the place of a timeout where there is none, at no cost."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: object, trace: object) -> None: ...

    def expired(self) -> bool:
        return False


_UNLIMITED: Final = _Unlimited()


class HandlerContext(NamedTuple):
    """The shared parts of all listeners of a client. `threads` runs plain handlers; None if the
    handler needs no thread.
    """

    mq: Any
    chain: Chain
    providers: Providers
    now_ns: Callable[[], int]
    threads: Executor | None


class MessageHandling:
    """How one listener handles messages. The module describes it."""

    def __init__(self, options: Options, binding: Binding, around: HandlerContext) -> None:
        self.options = options
        self._binding = binding
        self._payload: Callable[[AnyMessage], Any] = (
            attrgetter("body") if binding.decode is same else self._decoded_payload
        )
        self._provided = binding.provided
        self._around = around
        self._chain, self._group = around.chain, options.group
        self._timeout_s = None if options.timeout is None else options.timeout.total_seconds()
        self._idempotent = options.idempotent
        self._record = options.record_group
        self._policy = options.policy
        self._loop = asyncio.get_running_loop()
        self._is_plain = (
            binding.is_async
            and binding.is_bare
            and self._idempotent is None
            and self._timeout_s is None
            and not around.chain
        )
        """Whether nothing surrounds the handler,
        so that calling it is all the work for a message.
        """
        self._settle_all = self._settle_each if binding.is_async else self._settle_each_soon

    async def handle(self, message: AnyMessage) -> None:
        """Handle a message and settle it. Raises only CancelledError."""
        limit = _UNLIMITED if self._timeout_s is None else asyncio.timeout(self._timeout_s)
        threads: list[asyncio.Future[Any]] = []
        failure: BaseException | None = None
        try:
            if self._is_plain:
                await self._binding.handler(self._payload(message))
            else:
                with self._chain.handling(message, self._group) if self._chain else _UNSEEN:
                    async with limit:
                        await self._work(message, self._payload(message), threads)
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                nack_cancelled(message)
                raise
            failure = error
        except Exception as error:
            failure = (
                self._timed_out() if limit.expired() and isinstance(error, TimeoutError) else error
            )
        if failure is not None:
            self.conclude(message, failure)
        elif not message.is_settled:
            message.ack_later()
        if threads:
            await asyncio.wait(threads)

    async def _work(
        self, message: AnyMessage, payload: object, threads: list[asyncio.Future[Any]]
    ) -> None:
        """Call the handler inside its timeout, transaction and dependencies. `threads` collects
        threads that may outlast a timeout.
        """
        context = self._context([message])
        if not self._binding.is_async:
            await self._work_in_threads(message, payload, context, threads)
        elif self._idempotent is None:
            await self._call(payload, context)
        else:
            await self._once(self._idempotent, message, payload, context)

    async def _work_in_threads(
        self,
        message: AnyMessage,
        payload: object,
        context: Context,
        threads: list[asyncio.Future[Any]],
    ) -> None:
        settle_from_threads(message, self._loop)
        for pause_s in _pauses():
            threads[:] = [self._start_thread(self._work_in_thread, message, payload, context)]
            raised = await asyncio.shield(threads[0])
            if raised is None:
                return
            if not isinstance(raised, _NotYet):
                raise raised
            await self._pause(message, raised, pause_s)

    async def _once(
        self, store: Idempotent, message: AnyMessage, payload: object, context: Context
    ) -> None:
        """Run an `async def` handler inside its transaction. While the store cannot say whether the
        message is done, it waits.
        """
        for pause_s in _pauses():
            try:
                async with AsyncExitStack() as stack:
                    with _nothing_known():
                        once = await stack.enter_async_context(store.once(message, self._record))
                    if once.is_new:
                        context.connection = once.connection
                        with verdicts_refused(message):
                            await self._call(payload, context)
                return
            except _NotYet as failure:
                await self._pause(message, failure, pause_s)

    async def _pause(self, message: AnyMessage, failure: _NotYet, pause_s: float) -> None:
        """Wait before another try. No attempt is counted, because the handler was not called."""
        log.warning(
            "%s: %r is tried again in %g s: %s",
            self._binding.handler_name,
            message,
            pause_s,
            failure,
        )
        await asyncio.sleep(pause_s)

    def _work_in_thread(
        self, message: AnyMessage, payload: object, context: Context
    ) -> Exception | None:
        """Run a plain handler inside its transaction. Returns the exception that it raised, since
        futures cannot carry every exception.
        """
        try:
            if self._idempotent is None:
                self._call_in_thread(payload, context)
                return None
            with ExitStack() as stack:
                with _nothing_known():
                    once = stack.enter_context(self._idempotent.once_sync(message, self._record))
                if once.is_new:
                    context.connection = once.connection
                    with verdicts_refused(message):
                        self._call_in_thread(payload, context)
        except Exception as failure:
            return failure
        except BaseException as failure:
            return RuntimeError(f"the handler ended its thread with {failure!r}")
        return None

    # --- the parts --------------------------------------------------------------------------------

    def _decoded_payload(self, message: AnyMessage) -> Any:
        decode = self._binding.decode
        if decode is None:
            return message
        try:
            return checked(decode, message.body)
        except Undecodable as failure:
            raise UndecodableBody(str(failure)) from failure

    async def _call(self, payload: object, context: Context) -> None:
        binding = self._binding
        if binding.is_bare:
            await binding.handler(payload)
            return
        if not self._provided:
            await binding.call(payload, context, {})
            return
        async with AsyncExitStack() as stack:
            provided = await self._around.providers.enter(self._provided, context, stack)
            await binding.call(payload, context, provided)

    def _call_in_thread(self, payload: object, context: Context) -> None:
        with ExitStack() as stack:
            provided = self._around.providers.enter_sync(self._provided, context, stack)
            result = self._binding.call(payload, context, provided)
        if asyncio.iscoroutine(result):
            result.close()
            raise TypeError(
                f"{self._binding.handler_name} is not an `async def` and returned a coroutine, "
                "which was not run: make the handler an `async def`"
            )

    def _start_thread(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        run = contextvars.copy_context().run
        return self._loop.run_in_executor(self._around.threads, lambda: run(work, *arguments))

    def _context(
        self, messages: Sequence[AnyMessage], settle_all: SettleMessages | None = None
    ) -> Context:
        deadline_ms = None
        if self._timeout_s is not None:
            deadline_ms = ms_of(self._around.now_ns()) + int(self._timeout_s * 1000)
        return Context(
            self._around.mq,
            self._group,
            messages,
            None if self._idempotent is not None else settle_all or self._settle_all,
            deadline_ms,
        )

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"timed out after {self._timeout_s:g} s")

    # --- verdicts ---------------------------------------------------------------------------------

    def conclude(self, message: AnyMessage, failure: BaseException | None) -> None:
        """Settle the message, unless it has a verdict, and log the failure."""
        if failure is not None:
            self.log(message, failure)
        self.settle(message, failure)

    def settle(self, message: AnyMessage, failure: BaseException | None) -> None:
        """Settle the message, unless it has a verdict."""
        if failure is not None:
            settle(message, decide(failure, message.attempt, self._policy))
        elif not message.is_settled:
            message.ack_later()

    def log(
        self, message: AnyMessage | LaneMessage, failure: BaseException, messages: int = 1
    ) -> None:
        """Log the failure of a message, or of a batch that begins with it."""
        which = f"{message!r}" if messages == 1 else f"{messages} messages from {message!r} on"
        if isinstance(failure, Retry):
            log.info("%s: %s is retried later: %s", self._binding.handler_name, which, failure)
        elif isinstance(failure, Reject | Undecodable | TimedOut):
            log.warning("%s: %s: %s", self._binding.handler_name, which, failure)
        else:
            log.warning("%s: %s failed", self._binding.handler_name, which, exc_info=failure)

    def _settle_each(self, messages: Sequence[AnyMessage], decision: HandlerDecision) -> None:
        for each in messages:
            settle(each, decision)

    def _settle_each_soon(self, messages: Sequence[AnyMessage], decision: HandlerDecision) -> None:
        self._loop.call_soon_threadsafe(self._settle_each, messages, decision)


def settle(message: AnyMessage, decision: HandlerDecision) -> None:
    """Give a verdict, unless the message has one."""
    if message.is_settled:
        return
    if decision.act is Act.ACK:
        message.ack_later()
    elif isinstance(message, OrderedMessage):
        message.fail(ordered_delay(decision), decision.error)
    elif decision.act is Act.NACK:
        message.nack(decision.delay, decision.error)
    else:
        message.reject(decision.error)


def ordered_delay(decision: HandlerDecision) -> timedelta | None:
    """How long an ordered message waits: at most as long as ordered subjects allow."""
    return None if decision.delay is None else min(decision.delay, _ORDERED_DELAY_MAX)


def nack_cancelled(message: AnyMessage) -> None:
    """The handler was cancelled: nack the message. An ordered consumer does this itself."""
    if not isinstance(message, OrderedMessage):
        settle(message, WHEN_CANCELLED)


class BatchHandling(MessageHandling):
    async def handle_all(self, messages: Sequence[Message]) -> None:
        """Handle messages of an unordered subject and settle them. Raises only CancelledError."""
        good: list[Any] = []
        payloads: list[Any] = []
        for each in messages:
            try:
                payloads.append(self._payload(each))
                good.append(each)
            except Undecodable as undecodable:
                self.conclude(each, undecodable)
        if not good:
            return
        thread: list[asyncio.Future[Any]] = []
        try:
            failure = await self._outcome(good, payloads, thread)
        except asyncio.CancelledError:
            for each in good:
                nack_cancelled(each)
            raise
        if failure is not None:
            self.log(good[0], failure, len(good))
        for each in good:
            self.settle(each, failure)
        await _returned(thread)

    async def handle_run(self, messages: OrderedMessages) -> None:
        """Handle messages of one lane, which succeed or fail together, and settle them.
        Raises only CancelledError.
        """
        every = list(messages)
        failure: BaseException | None = None
        thread: list[asyncio.Future[Any]] = []
        try:
            good, payloads = self._decoded(every)
            if good:
                failure = await self._outcome(
                    good,
                    payloads,
                    thread,
                    lambda _, decision: self._settle_run_in_loop(messages, decision),
                )
        except Undecodable as undecodable:
            failure = undecodable
        except asyncio.CancelledError:
            messages.fail(WHEN_CANCELLED.delay, WHEN_CANCELLED.error)
            raise
        if failure is not None:
            self.log(every[0], failure, len(every))
        _settle_run(messages, decide(failure, messages.attempt, self._policy))
        await _returned(thread)

    def _decoded(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Raises Undecodable, unless such messages are skipped."""
        good: list[Any] = []
        payloads: list[Any] = []
        for each in messages:
            try:
                payloads.append(self._payload(each))
                good.append(each)
            except Undecodable as failure:
                if self._policy.on_undecodable != "skip":
                    raise UndecodableBody(f"{each!r}: {failure}") from failure
                self.log(each, failure)
        return good, payloads

    async def _outcome(
        self,
        messages: Sequence[Any],
        payloads: list[Any],
        threads: list[asyncio.Future[Any]],
        settle_all: SettleMessages | None = None,
    ) -> BaseException | None:
        """The exception with which the handler ended, or None. Raises CancelledError if the worker
        is cancelled.
        """
        context = self._context(messages, settle_all)
        limit = asyncio.timeout(self._timeout_s)
        try:
            with ExitStack() as stack:
                for each in messages:
                    stack.enter_context(self._chain.handling(each, self._group))
                async with limit:
                    if self._binding.is_async:
                        await self._call(payloads, context)
                        return None
                    for each in messages:
                        if isinstance(each, Message):
                            settle_from_threads(each, self._loop)
                    threads.append(self._start_thread(self._work_on_all, payloads, context))
                    raised = await asyncio.shield(threads[0])
                    if raised is not None:
                        raise raised
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            return error
        except Exception as error:
            return (
                self._timed_out() if limit.expired() and isinstance(error, TimeoutError) else error
            )
        return None

    def _settle_run_in_loop(self, messages: OrderedMessages, decision: HandlerDecision) -> None:
        if self._binding.is_async:
            _settle_run(messages, decision)
        else:
            self._loop.call_soon_threadsafe(_settle_run, messages, decision)

    def _work_on_all(self, payloads: list[Any], context: Any) -> Exception | None:
        try:
            self._call_in_thread(payloads, context)
        except Exception as failure:
            return failure
        except BaseException as failure:
            return RuntimeError(f"the handler ended its thread with {failure!r}")
        return None


def _settle_run(messages: OrderedMessages, decision: HandlerDecision) -> None:
    """Settle the messages that have no verdict yet."""
    if decision.act is Act.ACK:
        messages.ack_later()
    else:
        messages.fail(ordered_delay(decision), decision.error)


async def _returned(threads: Sequence[asyncio.Future[Any]]) -> None:
    """An abandoned thread keeps its place until it returns."""
    if threads:
        await asyncio.wait(threads)
