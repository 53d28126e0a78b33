"""A handler: its signature, what it gets besides the payload, its context, and the verdict that
follows from its end.

The end of a handler decides about its message:

    handler                                message
    returned                               acknowledged
    raised qmq.Retry(after=...)            handed out again after that time
    raised qmq.Reject("why")               dead-letter queue of the group, immediately
    took longer than `timeout`             handed out again, error "timed out after 5 s"
    raised anything else                   handed out again, error "ValueError: ..."
    not called: the body does not decode   as `on_undecodable` says; dead-letter queue by default

The broker counts attempts: a message that fails for the last time goes to the dead-letter queue
with the same error (docs/DELIVERY.md). The delay before the next attempt is the handler's, else the
listener's `retry_delays` by attempt, else the group's.

On an ordered subject the decision is only: done, or failed with a delay. The consumer's
`on_failure` says what follows.

`mq.provide(Session, factory)` passes a Session to parameters with that annotation. A factory is
called for each message, with the Context if it takes a parameter. It may return

    an instance of the type                     passed as it is, and not closed: for a pool or a
                                                client, say
    a context manager of another type           entered before the handler, left after it with its
                                                exception; its value is passed
    an async one, or an awaitable               likewise; not for plain `def` handlers, whose
                                                factories run in the handler's thread

    @asynccontextmanager
    async def session():
        async with engine.begin() as connection:
            yield connection

    mq.provide(AsyncConnection, session)

A handler's signature is read once, when it is registered:

    async def on_order(order: Order, context: qmq.Context, *, session: Session) -> None: ...
                       ─────┬──────  ─────────┬─────────      ────────┬────────
                     first: the payload   by annotation      by annotation: what
                                                             `mq.provide(Session, ...)` makes

Rules:
* The first parameter is the payload: its annotation says how a body is decoded (`payloads.py`), or,
  as `qmq.Message`, that nothing is.
* With `batch` it is a list of payloads.
* Every other parameter is a Context or a provided type. A parameter that is neither must have a
  default, which it keeps.
* A signature that cannot be bound is an error at registration. Whether a type is provided is
  checked when listening begins (`Binding.provided`), because providers may be registered after
  listeners.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
)
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from qmq.client.consuming.message import Message, StoredMessage, error_text, retry_ms
from qmq.client.consuming.ordered.consumer import AnyMessage
from qmq.client.consuming.ordered.message import LaneMessage, OrderedMessage
from qmq.client.payloads import Decode, Undecodable, UndecodableBody, codec_of
from qmq.errors import InvalidArgument
from qmq.process.event_loop import time_of

STOPPED: Final = "the listener was stopped before its handler was done"
_AT_ONCE: Final = timedelta(0)


class Retry(Exception):
    """Raised in a handler: hand the message out again after the delay `after` (None: the usual
    delay). Raises InvalidArgument, DelayTooLong for a delay above the limit.
    """

    def __init__(self, why: str = "", *, after: timedelta | None = None) -> None:
        super().__init__(why)
        if after is not None:
            retry_ms(after)
        self.after = after


class Reject(Exception):
    """Raised in a handler: no other attempt will help, so the message goes to the dead-letter
    queue, with this reason.
    """


class TimedOut(Exception):
    """The handler took longer than its listener's timeout."""


class Act(Enum):
    """The verdict on a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


class HandlerDecision(NamedTuple):
    """A verdict; `delay` None means the usual one."""

    act: Act
    delay: timedelta | None = None
    error: str = ""


DONE: Final = HandlerDecision(Act.ACK)
WHEN_CANCELLED: Final = HandlerDecision(Act.NACK, _AT_ONCE, STOPPED)
"""For a message whose handler was cancelled: the group gets the message again immediately."""


class Policy(NamedTuple):
    """A listener's options about failures."""

    retry_delays: Sequence[timedelta] = ()
    on_undecodable: str = "reject"

    def delay(self, attempt: int) -> timedelta | None:
        """How long a message waits after this attempt (from 1) failed; None: as the group's
        settings say.
        """
        return (
            self.retry_delays[min(attempt, len(self.retry_delays)) - 1]
            if self.retry_delays
            else None
        )


def decide(failure: BaseException | None, attempt: int, policy: Policy) -> HandlerDecision:
    """The verdict on a message, from the exception of its handler and the number of the attempt."""
    if failure is None:
        return DONE
    text = _text(failure)
    if isinstance(failure, Retry) and failure.after is not None:
        return HandlerDecision(Act.NACK, failure.after, text)
    if isinstance(failure, Reject):
        return HandlerDecision(Act.REJECT, None, text)
    if not isinstance(failure, UndecodableBody) or policy.on_undecodable == "retry":
        return HandlerDecision(Act.NACK, policy.delay(attempt), text)
    return DONE if policy.on_undecodable == "skip" else HandlerDecision(Act.REJECT, None, text)


