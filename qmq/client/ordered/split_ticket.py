"""Follows the messages of one ticket through all the batches that they were cut into. Pure.

The ticket is decided when every piece is decided: with a receipt if all pieces are stored, otherwise with the first failure. The failure's
outcome is about *all* messages: if some are stored and some are not, it is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq.client.receipts import BatchReceipt, CutReceipt, Ticket
from qmq.errors import Outcome, QmqError


class SplitTicket:
    """The outcome of one ticket; `pieces` are the undecided batches."""

    __slots__ = ("_failures", "_stored", "count", "pieces", "size", "ticket")

    def __init__(self, ticket: Ticket, count: int, size: int) -> None:
        self.ticket = ticket
        self.count = count
        self.size = size
        self.pieces = 1
        self._stored: list[tuple[Sequence[int], BatchReceipt]] = []
        self._failures: list[QmqError] = []

    def stored(self, places: Sequence[int], receipt: BatchReceipt) -> None:
        """A piece is stored."""
        self._stored.append((places, receipt))
        self._decided()

    def failed(self, failure: QmqError) -> None:
        self._failures.append(failure)
        self._decided()

    @property
    def failure(self) -> QmqError | None:
        """Why the ticket failed; None if it did not fail, or is not decided."""
        return self._failures[0] if self._failures and not self.pieces else None

    def _decided(self) -> None:
        self.pieces -= 1
        if self.pieces:
            return
        if self._failures:
            self.ticket.fail(self._summed())
        elif len(self._stored) == 1:
            self.ticket.resolve(self._stored[0][1])
        else:
            self.ticket.resolve(CutReceipt.join(self._stored, self.count))

    def _summed(self) -> QmqError:
        first = self._failures[0]
        outcomes = {each.outcome for each in self._failures}
        if not self._stored and len(outcomes) == 1:
            return first
        stored = sum([receipt.count for _, receipt in self._stored])
        text = f"{first.message} (of the {self.count} messages sent together {stored} are stored)"
        summed = type(first)(text, outcome=Outcome.UNKNOWN)
        summed.code, summed.retry_after_ms, summed.__cause__ = first.code, first.retry_after_ms, first
        self._failures[0] = summed
        return summed
