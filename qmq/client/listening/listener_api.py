"""The methods of `qmq.Client` for listeners. `listeners.py` does the work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast

from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.listeners import ForThreads, Listeners, Listening, ListeningClient

if TYPE_CHECKING:
    from qmq.client.connection import ClientTiming
    from qmq.client.route_book import Ordering

GRACE: Final = timedelta(seconds=30)

_T = TypeVar("_T")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class ListenerApi:
    """The part of `qmq.Client` for listeners. docs/LISTENERS.md says what handlers may be, and what happens to their messages."""

    _now_ns: Callable[[], int]
    _for_threads: ForThreads
    _timing: ClientTiming
    _ordering: Callable[[str], Awaitable[Ordering | None]]
    _own_listeners: Listeners | None = None

    @property
    def _listeners(self) -> Listeners:
        if self._own_listeners is None:
            mq = cast(ListeningClient, self)
            self._own_listeners = Listeners(mq, self._ordering, self._now_ns, self._for_threads, self._timing.cancel_s)
        return self._own_listeners

    def listener(self, subject: str, group: str, **options: Unpack[ListenerOptions]) -> Callable[[_Handler], _Handler]:
        """Register a function as the handler of a subject's messages: `@mq.listener("order.created", group="billing", concurrency=16)`.

        The annotation of its first parameter says what a body is decoded to; a parameter annotated with `qmq.Context` gets the context.
        When the handler returns, the message is acknowledged; when it raises, the message is handed out again; see `qmq.Retry` and
        `qmq.Reject`. Handling begins with `run` or `listening`. The options are those of `ListenerOptions`. Raises InvalidName,
        InvalidArgument for a handler that cannot be called.
        """

        def register(handler: _Handler) -> _Handler:
            self.listen(subject, handler, group, **options)
            return handler

        return register

    def listen(self, subject: str, handler: Callable[..., Any], group: str, **options: Unpack[ListenerOptions]) -> None:
        """Register a handler that is not a plain function, such as a method of an object. Otherwise as `listener`."""
        self._listeners.add(subject, group, handler, options)

    def provide(self, kind: type[_T], factory: Callable[..., Any]) -> None:
        """Pass what the factory makes for each message to parameters of handlers that are annotated with this class: an instance, or a
        context manager that is entered around the handler and yields one. Raises InvalidArgument.
        """
        self._listeners.provide(kind, factory)

    def listening(self, *, grace: timedelta = GRACE) -> AbstractAsyncContextManager[Listening]:
        """`async with mq.listening():` runs all listeners inside the block. At its end, or when one fails, they take no more messages,
        finish and acknowledge those in progress, for `grace` at most, and leave; unseen messages return to the group immediately.

        Raises InvalidArgument; at the end the error that stopped a listener (UnknownSubject, MessagesExpired, ...).
        """
        return self._listeners.listening(grace)

    async def run(self, *, grace: timedelta = GRACE) -> None:
        """Run all listeners until `stop`, SIGINT or SIGTERM (a second signal stops immediately), or until one of them fails: then the
        others stop with grace, and the error is raised. Raises InvalidArgument if there is no listener.
        """
        await self._listeners.run(grace)

    def stop(self) -> None:
        """Stop the listeners with grace; a second call stops them immediately. Call it in the event loop's thread; it does not wait."""
        self._listeners.stop()

    async def _close_listeners(self) -> None:
        if self._own_listeners is not None:
            await self._own_listeners.close()
