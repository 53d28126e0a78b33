"""The rules of a retry, for all who send batches: what is retried, after which pause, and the final error. Pure but for jitter."""

from __future__ import annotations

import random
from typing import Final

from qmq.delivery.in_flight_batch import InFlightBatch
from qmq.errors import CorruptBatch, DeadlineExceeded, Outcome, QmqError, Unavailable, UnknownSubject

_RETRY_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 30.0


def is_worth_another_try(failure: QmqError) -> bool:
    """A batch damaged on its way is sent again, and a broker may hear of a new subject later than we do."""
    return isinstance(failure, Unavailable | CorruptBatch | UnknownSubject)


def final(failure: QmqError | None, batch: InFlightBatch) -> QmqError:
    """The error of a batch that failed: after an unanswered try nobody knows, whatever the last refusal was."""
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    if failure is None or isinstance(failure, Unavailable):
        last = failure or "there was no room at any broker group"
        error = DeadlineExceeded(f"not stored in time after {batch.attempts} tries; the last: {last}", outcome=outcome)
        error.__cause__ = failure
        return error
    if batch.is_uncertain and failure.outcome is Outcome.NOT_STORED:
        code, failure = failure.code, type(failure)(failure.message, outcome=outcome)
        failure.code = code
    return failure


def rest_s(refusals: int, failure: QmqError) -> float:
    """How long a window rests after the `refusals`-th refusal in a row, in seconds."""
    base = _RETRY_S[min(refusals, len(_RETRY_S)) - 1]
    asked = (failure.retry_after_ms or 0) / 1000 if refusals > 1 else 0.0
    return max(base, min(asked, 1.0)) * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret


def pause_s(refusals: int, failure: QmqError) -> float:
    """`rest_s` where a broker is only busy or gone; rising to 30 s where somebody has to do something."""
    if isinstance(failure, Unavailable | CorruptBatch):
        return rest_s(refusals, failure)
    return min(_PAUSE_S * 2.0 ** min(refusals, 10), PAUSE_S_MAX) * random.uniform(0.7, 1.0)  # noqa: S311 - jitter, not a secret
