"""The result of `send_many` of an ordered producer: receipts in the caller's order, although the messages go to
several partitions. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qmq.client.receipts import BatchReceipt, Receipt, Receipts, Ticket, Tickets


class TicketChunk(NamedTuple):
    """Messages of one call in one batch: the ticket's message `place` is the call's message `indices[0]`, and so on."""

    ticket: Ticket
    place: int
    indices: Sequence[int]


class SpreadTickets(Tickets):
    """`await` it for the receipts in the order of the messages; raises the first failure."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: list[TicketChunk]) -> None:
        super().__init__([chunk.ticket for chunk in chunks])
        self._chunks = chunks

    def collect(self, batches: list[BatchReceipt]) -> Receipts:
        return SpreadReceipts(batches, self._chunks)


class SpreadReceipts(Receipts):
    """Where many messages are stored. `batches` may hold other messages, too."""

    __slots__ = ("_chunks", "_where")

    def __init__(self, batches: list[BatchReceipt], chunks: list[TicketChunk]) -> None:
        super().__init__(batches)
        self._chunks = chunks
        self._where: list[tuple[BatchReceipt, int]] | None = None

    def _find(self) -> list[tuple[BatchReceipt, int]]:
        if self._where is None:
            found = {
                index: (batch, chunk.place + step)
                for batch, chunk in zip(self.batches, self._chunks, strict=True)
                for step, index in enumerate(chunk.indices)
            }
            self._where = [found[index] for index in range(len(found))]
        return self._where

    def __len__(self) -> int:
        return sum([len(chunk.indices) for chunk in self._chunks])

    def __iter__(self) -> Iterator[Receipt]:
        return (batch.receipt(place) for batch, place in self._find())

    def __getitem__(self, index: int) -> Receipt:
        batch, place = self._find()[index]
        return batch.receipt(place)
