"""The configuration of a delay server, with defaults and reasons. `DelaySettings` has what all
replicas must agree on.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from qmq.errors import InvalidArgument

BUCKET_MS: Final = 3_600_000
"""Default of a bucket's length: an hour."""


@dataclass(frozen=True, slots=True)
class DelayConfig:
    """The configuration of one replica; replicas may differ. Times are milliseconds."""

    tick_ms: int = 500
    """Due messages are sent at multiples of it (the Java original's tick)."""
    _: KW_ONLY  # what follows is no option: only tests and qmq.testing set it
    load_ahead_ms: int = 600_000
    """The wheel has all messages that are due within this time, if there is room."""
    wheel_messages_max: int = 16_000_000
    """8 bytes each: 128 MB."""
    pause_ms: int = 0
    """The shortest time between two readings of the clock, for a clock that may stand still just
    before a tick (qmq/testing).
    """
    slice_messages_max: int = 2_000_000
    """Messages loaded at once."""
    waiting_messages_max: int = 20_000
    """Messages that are read and not planned yet.
    Other due messages stay in the wheel, 8 bytes each.
    """
    stuck_messages_max: int = 2_000
    """Waiting messages of a subject that cannot be delivered. Further due messages take 16 bytes
    each and do not delay other subjects.
    """
    read_messages: int = 250
    """Messages read from the schedule log in one step of the event loop."""
    keep_ms: int = 24 * 3_600_000
    """How long a finished bucket is kept, so that the states of its messages can be shown."""

    def __post_init__(self) -> None:
        limits = (
            "wheel_messages_max",
            "slice_messages_max",
            "waiting_messages_max",
            "stuck_messages_max",
            "read_messages",
        )
        for name in ("tick_ms", "load_ahead_ms", *limits):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("keep_ms", "pause_ms"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must not be negative, and is {getattr(self, name)}")