def _text(failure: BaseException) -> str:
    """The error text. QMQ's own exceptions are written for readers; for others the type's name
    comes first. Never raises.
    """
    try:
        words = str(failure) if isinstance(failure, Retry | Reject | TimedOut | Undecodable) else ""
        return error_text(words or failure)
    except Exception:  # an exception whose __str__ raises
        return type(failure).__name__


VERDICT_OF_TRANSACTION: Final = (
    "with `idempotent` the verdict belongs to the transaction: return to commit and acknowledge, "
    "raise qmq.Retry or qmq.Reject to roll back"
)
SettleMessages = Callable[[Sequence[AnyMessage], HandlerDecision], None]
"""Gives this verdict to the messages without a verdict."""


class Context:
    """The context of a handler. A handler gets it in the parameter that is annotated with
    `qmq.Context`.

    `mq` is the client, for sending messages; a plain `def` handler, which has no event loop, gets
    the client of `qmq.blocking`. `connection` belongs to the transaction that `idempotent` began;
    None without `idempotent`. `messages` has all messages of a batch; `message` and the properties
    of this class are about the first.
    """

    __slots__ = ("_deadline_ms", "_settle_all", "connection", "group", "messages", "mq")

    def __init__(
        self,
        mq: Any,
        group: str,
        messages: Sequence[AnyMessage],
        settle_all: SettleMessages | None,
        deadline_ms: int | None,
    ) -> None:
        self.mq = mq
        self.group = group
        self.messages = messages
        self.connection: Any = None
        self._settle_all = settle_all
        self._deadline_ms = deadline_ms

    @property
    def message(self) -> AnyMessage:
        """The message: its id, key, tags, sequence, times."""
        return self.messages[0]

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self.message.subject

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.message.attempt

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The message's headers, by name."""
        return self.message.headers

    @property
    def deadline(self) -> datetime | None:
        """When the listener's `timeout` ends this handler; None without a timeout."""
        return None if self._deadline_ms is None else time_of(self._deadline_ms)

    def ack(self) -> None:
        """Acknowledge now; a later exception of the handler is only logged. For a batch: all
        messages without a verdict. Raises InvalidArgument with `idempotent`.
        """
        self._decide(DONE)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: it is handed out again, even if the handler returns. Raises
        InvalidArgument (with `idempotent`), DelayTooLong.
        """
        if delay is not None:
            retry_ms(delay)
        self._decide(HandlerDecision(Act.NACK, delay, error_text(error)))

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: it goes to the dead-letter queue.
        Raises InvalidArgument with `idempotent`.
        """
        self._decide(HandlerDecision(Act.REJECT, None, error_text(error)))

    def _decide(self, decision: HandlerDecision) -> None:
        if self._settle_all is None:
            raise InvalidArgument(VERDICT_OF_TRANSACTION)
        self._settle_all(self.messages, decision)


Factory = Callable[..., Any]


class Providers:
    """A client's providers. The module describes them."""

    def __init__(self) -> None:
        self._factories: dict[Any, tuple[Factory, bool]] = {}

    def add(self, kind: type, factory: Factory) -> None:
        """Register a factory for a type; the last one wins. Raises InvalidArgument."""
        if kind is Context or not isinstance(kind, type) or not callable(factory):
            raise InvalidArgument(
                f"mq.provide takes a class and a function that makes it, not {kind!r} and "
                f"{factory!r}"
            )
        self._factories[kind] = factory, _takes_context(factory)

    def check(self, kinds: Iterable[Any], handler_name: str) -> None:
        """Raises InvalidArgument if a handler depends on a type that is not provided."""
        for kind in kinds:
            if kind not in self._factories:
                raise InvalidArgument(
                    f"{handler_name} takes a {kind.__name__}, which is not provided: call "
                    f"mq.provide({kind.__name__}, factory)"
                )

    async def enter(
        self, kinds: Iterable[Any], context: Context, stack: AsyncExitStack
    ) -> dict[Any, object]:
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
                found[kind] = (
                    stack.enter_context(made) if isinstance(made, AbstractContextManager) else made
                )
        return found

    def enter_sync(
        self, kinds: Iterable[Any], context: Context, stack: ExitStack
    ) -> dict[Any, object]:
        """The dependencies of a handler in a thread. Raises InvalidArgument for one that needs an
        event loop.
        """
        found: dict[Any, object] = {}
        for kind in kinds:
            made = self._make(kind, context)
            if isinstance(made, kind):
                found[kind] = made
            elif inspect.isawaitable(made) or isinstance(made, AbstractAsyncContextManager):
                if inspect.iscoroutine(made):
                    made.close()
                raise InvalidArgument(
                    f"the factory of {kind.__name__} is async: a plain `def` handler cannot "
                    "wait for it, so make the handler an `async def`"
                )
            else:
                found[kind] = (
                    stack.enter_context(made) if isinstance(made, AbstractContextManager) else made
                )
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
    return any(
        each.default is empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters
    )


