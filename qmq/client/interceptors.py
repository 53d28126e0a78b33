"""Interceptors: code of the application's that sees every message come and go, as tracing and auditing need it. No I/O.

    class Audit(BaseInterceptor):
        def sending(self, outgoing):                   # before messages are sent: headers to add to them
            return {"sent-by": "shop-3"}

        @contextmanager
        def handling(self, message, group):            # around the handler of a message
            began = time.monotonic()
            try:
                yield
            finally:
                print(message.id, group, time.monotonic() - began)

    mq = qmq.connect("localhost:20880", interceptors=[Audit()])

Rules:
* The first one is the outermost: it is asked first on the way in (`sending`, entering `handling`) and last on the way out (`sent`,
  `failed`, leaving `handling`), so what one does lies wholly within what those before it do.
* One call of `send` or `send_many` is one `Outgoing`. Whoever was asked `sending` is told `sent` or `failed`, once.
* A header that the application gave itself stays as it is: what interceptors add to it under the same name is left out. Among
  interceptors the last one wins.
* An interceptor that raises in `sending` has the call fail, and nothing is sent. What it raises in `sent` or `failed` is logged: the
  messages are stored, or not, whatever it thinks of that.
* `handling` sees the handler's exception and may raise another one, but not swallow it: whether a message is acknowledged is said by its
  handler alone.
* Handling is: what a listener does with a message; what an ordered consumer's `run` calls; one turn of an `async for` (until the loop
  comes back, or the consumer is closed). After a `pull` nobody knows when a message is handled; the application says it itself:
  `with mq.interceptors.handling(message, consumer.group): ...`.
* Messages that the system sends again itself (a retry by way of a delay group, a replay) keep their headers and are not intercepted.

Without interceptors nothing of this runs: see `intercepted.py` and `handling.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from qmq.client import message_checks

if TYPE_CHECKING:
    from qmq.client.message import Message
    from qmq.client.ordered.ordered_message import LaneMessage
    from qmq.client.receipts import Receipt

    AnyMessage: TypeAlias = Message | LaneMessage

log = logging.getLogger("qmq.client")

Headers = Mapping[str, str | bytes]
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True, eq=False)
class Outgoing:
    """What one call sends: one message, or with `send_many` many (`is_batch`). The columns have one item a message."""

    subject: str
    count: int
    keys: Sequence[str | bytes | None]
    tags: Sequence[Iterable[str]]
    headers: list[dict[str, bytes]]
    """What the messages have so far: of the application's, and of the interceptors before this one."""
    is_batch: bool = False
    is_delayed: bool = False
    kept: dict[Any, Any] = field(default_factory=dict)
    """For an interceptor to keep something until the outcome, under a key of its own, such as itself."""


class Interceptor(Protocol):
    """`BaseInterceptor` does nothing in each of these."""

    def sending(self, outgoing: Outgoing) -> Headers | Sequence[Headers]:
        """Messages are about to be sent. Gives headers to add to all of them, or a list of them with one item a message."""
        ...

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None:
        """They are stored; the receipts are in the messages' order."""
        ...

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """They are not, or not known to be: see the error's `outcome`."""
        ...

    def handling(self, message: AnyMessage, group: str) -> AbstractContextManager[object]:
        """Entered before a message is handled by a consumer of the group, left after; sees the exception."""
        ...


class BaseInterceptor:
    """An interceptor that does nothing: to derive from."""

    def sending(self, outgoing: Outgoing) -> Headers | Sequence[Headers]:
        return {}

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None: ...

    def failed(self, outgoing: Outgoing, error: Exception) -> None: ...

    def handling(self, message: AnyMessage, group: str) -> AbstractContextManager[object]:
        return nullcontext()


class Chain(tuple[Interceptor, ...]):
    """A client's interceptors, outermost first; false if there are none."""

    __slots__ = ()

    def sending(self, outgoing: Outgoing) -> None:
        """Ask each for the headers that it adds. Raises what an interceptor raises, InvalidArgument, MessageTooLarge."""
        given = [frozenset(each) for each in outgoing.headers]
        asked: list[Interceptor] = []
        try:
            for each in self:
                added = each.sending(outgoing)
                asked.append(each)
                _add(outgoing, added, given)
        except Exception as error:
            Chain(asked).failed(outgoing, error)
            raise

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None:
        """Tell each, the innermost first."""
        for each in reversed(self):
            try:
                each.sent(outgoing, receipts)
            except Exception:
                log.exception("interceptor %r, told that messages to %s are stored", each, outgoing.subject)

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """Tell each, the innermost first."""
        for each in reversed(self):
            try:
                each.failed(outgoing, error)
            except Exception:
                log.exception("interceptor %r, told that messages to %s failed", each, outgoing.subject)

    def handling(self, message: AnyMessage, group: str = "") -> AbstractContextManager[object]:
        """To be entered around the handler of a message: `with mq.interceptors.handling(message, group): ...`."""
        return Handling(self, message, group) if self else nullcontext()


class Handling:
    """All interceptors around one handler."""

    __slots__ = ("_chain", "_entered", "_group", "_message")

    def __init__(self, chain: Iterable[Interceptor], message: AnyMessage, group: str) -> None:
        self._chain = chain
        self._message = message
        self._group = group
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        try:
            for each in self._chain:
                context = each.handling(self._message, self._group)
                context.__enter__()
                self._entered.append(context)
        except BaseException as error:
            self._leave(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failure = self._leave(error)
        if failure is not None and failure is not error:
            raise failure

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Leave all; gives the exception that is on its way in the end."""
        while self._entered:
            context = self._entered.pop()
            try:
                context.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error is not None else None)
            except BaseException as other:
                error = other
        return error


def chosen(chain: Chain, plain: Callable[_P, _R], intercepted: Callable[Concatenate[Chain, _P], _R]) -> Callable[_P, _R]:
    """How a client makes a producer or a consumer: the plain one, if nobody wants to be told."""
    return partial(intercepted, chain) if chain else plain


def outgoing(
    subject: str,
    keys: Sequence[str | bytes | None],
    tags: Sequence[Iterable[str]],
    headers: Iterator[object] | Sequence[object],
    *,
    is_batch: bool = False,
    is_delayed: bool = False,
) -> Outgoing:
    """Messages as interceptors see them. Raises InvalidArgument, MessageTooLarge for headers that cannot be sent."""
    return Outgoing(subject, len(keys), keys, tags, [message_checks.header_map(each) for each in headers], is_batch, is_delayed)


def _add(outgoing: Outgoing, added: Headers | Sequence[Headers], given: Sequence[frozenset[str]]) -> None:
    """Add headers to the messages, but none that the application gave."""
    if isinstance(added, Mapping):
        if not added:
            return
        same = message_checks.header_map(added)
        pairs: Iterable[tuple[dict[str, bytes], frozenset[str], dict[str, bytes]]]
        pairs = ((each, own, same) for each, own in zip(outgoing.headers, given, strict=True))
    else:
        message_checks.check_length("headers of an interceptor", added, outgoing.count)
        pairs = ((each, own, message_checks.header_map(more)) for each, own, more in zip(outgoing.headers, given, added, strict=True))
    outgoing.headers = [each | {name: value for name, value in more.items() if name not in own} for each, own, more in pairs]
