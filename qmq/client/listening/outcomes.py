"""Decides about a message by the end of its handler. Pure.

    handler                                message
    returned                               acknowledged
    raised qmq.Retry(after=...)            handed out again after that time
    raised qmq.Reject("why")               dead-letter queue of the group, immediately
    took longer than `timeout`             handed out again, error "timed out after 5 s"
    raised anything else                   handed out again, error "ValueError: ..."
    not called: the body does not decode   as `on_undecodable` says; dead-letter queue by default

The broker counts attempts: a message that fails for the last time goes to the dead-letter queue with the same error (docs/DELIVERY.md). The
delay before the next attempt is the handler's, else the listener's `retry_delays` by attempt, else the group's.

On an ordered subject the decision is only: done, or failed with a delay. The consumer's `on_failure` says what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Final, NamedTuple

from qmq.client.message import error_text, retry_ms
from qmq.client.payloads import Undecodable, UndecodableBody

STOPPED: Final = "the listener was stopped before its handler was done"
_AT_ONCE: Final = timedelta(0)


class Retry(Exception):
    """Raised in a handler: hand the message out again after the delay `after` (None: the usual delay). Raises InvalidArgument, DelayTooLong
    for a delay above the limit.
    """

    def __init__(self, why: str = "", *, after: timedelta | None = None) -> None:
        super().__init__(why)
        if after is not None:
            retry_ms(after)
        self.after = after


class Reject(Exception):
    """Raised in a handler: no other attempt will help, so the message goes to the dead-letter queue, with this reason."""


class TimedOut(Exception):
    """The handler took longer than its listener's timeout."""


class Act(Enum):
    """The verdict on a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


class HandlerDecision(NamedTuple):
    """A verdict; `delay` None means the usual one."""

    act: Act
    delay: timedelta | None = None
    error: str = ""


DONE: Final = HandlerDecision(Act.ACK)
GIVEN_BACK: Final = HandlerDecision(Act.NACK, _AT_ONCE, STOPPED)
"""For a message whose handler was cancelled: the group gets the message again immediately."""


class Policy(NamedTuple):
    """A listener's options about failures."""

    retry_delays: Sequence[timedelta] = ()
    on_undecodable: str = "reject"

    def delay(self, attempt: int) -> timedelta | None:
        """How long a message waits after this attempt (from 1) failed; None: as the group's settings say."""
        return self.retry_delays[min(attempt, len(self.retry_delays)) - 1] if self.retry_delays else None


def decide(failure: BaseException | None, attempt: int, policy: Policy) -> HandlerDecision:
    """The verdict on a message, from the exception of its handler and the number of the attempt."""
    if failure is None:
        return DONE
    text = _text(failure)
    if isinstance(failure, Retry) and failure.after is not None:
        return HandlerDecision(Act.NACK, failure.after, text)
    if isinstance(failure, Reject):
        return HandlerDecision(Act.REJECT, None, text)
    if not isinstance(failure, UndecodableBody) or policy.on_undecodable == "retry":
        return HandlerDecision(Act.NACK, policy.delay(attempt), text)
    return DONE if policy.on_undecodable == "skip" else HandlerDecision(Act.REJECT, None, text)


def _text(failure: BaseException) -> str:
    """The error text. QMQ's own exceptions are written for readers; for others the type's name comes first. Never raises."""
    try:
        words = str(failure) if isinstance(failure, Retry | Reject | TimedOut | Undecodable) else ""
        return error_text(words or failure)
    except Exception:  # an exception whose __str__ raises
        return type(failure).__name__
