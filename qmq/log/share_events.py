"""The events of `Share.apply`: the effects of an action on messages. Values only.

A message's trail and Spark's deliveries are made from these events. The kinds are those of deliveries in docs/SPARK_JOBS.md:

    pull                          handed out                 return, left, lost, again      taken back from its consumer
    ack, nack, release, dead      its consumer's verdict     expired, passed, reset, skip   done without processing
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from qmq.log.actions import Cause
from qmq.wire.settle_payloads import Verdict


class ShareEventKind(StrEnum):
    PULL = "pull"
    ACK = "ack"
    NACK = "nack"
    RELEASE = "release"
    DEAD = "dead"
    RETURN = "return"
    """The consumer never received the message: the connection was lost."""
    LEFT = "left"
    LOST = "lost"
    """The consumer's lease ended."""
    AGAIN = "again"
    """The consumer came back as another incarnation."""
    EXPIRED = "expired"
    """Retention deleted the message before its redelivery."""
    PASSED = "passed"
    """The message was skipped: it has other tags, or is for another group."""
    RESET = "reset"
    """An operator moved the group to a place after or before the message."""
    SKIP = "skip"
    """The group began after the message."""


class ShareEvent(NamedTuple):
    """An event of `count` messages from sequence `first` on."""

    kind: ShareEventKind
    consumer: str
    """The consumer that holds the messages, or held them last; empty if none."""
    first: int
    count: int  # type: ignore[assignment]
    attempt: int = 0
    """The number of the attempt, from 1; 0 if the messages were not delivered."""
    pull: int = -1
    """The consumer's pull sequence of the first message."""
    delay_ms: int = 0
    error: str = ""


_VERDICTS: Final = {
    Verdict.ACK: ShareEventKind.ACK,
    Verdict.NACK: ShareEventKind.NACK,
    Verdict.RELEASE: ShareEventKind.RELEASE,
    Verdict.DEAD: ShareEventKind.DEAD,
}
_CAUSES: Final = {Cause.LOST: ShareEventKind.LOST, Cause.LEFT: ShareEventKind.LEFT, Cause.AGAIN: ShareEventKind.AGAIN}


def settlement_kind(verdict: int, cause: int) -> ShareEventKind:
    """The kind of a settlement, by its verdict or by the reason why the master put the messages back."""
    kind = _VERDICTS[Verdict(verdict)]
    return _CAUSES.get(Cause(cause), kind) if verdict in (Verdict.NACK, Verdict.RELEASE) else kind
