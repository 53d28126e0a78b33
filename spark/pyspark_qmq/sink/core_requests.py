"""What a subject's core wants to know before it goes on, and what it is told. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.row_identity import Rows, RowTarget
from pyspark_qmq.source_model import Routes
from qmq.errors import QmqError


@dataclass(frozen=True, slots=True)
class Locate:
    """Where may the subject's rows go, and where may they be? To be told by `located`."""

    subject: str
    is_delayed: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What of this epoch is in the queue already? To be told by `looked`."""

    target: RowTarget
    is_final: bool = False
    """Only an answer of a sealed partition counts: nothing may be added to it behind the answer."""
    from_number: int = 0
    """What has a lower number is known."""


Ask: TypeAlias = Locate | Look


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What a queue has of this writer and epoch."""

    number: int = 0
    """Of partitions: the number that comes next."""
    runs: Mapping[int, int] = field(default_factory=dict)
    """Of all other queues: first row of each batch → how many rows it has."""
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """Of partitions: the rows."""
    ids: frozenset[bytes] = frozenset()
    """The same, where rows bring their ids."""


Where: TypeAlias = Mapping[str, bool] | Routes
"""Of an unordered subject, or of delayed rows: the broker groups that may have rows of it, and whether each takes new ones. Of an ordered
subject its routes."""


class SubjectCore(Protocol):
    """Brings one subject's rows to its queues: `BalancedRows` or `PartitionedRows`. Pure; `now` is in seconds.

    in    put, located, looked, failed, answered, broken
    out   asks (to be done and told), next (what to send), check (raises when it is enough), wake_at
    """

    stored: int
    """Rows that were stored by this attempt, or by another one since it looked."""
    found: int
    """Rows that were there when it looked."""
    batches: int

    def put(self, load: Load) -> None:
        """More rows, behind all others."""
        ...

    def asks(self, now: float) -> list[Ask]:
        """What is to be found out now."""
        ...

    def located(self, where: Where, now: float) -> None:
        """The answer to a `Locate`. Raises OrderMismatch."""
        ...

    def looked(self, target: RowTarget, found: LookedUp, now: float) -> None:
        """The answer to a `Look`. Raises InvalidArgument: the rows are not those that an earlier attempt had."""
        ...

    def failed(self, failure: QmqError, now: float) -> None:
        """Something that was asked for could not be found out now. Raises what must not be tried again."""
        ...

    def next(self, now: float) -> Packet | None:
        """The packet to send now: it counts as sent. Ask until there is none."""
        ...

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        """What became of a try; None: stored. Raises what must not be tried again."""
        ...

    def broken(self, group: str, failure: QmqError, now: float) -> None:
        """The connection to a broker group is lost, or none could be had."""
        ...

    def check(self, now: float) -> None:
        """Raises the trouble that lasts for too long."""
        ...

    def wake_at(self, now: float) -> float:
        """When to ask again, at the latest, if nothing happens before."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether everything that was put is stored."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Of rows that were put and are not stored, about."""
        ...
