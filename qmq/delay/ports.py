"""What the parts of the delay server know of each other: values and protocols, no code of any part.

    Schedule   (schedule.py)    what is where on disk, and what became of it: the projection
    Wheel      (wheel.py)       what is due when, of what is near
    Loader     (loader.py)      moves the horizon on
    Engine     (engine.py)      ticks, plans, cancels: the only one that writes actions
    Outlets    (outlets/)       bring due messages to the real-time brokers

Arrays of *places* (due, bucket, ordinal) travel together as `Places`; a message on its way out is a `DueMessage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.log.actions import PlanAction

INDEX_ROW: Final = np.dtype([("due", "<i8"), ("position8", "<u4"), ("place", "<u2"), ("flags", "<u2")])
"""A line of a bucket's index file, the `ordinal`-th: due time in ms, position of its batch in the schedule log divided by 8, its place in
the batch, and the `BatchFlag`s of the batch."""


class Place(NamedTuple):
    """Where one delayed message is: the `ordinal`-th of the bucket number `due_ms // bucket_ms`."""

    bucket: int
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Many messages: three arrays of one length, in an order that means something to who gives them."""

    dues: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int32]
    ordinals: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.dues)


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message as the schedule log has it. `message_id` is 16 bytes; `flags` are its batch's."""

    place: Place
    due_ms: int
    subject: str
    body: bytes
    key: bytes
    tags: tuple[str, ...]
    headers: dict[str, bytes]
    create_time_ms: int
    message_id: bytes
    flags: int


class Draft(NamedTuple):
    """A batch that an outlet wants to send."""

    subject: str
    partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    messages: Sequence[DueMessage]


class Ledger(Protocol):
    """The outlets' way to the log: the engine."""

    async def plan(self, draft: Draft) -> PlanAction:
        """Write the plan; returns when it is committed, and only then may the batch be sent. Calls are written in the order in which they
        are made. Raises NotMaster: it is unknown whether it is planned; send nothing more, this master is one no longer.
        """
        ...

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        """The batch is stored where it was to go; when, by the real-time broker's clock."""
        ...

    def void(self, plan: PlanAction) -> None:
        """It is certainly not stored, and will not be sent again under this plan: the outlet drafts its messages anew."""
        ...
