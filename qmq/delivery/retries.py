"""The rules of a retry for all senders of batches: which refusals are retried, and after which
pause. Pure but for jitter.

    sender                            sent again under its number      pause after refusals in a row
    `PRODUCER`: ordered or not        what `is_worth_another_try`      `backoff_s`: 20 ms to 1 s, or
                                      says                             what the broker asks for
    `DELAY_SERVER`                    also what may be stored,         `pause_s`: 30 s at most
                                      unless a message is at fault     where an operator has to act
    `SINK`: rows to a broker group    as a producer                    `backoff_s`
    `ORDERED_SINK`: to a partition    also what lost its number to     `backoff_s`
                                      another attempt of the task

What is not sent again goes to the window's `_reject`. Tries are not counted: a producer's batch has
a deadline (`InFlightBatch.until`), the delay server tries forever, and Spark's task fails after
`qmq.retryMs` without progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from qmq.errors import (
    CorruptBatch,
    InvalidArgument,
    NeverReached,
    NumberTaken,
    QmqError,
    Unavailable,
    UnknownSubject,
)

_RETRY_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 30.0


def is_worth_another_try(failure: QmqError) -> bool:
    """Whether to retry after this refusal. A batch that was damaged on its way is sent again, and a
    broker may learn of a new subject later than the sender.
    """
    return isinstance(failure, Unavailable | CorruptBatch | UnknownSubject)


def backoff_s(refusals: int, failure: QmqError) -> float:
    """How long a window pauses after the `refusals`-th refusal in a row, in seconds."""
    base = _RETRY_S[min(refusals, len(_RETRY_S)) - 1]
    asked = (failure.retry_after_ms or 0) / 1000 if refusals > 1 else 0.0
    return max(base, min(asked, 1.0)) * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret


def pause_s(refusals: int, failure: QmqError) -> float:
    """As `backoff_s` while a broker is busy or unreachable;
    rising to 30 s if an operator has to act.
    """
    if isinstance(failure, Unavailable | CorruptBatch | NeverReached):
        return backoff_s(refusals, failure)
    return min(_PAUSE_S * 2.0 ** min(refusals, 10), PAUSE_S_MAX) * random.uniform(0.7, 1.0)  # noqa: S311 - jitter, not a secret


class RetryRules(NamedTuple):
    """How one kind of sender retries."""

    is_retried: Callable[[QmqError, bool], bool]
    """(refusal, whether the batch is certainly not stored) -> whether the batch is sent again under
    its number.
    """
    backoff_s: Callable[[int, QmqError], float]
    """(refusals in a row, the last one) -> seconds to pause."""


def _is_retried(failure: QmqError, is_certain: bool) -> bool:
    return is_worth_another_try(failure)


def _is_retried_by_delay_server(failure: QmqError, is_certain: bool) -> bool:
    """A batch that may be stored keeps its number and destination, so only a permanent refusal ends
    its tries.
    """
    return is_worth_another_try(failure) or not (is_certain or isinstance(failure, InvalidArgument))


def _is_retried_by_ordered_sink(failure: QmqError, is_certain: bool) -> bool:
    return is_worth_another_try(failure) or isinstance(failure, NumberTaken)


PRODUCER: Final = RetryRules(_is_retried, backoff_s)
DELAY_SERVER: Final = RetryRules(_is_retried_by_delay_server, pause_s)
SINK: Final = PRODUCER
ORDERED_SINK: Final = RetryRules(_is_retried_by_ordered_sink, backoff_s)
