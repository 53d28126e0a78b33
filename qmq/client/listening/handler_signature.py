"""A handler's signature, read once when it is registered. Pure.

    async def on_order(order: Order, context: qmq.Context, *, session: Session) -> None: ...
                       ─────┬──────  ─────────┬─────────      ────────┬────────
                     first: the payload   by annotation      by annotation: what `mq.provide(Session, ...)` makes

Rules:
* The first parameter is the payload: its annotation says how a body is decoded (`payloads.py`), or, as `qmq.Message`, that nothing is.
* With `batch` it is a list of payloads.
* Every other parameter is a Context or a provided type. A parameter that is neither must have a default, which it keeps.
* A signature that cannot be bound is an error at registration. Whether a type is provided is checked when listening begins
  (`Binding.provided`), because providers may be registered after listeners.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from qmq.client.listening.context import Context
from qmq.client.message import Message, StoredMessage
from qmq.client.ordered.ordered_message import LaneMessage, OrderedMessage
from qmq.client.payloads import Decode, codec_of
from qmq.errors import InvalidArgument

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
    spoken: str
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
        values = [(each, context if each.kind is None else provided[each.kind]) for each in self.arguments]
        positional = [value for each, value in values if not each.is_keyword]
        return self.handler(payload, *positional, **{each.name: value for each, value in values if each.is_keyword})


def bind(handler: Handler, *, is_batch: bool) -> Binding:
    """Read a handler's signature. Raises InvalidArgument."""
    spoken = getattr(handler, "__qualname__", None) or repr(handler)
    if not callable(handler):
        raise InvalidArgument(f"a handler is a function or a method, not {handler!r}")
    hints = _hints(handler, spoken)
    parameters = list(inspect.signature(handler).parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise InvalidArgument(f"{spoken} takes no payload: give it a first parameter, such as `body: bytes`")
    first, *others = parameters
    kind = _payload_kind(hints.get(first.name, inspect.Parameter.empty), spoken, first.name, is_batch=is_batch)
    try:
        decode = None if _is_message(kind) else codec_of(kind)
    except InvalidArgument as failure:
        raise InvalidArgument(f"{spoken}: parameter {first.name!r}: {failure.message}") from failure
    arguments = [_argument(each, hints.get(each.name), spoken) for each in others]
    return Binding(handler, spoken, _is_async(handler), decode, tuple(each for each in arguments if each is not None))


def _hints(handler: Handler, spoken: str) -> dict[str, Any]:
    found = _function(handler)
    try:
        return get_type_hints(found, include_extras=True)
    except NameError as failure:
        raise InvalidArgument(
            f"{spoken}: an annotation cannot be resolved, {failure}: define or import it at the module's level, not only for type checking"
        ) from failure
    except TypeError as failure:
        raise InvalidArgument(f"{spoken}: {failure}") from failure


def _function(handler: Handler) -> Handler:
    """The function that has the annotations."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_plain = inspect.isroutine(handler)
    return handler if is_plain else type(handler).__call__


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(_function(handler)))


def _payload_kind(kind: Any, spoken: str, name: str, *, is_batch: bool) -> Any:
    if name == "self":
        raise InvalidArgument(
            f"{spoken} is a method without an object: register the method of an object, mq.listen(subject, thing.method, group)"
        )
    if kind is inspect.Parameter.empty:
        raise InvalidArgument(f"{spoken}: annotate {name!r}: `bytes`, `qmq.Message`, or the type to which JSON is decoded")
    if is_batch and get_origin(kind) is not list:
        raise InvalidArgument(f"{spoken}: with `batch` the first parameter is a list, such as `list[bytes]`, not {kind}")
    if kind is Context:
        raise InvalidArgument(f"{spoken}: the first parameter is the payload; the Context comes after it")
    return get_args(kind)[0] if is_batch else kind


def _is_message(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return all(map(_is_message, get_args(kind)))
    return kind in _MESSAGES if isinstance(kind, type) else False


def _argument(parameter: inspect.Parameter, kind: Any, spoken: str) -> Argument | None:
    """None for a parameter that keeps its default."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_keyword = parameter.kind not in _POSITIONAL
    if kind is Context:
        return Argument(parameter.name, None, is_keyword)
    is_variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if is_variadic or parameter.default is not inspect.Parameter.empty:
        return None
    if not isinstance(kind, type) or kind in (Any, object):
        raise InvalidArgument(f"{spoken}: annotate {parameter.name!r} with qmq.Context, or with a class registered by mq.provide")
    return Argument(parameter.name, kind, is_keyword)
