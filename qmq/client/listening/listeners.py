"""A client's listeners: registered by `qmq.Client` at any time, run together, stopped together.

    registered ──listening──▶ at work
    ──stop, signal, a failure, mq.close──▶ finishing ──▶ registered again

Rules:
* A listener locates its subject before it makes its consumer, and so learns whether the subject is
  ordered. While the cluster cannot be reached, it waits.
* When one listener fails, the others stop with grace, and then its error is raised.
* A listener that is registered while others run begins immediately.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.interceptors import Chain
from qmq.client.listening.context import Binding, Factory, Handler, Providers, bind
from qmq.client.listening.listener_options import ListenerOptions, Options, options_of
from qmq.client.listening.message_handling import BatchHandling, HandlerContext, MessageHandling
from qmq.client.listening.pools import (
    Batches,
    OrderedPool,
    Pool,
    Runs,
    Singles,
    Stop,
    asked_by_signals,
    failure_of,
)
from qmq.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from qmq.client.connection.connection import ClientTiming
    from qmq.client.metadata.cache import Ordering

log = logging.getLogger("qmq.client")

Ask = Callable[[str], Awaitable[object]]
"""Subject -> its order; None: unordered. Raises UnknownSubject, Unavailable."""


ForThreads = Callable[[Any, asyncio.AbstractEventLoop], object]
"""Makes the client that plain handlers get in their context from an asyncio
client: `qmq.blocking.beside`.
"""


def no_client(_: object, __: asyncio.AbstractEventLoop) -> None:
    """Used by tests, and by clients whose plain handlers send nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A registered listener."""

    options: Options
    binding: Binding


class Listening:
    """Running listeners."""

    def __init__(
        self,
        mq: ListenerApi,
        ordering: Ask,
        now_ns: Callable[[], int],
        for_threads: ForThreads,
        providers: Providers,
        stop: Stop,
    ) -> None:
        self._mq, self._ordering, self._now_ns, self._for_threads, self._providers = (
            mq,
            ordering,
            now_ns,
            for_threads,
            providers,
        )
        self._stop = stop
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, listener: Listener) -> None:
        """Start a listener. Raises InvalidArgument if it depends on a type that is not provided."""
        self._providers.check(listener.binding.provided, listener.binding.handler_name)
        self._tasks.append(asyncio.get_running_loop().create_task(self._run(listener)))

    def stop(self) -> None:
        """Take no more messages and finish those in progress; a second call stops immediately."""
        self._stop.again()

    async def wait(self) -> None:
        """Wait until all listeners have stopped. Raises the error of one that failed."""
        while running := [each for each in self._tasks if not each.done()]:
            await asyncio.wait(running)
        failure = failure_of(self._tasks)
        if failure is not None:
            raise failure

    async def finish(self) -> None:
        """Stop with grace and wait for the end; cancellation stops immediately."""
        self._stop.begin()
        running = [each for each in self._tasks if not each.done()]
        try:
            if running:
                await asyncio.wait(running)
        except asyncio.CancelledError:
            self._stop.now.set()
            await asyncio.wait(running)
            raise
        finally:
            self._stop.over()

    async def _run(self, listener: Listener) -> None:
        handler_name = listener.binding.handler_name
        threads: Executor | None = None
        try:
            if not listener.binding.is_async:
                threads = ThreadPoolExecutor(
                    listener.options.concurrency, thread_name_prefix=f"qmq-{handler_name}"
                )
            work = await self._prepared(listener, threads)
            if work is not None:
                await work.run()
        except Exception as failure:
            log.error(
                "listener %s of subject %r ends: %s",
                handler_name,
                listener.options.subject,
                failure,
            )
            raise
        finally:
            self._stop.begin()
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)

    async def _prepared(
        self, listener: Listener, threads: Executor | None
    ) -> Pool | OrderedPool | None:
        """The parts that a listener needs to run; None if it was stopped before."""
        options, binding, stop, mq = listener.options, listener.binding, self._stop, self._mq
        is_ordered = await self._is_ordered(options.subject)
        if is_ordered is None:
            return None
        seen = mq if binding.is_async else self._for_threads(mq, asyncio.get_running_loop())
        around = HandlerContext(seen, mq.interceptors, self._providers, self._now_ns, threads)
        handling = MessageHandling(options, binding, around)
        if is_ordered:
            ordered = mq.ordered_consumer(
                options.subject,
                options.group,
                **options.ordered_consumer(is_async=binding.is_async),
            )
            if options.batch is None:
                return OrderedPool(ordered, handling, options.concurrency, stop)
            runs = BatchHandling(options, binding, around)
            return Pool(
                ordered, Runs(ordered, options.batch[0]), runs.handle_run, options.concurrency, stop
            )
        consumer = mq.consumer(options.subject, options.group, **options.consumer())
        if options.batch is None:
            return Pool(
                consumer,
                Singles(consumer, is_most_once=options.most_once),
                handling.handle,
                options.concurrency,
                stop,
            )
        batches = Batches(consumer, *options.batch, stop, is_most_once=options.most_once)
        return Pool(
            consumer,
            batches,
            BatchHandling(options, binding, around).handle_all,
            options.concurrency,
            stop,
        )

    async def _is_ordered(self, subject: str) -> bool | None:
        """Whether the subject is ordered; None if the listener was stopped first.
        Raises UnknownSubject.
        """
        asking = asyncio.get_running_loop().create_task(self._ask(subject))
        stopping = asyncio.get_running_loop().create_task(self._stop.wanted.wait())
        try:
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            stopping.cancel()

    async def _ask(self, subject: str) -> bool:
        while True:
            try:
                return await self._ordering(subject) is not None
            except Unavailable as failure:
                log.warning("a listener of subject %r waits for the cluster: %s", subject, failure)


class Listeners:
    """A client's listeners. The module describes them."""

    def __init__(
        self,
        mq: ListenerApi,
        ordering: Ask,
        now_ns: Callable[[], int],
        for_threads: ForThreads,
        cancel_s: float,
    ) -> None:
        self.providers = Providers()
        self._mq, self._ordering, self._now_ns, self._for_threads, self._cancel_s = (
            mq,
            ordering,
            now_ns,
            for_threads,
            cancel_s,
        )
        self._registered: list[Listener] = []
        self._listening: Listening | None = None

    def add(self, subject: str, group: str, handler: Handler, given: ListenerOptions) -> None:
        """Register a listener. Raises InvalidName, InvalidArgument."""
        options = options_of(subject, group, given)
        listener = Listener(options, bind(handler, is_batch=options.batch is not None))
        if options.idempotent is not None:
            options.idempotent.check_handler(is_async=listener.binding.is_async)
        if self._listening is not None:
            self._listening.start(listener)
        self._registered.append(listener)

    def provide(self, kind: type, factory: Factory) -> None:
        self.providers.add(kind, factory)

    @asynccontextmanager
    async def listening(self, grace: timedelta) -> AsyncIterator[Listening]:
        """All listeners run until the block is left. Raises InvalidArgument, and the error of a
        listener that failed.
        """
        if self._listening is not None:
            raise InvalidArgument("the listeners of this client are running already")
        for each in self._registered:
            self.providers.check(each.binding.provided, each.binding.handler_name)
        stop = Stop(grace.total_seconds(), self._cancel_s)
        listening = Listening(
            self._mq, self._ordering, self._now_ns, self._for_threads, self.providers, stop
        )
        self._listening = listening
        try:
            for each in self._registered:
                listening.start(each)
            yield listening
        finally:
            try:
                await listening.finish()
            finally:
                self._listening = None
        await listening.wait()

    async def run(self, grace: timedelta) -> None:
        """Run all listeners until they are stopped, also by SIGINT or SIGTERM."""
        if not self._registered:
            raise InvalidArgument(
                "no listener is registered: register one with @mq.listener or mq.listen"
            )
        async with self.listening(grace) as listening:
            with asked_by_signals(listening.stop):
                await listening.wait()

    def stop(self) -> None:
        if self._listening is not None:
            self._listening.stop()

    async def close(self) -> None:
        """Stop with grace, before the client closes."""
        if self._listening is not None:
            await self._listening.finish()


