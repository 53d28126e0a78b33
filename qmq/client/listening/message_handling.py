"""One message: its codec, interceptors, transaction, handler, and verdict.

    interceptors ( timeout ( decode, transaction ( dependencies ( handler )))) ──▶ outcome ──▶ decide ──▶ verdict

Rules:
* The verdict comes last: after the transaction of `idempotent` is committed, and after every interceptor has seen how the handler ended. So
  a crash at any line leaves the message unacknowledged, and if its effect was committed, the next attempt finds that out.
* One verdict a message. What a handler says by the context or by the message itself holds; an exception after it is only logged.
* A plain `def` handler runs in a thread, with its transaction and dependencies, in a copy of the context that interceptors see. A thread
  cannot be cancelled: after `timeout` its message is handed back, what it still does counts for nothing (its transaction is the
  application's business, and with `idempotent` it is found out), and its place is taken until it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

from qmq.client.interceptors import Chain
from qmq.client.listening.context import AnyMessage, Context, Say
from qmq.client.listening.guarded_message import verdicts_refused
from qmq.client.listening.handler_signature import Binding
from qmq.client.listening.idempotent import Idempotent
from qmq.client.listening.listener_options import Options
from qmq.client.listening.outcomes import GIVEN_BACK, Act, HandlerDecision, Reject, Retry, TimedOut, decide
from qmq.client.listening.providers import Providers
from qmq.client.listening.thread_acks import say_from_threads
from qmq.client.ordered.ordered_message import LaneMessage, OrderedMessage
from qmq.client.payloads import Undecodable, UndecodableBody, checked
from qmq.errors import Unavailable

log = logging.getLogger("qmq.client")

_UNSEEN: Final = nullcontext()
_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Between asking a store that is away whether a message is done; the last one for ever."""


class _NotYet(Exception):
    """The store does not say whether the message is done."""


def _pauses() -> Iterator[float]:
    return chain(_PAUSES_S, repeat(_PAUSES_S[-1]))


@contextmanager
def _nothing_known() -> Iterator[None]:
    """Around asking the store: that it is away is no failure of the message."""
    try:
        yield
    except Unavailable as failure:
        raise _NotYet(str(failure)) from failure


_ORDERED_DELAY_MAX: Final = timedelta(days=30)


