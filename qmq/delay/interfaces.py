"""The values that the parts of the delay server exchange.

    Schedule    (schedule.py)       where each message is on disk, and its state: the projection
    Wheel       (wheel.py)          the near messages by due time
    Loader      (loader.py)         advances the horizon
    Engine      (engine.py)         ticks, plans, cancels: the only writer of actions
    Dispatcher  (dispatcher/)       brings due messages to the real-time brokers

Arrays of *places* (due, bucket, ordinal) travel together as `Places`; a message on its way out is a
`DueMessage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

INDEX_ROW: Final = np.dtype(
    [("due", "<i8"), ("position8", "<u4"), ("place", "<u2"), ("flags", "<u2")]
)
"""A line of a bucket's index file, the `ordinal`-th: due time in ms, position of its batch in the
schedule log divided by 8, its place in the batch, and the `BatchFlag`s of the batch."""


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


class BucketInfo(NamedTuple):
    """A bucket, as far as the schedule knows it without reading."""

    bucket: int
    messages: int
    pending: int
    """Messages that are not delivered, cancelled or moved; planned ones count."""
    stored_bytes: int


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
