"""The values and interfaces between the parts of the delay server.

    Schedule    (schedule.py)       where each message is on disk, and its state: the projection
    Wheel       (wheel.py)          the near messages by due time
    Loader      (loader.py)         advances the horizon
    Engine      (engine.py)   ticks, plans, cancels: the only writer of actions
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
    """The place of a delayed message: the `ordinal`-th of bucket number `due_ms // bucket_ms`."""

    bucket: int
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Many messages as three arrays of the same length; their order is up to the caller."""

    due_times_ms: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int32]
    ordinals: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.due_times_ms)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> Places:
        """A selection: by slice, mask, or indexes in any order."""
        return Places(self.due_times_ms[which], self.buckets[which], self.ordinals[which])

    def __iter__(self) -> Iterator[SchedulePlace]:
        return map(SchedulePlace, self.buckets.tolist(), self.ordinals.tolist())

    @classmethod
    def of(cls, places: Sequence[SchedulePlace], due_times_ms: Sequence[int] = ()) -> Places:
        """Make arrays of places; without `due_times_ms` (for reading only) due times are 0."""
        return cls(
            np.array(due_times_ms or [0] * len(places), np.int64),
            np.array([each.bucket for each in places], np.int32),
            np.array([each.ordinal for each in places], np.uint32),
        )


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message from the schedule log. `message_id` is 16 bytes; `flags` are its batch's."""

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
    """When the delay group stored its batch."""


class Draft(NamedTuple):
    """A batch that a dispatcher wants to send."""

    subject: str
    partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    messages: Sequence[DueMessage]


class PlanLog(Protocol):
    """The dispatcher's interface to the log."""

    async def plan(self, draft: Draft) -> PlanAction:
        """Write the plan. Returns when it is committed; only then may the batch be sent. Plans are written in the order of the calls.
        Raises NotMaster: whether it is planned is unknown, and this replica must send nothing more.
        """
        ...

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        """The batch is stored at its destination; the time is by the real-time broker's clock."""
        ...

    def void(self, plan: PlanAction) -> None:
        """The batch is certainly not stored, and will not be sent again under this plan: its messages will be planned again."""
        ...


class BucketInfo(NamedTuple):
    """A bucket, as far as the schedule knows it without reading."""

    bucket: int
    messages: int
    pending: int
    """Messages that are not delivered, cancelled or moved; planned ones count."""
    stored_bytes: int


class DueSource(Protocol):
    """The loader's interface to the schedule."""

    bucket_ms: int

    @property
    def closed_before(self) -> int:
        """The first bucket that may be kept; earlier due times belong to it, too."""
        ...

    def buckets(self) -> list[BucketInfo]:
        """All stored buckets, ascending."""
        ...

    def count(self, bucket: int) -> int:
        """The number of the bucket's messages; 0 if the bucket does not exist."""
        ...

    def reader(self, bucket: int) -> RowReader:
        """The bucket's index at this moment, for reading in a thread."""
        ...

    def rows(self, bucket: int, first: int, end: int) -> npt.NDArray[np.void]:
        """Rows of the bucket's index (INDEX_ROW), including those that are only in memory."""
        ...

    def settled(self, bucket: int) -> npt.NDArray[np.bool_]:
        """For each ordinal whether it is planned, delivered, cancelled or moved. A copy."""
        ...


class RowReader(Protocol):
    """A bucket's index at one moment. Safe in a thread."""

    count: int

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        """The rows of the index. Raises LogDamaged, OSError."""
        ...


class BucketStatus(NamedTuple):
    """The state of delivery, for people. See DelayDescription in delay.proto."""

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
    """(subject, waiting messages, reason)."""
    time_ms: int
    clock_step_ms: int


class DelayAdmin(Protocol):
    """Administration of delayed messages on the master."""

    async def cancel(self, delayed: DelayedId) -> DueMessage:
        """Cancel a message. Returns when that is committed. Raises TooLate, MessageNotFound, NotMaster (outcome unknown)."""
        ...

    async def move(self, delayed: DelayedId, due_ms: int) -> DueMessage:
        """Change its due time. Returns its new id and place. Raises as `cancel`, and DelayTooLong."""
        ...

    async def show(self, delayed: DelayedId) -> tuple[DueMessage, str]:
        """The message and "pending", "planned", "delivered" or "cancelled", as committed. Raises MessageNotFound, NotMaster."""
        ...

    async def listed(
        self, subject: str, from_ms: int, to_ms: int, after: tuple[int, str], most: int, is_half: bool
    ) -> tuple[list[DueMessage], tuple[int, str] | None]:
        """Pending messages of the subject ("": of all) with from <= due < to (0: no limit), after (due, id), in that order. With `is_half`,
        only messages that wait for a decision. Also returns the (due, id) after which the next page begins, or None at the end: a page may
        have fewer messages than asked for although more follow. Raises InvalidArgument.
        """
        ...

    def id_of(self, message: DueMessage) -> DelayedId:
        """The message's public id."""
        ...

    def standing(self) -> BucketStatus:
        """The state of delivery."""
        ...


class ScheduleFiles(Protocol):
    """The files of the newest checkpoint's schedule, for another replica. Any replica serves them. Called in a thread."""

    def describe(self) -> tuple[bytes, int]:
        """The projection's state in the newest checkpoint, as MessagePack, and the checkpoint's index. Raises NotConnected if there is
        none.
        """
        ...

    def read(self, file: str, offset: int, bytes_max: int) -> bytes:
        """Up to `bytes_max` bytes of a file in the folder `schedule`; empty at its end."""
        ...
