"""The configuration of storage, with defaults and reasons."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Final

from qmq.errors import InvalidArgument
from qmq.limits import BATCH_BYTES_MAX, FLUSH_INTERVAL_MS, KIB, MIB

CACHE_BYTES_MIN: Final = 128 * MIB
"""The smallest cache: the chunks of a large pull, and those of a few other readers."""


class Flush(Enum):
    """When written entries are flushed to disk."""

    ASYNC = "async"
    """Flush continuously: the next flush begins when the previous one has ended and there are new
    entries. Entries survive a killed process. A power cut loses at most the entries of about two
    flushes, unless the producer waited for the flush (`acks="flushed"`).
    """
    SYNC = "sync"
    """Flush entries before they are acknowledged or visible.
    One fdatasync covers all waiting entries.
    """


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The storage of one broker. Sizes are bytes, times milliseconds."""

    segment_bytes: int = 1024 * MIB
    flush: Flush = Flush.ASYNC
    flush_interval_ms: int = FLUSH_INTERVAL_MS
    """With `async`: least time from the beginning of one flush to the next, which is also what a
    power cut can take in addition. A flush that a request waits for is not delayed.
    """
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int | None = None
    """The size limit of the whole message log; older segments are deleted."""
    disk_free_bytes_min: int = 64 * MIB
    """Messages are refused when less space is free,
    so that acknowledgements and checkpoints still fit.
    """
    object_store_url: str = ""
    """Where a replica copies sealed segments of the message log
    (docs/TIERING.md); empty: nowhere.
    """
    local_retention_ms: int | None = None
    """How long a sealed segment stays on the disk after the store has it; None: as long as its
    messages are kept.
    """
    local_retention_bytes: int | None = None
    """The size of the message log on the disk from which on the oldest segments are kept in the
    store only.
    """
    object_store_cache_bytes: int = 1024 * MIB
    """Disk space for what consumers read from the store."""
    _: KW_ONLY  # what follows is no option: only tests set it
    action_segment_bytes: int = 64 * MIB
    checkpoint_bytes: int = 256 * MIB
    """Bytes of log after which a checkpoint is taken:
    the most that a restart replays (about half a second).
    """
    checkpoint_interval_ms: int = 60_000
    cache_bytes: int = 32 * MIB
    """Newest batches in memory, so that consumers that keep up cause no reads."""
    tail_bytes: int = 64 * MIB
    """Newest writes in memory, for slaves."""
    producer_expiry_ms: int = 3600 * 1000
    """A producer that was silent on a queue for so long is forgotten; an older retry could be
    stored twice.
    """

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "action_segment_bytes", "checkpoint_bytes"):
            if getattr(self, name) < 64 * KIB:
                raise InvalidArgument(f"{name} must be at least 64 KiB, not {getattr(self, name)}")
        for name in ("retention_ms", "checkpoint_interval_ms"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be positive, not {getattr(self, name)}")
        if self.flush_interval_ms < 0:
            raise InvalidArgument(
                f"flush_interval_ms must be 0 or more, not {self.flush_interval_ms}"
            )
        if self.retention_bytes is not None and self.retention_bytes < BATCH_BYTES_MAX:
            raise InvalidArgument(f"retention_bytes must be at least {BATCH_BYTES_MAX}")
        if self.is_local_retention_set and not self.object_store_url:
            raise InvalidArgument(
                "local retention needs an object store, which keeps what the disk does not: "
                "set --object-store"
            )
        if self.local_retention_ms is not None and self.local_retention_ms <= 0:
            raise InvalidArgument(
                f"local_retention_ms must be positive, not {self.local_retention_ms}"
            )
        if self.local_retention_bytes is not None and self.local_retention_bytes < 0:
            raise InvalidArgument(
                f"local_retention_bytes must be 0 or more, not {self.local_retention_bytes}"
            )
        if self.object_store_cache_bytes < CACHE_BYTES_MIN:
            raise InvalidArgument(
                f"the object store's cache has at least {CACHE_BYTES_MIN >> 20} MiB, not "
                f"{self.object_store_cache_bytes} bytes"
            )

    @property
    def is_local_retention_set(self) -> bool:
        """Whether segments may be in the object store only."""
        return self.local_retention_ms is not None or self.local_retention_bytes is not None
