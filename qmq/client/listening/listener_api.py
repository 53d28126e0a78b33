"""What a client says about listeners: the part of `qmq.Client` that has their names. The work is the registry's (`listeners.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast

from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.listeners import ForThreads, Listeners, Listening, ListeningClient

if TYPE_CHECKING:
    from qmq.client.client_timing import ClientTiming
    from qmq.client.route_book import Ordering

GRACE: Final = timedelta(seconds=30)

_T = TypeVar("_T")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class ListeningDoor:
    """Docs/LISTENERS.md says what handlers may be, and what becomes of their messages."""

    _now_ns: Callable[[], int]
    _for_threads: ForThreads
    _timing: ClientTiming
    _own_listeners: Listeners | None = None

    async def _ordering(self, target: str) -> Ordering | None:
        raise NotImplementedError

    @property
    def _listeners(self) -> Listeners:
        if self._own_listeners is None:
            mq = cast(ListeningClient, self)
            self._own_listeners = Listeners(mq, self._ordering, self._now_ns, self._for_threads, self._timing.cancel_s)
        return self._own_listeners

    def listener(self, subject: str, group: str, **options: Unpack[ListenerOptions]) -> Callable[[_Handler], _Handler]:
        """Have a function handle the subject's messages: `@mq.listener("order.created", group="billing", concurrency=16)`.

        The annotation of its first parameter says what a body is decoded to; a parameter annotated with `qmq.Context` gets the context.
        To return acknowledges, to raise has the message handed out again; see `qmq.Retry` and `qmq.Reject`. It begins with `run` or
        `listening`. The options are those of `ListenerOptions`. Raises InvalidName, InvalidArgument for a handler that cannot be called.
        """

        def register(handler: _Handler) -> _Handler:
            self.listen(subject, handler, group, **options)
            return handler

        return register

    def listen(self, subject: str, handler: Callable[..., Any], group: str, **options: Unpack[ListenerOptions]) -> None:
        """The same for what is no function of its own, such as a method of an object."""
        self._listeners.add(subject, group, handler, options)

    def provide(self, kind: type[_T], factory: Callable[..., Any]) -> None:
        """Have handlers' parameters annotated with this class get what the factory makes, for each message: an instance, or a context
        manager that is entered around the handler and yields one. Raises InvalidArgument.
        """
        self._listeners.provide(kind, factory)

    def listening(self, *, grace: timedelta = GRACE) -> AbstractAsyncContextManager[Listening]:
        """`async with mq.listening():` all listeners are at work in the block. At its end, and when one fails, they take no more messages,
        finish and acknowledge what is in hand, for `grace` at most, and leave; unseen messages go back at once.

        Raises InvalidArgument; at the end what a listener could not go on with (UnknownSubject, MessagesExpired, ...).
        """
        return self._listeners.listening(grace)

    async def run(self, *, grace: timedelta = GRACE) -> None:
        """Run all listeners until `stop`, SIGINT or SIGTERM (a second one: at once), or until one of them cannot go on: then the others
        stop with grace, and it is raised. Raises InvalidArgument if there is no listener.
        """
        await self._listeners.run(grace)

    def stop(self) -> None:
        """Have the listeners stop with grace; asked again, at once. From the event loop's thread; nothing is waited for."""
        self._listeners.stop()

    async def _close_listeners(self) -> None:
        if self._own_listeners is not None:
            await self._own_listeners.close()
