"""The settings of a gateway. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq import limits
from qmq.gateway.transactions import TIMING, TransactionTiming

DEFAULT_PORT: Final = 8081


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The bounds are those of RocketMQ's own proxy."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: a free one."""
    advertise: str = ""
    """HOST:PORT that the gateway gives to clients; empty: the address by which the client connected."""
    creates_topics: bool = True
    """Whether a message to an unknown topic creates it."""
    all_ordered: bool = False
    """Whether topics that are created so are ordered, also if their first message has no message group."""
    body_bytes_max: int = limits.BODY_BYTES_MAX
    invisible_ms_min: int = 10_000
    invisible_ms_max: int = 12 * 3600 * 1000
    renewed_invisible_ms: int = 60_000
    """For a push consumer, which gives no time: its messages are renewed while it is alive."""
    renewal_ms_max: int = 3 * 3600 * 1000
    batch_max: int = 1_024
    """Messages of one answer."""
    long_poll_ms: int = 20_000
    """For a request that gives no time."""
    transactions: TransactionTiming = TIMING
    sweep_ms: int = 100
    """So late may a message be visible again."""
    shares_port: bool = False
    """Whether other gateways of this machine may listen at the same port."""
    takes_plaintext: bool = False
    """Whether a port with TLS also serves clients without TLS."""
