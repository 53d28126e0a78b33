"""A projection: state that follows from a store's logs, besides queues and shares. An example is the delay server's schedule.

The store passes every entry of the projection's kinds to it once, in the order of the index: on a master when the entry is written, on a
slave when it is committed, at a start when it is replayed. A projection may keep files, whose lengths are part of its state. A checkpoint
holds the state, and opening cuts the files back to these lengths before the replay. So a projection is a function of the log, the same on
every replica.
"""

from __future__ import annotations

from typing import Any, Protocol

from qmq.log.actions import ScheduleAction


class ProjectionPlan(Protocol):
    """A captured state: `run` it in a thread, then give it to `Projection.end_checkpoint`."""

    @property
    def state(self) -> Any:
        """The state for the checkpoint; MessagePack can encode it. None if there is no usable state yet."""
        ...

    def run(self) -> None:
        """Write and sync the files that the state refers to. Raises FlushFailed, DiskFull."""
        ...


class Projection(Protocol):
    """All methods except `ProjectionPlan.run` are called in the store's thread."""

    def load(self, state: Any | None, replayed_from: int) -> None:
        """Load `state` from the checkpoint (None without one) while the store is being opened, and cut the files back.

        Every entry from `replayed_from` on follows, and perhaps some before it. If `replayed_from` is not 1 and there is no state, the
        beginning is missing. Raises LogDamaged.
        """
        ...

    def take(self, index: int, append_time_ms: int, region: bytes, region_crc: int) -> None:
        """Handle a batch in the message log at `index`."""
        ...

    def act(self, index: int, append_time_ms: int, action: ScheduleAction) -> None:
        """Handle an action in the action log at `index`. The actions of one entry come one after another with the same index."""
        ...

    def begin_checkpoint(self, index: int) -> ProjectionPlan:
        """Capture the state. The projection has got every entry up to `index`."""
        ...

    def end_checkpoint(self, plan: Any) -> None:
        """Handle the end of a checkpoint: the state of this plan is on disk."""
        ...

    def close(self) -> None:
        """Close files. State that is only in memory follows from the log."""
        ...
