"""The messages that an ordered consumer hands out in bulk: consecutive messages of one lane, in its order, with one verdict.

A *run* has the delivered messages of one batch, and the cell by which they are settled (`lane_core.py`). `OrderedMessages` holds runs of
one lane. Message objects are made only if the application iterates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Protocol

from qmq.client.message import Decoded, delay_ms, error_text
from qmq.client.ordered.lane_core import Cell
from qmq.client.ordered.ordered_message import LaneMessage, LaneSource

log = logging.getLogger("qmq.client")


class BulkSettler(Protocol):
    """Takes verdicts: the consumer."""

    def finish_all(self, messages: OrderedMessages) -> None:
        """The messages were handled."""
        ...

    def fail_all(self, messages: OrderedMessages, pause_ms: int | None) -> None:
        """The messages failed."""
        ...


@dataclass(slots=True, eq=False)
class MessageRun:
    """The messages at `indices` (ascending) of one batch."""

    lane: LaneSource
    cell: Cell
    batch: Decoded
    indices: Sequence[int]
    attempt: int
    token: int
    version: int

    def split(self, count: int) -> MessageRun:
        """Keep the first `count` messages; returns the rest."""
        base, head, tail = self.batch.view.base_sequence, self.indices[:count], self.indices[count:]
        rest = self.lane.core.split(self.cell, base + head[-1], base + tail[0], count)
        self.indices = head
        return MessageRun(self.lane, rest, self.batch, tail, self.attempt, self.token, self.version)

    def message(self, place: int) -> LaneMessage:
        index = self.indices[place]
        return LaneMessage(self.lane, self.batch, index, self.batch.bodies[index], self.attempt, self.token, self.version)

    def again(self) -> MessageRun:
        """The same messages for another attempt."""
        return replace(self, attempt=self.cell.attempt)

    def choose(self, column: list[bytes]) -> list[bytes]:
        """The values of these messages in a column of the batch."""
        indices = self.indices
        if isinstance(indices, range):
            return column if len(indices) == len(column) else column[indices.start : indices.stop]
        return list(itemgetter(*indices)(column)) if len(indices) > 1 else [column[indices[0]]]


class OrderedMessages:
    """A sequence of `LaneMessage`, made on access, with bodies and keys as lists. All are of one lane, in its order: working through them
    in order keeps the order of each key. Until they are settled, the lane hands out nothing else.
    """

    __slots__ = ("_settler", "is_settled", "runs")

    def __init__(self, settler: BulkSettler, runs: list[MessageRun]) -> None:
        self._settler = settler
        self.runs = runs
        self.is_settled = not runs

    @property
    def partition(self) -> int:
        """The physical partition; 0 if there are no messages."""
        return self.runs[0].lane.partition if self.runs else 0

    @property
    def broker_group(self) -> str:
        """The broker group that stores them; "" if there are no messages."""
        return self.runs[0].lane.broker_group if self.runs else ""

    @property
    def token(self) -> int:
        """The fencing token of their lane, as in `OrderedMessage`; 0 if there are no messages."""
        return self.runs[0].token if self.runs else 0

    @property
    def attempt(self) -> int:
        """The number of the first message's attempt, from 1; 0 if there are no messages."""
        return self.runs[0].attempt if self.runs else 0

    def __len__(self) -> int:
        return sum([len(each.indices) for each in self.runs])

    def __iter__(self) -> Iterator[LaneMessage]:
        for each in self.runs:
            yield from map(each.message, range(len(each.indices)))

    def __getitem__(self, index: int) -> LaneMessage:
        place = index + len(self) if index < 0 else index
        for each in self.runs:
            if 0 <= place < len(each.indices):
                return each.message(place)
            place -= len(each.indices)
        raise IndexError(f"{index} of {len(self)} messages")

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, without making an object for each message: the fast way."""
        if len(self.runs) == 1:
            return self.runs[0].choose(self.runs[0].batch.bodies)
        return [body for each in self.runs for body in each.choose(each.batch.bodies)]

    @property
    def keys(self) -> list[str]:
        """All keys as text. Raises UnicodeDecodeError for a key that is not UTF-8: see `keys_bytes`."""
        return list(map(bytes.decode, self.keys_bytes))

    @property
    def keys_bytes(self) -> list[bytes]:
        return [key for each in self.runs for key in each.choose(each.batch.column("keys") or [b""] * each.batch.view.count)]

    # --- settling ------------------------------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge all. Does not wait; see `OrderedMessage.ack`."""
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge all, and return when the acknowledgement is committed. Raises as `OrderedMessage.ack_sync`."""
        self.ack_later()
        for each in self.runs:
            await each.lane.confirmed(each.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.finish_all(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """All failed: retry them after `delay` (default: the consumer's retry delays). Their lane waits. `error`, a text or an exception,
        is logged. Raises InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._settler.fail_all(self, pause_ms)

    def __repr__(self) -> str:
        return f"<OrderedMessages: {len(self)} of partition {self.partition}>"
