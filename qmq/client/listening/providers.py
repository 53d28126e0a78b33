"""Dependencies of handlers: `mq.provide(Session, factory)` passes a Session to parameters with that annotation.

A factory is called for each message, with the Context if it takes a parameter. It may return

    an instance of the type                     passed as it is, and not closed: for a pool or a client, say
    a context manager of another type           entered before the handler, left after it with its exception; its value is passed
    an async one, or an awaitable               likewise; not for plain `def` handlers, whose factories run in the handler's thread

    @asynccontextmanager
    async def session():
        async with engine.begin() as connection:
            yield connection

    mq.provide(AsyncConnection, session)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from typing import Any

from qmq.client.listening.context import Context
from qmq.errors import InvalidArgument

Factory = Callable[..., Any]


class Providers:
    """A client's providers. The module describes them."""

    def __init__(self) -> None:
        self._factories: dict[Any, tuple[Factory, bool]] = {}

    def add(self, kind: type, factory: Factory) -> None:
        """Register a factory for a type; the last one wins. Raises InvalidArgument."""
        if kind is Context or not isinstance(kind, type) or not callable(factory):
            raise InvalidArgument(f"mq.provide takes a class and a function that makes it, not {kind!r} and {factory!r}")
        self._factories[kind] = factory, _takes_context(factory)

    def check(self, kinds: Iterable[Any], spoken: str) -> None:
        """Raises InvalidArgument if a handler depends on a type that is not provided."""
        for kind in kinds:
            if kind not in self._factories:
                raise InvalidArgument(f"{spoken} takes a {kind.__name__}, which is not provided: call mq.provide({kind.__name__}, factory)")

    async def enter(self, kinds: Iterable[Any], context: Context, stack: AsyncExitStack) -> dict[Any, object]:
        """The dependencies of an async handler."""
        found: dict[Any, object] = {}
        for kind in kinds:
            made = self._make(kind, context)
            if inspect.isawaitable(made) and not isinstance(made, kind):
                made = await made
            if isinstance(made, kind):
                found[kind] = made
            elif isinstance(made, AbstractAsyncContextManager):
                found[kind] = await stack.enter_async_context(made)
            else:
                found[kind] = stack.enter_context(made) if isinstance(made, AbstractContextManager) else made
        return found

    def enter_sync(self, kinds: Iterable[Any], context: Context, stack: ExitStack) -> dict[Any, object]:
        """The dependencies of a handler in a thread. Raises InvalidArgument for one that needs an event loop."""
        found: dict[Any, object] = {}
        for kind in kinds:
            made = self._make(kind, context)
            if isinstance(made, kind):
                found[kind] = made
            elif inspect.isawaitable(made) or isinstance(made, AbstractAsyncContextManager):
                if inspect.iscoroutine(made):
                    made.close()
                raise InvalidArgument(
                    f"the factory of {kind.__name__} is async: a plain `def` handler cannot wait for it, so make the handler an `async def`"
                )
            else:
                found[kind] = stack.enter_context(made) if isinstance(made, AbstractContextManager) else made
        return found

    def _make(self, kind: Any, context: Context) -> Any:
        factory, takes_context = self._factories[kind]
        return factory(context) if takes_context else factory()


def _takes_context(factory: Factory) -> bool:
    """Whether the factory has a required parameter."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    empty = inspect.Parameter.empty
    return any(each.default is empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
