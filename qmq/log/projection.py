"""A projection: state of another kind that follows from a store's logs, beside queues and shares. The delay server's schedule is one.

The store gives it every entry of a kind it knows, in the order of the index, once: on a master when it is written, on a slave when it is
committed, at a start when it is replayed. It may keep files, whose lengths are part of its state; a checkpoint holds the state, and
opening cuts the files back to it before it replays. So a projection is a function of the log, the same on every replica.
"""

from __future__ import annotations

from typing import Any, Protocol

from qmq.log.actions import ScheduleAction


class ProjectionPlan(Protocol):
    """A captured state: `run` it in a thread, then give it to `Projection.end_checkpoint`."""

    @property
    def state(self) -> Any:
        """For the checkpoint; MessagePack can encode it."""
        ...

    def run(self) -> None:
        """Write and sync what the state says of files. Raises FlushFailed, DiskFull."""
        ...


class Projection(Protocol):
    """See the module. All methods but `ProjectionPlan.run` are called in the store's thread."""

    def load(self, state: Any | None) -> None:
        """The store is being opened: `state` of the checkpoint that it loads, None if there is none. Cuts files back. Raises LogDamaged."""
        ...

    def take(self, index: int, append_time_ms: int, region: bytes, region_crc: int) -> None:
        """A batch is in the message log at `index`."""
        ...

    def act(self, index: int, append_time_ms: int, action: ScheduleAction) -> None:
        """An action is in the action log at `index`."""
        ...

    def begin_checkpoint(self) -> ProjectionPlan:
        """Capture."""
        ...

    def end_checkpoint(self, plan: ProjectionPlan) -> None:
        """The checkpoint with the plan's state is on disk."""
        ...

    def close(self) -> None:
        """Close files. What is only in memory follows from the log."""
        ...
