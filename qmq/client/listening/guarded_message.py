"""While a message's transaction is open, nobody gives it a verdict: a crash after it and before the commit would skip its effect."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from qmq.client.listening.context import VERDICT_OF_TRANSACTION, AnyMessage
from qmq.client.message import Settler, Slice
from qmq.client.ordered.ordered_message import LaneSettler as OrderedSettler
from qmq.client.ordered.ordered_message import OrderedMessage
from qmq.errors import InvalidArgument


@contextmanager
def verdicts_refused(message: AnyMessage) -> Iterator[None]:
    """In the block, who says ack, nack or the like of the message itself is told why not, and it has no verdict after it.

    From the handler's thread, that is: where the handler took too long, the loop gives its verdict meanwhile.
    """
    door = _Door(message)
    if isinstance(message, OrderedMessage):
        message.settle_through(lambda settler: _Ordered(settler, door))
    else:
        message.settle_through(lambda settler: _Unordered(settler, door))
    try:
        yield
    finally:
        message.settle_through(lambda refusing: refusing.settler)  # type: ignore[attr-defined]  # ours, from above


class _Door:
    """Closed for the thread that made it."""

    def __init__(self, message: AnyMessage) -> None:
        self._home = threading.get_ident()
        self._message = message

    def check(self) -> None:
        if threading.get_ident() == self._home:
            self._message.is_settled = False  # who asked has set it already
            raise InvalidArgument(VERDICT_OF_TRANSACTION)


class _Unordered:
    def __init__(self, settler: Settler, door: _Door) -> None:
        self.settler, self._door = settler, door
        self.subject, self.broker_group = settler.subject, settler.broker_group

    def ack(self, pull: int) -> None:
        self._door.check()
        self.settler.ack(pull)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._door.check()
        self.settler.settle(first, last, verdict, delay, error)

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        self._door.check()
        self.settler.nack(part, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        self._door.check()
        await self.settler.settle_now(first, last, verdict)


class _Ordered:
    def __init__(self, settler: OrderedSettler, door: _Door) -> None:
        self.settler, self._door = settler, door

    def finish(self, message: OrderedMessage) -> None:
        self._door.check()
        self.settler.finish(message)

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        self._door.check()
        self.settler.fail(message, pause_ms)

    def reject(self, message: OrderedMessage) -> None:
        self._door.check()
        self.settler.reject(message)
