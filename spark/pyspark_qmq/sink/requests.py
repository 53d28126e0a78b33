"""The questions of a subject's core, and their answers. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.row_identity import Rows, RowTarget
from pyspark_qmq.sink.row_prints import Prints, unknown
from qmq.columns.model import Routes
from qmq.errors import QmqError


@dataclass(frozen=True, slots=True)
class Locate:
    """Asks for the queues that may get the subject's rows or may have some. Answered by `located`."""

    subject: str
    is_delayed: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Asks which rows of this epoch are in the queue. Answered by `looked`."""

    target: RowTarget
    is_final: bool = False
    """Whether the partition must be sealed, so that no row can be added after the answer."""
    from_number: int = 0
    """Batches with lower numbers are known."""


Ask: TypeAlias = Locate | Look


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The rows of this writer and epoch in a queue."""

    number: int = 0
    """For partitions: the next number."""
    runs: Mapping[int, Prints] = field(default_factory=dict)
    """For other queues: first row of each batch → the fingerprint of each of its rows."""
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """For partitions: the rows, ascending."""
    prints: Prints = field(default_factory=lambda: unknown(0))
    """For partitions: the fingerprints of `rows`."""
    ids: frozenset[bytes] = frozenset()
    """For rows with their own ids: the ids."""
    has_later: bool = False
    """Whether the queue has rows of later epochs of this writer. For partitions and rows with their own ids it is never known."""


Where: TypeAlias = Mapping[str, bool] | Routes
"""For an unordered subject or delayed rows: the broker groups that may have rows, and whether each accepts new ones. For an ordered
subject: its routes."""


class SubjectCore(Protocol):
    """Sends one subject's rows to its queues; implemented by `BalancedRows` and `PartitionedRows`. Pure; `now` is in seconds.

    in    put, located, looked, failed, answered, broken
    out   asks (requests to carry out and answer), next (batches to send), check (raises when the time is up), wake_at
    """

    stored: int
    """Rows stored since the lookup, by this attempt or another one."""
    found: int
    """Rows that the lookup found."""
    batches: int

    def put(self, load: Load) -> None:
        """Add rows after all others."""
        ...

    def asks(self, now: float) -> list[Ask]:
        """The open questions."""
        ...

    def located(self, where: Where, now: float) -> None:
        """The answer to a `Locate`. Raises OrderMismatch."""
        ...

    def looked(self, target: RowTarget, found: LookedUp, now: float) -> None:
        """The answer to a `Look`. Raises InvalidArgument if the rows differ from those of an earlier attempt."""
        ...

    def failed(self, failure: QmqError, now: float) -> None:
        """A question could not be answered. Raises the failure if a retry cannot help."""
        ...

    def next(self, now: float) -> Packet | None:
        """The next packet to send, which then counts as sent; None if there is none. Raises InvalidArgument if rows differ from those of
        an earlier attempt.
        """
        ...

    def end(self) -> None:
        """There are no more rows, and all are stored. Raises InvalidArgument if an earlier attempt stored rows that did not come."""
        ...

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        """The outcome of a send; None: stored. Raises the failure if a retry cannot help."""
        ...

    def broken(self, group: str, failure: QmqError, now: float) -> None:
        """The connection to a broker group was lost or could not be made."""
        ...

    def check(self, now: float) -> None:
        """Raise a failure that has lasted too long."""
        ...

    def wake_at(self, now: float) -> float:
        """The latest time of the next call if no event occurs before."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether all rows are stored."""
        ...

    @property
    def pending_bytes(self) -> int:
        """The approximate bytes of rows that are not stored."""
        ...
