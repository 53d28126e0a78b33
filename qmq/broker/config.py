"""The configuration of a broker process."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from qmq.limits import MIB, PARTIAL_FRAMES_BYTES_MAX
from qmq.model import GroupSettings

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 3_600_000
"""Longest lease that a consumer may ask for."""
GRANTED_LEASE_MS_MAX: Final = 300_000
"""The longest lease granted to a consumer, and so the longest time that a vanished consumer keeps
messages from the others.
"""


def granted_lease_ms(asked_ms: int) -> int:
    """The lease that a consumer is granted. One that an older version granted may be longer."""
    return min(asked_ms, GRANTED_LEASE_MS_MAX)


IDLE_CHECK_MS: Final = 250
"""How often the broker checks a broadcast group's consumer that has left with dying messages."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The configuration of one broker process. Times are milliseconds."""

    name: str = "broker-0"
    retries: GroupSettings = GroupSettings()  # noqa: RUF009 - it is frozen
    """The retry settings of groups that have none in the coordination store."""
    _: KW_ONLY  # what follows is no option: only tests set it
    connections_max: int = 10_000
    broadcast_idle_ms: int = 3 * 86_400_000
    """After this absence the progress of a broadcast group's consumer is deleted."""
    handshakes_per_s: int = 1_000
    """TLS handshakes; further connections wait in the kernel's queue."""
    hello_timeout_ms: int = 10_000
    """A connection without HELLO is closed after this time."""
    stall_ms: int = 60_000
    """A connection that has begun a frame and sends nothing, or does not read its answers, is ended
    after this time.
    """
    partial_frames_bytes_max: int = PARTIAL_FRAMES_BYTES_MAX
    """Memory for incomplete large frames, over all client connections."""
    recent_bytes: int = 64 * MIB
    """The event loop reads batches within this distance from the end of the message log. For groups
    farther behind, threads read ahead.
    """
    retention_interval_ms: int = 30_000
