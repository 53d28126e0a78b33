"""Interceptors: application code that sees every sent and every handled message, for tracing or
auditing. No I/O.

    class Audit(BaseInterceptor):
        # before messages are sent: headers to add to them
        def sending(self, outgoing):
            return {"sent-by": "shop-3"}

        @contextmanager
        # around the handler of a message
        def handling(self, message, group):
            began = time.monotonic()
            try:
                yield
            finally:
                print(message.id, group, time.monotonic() - began)

    mq = qmq.connect("localhost:20880", interceptors=[Audit()])

Rules:
* The first interceptor is the outermost: it is called first on the way in (`sending`, entering
  `handling`) and last on the way out (`sent`, `failed`, leaving `handling`).
* One call of `send` or `send_many` is one `Outgoing`. Each call of `sending` is followed by one
  call of `sent` or `failed`.
* A header that the application set stays: an interceptor's header of the same name is dropped.
  Among interceptors the last one wins.
* If `sending` raises, the call fails and nothing is sent. An exception in `sent`, `failed` or
  `settled` is only logged, since the outcome is already decided.
* `handling` sees the handler's exception and may raise another one, but cannot suppress it: only
  the handler decides whether a message is acknowledged.
* Handling is what a listener does with a message, what an ordered consumer's `run` calls, or one
  turn of an `async for` (until the message has its verdict, its task asks for the next one or ends,
  or the consumer is closed). After a `pull` the application marks the handling itself: `with
  mq.interceptors.handling(message, consumer.group): ...`.
* Consumers send verdicts together. `settled` is called once for each request that took verdicts to
  a broker, when it is answered or has failed. Verdicts that are sent again are another request.
* Messages that QMQ sends again (a retry through a delay group, a replay) keep their headers and are
  not intercepted.

Without interceptors none of this code runs: see `intercepted.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from qmq.client.producing import batch

if TYPE_CHECKING:
    from qmq.client.connection.pool import SettleReport
    from qmq.client.consuming.message import Message
    from qmq.client.consuming.ordered.message import MessageOfLane
    from qmq.client.producing.receipts import Receipt

    AnyMessage: TypeAlias = Message | MessageOfLane

log = logging.getLogger("qmq.client")

Headers = Mapping[str, str | bytes]
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True, eq=False)
class Outgoing:
    """The messages of one call: one, or with `send_many` many (`is_batch`). Each column has one
    item for each message.
    """

    subject: str
    count: int
    keys: Sequence[str | bytes | None]
    tags: Sequence[Iterable[str]]
    headers: list[dict[str, bytes]]
    """The headers so far: the application's, and those of the interceptors before this one."""
    is_batch: bool = False
    is_delayed: bool = False
    kept: dict[Any, Any] = field(default_factory=dict)
    """An interceptor may keep a value here until the outcome is known,
    under a unique key, such as `self`.
    """
    server: str | None = None
    """Once the messages are stored: the address of the master that has them; None if several have
    them, or the master changed.
    """
    bodies: Sequence[bytes] = ()


class Interceptor(Protocol):
    """The interface of an interceptor; `BaseInterceptor` has methods that do nothing."""

    def sending(self, outgoing: Outgoing) -> Headers | Sequence[Headers]:
        """Called before messages are sent. Returns headers to add to all of them, or a list with
        one item for each message.
        """
        ...

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None:
        """Called when the messages are stored; the receipts are in the order of the messages."""
        ...

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """Called when the messages are not stored, or when that is unknown:
        see the error's `outcome`.
        """
        ...

    def handling(self, message: AnyMessage, group: str) -> AbstractContextManager[object]:
        """A context manager around the handling of a message; it sees the handler's exception."""
        ...

    def settled(self, report: SettleReport) -> None:
        """Called when a broker has answered a request with verdicts, or the request has failed."""
        ...


