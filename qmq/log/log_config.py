"""What an operator may choose about storage, with defaults and reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qmq.errors import InvalidArgument
from qmq.limits import BATCH_BYTES_MAX, FLUSH_INTERVAL_MS, KIB, MIB


class Flush(Enum):
    """When the disk is made to keep what was written."""

    ASYNC = "async"
    """All the time: the next flush begins when the last one has ended and something came meanwhile. Survives a killed process; a power cut
    takes at most what came in about two flushes, unless its producer waited for the flush (`acks="flushed"`)."""
    SYNC = "sync"
    """Before it is acknowledged or seen; one fdatasync covers all that is waiting."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Storage of one broker. All sizes in bytes, all times in milliseconds."""

    segment_bytes: int = 1024 * MIB
    action_segment_bytes: int = 64 * MIB
    flush: Flush = Flush.ASYNC
    flush_interval_ms: int = FLUSH_INTERVAL_MS
    """With `async`: from the beginning of a flush to that of the next, at least; what a power cut can take grows by so much. Who waits for
    a flush does not wait for that."""
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int | None = None
    """Of the whole message log; the oldest segments beyond it go."""
    checkpoint_bytes: int = 256 * MIB
    """A checkpoint after so many bytes of log: what a restart replays at most (about half a second)."""
    checkpoint_interval_ms: int = 60_000
    disk_free_bytes_min: int = 64 * MIB
    """Messages are refused below this much free space, so that acknowledgements and checkpoints still fit."""
    cache_bytes: int = 32 * MIB
    """Newest batches kept in memory, so that consumers who keep up cost no read."""
    tail_bytes: int = 64 * MIB
    """Newest writes kept in memory for slaves."""
    producer_expiry_ms: int = 3600 * 1000
    """A producer silent for so long on a queue is forgotten; a retry older than that could be stored twice."""

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "action_segment_bytes", "checkpoint_bytes"):
            if getattr(self, name) < 64 * KIB:
                raise InvalidArgument(f"{name} must be at least 64 KiB, not {getattr(self, name)}")
        for name in ("retention_ms", "checkpoint_interval_ms"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be positive, not {getattr(self, name)}")
        if self.flush_interval_ms < 0:
            raise InvalidArgument(f"flush_interval_ms must be 0 or more, not {self.flush_interval_ms}")
        if self.retention_bytes is not None and self.retention_bytes < BATCH_BYTES_MAX:
            raise InvalidArgument(f"retention_bytes must be at least {BATCH_BYTES_MAX}")
