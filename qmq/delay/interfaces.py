"""What the parts of the delay server know of each other: values and protocols, no code of any part.

    Schedule    (schedule.py)       what is where on disk, and what became of it: the projection
    Wheel       (wheel.py)          what is due when, of what is near
    Loader      (loader.py)         moves the horizon on
    Engine      (delay_engine.py)   ticks, plans, cancels: the only one that writes actions
    Dispatcher  (dispatcher/)       brings due messages to the real-time brokers

Arrays of *places* (due, bucket, ordinal) travel together as `Places`; a message on its way out is a `DueMessage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.log.actions import PlanAction
from qmq.model import DelayedId

INDEX_ROW: Final = np.dtype([("due", "<i8"), ("position8", "<u4"), ("place", "<u2"), ("flags", "<u2")])
"""A line of a bucket's index file, the `ordinal`-th: due time in ms, position of its batch in the schedule log divided by 8, its place in
the batch, and the `BatchFlag`s of the batch."""


class SchedulePlace(NamedTuple):
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

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> Places:
        """Some of them: a slice, a mask, or numbers in any order."""
        return Places(self.dues[which], self.buckets[which], self.ordinals[which])

    def __iter__(self) -> Iterator[SchedulePlace]:
        return map(SchedulePlace, self.buckets.tolist(), self.ordinals.tolist())

    @classmethod
    def of(cls, places: Sequence[SchedulePlace], dues: Sequence[int] = ()) -> Places:
        """The same as arrays; without `dues`, for reading only, they count as 0."""
        return cls(
            np.array(dues or [0] * len(places), np.int64),
            np.array([each.bucket for each in places], np.int32),
            np.array([each.ordinal for each in places], np.uint32),
        )


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message as the schedule log has it. `message_id` is 16 bytes; `flags` are its batch's."""

    place: SchedulePlace
    due_ms: int
    subject: str
    body: bytes
    key: bytes
    tags: tuple[str, ...]
    headers: dict[str, bytes]
    create_time_ms: int
    message_id: bytes
    flags: int
    append_ms: int = 0
    """When its batch was stored by the delay group."""


class Draft(NamedTuple):
    """A batch that a dispatcher wants to send."""

    subject: str
    partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    messages: Sequence[DueMessage]


class PlanLog(Protocol):
    """The dispatcher's way to the log: the engine."""

    async def plan(self, draft: Draft) -> PlanAction:
        """Write the plan; returns when it is committed, and only then may the batch be sent. Calls are written in the order in which they
        are made. Raises NotMaster: it is unknown whether it is planned; send nothing more, this master is one no longer.
        """
        ...

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        """The batch is stored where it was to go; when, by the real-time broker's clock."""
        ...

    def void(self, plan: PlanAction) -> None:
        """It is certainly not stored, and will not be sent again under this plan: the dispatcher drafts its messages anew."""
        ...


class BucketInfo(NamedTuple):
    """One bucket, as the schedule knows it without reading anything."""

    bucket: int
    messages: int
    pending: int
    """Neither delivered, cancelled nor moved; planned ones count."""
    stored_bytes: int


class DueSource(Protocol):
    """The schedule, as the loader reads it."""

    bucket_ms: int

    def buckets(self) -> list[BucketInfo]:
        """All that are kept, ascending."""
        ...

    def count(self, bucket: int) -> int:
        """How many messages it has, 0 if there is no such bucket."""
        ...

    def reader(self, bucket: int) -> RowReader:
        """Its index up to now, for reading in a thread, whatever is stored meanwhile."""
        ...

    def rows(self, bucket: int, first: int, end: int) -> npt.NDArray[np.void]:
        """Lines of its index (INDEX_ROW), those not written yet too."""
        ...

    def settled(self, bucket: int) -> npt.NDArray[np.bool_]:
        """By ordinal: planned, delivered, cancelled or moved. A copy, as of now."""
        ...


class RowReader(Protocol):
    """A bucket's index as it was when this was made. Safe in a thread."""

    count: int

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        """Its lines. Raises LogDamaged, OSError."""
        ...


class BucketStatus(NamedTuple):
    """How the delivery stands, for people. See DelayDescription in delay.proto."""

    buckets: list[BucketInfo]
    wheel_messages: int
    wheel_bytes: int
    horizon_ms: int
    waiting: int
    planned: int
    lateness_p50_ms: int
    lateness_p99_ms: int
    delivered: int
    troubles: list[tuple[str, int, str]]
    """(subject, messages that wait, why)."""
    time_ms: int
    clock_step_ms: int


class DelayAdmin(Protocol):
    """What administration asks of the master: the engine."""

    async def cancel(self, delayed: DelayedId) -> DueMessage:
        """It will not be delivered; returns when that is committed. Raises TooLate, MessageNotFound, NotMaster (outcome unknown)."""
        ...

    async def move(self, delayed: DelayedId, due_ms: int) -> DueMessage:
        """It will be delivered then; what it is from now on. Raises as `cancel`, and DelayTooLong."""
        ...

    def show(self, delayed: DelayedId) -> tuple[DueMessage, str]:
        """The message and "pending", "planned", "delivered" or "cancelled". Raises MessageNotFound, NotMaster."""
        ...

    def listed(
        self, subject: str, from_ms: int, to_ms: int, after: tuple[int, str], most: int
    ) -> tuple[list[DueMessage], tuple[int, str] | None]:
        """Pending messages of the subject ("": of all) with from <= due < to (0: no limit), behind (due, id), in that order.

        And behind which (due, id) to go on, None if that was all: there may be fewer than asked for, and more to come. Raises
        InvalidArgument.
        """
        ...

    def id_of(self, message: DueMessage) -> DelayedId:
        """The id by which it is known."""
        ...

    def standing(self) -> BucketStatus:
        """How the delivery stands."""
        ...


class ScheduleFiles(Protocol):
    """The schedule as another replica copies it: files as the newest checkpoint says they are. Of any replica, serving or not. Called in a
    thread.
    """

    def describe(self) -> tuple[bytes, int]:
        """The projection's state in the newest checkpoint, as MessagePack, and the checkpoint's index. NotConnected: there is none."""
        ...

    def read(self, file: str, offset: int, bytes_max: int) -> bytes:
        """Up to so many bytes of a file in the folder `schedule`; empty at its end.

        Raises FileNotFoundError (its bucket was deleted since: begin again with `describe`), OSError.
        """
        ...
