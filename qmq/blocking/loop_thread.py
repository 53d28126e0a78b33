"""The hand-written part of the blocking client: the event loop's thread, and what has another shape
without asyncio.

`qmq/blocking/__init__.py` and `qmq/blocking/admin.py` are made from the asyncio client
(tools/generate_blocking.py). Their classes derive from these.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, overload

from qmq.client.client import GRACE, Client
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import BatchSlice, Message, Messages, Settler
from qmq.client.interceptors import Chain
from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.listeners import asked_in_main_thread
from qmq.client.task_messages import Owner
from qmq.errors import ClientClosed, InvalidArgument
from qmq.wire.frame_payloads import Verdict

if TYPE_CHECKING:
    from qmq.sql.outbox import BlockingOutbox, Outbox

_CLOSED: Final = "the client is closed: make a new one with qmq.blocking.connect()"
_R = TypeVar("_R")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class LoopThread:
    """The event loop of an asyncio client, for callers in other threads: in a thread that it
    starts, or in one of the application.

    A caller waits only for a loop that can answer: not after `close`, not in the loop's own thread,
    and not in a forked child, which does not have its parent's threads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the application's, which starts and stops it. Without one there is a new loop;
        `start` begins its thread.
        """
        self.is_own = loop is None
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="qmq-client", daemon=True
        )
        self._process = os.getpid()
        self._submitting = threading.Lock()
        """What is submitted under it gets an answer, or is cancelled by `close`."""
        self._is_closing = self._is_ended = False

    def start(self) -> None:
        """Begin the loop's own thread."""
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """Whether this process inherited the object from its parent."""
        return self._process != os.getpid()

    @property
    def is_inside(self) -> bool:
        """Whether the caller runs in the loop's thread."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine in the loop, and wait for it. Raises what it raises, ClientClosed, and
        InvalidArgument in the loop's thread.
        """
        try:
            future = self._submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException as failure:
            future.cancel()
            if isinstance(failure, CancelledError) and (self._is_ended or self.loop.is_closed()):
                raise ClientClosed(_CLOSED) from None
            raise

    def _submit(self, work: Coroutine[Any, Any, _R]) -> Future[_R]:
        if self.is_forked:
            raise ClientClosed(
                "the client was made before a fork, and its thread is in the parent process: "
                "make a new one in this process"
            )
        self._check_outside()
        with self._submitting:
            self._check_open()
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _check_outside(self) -> None:
        if self.is_inside:
            raise InvalidArgument(
                "a blocking client was called in its own event loop, "
                "which cannot answer while it waits: let the handler be a plain function, "
                "or an async one that awaits the asyncio client of its context (context.mq)"
            )

    def _check_open(self) -> None:
        if self._is_ended or self.loop.is_closed():
            raise ClientClosed(_CLOSED)

    def call(self, function: Callable[[], _R]) -> _R:
        """Call a function in the loop's thread, and wait for it.
        Raises what it raises, ClientClosed.
        """
        if self.is_inside and not self.is_forked:
            return function()

        async def called() -> _R:
            return function()

        return self.run(called())

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop's thread, without waiting for it. Raises ClientClosed."""
        with self._submitting:
            self._check_open()
            self.loop.call_soon_threadsafe(function, *arguments)

    def iterate(self, items: AsyncIterator[_R]) -> Iterator[_R]:
        """The items, each fetched when it is asked for."""
        end = object()

        async def following() -> object:
            return await anext(items, end)

        while (item := self.run(following())) is not end:
            yield item  # type: ignore[misc]

    def close(self, last: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        """Run `last` and end the loop's own thread. Calls that wait then, in other threads, raise
        ClientClosed.

        Harmless to repeat; does nothing in a forked child, or to the application's loop. Raises as
        `run`.
        """
        if self.is_forked or not self.is_own:
            return
        self._check_outside()
        with self._submitting:
            if self._is_closing:
                return
            self._is_closing = True
        try:
            if last is not None:
                self.run(last())
        finally:
            with self._submitting:
                self._is_ended = True
            asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _cancel_others() -> None:
    """Cancel all tasks of the loop, which began before this one."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class BlockingPart:
    """A part of a blocking client."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread


class BlockingClientBase(BlockingPart):
    def __init__(self, client: Client, thread: LoopThread) -> None:
        super().__init__(thread)
        self._client = client

    @overload
    def run(self) -> None: ...

    @overload
    def run(self, work: Coroutine[Any, Any, _R]) -> _R: ...

    def run(self, work: Coroutine[Any, Any, _R] | None = None) -> _R | None:
        """Run the listeners until they are stopped: see `qmq.Client.run`. Or run a coroutine of the
        asyncio client in the loop's thread, and wait for it. Raises ClientClosed.
        """
        if work is not None:
            return self._thread.run(work)
        with asked_in_main_thread(self.stop):
            return self._thread.run(self._client.run())

    @property
    def interceptors(self) -> Chain:
        """See `qmq.Client.interceptors`. They are called in the loop's thread for what is sent, in
        the caller's for what is handled.
        """
        return self._client.interceptors

    def outbox(
        self, connection: Any, *, table: str = "qmq_outbox", grace: timedelta = GRACE
    ) -> BlockingOutbox:
        """See `qmq.Client.outbox`; on sync connections, sessions and engines: `with
        mq.outbox(connection) as box: box.send(...)`.
        """
        made: Outbox = self._thread.call(
            lambda: self._client.outbox(connection, table=table, grace=grace)
        )
        from qmq.sql.outbox import (
            BlockingOutbox,
        )  # after the check whether the client can be imported

        return BlockingOutbox(made, self._thread.run)

    def listener(
        self, subject: str, group: str, **options: Unpack[ListenerOptions]
    ) -> Callable[[_Handler], _Handler]:
        """See `qmq.Client.listener`. Plain functions run in threads, and their context's `mq` is a
        blocking client.
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
        """See `qmq.Client.listen`."""
        self._thread.call(lambda: self._client.listen(subject, handler, group, **options))

    def provide(self, kind: type[Any], factory: Callable[..., Any]) -> None:
        """See `qmq.Client.provide`."""
        self._client.provide(kind, factory)

    def stop(self) -> None:
        """See `qmq.Client.stop`. From any thread."""
        with suppress(ClientClosed):
            self._thread.call_soon(self._client.stop)

    def close(self) -> None:
        """See `qmq.Client.close`. A client beside an asyncio client is closed with that one, and
        not here.
        """
        self._thread.close(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _ThreadLife:
    """Lives as long as the thread whose `threading.local` has it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.owner: Owner = loop.create_future()
        """Stands for the thread, as a task does in the asyncio client (`task_messages.py`). Only
        the loop's thread uses it. It is done when the thread has ended, in whichever way.
        """
        self._loop = loop

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.owner.set_result, None)