class BaseInterceptor:
    """An interceptor whose methods do nothing: a base class."""

    def sending(self, outgoing: Outgoing) -> Headers | Sequence[Headers]:
        return {}

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None: ...

    def failed(self, outgoing: Outgoing, error: Exception) -> None: ...

    def handling(self, message: AnyMessage, group: str) -> AbstractContextManager[object]:
        return nullcontext()

    def settled(self, report: SettleReport) -> None: ...


class Chain(tuple[Interceptor, ...]):
    """A client's interceptors, outermost first. False if there are none."""

    __slots__ = ()

    def sending(self, outgoing: Outgoing) -> None:
        """Call `sending` of each interceptor and add its headers. Raises what an interceptor
        raises, InvalidArgument, MessageTooLarge.
        """
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
        """Call `sent` of each interceptor, the innermost first."""
        for each in reversed(self):
            try:
                each.sent(outgoing, receipts)
            except Exception:
                log.exception(
                    "interceptor %r failed when messages to %s were stored", each, outgoing.subject
                )

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """Call `failed` of each interceptor, the innermost first."""
        for each in reversed(self):
            try:
                each.failed(outgoing, error)
            except Exception:
                log.exception(
                    "interceptor %r failed when messages to %s had failed", each, outgoing.subject
                )

    def handling(self, message: AnyMessage, group: str = "") -> AbstractContextManager[object]:
        """All interceptors around a handler:
        `with mq.interceptors.handling(message, group): ...`.
        """
        return Handling(self, message, group) if self else nullcontext()

    def settled(self, report: SettleReport) -> None:
        """Call `settled` of each interceptor, the innermost first."""
        for each in reversed(self):
            try:
                each.settled(report)
            except Exception:
                log.exception(
                    "interceptor %r failed when messages of %s were settled", each, report.subject
                )


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = self._leave(error)
        if failure is not None and failure is not error:
            raise failure

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Leave all interceptors. Returns the exception that results."""
        while self._entered:
            context = self._entered.pop()
            try:
                context.__exit__(
                    type(error) if error is not None else None,
                    error,
                    error.__traceback__ if error is not None else None,
                )
            except BaseException as other:
                error = other
        return error


def chosen(
    chain: Chain, plain: Callable[_P, _R], intercepted: Callable[Concatenate[Chain, _P], _R]
) -> Callable[_P, _R]:
    """Make a producer or a consumer: the plain class without interceptors,
    else the intercepted one.
    """
    return partial(intercepted, chain) if chain else plain


def outgoing(
    subject: str,
    keys: Sequence[str | bytes | None],
    tags: Sequence[Iterable[str]],
    headers: Iterator[object] | Sequence[object],
    *,
    bodies: Sequence[bytes],
    is_batch: bool = False,
    is_delayed: bool = False,
) -> Outgoing:
    """The messages of a call as interceptors see them. Raises InvalidArgument, MessageTooLarge for
    headers that cannot be sent.
    """
    told = [batch.header_map(each) for each in headers]
    return Outgoing(subject, len(keys), keys, tags, told, is_batch, is_delayed, bodies=bodies)


def _add(
    outgoing: Outgoing, added: Headers | Sequence[Headers], given: Sequence[frozenset[str]]
) -> None:
    """Add headers to the messages, except those that the application set."""
    if isinstance(added, Mapping):
        if not added:
            return
        same = batch.header_map(added)
        pairs: Iterable[tuple[dict[str, bytes], frozenset[str], dict[str, bytes]]]
        pairs = ((each, own, same) for each, own in zip(outgoing.headers, given, strict=True))
    else:
        batch.check_length("headers of an interceptor", added, outgoing.count)
        pairs = (
            (each, own, batch.header_map(more))
            for each, own, more in zip(outgoing.headers, given, added, strict=True)
        )
    outgoing.headers = [
        each | {name: value for name, value in more.items() if name not in own}
        for each, own, more in pairs
    ]
