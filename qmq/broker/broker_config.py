"""What an operator may choose about the broker itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq.limits import INFLIGHT_BYTES_MAX, PARTIAL_FRAMES_BYTES_MAX
from qmq.model import GroupSettings

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 3_600_000
"""What a consumer may ask for."""

LOOK_MS: Final = 250
"""How often all groups are looked at for leases that have ended."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Of one broker process. Times in milliseconds."""

    name: str = "broker-0"
    inflight_bytes_max: int = INFLIGHT_BYTES_MAX
    connections_max: int = 10_000
    broadcast_idle_ms: int = 3 * 86_400_000
    """A consumer of a broadcast group that stays away for so long is forgotten."""
    handshakes_per_s: int = 1_000
    """TLS handshakes; when more come, connections wait in the system's queue."""
    hello_timeout_ms: int = 10_000
    """A connection that has not said hello by then is closed."""
    stall_ms: int = 60_000
    """A connection that sends nothing of a frame that it began, or reads nothing of its answers, for so long is ended."""
    partial_frames_bytes_max: int = PARTIAL_FRAMES_BYTES_MAX
    """Memory that large frames may take before they are whole, over all connections of clients."""
    lease_ms_max: int = 300_000
    """What a consumer is granted at most: for so long, what one holds that vanished is kept from the others."""
    retention_interval_ms: int = 30_000
    retries: GroupSettings = GroupSettings()  # noqa: RUF009 - it is frozen
    """How messages of groups are tried again for which nothing is set in the coordination store."""
