"""What an operator may choose about a delay server, with defaults and reasons. What all replicas must agree on is `DelaySettings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq.errors import InvalidArgument

BUCKET_MS: Final = 3_600_000
"""Default of a bucket's length: an hour."""


@dataclass(frozen=True, slots=True)
class DelayConfig:
    """One replica's choices; they may differ between replicas. Times in milliseconds."""

    tick_ms: int = 500
    """Due messages leave at multiples of it (the Java original's tick)."""
    pause_ms: int = 0
    """At least so long between two looks at the clock: for one that may stand just before a tick (qmq/testing)."""
    load_ahead_ms: int = 600_000
    """The wheel holds what is due within this time, if there is room."""
    wheel_messages_max: int = 16_000_000
    """8 bytes each: 128 MB."""
    slice_messages_max: int = 2_000_000
    """Loaded at once."""
    waiting_messages_max: int = 20_000
    """Read and not planned yet; what is due beyond that stays in the wheel, 8 bytes a message."""
    stuck_messages_max: int = 2_000
    """Of a subject that cannot be delivered: what more of it is due goes back to being 16 bytes a message, and holds up no other."""
    read_messages: int = 250
    """Read from the schedule log in one go: what the event loop waits for."""
    keep_ms: int = 24 * 3_600_000
    """A bucket that is over and has nothing left is kept for so long, so that it can be said what became of its messages."""

    def __post_init__(self) -> None:
        limits = ("wheel_messages_max", "slice_messages_max", "waiting_messages_max", "stuck_messages_max", "read_messages")
        for name in ("tick_ms", "load_ahead_ms", *limits):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("keep_ms", "pause_ms"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must not be negative, and is {getattr(self, name)}")
