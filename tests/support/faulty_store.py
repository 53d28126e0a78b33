"""A coordination store with a faulty connection, and a store that several nodes of a test share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import inf
from typing import Any

from qmq_coordination.coordination_store import Compare, Operation, TxnResult
from qmq_coordination.embedded import EmbeddedStore

from qmq.errors import CoordinationUnavailable, CoordinationUnknown
from qmq.rpc.request_changes import note_change


class Fault(Enum):
    """The outcome of a transaction whose answer is lost."""

    LOST = "lost"
    """The request is lost."""
    UNANSWERED = "unanswered"
    """The transaction is done, and the answer is lost."""
    DELAYED = "delayed"
    """The request arrives when `deliver_delayed` is called."""


@dataclass(slots=True)
class _Cut:
    """Calls that do not reach the store."""

    times: float
    key: str | None
    failure: Exception | None


async def _nothing() -> None: ...


class FaultyStore:
    """A store with faults in front of `inner`. Transactions are counted from 1; `faults` maps a transaction's number to its fault.

    `cut` keeps calls of other kinds away from it too. `before` and `after` are awaited around each transaction.
    """

    def __init__(
        self,
        inner: Any,
        faults: Mapping[int, Fault] | None = None,
        *,
        before: Callable[[], Awaitable[Any]] = _nothing,
        after: Callable[[], Awaitable[Any]] = _nothing,
    ) -> None:
        self.inner = inner
        self.faults = dict(faults or {})
        self.before, self.after = before, after
        self.delayed: list[tuple[Any, ...]] = []
        self.count = 0
        self._cuts: dict[str, _Cut] = {}

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._cuts else getattr(self.inner, name)

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._raise_if_cut(name, *arguments)
        return await getattr(self.inner, name)(*arguments, **named)

    def _raise_if_cut(self, name: str, *arguments: Any) -> None:
        cut = self._cuts.get(name)
        if cut is None or not cut.times or (cut.key is not None and cut.key != arguments[0]):
            return
        cut.times -= 1
        raise cut.failure or CoordinationUnavailable("nobody answers (in this test)")

    def cut(self, *names: str, times: float = inf, key: str | None = None, failure: Exception | None = None) -> None:
        """Make calls of these names fail, a number of times, or only those about a key (or a prefix)."""
        self._cuts.update({name: _Cut(times, key, failure) for name in names})

    def heal(self) -> None:
        """Let all calls reach the store again."""
        self._cuts.clear()

    def fail_next(self, *faults: Fault | None) -> None:
        """The faults of the next transactions; None: done and answered."""
        self.faults.update({self.count + number: fault for number, fault in enumerate(faults, 1) if fault})

    def do_before_next(self, what: Awaitable[Any]) -> None:
        """Let this happen when the next transaction is about to be sent."""

        async def do() -> None:
            self.before = _nothing
            await what

        self.before = do

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        """See CoordinationStore."""
        number = self.count = self.count + 1
        await self.before()
        try:
            self._raise_if_cut("txn")
            return await self._txn(self.faults.pop(number, None), compares, success, failure)
        finally:
            await self.after()

    async def _txn(self, fault: Fault | None, *request: Any) -> TxnResult:
        if fault is Fault.DELAYED:
            self.delayed.append(request)
        if fault in (None, Fault.UNANSWERED):
            done: TxnResult = await self.inner.txn(*request)
        if fault is not None:
            note_change()
            raise CoordinationUnknown("the answer was lost (in this test)")
        return done

    async def deliver_delayed(self) -> list[TxnResult]:
        """Let the transactions arrive that were held up."""
        return [await self.inner.txn(*each) for each in self.delayed]


class SharedStore(EmbeddedStore):
    """One store for several nodes. `close` by a node does nothing; the test closes the store by `end`."""

    async def close(self) -> None:
        """Does nothing: nodes call this; the test calls `end`."""

    async def end(self) -> None:
        """Close it."""
        await super().close()
