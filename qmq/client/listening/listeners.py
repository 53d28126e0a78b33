"""A client's listeners: registered by `qmq.Client` at any time, run together, stopped together.

    registered ──listening──▶ at work
    ──stop, signal, a failure, mq.close──▶ finishing ──▶ registered again

Rules:
* A listener locates its subject before it makes its consumer, and so learns whether the subject is
  ordered. While the cluster cannot be reached, it waits.
* When one listener fails, the others stop with grace, and then its error is raised.
* A listener that is registered while others run begins immediately.

A listener of an unordered subject runs with a pool of workers, one of an ordered subject by the
consumer's `run`. A worker takes the next messages, handles them, and comes back for more.

    consumer ──take──▶ worker ──handle──▶ verdict    `concurrency` of these; no task for each
       ▲                                    │        message
       └────────────────────────────────────┘

* A worker is *idle* while it waits for messages: it may be cancelled then without loss. Otherwise
  it is handling messages.
* The end is the same for all causes (the application, a signal, a failed consumer, a cancelled
  task): idle workers are cancelled, unseen messages return to the group immediately, the others
  finish, the consumer leaves. Only then is an error raised.

The ordered consumer's `run` handles up to `concurrency` keys at a time. After `stop`, a message
that comes to a worker is not begun, but held until the others are finished; then the consumer puts
it back, and leaves. The consumer alone would cancel handlers after half a lease.

Listeners stop in two steps (`Stop`), which are the same for all listeners of a client:

    wanted    take no more messages; unseen ones return to the group, those in progress are finished
              and acknowledged
    now       the grace period has ended, or a second stop was requested: handlers are cancelled,
              their messages handed back

Of SIGINT and SIGTERM while listeners run, the first signal asks them to stop, the second to stop
immediately. Previous handlers are restored afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from qmq import limits
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message, Messages
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.message import OrderedMessage, OrderedMessages
from qmq.client.interceptors import Chain
from qmq.client.listening.context import Binding, Factory, Handler, Providers, bind
from qmq.client.listening.listener_options import ListenerOptions, Options, options_of
from qmq.client.listening.message_handling import BatchHandling, HandlerContext, MessageHandling
from qmq.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from qmq.client.connection.connection import ClientTiming
    from qmq.client.metadata.cache import Ordering

log = logging.getLogger("qmq.client")

# --- stopping -------------------------------------------------------------------------------------


class Stop:
    """The two steps, as events. An event that is set stays set."""

    def __init__(self, grace_s: float, cancel_s: float) -> None:
        self.wanted = asyncio.Event()
        self.now = asyncio.Event()
        self._grace_s = grace_s
        self.cancel_s = cancel_s
        """How long a handler may take to end after it was cancelled."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Stop, with grace. Harmless to call again."""
        if not self.wanted.is_set():
            self.wanted.set()
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.now.set)

    def again(self) -> None:
        """A stop was requested: the first request stops with grace, the second immediately."""
        if self.wanted.is_set():
            self.now.set()
        self.begin()

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def wait_for_first(tasks: Iterable[asyncio.Task[Any]], event: asyncio.Event) -> None:
    """Wait until a task is done, or the event is set."""
    heard = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait((heard, *tasks), return_when=asyncio.FIRST_COMPLETED)
    finally:
        heard.cancel()


async def finish(tasks: Iterable[asyncio.Task[Any]], stop: Stop, name: str) -> None:
    """Wait for the tasks until `stop.now`, then cancel them. Cancelling the caller means `now`."""
    left = {each for each in tasks if not each.done()}
    try:
        while left and not stop.now.is_set():
            await wait_for_first(left, stop.now)
            left = {each for each in left if not each.done()}
    except asyncio.CancelledError:
        stop.now.set()
        await cancel(left, stop, name)
        raise
    await cancel(left, stop, name)


async def cancel(tasks: Iterable[asyncio.Task[Any]], stop: Stop, name: str) -> None:
    """Cancel tasks and wait for them, for a limited time."""
    left = {each for each in tasks if not each.done()}
    for each in left:
        each.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=stop.cancel_s)
        if stubborn:
            log.error(
                "%s: %d handlers did not end after cancellation and are abandoned",
                name,
                len(stubborn),
            )


def failure_of(tasks: Iterable[asyncio.Task[Any]]) -> BaseException | None:
    """The first failure of these tasks. All exceptions count as retrieved."""
    found = [each.exception() for each in tasks if each.done() and not each.cancelled()]
    return next((each for each in found if each is not None), None)


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """For code inside the event loop. Where a loop cannot handle signals (outside the main thread,
    on Windows), signals keep their usual effect.
    """
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                found = signal.getsignal(each)
                try:
                    loop.add_signal_handler(each, ask)
                except NotImplementedError:
                    break
                before[each] = found
        yield
    finally:
        for each, found in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, found if found is not None else signal.SIG_DFL)