GRACE: Final = timedelta(seconds=30)

_T = TypeVar("_T")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class ListenerApi:
    """The part of `qmq.Client` for listeners. docs/LISTENERS.md says what handlers may be, and what
    happens to their messages.
    """

    _now_ns: Callable[[], int]
    _for_threads: ForThreads
    _timing: ClientTiming
    _ordering: Callable[[str], Awaitable[Ordering | None]]
    _own_listeners: Listeners | None = None
    interceptors: Chain

    def consumer(self, *positional: Any, **named: Any) -> Consumer:
        """See `Client.consumer`."""
        raise NotImplementedError

    def ordered_consumer(self, *positional: Any, **named: Any) -> OrderedConsumer:
        """See `Client.ordered_consumer`."""
        raise NotImplementedError

    @property
    def _listeners(self) -> Listeners:
        if self._own_listeners is None:
            self._own_listeners = Listeners(
                self, self._ordering, self._now_ns, self._for_threads, self._timing.cancel_s
            )
        return self._own_listeners

    def listener(
        self, subject: str, group: str, **options: Unpack[ListenerOptions]
    ) -> Callable[[_Handler], _Handler]:
        """Register a function as the handler of a subject's messages:
        `@mq.listener("order.created", group="billing", concurrency=16)`.

        The annotation of its first parameter says what a body is decoded to; a parameter annotated
        with `qmq.Context` gets the context. When the handler returns, the message is acknowledged;
        when it raises, the message is handed out again; see `qmq.Retry` and `qmq.Reject`. Handling
        begins with `run` or `listening`. The options are those of `ListenerOptions`. Raises
        InvalidName, InvalidArgument for a handler that cannot be called.
        """

        def register(handler: _Handler) -> _Handler:
            self.listen(subject, handler, group, **options)
            return handler

        return register

    def listen(
        self,
        subject: str,
        handler: Callable[..., Any],
        group: str,
        **options: Unpack[ListenerOptions],
    ) -> None:
        """Register a handler that is not a plain function, such as a method of an object. Otherwise
        as `listener`.
        """
        self._listeners.add(subject, group, handler, options)

    def provide(self, kind: type[_T], factory: Callable[..., Any]) -> None:
        """Pass what the factory makes for each message to parameters of handlers that are annotated
        with this class: an instance, or a context manager that is entered around the handler and
        yields one. Raises InvalidArgument.
        """
        self._listeners.provide(kind, factory)

    def listening(self, *, grace: timedelta = GRACE) -> AbstractAsyncContextManager[Listening]:
        """`async with mq.listening():` runs all listeners inside the block. At its end, or when one
        fails, they take no more messages, finish and acknowledge those in progress, for `grace` at
        most, and leave; unseen messages return to the group immediately.

        Raises InvalidArgument; at the end the error that stopped a listener (UnknownSubject,
        MessagesExpired, ...).
        """
        return self._listeners.listening(grace)

    async def run(self, *, grace: timedelta = GRACE) -> None:
        """Run all listeners until `stop`, SIGINT or SIGTERM (a second signal stops immediately), or
        until one of them fails: then the others stop with grace, and the error is raised. Raises
        InvalidArgument if there is no listener.
        """
        await self._listeners.run(grace)

    def stop(self) -> None:
        """Stop the listeners with grace; a second call stops them immediately. Call it in the event
        loop's thread; it does not wait.
        """
        self._listeners.stop()

    async def _close_listeners(self) -> None:
        if self._own_listeners is not None:
            await self._own_listeners.close()