class BlockingConsumerBase(BlockingPart):
    def __init__(self, thread: LoopThread, consumer: Consumer, interceptors: Chain) -> None:
        super().__init__(thread)
        self._consumer = consumer
        self._interceptors = interceptors
        self._of_thread = threading.local()

    def _wrap(self, settler: Settler) -> Settler:
        return _FromAnyThread(self._thread, settler)

    def __iter__(self) -> Iterator[Message]:
        """A message is acknowledged when the thread that got it asks for the next
        one (`ack="auto"`).
        """
        while True:
            message = self._thread.run(self._consumer.next_for(self._owner()))
            message.settle_through(self._wrap)
            # Not the loop's own interception: a message is handled in the caller's thread and
            # context.
            with self._interceptors.handling(message, self._consumer.group):
                yield message

    def _owner(self) -> Owner:
        """What stands for the calling thread."""
        life: _ThreadLife | None = getattr(self._of_thread, "life", None)
        if life is None:
            life = self._of_thread.life = _ThreadLife(self._thread.loop)
        return life.owner

    def pull(self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)) -> Messages:
        """See `qmq.Consumer.pull`."""
        found = self._thread.run(self._consumer.pull(messages_max, wait))
        found.settle_through(self._wrap)
        return found

    def ack(self, messages: Message | Messages) -> None:
        """They were worked on. Does not wait for the broker; see `qmq.Message.ack`."""
        messages.ack_later()

    def ack_sync(self, messages: Message | Messages) -> None:
        """The same; returns when the broker has it. Raises as `qmq.Message.ack_sync`."""
        self._thread.run(messages.ack_sync())

    def nack(
        self,
        messages: Message | Messages,
        delay: timedelta | None = None,
        error: str | BaseException = "",
    ) -> None:
        """Have them handed out again. See `qmq.Message.nack`."""
        messages.nack(delay, error)

    def reject(self, messages: Message | Messages, error: str | BaseException = "") -> None:
        """To the group's dead-letter queue. See `qmq.Message.reject`."""
        messages.reject(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.run(self._consumer.close(error))


class _FromAnyThread:
    """Carries verdicts from any thread into the loop's."""

    def __init__(self, thread: LoopThread, settler: Settler) -> None:
        self._thread = thread
        self._settler = settler
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def ack(self, pull: int) -> None:
        self.settle(pull, pull, Verdict.ACK)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._thread.call(lambda: self._settler.settle(first, last, verdict, delay, error))

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        self._thread.call(lambda: self._settler.nack(part, delay, error))

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)
