"""A delivery: a range of sequences that had one fate. Values.

Those with `settled_ms` are events; those without say what is so where the action log ends:

    open       a consumer has it            waiting    it came back, and waits to be handed out again       parked    set aside with its key

Events of shares, where messages are handed to whoever asks:

    ack, nack, release     the consumer's verdict
    return                 it never got them: the connection was lost on the way
    left, lost, again      it went; its lease ended; it came anew, as another incarnation
    reset                  an operator moved the group
    expired                they came back, and retention took them before they went out again
    passed                 they were never handed out: other tags, or directed to another group

Events of lanes, where nothing is remembered of what was handed out, so `pulled_ms` is not known:

    done                   worked on, all messages of `lps` in these sequences
    nack                   it failed for the `attempt`-th time
    park                   set aside; `attempt` 0: only because an earlier message of its key was
    replay, drop, reset    an operator gave parked messages back, counted them as done, moved the group
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from qmq_ordering.route import LpRange


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
    """One group's part in one queue of the broker group."""

    subject: str
    partition: int
    group: str


class Delivery(NamedTuple):
    """A range of sequences, both ends included, and its fate. Times are milliseconds since 1970."""

    share: ShareKey
    consumer: str
    """Empty where none is meant."""
    first: int
    last: int
    attempt: int | None
    """From 1; of what waits: which one comes next."""
    pulled_ms: int | None
    """When it was handed out; None if that is not known, or it was not."""
    settled_ms: int | None
    """None: it is so still."""
    fate: DeliveryFate
    delay_ms: int = 0
    """Of a nack: what the consumer asked for."""
    lps: LpRange | None = None
    """Of partitions of ordered subjects: only messages of these logical partitions are meant."""
    key: bytes | None = None
    """Of what was parked."""