Handler = Callable[..., Any]

_MESSAGES: Final = frozenset({Message, OrderedMessage, LaneMessage, StoredMessage})
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter after the first: a type to be provided, or None for the Context."""

    name: str
    kind: Any
    is_keyword: bool


@dataclass(frozen=True, slots=True)
class Binding:
    """How a handler is called. `decode` is None if the handler takes the message itself."""

    handler: Handler
    handler_name: str
    is_async: bool
    decode: Decode | None
    arguments: tuple[Argument, ...]

    @property
    def is_bare(self) -> bool:
        """Whether the handler takes only the payload."""
        return not self.arguments

    @property
    def provided(self) -> tuple[Any, ...]:
        """The types that must be provided."""
        return tuple(each.kind for each in self.arguments if each.kind is not None)

    def call(self, payload: object, context: Context, provided: Mapping[Any, object]) -> Any:
        """Call the handler. Returns the coroutine of an async handler."""
        values = [
            (each, context if each.kind is None else provided[each.kind]) for each in self.arguments
        ]
        positional = [value for each, value in values if not each.is_keyword]
        return self.handler(
            payload, *positional, **{each.name: value for each, value in values if each.is_keyword}
        )


def bind(handler: Handler, *, is_batch: bool) -> Binding:
    """Read a handler's signature. Raises InvalidArgument."""
    handler_name = getattr(handler, "__qualname__", None) or repr(handler)
    if not callable(handler):
        raise InvalidArgument(f"a handler is a function or a method, not {handler!r}")
    hints = _hints(handler, handler_name)
    parameters = list(inspect.signature(handler).parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise InvalidArgument(
            f"{handler_name} takes no payload: give it a first parameter, such as `body: bytes`"
        )
    first, *others = parameters
    kind = _payload_kind(
        hints.get(first.name, inspect.Parameter.empty), handler_name, first.name, is_batch=is_batch
    )
    try:
        decode = None if _is_message(kind) else codec_of(kind)
    except InvalidArgument as failure:
        raise InvalidArgument(
            f"{handler_name}: parameter {first.name!r}: {failure.message}"
        ) from failure
    arguments = [_argument(each, hints.get(each.name), handler_name) for each in others]
    return Binding(
        handler,
        handler_name,
        _is_async(handler),
        decode,
        tuple(each for each in arguments if each is not None),
    )


def _hints(handler: Handler, handler_name: str) -> dict[str, Any]:
    found = _function(handler)
    try:
        return get_type_hints(found, include_extras=True)
    except NameError as failure:
        raise InvalidArgument(
            f"{handler_name}: an annotation cannot be resolved, {failure}: define or import it at "
            "the module's level, not only for type checking"
        ) from failure
    except TypeError as failure:
        raise InvalidArgument(f"{handler_name}: {failure}") from failure


def _function(handler: Handler) -> Handler:
    """The function that has the annotations."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_plain = inspect.isroutine(handler)
    return handler if is_plain else type(handler).__call__


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(_function(handler)))


def _payload_kind(kind: Any, handler_name: str, name: str, *, is_batch: bool) -> Any:
    if name == "self":
        raise InvalidArgument(
            f"{handler_name} is a method without an object: register the method of an object, "
            "mq.listen(subject, thing.method, group)"
        )
    if kind is inspect.Parameter.empty:
        raise InvalidArgument(
            f"{handler_name}: annotate {name!r}: `bytes`, `qmq.Message`, or the type to which JSON "
            "is decoded"
        )
    if is_batch and get_origin(kind) is not list:
        raise InvalidArgument(
            f"{handler_name}: with `batch` the first parameter is a list, such as `list[bytes]`, "
            f"not {kind}"
        )
    if kind is Context:
        raise InvalidArgument(
            f"{handler_name}: the first parameter is the payload; the Context comes after it"
        )
    return get_args(kind)[0] if is_batch else kind


def _is_message(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return all(map(_is_message, get_args(kind)))
    return kind in _MESSAGES if isinstance(kind, type) else False


def _argument(parameter: inspect.Parameter, kind: Any, handler_name: str) -> Argument | None:
    """None for a parameter that keeps its default."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_keyword = parameter.kind not in _POSITIONAL
    if kind is Context:
        return Argument(parameter.name, None, is_keyword)
    is_variadic = parameter.kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    if is_variadic or parameter.default is not inspect.Parameter.empty:
        return None
    if not isinstance(kind, type) or kind in (Any, object):
        raise InvalidArgument(
            f"{handler_name}: annotate {parameter.name!r} with qmq.Context, or with a class "
            "registered by mq.provide"
        )
    return Argument(parameter.name, kind, is_keyword)
