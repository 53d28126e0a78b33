"""A closed batch of an ordered producer, and how it is cut when the route changes. Pure.

    claim (what one ticket stands for)  1 ── n  batch  n ── 1  stream (one partition)

Worked example: 1,000 messages left together for partition 2, which is split into 3 and 4 before it took them. The batch is cut by the
logical partitions of its messages, in two of, say, 480 and 520; both belong to the claim of the first, and `places` says which of the
claim's messages they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from qmq.client.producing.receipts import SplitTicket
from qmq.delivery.in_flight_batch import InFlightBatch
from qmq.wire.batch_columns import Columns

_T = TypeVar("_T")
_O = TypeVar("_O")


@dataclass(slots=True, eq=False)
class OrderedBatch(InFlightBatch):
    """A batch for one partition. Its columns have keys and logical partitions, and ids if copies of its messages may
    be stored elsewhere.
    """

    columns: Columns
    create_time_ms: int
    claim: SplitTicket
    places: Sequence[int]
    """The places of these messages among the claim's."""
    is_bent: bool = False
    """Best-effort order: the batch goes to a partition that is not the one of its keys."""

    producer_id: int = 0
    number: int = -1
    """Its number in its stream; -1 if it was never sent."""

    @property
    def count(self) -> int:
        return len(self.columns.bodies)

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether a copy may be stored in a partition that was fenced: then the outcome of its messages is never "not stored"."""
        return self.columns.message_ids is not None

    def unsent_copy(self, *, keep_ids: bool = False) -> OrderedBatch:
        """The same messages as an unsent batch. With `keep_ids` they keep their ids, because they may be stored already."""
        self.is_gone = True
        columns = self.columns
        if keep_ids and columns.message_ids is None:
            columns.message_ids = message_ids(self.producer_id, self.number, self.count)
        return OrderedBatch(
            columns,
            self.create_time_ms,
            self.claim,
            self.places,
            self.is_bent,
            size=self.size,
            until=self.until,
            failure=self.failure,
        )


def message_ids(producer_id: int, number: int, count: int) -> list[bytes]:
    """The ids of a batch's messages for the message-id column (`MessageId.to_bytes`)."""
    head = producer_id.to_bytes(8, "big") + number.to_bytes(6, "big")
    return [head + index.to_bytes(2, "big") for index in range(count)]


def cut(batch: OrderedBatch, owner_of: Callable[[int], _O]) -> list[tuple[_O, OrderedBatch]]:
    """Cut the batch by the owners of its logical partitions; each piece keeps the order of its messages."""
    lps = batch.columns.logical_partitions
    assert lps is not None
    indices: dict[_O, list[int]] = {}
    for index, lp in enumerate(lps):
        indices.setdefault(owner_of(lp), []).append(index)
    if len(indices) == 1:
        return [(next(iter(indices)), batch)]
    batch.claim.pieces += len(indices) - 1
    batch.is_gone = True
    return [(owner, _piece(batch, chosen)) for owner, chosen in indices.items()]


def _piece(batch: OrderedBatch, chosen: list[int]) -> OrderedBatch:
    size = max(batch.size * len(chosen) // batch.count, 1)
    return OrderedBatch(
        pick(batch.columns, chosen),
        batch.create_time_ms,
        batch.claim,
        choose(batch.places, chosen),
        size=size,
        until=batch.until,
        failure=batch.failure,
    )


def pick(columns: Columns, chosen: list[int]) -> Columns:
    """The columns of some of the messages."""
    return Columns(
        choose(columns.bodies, chosen),
        columns.keys and choose(columns.keys, chosen),
        columns.tags and choose(columns.tags, chosen),
        columns.headers and choose(columns.headers, chosen),
        columns.create_deltas and choose(columns.create_deltas, chosen),
        columns.message_ids and choose(columns.message_ids, chosen),
        columns.logical_partitions and choose(columns.logical_partitions, chosen),
    )


def choose(items: Sequence[_T], chosen: Sequence[int]) -> list[_T]:
    return list(itemgetter(*chosen)(items)) if len(chosen) > 1 else [items[index] for index in chosen]
