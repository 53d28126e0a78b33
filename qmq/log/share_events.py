"""What an action did to the messages of a share, as `Share.apply` tells it. Values.

A message's story, a message's trail and Spark's deliveries are these events, folded. Their kinds are those of deliveries in
docs/SPARK_JOBS.md:

    pull                          handed out                 return, left, lost, again      taken back from its consumer
    ack, nack, release, dead      its consumer's verdict     expired, passed, reset, skip   done without being worked on
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
    """The consumer never got it: the connection was lost on the way."""
    LEFT = "left"
    LOST = "lost"
    """The consumer's lease ended."""
    AGAIN = "again"
    """The consumer came back as another incarnation."""
    EXPIRED = "expired"
    """Retention took it before it went out again."""
    PASSED = "passed"
    """It was never handed out: other tags, or directed to another group."""
    RESET = "reset"
    """An operator moved the group, past it or back before it."""
    SKIP = "skip"
    """The group began behind it."""


class ShareEvent(NamedTuple):
    """What became of `count` messages from sequence `first` on."""

    kind: ShareEventKind
    consumer: str
    """Who has them, or had them last; empty where none is meant."""
    first: int
    count: int  # type: ignore[assignment]
    attempt: int = 0
    """From 1: how often they were handed out, this time included; 0 where they were not."""
    pull: int = -1
    """The consumer's pull sequence of the first of them."""
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
    """What a settlement is called: by its verdict, or by why the master put the messages back."""
    kind = _VERDICTS[Verdict(verdict)]
    return _CAUSES.get(Cause(cause), kind) if verdict in (Verdict.NACK, Verdict.RELEASE) else kind
