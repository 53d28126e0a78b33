"""What of one queue's verdicts is in the client's store (`verdict_store.py`), and when: from a verdict that no broker can be told to its
answer.

    session ends      everything that is not answered is written
    no session        what is said is written behind it, with what else is said in this round of the event loop
    part is void      what is left is written anew, before anything else is pulled
    session begins    nothing is written any more; when all that was unanswered then is answered, the file goes
    closing           the file goes if the broker heard everything, and else is left to the next process
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from qmq.client.settlements import Settlements, SettleRequest
from qmq.wire.settle_payloads import Settlement


class File(Protocol):
    """The store's file of this queue. Raises nothing."""

    @property
    def exists(self) -> bool:
        """Whether something is written."""
        ...

    def rewrite(self, settlements: Sequence[Settlement]) -> None:
        """These, and nothing else, are not answered."""
        ...

    def append(self, settlements: Sequence[Settlement]) -> None:
        """These are not answered either."""
        ...

    def clear(self) -> None: ...

    def leave(self) -> None:
        """What is written is for another process."""
        ...


class Keeping:
    """`unanswered` gives everything that no broker has answered, in the order in which it was said."""

    def __init__(self, file: File | None, unanswered: Callable[[], Sequence[Settlement]]) -> None:
        self._file = file
        self._unanswered = unanswered
        self._loop = asyncio.get_running_loop()
        self._is_attached = True
        self._given = Settlements()
        """Not written yet."""
        self._waited_for: set[SettleRequest] = set()
        """What was not answered when the session began, and is not yet."""

    def given(self, settlement: Settlement) -> None:
        """A verdict, while there is no session."""
        if self._file is not None and not self._is_attached:
            if not self._given.messages:
                self._loop.call_soon(self._write)
            self._given.add(*settlement)

    def _write(self) -> None:
        settlements = self._given.take()
        if self._file is None or not settlements:
            return
        if self._file.exists:
            self._file.append(settlements)
        else:
            self._write_all()

    def _write_all(self) -> None:
        self._given.take()
        if self._file is not None:
            settlements = self._unanswered()
            if settlements:
                self._file.rewrite(settlements)
            else:
                self._file.clear()

    def detached(self) -> None:
        """The session has ended. Harmless to repeat."""
        if self._is_attached:
            self._is_attached = False
            self._write_all()

    def voided(self) -> None:
        """A part of what was said is not ours any more."""
        if self._file is not None and self._file.exists:
            self._write_all()

    def attached(self, requests: Iterable[SettleRequest]) -> None:
        """A session has begun, and these are on their way: everything there is."""
        self._is_attached = True
        self._given.take()
        self._waited_for = set(requests)
        self._clear_if_answered()

    def over(self, request: SettleRequest) -> None:
        """It was answered, or came too late."""
        if request in self._waited_for:
            self._waited_for.remove(request)
            self._clear_if_answered()

    def _clear_if_answered(self) -> None:
        if self._file is not None and self._is_attached and not self._waited_for:
            self._file.clear()

    def close(self, *, is_told: bool) -> None:
        """Nothing is said any more. `is_told`: the master heard everything."""
        if self._file is None:
            return
        if is_told:
            self._file.clear()
        elif self._is_attached:
            self.detached()
        else:
            self._write()
        self._file.leave()
        self._file = None
