"""What an ordered consumer hands out in bulk: consecutive messages of one lane, in its order, with one word for all of them.

A *run* is what came of one batch: its messages, and the cell by which they are settled (`lane_core.py`). `OrderedMessages` holds some runs
of one lane. No object is made for a message, unless the application iterates.
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
        """They were worked on."""
        ...

    def fail_all(self, messages: OrderedMessages, pause_ms: int | None) -> None:
        """They could not be."""
        ...


@dataclass(slots=True, eq=False)
class MessageRun:
    """Messages of one batch: those at `indices`, ascending."""

    lane: LaneSource
    cell: Cell
    batch: Decoded
    indices: Sequence[int]
    attempt: int
    token: int
    version: int

    def split(self, count: int) -> MessageRun:
        """Keep the first `count` messages; the rest."""
        base, head, tail = self.batch.view.base_sequence, self.indices[:count], self.indices[count:]
        rest = self.lane.core.split(self.cell, base + head[-1], base + tail[0], count)
        self.indices = head
        return MessageRun(self.lane, rest, self.batch, tail, self.attempt, self.token, self.version)

    def message(self, place: int) -> LaneMessage:
        index = self.indices[place]
        return LaneMessage(self.lane, self.batch, index, self.batch.bodies[index], self.attempt, self.token, self.version)

    def again(self) -> MessageRun:
        """The same messages for another try."""
        return replace(self, attempt=self.cell.attempt)

    def choose(self, column: list[bytes]) -> list[bytes]:
        """Their items of a column of the batch."""
        indices = self.indices
        if isinstance(indices, range):
            return column if len(indices) == len(column) else column[indices.start : indices.stop]
        return list(itemgetter(*indices)(column)) if len(indices) > 1 else [column[indices[0]]]


class OrderedMessages:
    """A sequence of `LaneMessage`, made when asked for, with bodies and keys as lists beside it. All are of one lane, in its order: work
    through them in order, and each key's messages are worked on in order. Until they are acknowledged, or failed, nothing else of the
    lane's keys is handed out.
    """

    __slots__ = ("_settler", "is_settled", "runs")

    def __init__(self, settler: BulkSettler, runs: list[MessageRun]) -> None:
        self._settler = settler
        self.runs = runs
        self.is_settled = not runs

    @property
    def partition(self) -> int:
        """The physical partition that holds them; 0 if there are none."""
        return self.runs[0].lane.partition if self.runs else 0

    @property
    def broker_group(self) -> str:
        """The broker group that has them; "" if there are none."""
        return self.runs[0].lane.broker_group if self.runs else ""

    @property
    def token(self) -> int:
        """The fencing token of their lane, as in `OrderedMessage`; 0 if there are none."""
        return self.runs[0].token if self.runs else 0

    @property
    def attempt(self) -> int:
        """How often the first of them is tried, this time included; 0 if there are none."""
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
        """All bodies, without making an object of each message: the fast way."""
        if len(self.runs) == 1:
            return self.runs[0].choose(self.runs[0].batch.bodies)
        return [body for each in self.runs for body in each.choose(each.batch.bodies)]

    @property
    def keys(self) -> list[str]:
        """All keys as text. Raises UnicodeDecodeError where one is no UTF-8: see `keys_bytes`."""
        return list(map(bytes.decode, self.keys_bytes))

    @property
    def keys_bytes(self) -> list[bytes]:
        return [key for each in self.runs for key in each.choose(each.batch.column("keys") or [b""] * each.batch.view.count)]

    # --- settling ------------------------------------------------------------------------------------------------------

    async def ack(self) -> None:
        """All were worked on. Does not wait; see `OrderedMessage.ack`."""
        self.ack_later()

    async def ack_sync(self) -> None:
        """The same; returns when it is committed. Raises as `OrderedMessage.ack_sync`."""
        self.ack_later()
        for each in self.runs:
            await each.lane.confirmed(each.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.finish_all(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """They could not be worked on: have all of them tried again after `delay`, by default the consumer's retry delays. Their lane
        waits. `error`, a text or an exception, is logged. Raises InvalidArgument.
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
