"""What happens before a message gets a verdict. While the message's transaction is open, it is refused: a crash between the verdict and the
commit would lose the effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from qmq.client.any_message import AnyMessage
from qmq.client.listening.context import VERDICT_OF_TRANSACTION
from qmq.client.message import Settler, Slice
from qmq.client.ordered.ordered_message import LaneSettler as OrderedSettler
from qmq.client.ordered.ordered_message import OrderedMessage
from qmq.errors import InvalidArgument


@contextmanager
def verdicts_refused(message: AnyMessage) -> Iterator[None]:
    """Inside the block, settling the message raises InvalidArgument, and the message has no verdict.

    Only in the handler's thread: if the handler times out, the event loop settles the message meanwhile.
    """
    before_verdicts(message, _VerdictGuard(message).check)
    try:
        yield
    finally:
        message.settle_through(lambda refusing: refusing.settler)  # type: ignore[attr-defined]  # ours, from above


def before_verdicts(message: AnyMessage, check: Callable[[], object]) -> None:
    """Call `check` before each verdict on a message; if it raises, the verdict is not given."""
    if isinstance(message, OrderedMessage):
        message.settle_through(lambda settler: _GuardedLaneSettler(settler, check))
    else:
        message.settle_through(lambda settler: _GuardedSettler(settler, check))


class _VerdictGuard:
    """Refuses verdicts in the thread that made it."""

    def __init__(self, message: AnyMessage) -> None:
        self._home = threading.get_ident()
        self._message = message

    def check(self) -> None:
        if threading.get_ident() == self._home:
            self._message.is_settled = False  # the caller has set it already
            raise InvalidArgument(VERDICT_OF_TRANSACTION)


class _GuardedSettler:
    def __init__(self, settler: Settler, check: Callable[[], object]) -> None:
        self.settler, self._check = settler, check
        self.subject, self.broker_group = settler.subject, settler.broker_group

    def ack(self, pull: int) -> None:
        self._check()
        self.settler.ack(pull)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._check()
        self.settler.settle(first, last, verdict, delay, error)

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        self._check()
        self.settler.nack(part, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        self._check()
        await self.settler.settle_now(first, last, verdict)


class _GuardedLaneSettler:
    def __init__(self, settler: OrderedSettler, check: Callable[[], object]) -> None:
        self.settler, self._check = settler, check

    def finish(self, message: OrderedMessage) -> None:
        self._check()
        self.settler.finish(message)

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        self._check()
        self.settler.fail(message, pause_ms)

    def reject(self, message: OrderedMessage) -> None:
        self._check()
        self.settler.reject(message)

    def release(self, message: OrderedMessage) -> None:
        self._check()
        self.settler.release(message)