class _Unlimited:
    """No timeout, in the place of one: it costs nothing."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: object, trace: object) -> None: ...

    def expired(self) -> bool:
        return False


_UNLIMITED: Final = _Unlimited()


class Surroundings(NamedTuple):
    """What all listeners of a client share. `threads` run plain handlers; None if the handler needs none."""

    mq: Any
    chain: Chain
    providers: Providers
    now_ns: Callable[[], int]
    threads: Executor | None


class MessageHandling:
    """How one listener handles messages. See the module."""

    def __init__(self, options: Options, binding: Binding, around: Surroundings) -> None:
        self.options = options
        self._binding = binding
        self._provided = binding.provided
        self._around = around
        self._chain, self._group = around.chain, options.group
        self._timeout_s = None if options.timeout is None else options.timeout.total_seconds()
        self._idempotent = options.idempotent
        self._record = options.record_group
        self._policy = options.policy
        self._loop = asyncio.get_running_loop()
        self._is_plain = binding.is_async and binding.is_bare and self._idempotent is None and self._timeout_s is None and not around.chain
        """Whether there is nothing around the handler: its call is all that a message costs."""
        self._say = self._said if binding.is_async else self._said_in_thread

    async def handle(self, message: AnyMessage) -> None:
        """A message, from its body to its verdict. Never raises, but for being cancelled."""
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
                give_back(message)
                raise
            failure = error
        except Exception as error:
            failure = self._timed_out() if limit.expired() and isinstance(error, TimeoutError) else error
        self.conclude(message, failure)
        if threads:
            await asyncio.wait(threads)

    async def _work(self, message: AnyMessage, payload: object, threads: list[asyncio.Future[Any]]) -> None:
        """Call the handler, with what goes around it. `threads` gets those that may outlast a timeout."""
        context = self._context([message])
        if not self._binding.is_async:
            await self._work_in_threads(message, payload, context, threads)
        elif self._idempotent is None:
            await self._call(payload, context)
        else:
            await self._once(self._idempotent, message, payload, context)

    async def _work_in_threads(self, message: AnyMessage, payload: object, context: Context, threads: list[asyncio.Future[Any]]) -> None:
        say_from_threads(message, self._loop)
        for pause_s in _pauses():
            threads[:] = [self._start_thread(self._work_in_thread, message, payload, context)]
            raised = await asyncio.shield(threads[0])
            if raised is None:
                return
            if not isinstance(raised, _NotYet):
                raise raised
            await self._rest(message, raised, pause_s)

    async def _once(self, store: Idempotent, message: AnyMessage, payload: object, context: Context) -> None:
        """The part of an `async def` handler whose effect happens once. While the store does not say whether it did, the message waits."""
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
                await self._rest(message, failure, pause_s)

    async def _rest(self, message: AnyMessage, failure: _NotYet, pause_s: float) -> None:
        """It costs no attempt: nothing was tried."""
        log.warning("%s: %r waits %g s: %s", self._binding.spoken, message, pause_s, failure)
        await asyncio.sleep(pause_s)

    def _work_in_thread(self, message: AnyMessage, payload: object, context: Context) -> Exception | None:
        """The same part for a plain handler. What it raised is returned: futures do not carry every exception."""
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

    # --- the parts -----------------------------------------------------------------------------------------------------

    def _payload(self, message: AnyMessage) -> Any:
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
            raise TypeError(f"{self._binding.spoken} is no `async def`, and gave a coroutine: nothing of it was run")

    def _start_thread(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        run = contextvars.copy_context().run
        return self._loop.run_in_executor(self._around.threads, lambda: run(work, *arguments))

    def _context(self, messages: Sequence[AnyMessage], say: Say | None = None) -> Context:
        deadline_ms = None
        if self._timeout_s is not None:
            deadline_ms = self._around.now_ns() // 1_000_000 + int(self._timeout_s * 1000)
        return Context(self._around.mq, self._group, messages, None if self._idempotent is not None else say or self._say, deadline_ms)

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"timed out after {self._timeout_s:g} s")

    # --- verdicts ------------------------------------------------------------------------------------------------------

    def conclude(self, message: AnyMessage, failure: BaseException | None) -> None:
        """Give the verdict, unless the message has one; and say what went wrong."""
        if failure is not None:
            self.log(message, failure)
        self.settle(message, failure)

    def settle(self, message: AnyMessage, failure: BaseException | None) -> None:
        """Give the verdict, unless the message has one."""
        if failure is not None:
            settle(message, decide(failure, message.attempt, self._policy))
        elif not message.is_settled:
            message.ack_later()

    def log(self, message: AnyMessage | LaneMessage, failure: BaseException, messages: int = 1) -> None:
        """Say what went wrong with a message, or with a batch that begins with it."""
        which = f"{message!r}" if messages == 1 else f"{messages} messages from {message!r} on"
        if isinstance(failure, Retry):
            log.info("%s: %s later again: %s", self._binding.spoken, which, failure)
        elif isinstance(failure, Reject | Undecodable | TimedOut):
            log.warning("%s: %s: %s", self._binding.spoken, which, failure)
        else:
            log.warning("%s: %s failed", self._binding.spoken, which, exc_info=failure)

    def _said(self, messages: Sequence[AnyMessage], decision: HandlerDecision) -> None:
        for each in messages:
            settle(each, decision)

    def _said_in_thread(self, messages: Sequence[AnyMessage], decision: HandlerDecision) -> None:
        self._loop.call_soon_threadsafe(self._said, messages, decision)


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
    """How long an ordered message rests: not as long as others may."""
    return None if decision.delay is None else min(decision.delay, _ORDERED_DELAY_MAX)


def give_back(message: AnyMessage) -> None:
    """Its handler was cut off. An ordered consumer sees to its own."""
    if not isinstance(message, OrderedMessage):
        settle(message, GIVEN_BACK)


def is_cancelled_from_outside() -> bool:
    """Whether it is the worker that is cancelled, and not the handler that cancelled itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
