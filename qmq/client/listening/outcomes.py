"""What becomes of a message, from how its handler ended. Pure.

    handler                                            message
    returned                                           acknowledged
    raised qmq.Retry(after=...)                        handed out again after that
    raised qmq.Reject("why")                           the group's dead-letter queue, at once
    took longer than `timeout`                         handed out again, error "timed out after 5 s"
    raised anything else                               handed out again, error "ValueError: ..."
    never began: the body does not decode              as `on_undecodable` says; the dead-letter queue if it says nothing

A message that fails for the last time goes to the dead-letter queue with the same error: the broker counts (docs/DELIVERY.md). How long it
waits for another try is what the handler said, else the listener's `retry_delays`, by attempt, else what is set for the group.

On an ordered subject nothing is decided here but done, or failed and after how long: what follows is the consumer's `on_failure`.
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
    """Raise it in a handler: not now, hand the message out again `after` so long (None: after the usual delay). Raises InvalidArgument,
    DelayTooLong for a delay that cannot be.
    """

    def __init__(self, why: str = "", *, after: timedelta | None = None) -> None:
        super().__init__(why)
        if after is not None:
            retry_ms(after)
        self.after = after


class Reject(Exception):
    """Raise it in a handler: no other attempt will help, off to the dead-letter queue, for this reason."""


class TimedOut(Exception):
    """The handler took longer than its listener allows."""


class Act(Enum):
    """What is done with a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


class HandlerDecision(NamedTuple):
    """`delay` None: the usual one."""

    act: Act
    delay: timedelta | None = None
    error: str = ""


DONE: Final = HandlerDecision(Act.ACK)
GIVEN_BACK: Final = HandlerDecision(Act.NACK, _AT_ONCE, STOPPED)
"""Its handler was cut off, and nobody is to wait for that."""


class Policy(NamedTuple):
    """What a listener says of failures."""

    retry_delays: Sequence[timedelta] = ()
    on_undecodable: str = "reject"

    def delay(self, attempt: int) -> timedelta | None:
        """How long a message rests that failed in this attempt, counted from 1; None: as long as the group says."""
        return self.retry_delays[min(attempt, len(self.retry_delays)) - 1] if self.retry_delays else None


def decide(failure: BaseException | None, attempt: int, policy: Policy) -> HandlerDecision:
    """The verdict on a message whose handler ended so, in its attempt of that number."""
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
    """What these classes say is meant for readers; of others the type belongs to it. Never raises."""
    try:
        words = str(failure) if isinstance(failure, Retry | Reject | TimedOut | Undecodable) else ""
        return error_text(words or failure)
    except Exception:  # an exception that cannot say what it is
        return type(failure).__name__
