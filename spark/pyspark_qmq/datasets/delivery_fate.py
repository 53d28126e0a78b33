"""A delivery: a range of sequences with the same outcome. Values.

Deliveries with `settled_ms` are events. Those without describe the state at the end of the action log:

    open       a consumer holds it          waiting    returned, waits for its next delivery          parked    set aside with its key

Events of shares, where any consumer of the group gets messages:

    ack, nack, release     the consumer's verdict
    return                 the consumer never got them: the connection was lost before
    left, lost, again      the consumer left; its lease ended; it reconnected as a new incarnation
    reset                  an operator moved the group
    expired                they were returned, and retention deleted them before their next delivery
    passed                 they were skipped: other tags, or directed to another group

Events of lanes, which do not record deliveries, so `pulled_ms` is unknown:

    done                   acknowledged: all messages of `lps` in these sequences
    nack                   it failed for the `attempt`-th time
    park                   set aside; `attempt` 0: only because an earlier message of its key failed
    replay, drop, reset    an operator replayed parked messages, skipped them, or moved the group
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from qmq_ordering.routes import LpRange


class DeliveryFate(StrEnum):
    OPEN = "open"
    WAITING = "waiting"
    PARKED = "parked"
    ACK = "ack"
    NACK = "nack"
    DEAD = "dead"
    RELEASE = "release"
    RETURN = "return"
    LEFT = "left"
    LOST = "lost"
    AGAIN = "again"
    RESET = "reset"
    EXPIRED = "expired"
    PASSED = "passed"
    DONE = "done"
    PARK = "park"
    REPLAY = "replay"
    DROP = "drop"


class ShareKey(NamedTuple):
    """A consumer group on one queue of the broker group."""

    subject: str
    partition: int
    group: str


class Delivery(NamedTuple):
    """A range of sequences, both ends included, with its outcome. Times are milliseconds since 1970."""

    share: ShareKey
    consumer: str
    """Empty if no consumer is involved."""
    first: int
    last: int
    attempt: int | None
    """Counts from 1; for waiting messages, the next attempt."""
    pulled_ms: int | None
    """When it was delivered; None if it was not, or if the time is unknown."""
    settled_ms: int | None
    """None: this is the current state."""
    fate: DeliveryFate
    delay_ms: int = 0
    """For a nack: the delay that the consumer asked for."""
    lps: LpRange | None = None
    """For ordered subjects: only messages of these logical partitions."""
    key: bytes | None = None
    """The key of parked messages."""
