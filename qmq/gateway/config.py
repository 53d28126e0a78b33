"""The settings of a gateway. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from qmq.gateway.transactions import TIMING, TransactionTiming

DEFAULT_PORT: Final = 8081


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: a free one."""
    advertise: str = ""
    """HOST:PORT that the gateway gives to clients; empty: the address by which the client connected."""
    creates_topics: bool = True
    """Whether a message to an unknown topic creates it."""
    all_ordered: bool = False
    """Whether topics that are created so are ordered, also if their first message has no message group."""
    shares_port: bool = False
    """Whether other gateways of this machine may listen at the same port."""
    takes_plaintext: bool = False
    """Whether a port with TLS also serves clients without TLS."""
    _: KW_ONLY  # what follows is no option: only tests set it
    invisible_ms_min: int = 10_000
    """As in RocketMQ's own proxy."""
    renewed_invisible_ms: int = 60_000
    """For a push consumer, which gives no time: its messages are renewed while it is alive."""
    transactions: TransactionTiming = TIMING
    sweep_ms: int = 100
    """So late may a message be visible again."""