@contextmanager
def asked_in_main_thread(ask: Callable[[], None]) -> Iterator[None]:
    """For a thread that waits for an event loop in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(each, signal.signal(each, lambda *_: ask())) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, found in before:
            signal.signal(each, found if found is not None else signal.SIG_DFL)


# --- a listener's workers -------------------------------------------------------------------------

_WAIT: Final = timedelta(seconds=20)
_GLANCE: Final = timedelta(milliseconds=500)
"""How often a worker that must not be cancelled while it waits checks whether to stop."""
_HANDLERS_IN_A_ROW: Final = 64
"""After this many handlers in a row that never awaited, other tasks get a turn."""


class Pool:
    """Workers on one consumer. A worker gets its next messages from the source:

    ready         those that are there without waiting; None if that is not known
    first         the next ones, or something empty after a while. Raises the error that stopped the
                  consumer. `may_cancel` says whether it may be cancelled without loss
    more          what `first` found, and what goes with it
    """

    def __init__(
        self,
        consumer: Consumer | OrderedConsumer,
        source: Singles | Batches | Runs,
        work: Callable[[Any], Awaitable[None]],
        concurrency: int,
        stop: Stop,
    ) -> None:
        self._consumer, self._source, self._work = consumer, source, work
        self._concurrency, self._stop = concurrency, stop
        self._idle: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._run_worker()) for _ in range(self._concurrency)]
        try:
            await wait_for_first(workers, self._stop.wanted)
        finally:
            self._stop.begin()
            for each in self._idle:
                each.cancel()
            if isinstance(self._consumer, Consumer):
                self._consumer.drain()
            try:
                await finish(workers, self._stop, self._consumer.name)
            finally:
                await self._consumer.close()
        failure = failure_of(workers)
        if failure is not None:
            raise failure

    async def _run_worker(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        source, work, idle, wanted = self._source, self._work, self._idle, self._stop.wanted
        handled = 0
        while not wanted.is_set():
            ready: Any = source.ready()
            if ready is None:
                if source.may_cancel:
                    idle.add(task)
                found: Any = await source.first()
                idle.discard(task)
                if not found:
                    continue
                ready = await source.more(found)
            await work(ready)
            handled += 1
            if handled == _HANDLERS_IN_A_ROW:
                handled = 0
                await asyncio.sleep(0)


class Singles:
    """Single messages of an unordered subject."""

    def __init__(self, consumer: Consumer, *, is_most_once: bool) -> None:
        self._consumer = consumer
        self.ready: Callable[[], Message | None] = consumer.ready.take
        self._is_most_once = is_most_once
        self._wait = _GLANCE if is_most_once else _WAIT
        self.may_cancel = not is_most_once

    async def first(self) -> Messages:
        return await self._consumer.pull(1, self._wait)

    async def more(self, found: Messages) -> Message:
        message = found.slices[0].message(0)
        message.is_settled = self._is_most_once
        return message


class Batches:
    """Batches of messages; one worker gathers at a time, so that batches fill."""

    def __init__(
        self, consumer: Consumer, count: int, wait: timedelta, stop: Stop, *, is_most_once: bool
    ) -> None:
        self._consumer = consumer
        self._count, self._wait_s, self._stop = count, wait.total_seconds(), stop
        self._is_most_once = is_most_once
        self._is_free = asyncio.Lock()
        self.may_cancel = not is_most_once

    def ready(self) -> None:
        return None

    async def first(self) -> list[Message]:
        await self._is_free.acquire()
        try:
            if self._stop.wanted.is_set():
                found: list[Message] = []
            else:
                found = list(
                    await self._consumer.pull(self._count, _GLANCE if self._is_most_once else _WAIT)
                )
        except BaseException:
            self._is_free.release()
            raise
        if not found:
            self._is_free.release()
        return found

    async def more(self, found: list[Message]) -> list[Message]:
        try:
            now_s = asyncio.get_running_loop().time
            until_s = now_s() + self._wait_s
            size = _bytes_of(found)
            while (
                self._has_room(found, size)
                and (left_s := until_s - now_s()) > 0
                and not self._stop.wanted.is_set()
            ):
                more = list(
                    await self._consumer.pull(
                        self._count - len(found), min(timedelta(seconds=left_s), _GLANCE)
                    )
                )
                size += _bytes_of(more)
                found += more
        finally:
            self._is_free.release()
        for each in found:
            each.is_settled = self._is_most_once
        return found

    def _has_room(self, found: list[Message], size: int) -> bool:
        return len(found) < self._count and size < limits.PULL_BYTES_MAX


def _bytes_of(messages: list[Message]) -> int:
    return sum([len(each.body) for each in messages])


class Runs:
    """Runs of messages of one lane of an ordered subject."""

    may_cancel = True

    def __init__(self, consumer: OrderedConsumer, count: int) -> None:
        self._consumer, self._count = consumer, count

    def ready(self) -> None:
        return None

    async def first(self) -> OrderedMessages:
        return await self._consumer.pull(self._count, _WAIT)

    async def more(self, found: OrderedMessages) -> OrderedMessages:
        return found


class OrderedPool:
    def __init__(
        self, consumer: OrderedConsumer, handling: MessageHandling, concurrency: int, stop: Stop
    ) -> None:
        self._consumer, self._handling = consumer, handling
        self._concurrency, self._stop = concurrency, stop
        self._unsettled = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        # Not the `run` of an intercepted consumer: here interceptors surround all of the handling,
        # where they see how it ends.
        running = loop.create_task(
            OrderedConsumer.run(self._consumer, self._handle, concurrency=self._concurrency)
        )
        try:
            await wait_for_first([running], self._stop.wanted)
        finally:
            self._stop.begin()
            idle = loop.create_task(self._is_idle.wait())
            try:
                await finish([idle], self._stop, self._consumer.name)
            finally:
                await cancel([running], self._stop, self._consumer.name)
                await self._consumer.close()
        failure = failure_of([running])
        if failure is not None:
            raise failure

    async def _handle(self, message: OrderedMessage) -> None:
        if self._stop.wanted.is_set():
            await (
                asyncio.get_running_loop().create_future()
            )  # until it is cancelled, which puts the message back
        self._unsettled += 1
        self._is_idle.clear()
        try:
            await self._handling.handle(message)
        finally:
            self._unsettled -= 1
            if not self._unsettled:
                self._is_idle.set()


# --- a client's listeners -------------------------------------------------------------------------

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
