"""What a request has changed, or may have changed: after that, no error of the request says "not
stored".

A request of an operator is often several steps: a change in the coordination store, a read, a call
to brokers, another change. The error that ends the request tells the outcome of its own step, which
may be a read. So the outcome of the whole is found here, once for all requests:

    the coordination store, and calls to brokers   `note_change`, for each change that was made, or
                                                   whose answer was lost
    around the whole request                       `whole_request`

If there was a change, an error with the outcome "not stored" leaves `whole_request` as "unknown". A
CallerError stays as it is: it is a decision about the request, made from answers. The steps of one
request may run in several tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from qmq.errors import CallerError, CoordinationUnavailable, Outcome, QmqError


@dataclass(slots=True)
class _Changes:
    are_possible: bool = False


_CHANGES: Final[ContextVar[_Changes | None]] = ContextVar("qmq_request_changes", default=None)


def note_change() -> None:
    """Note a change that was made for this request, or that may have been made. Outside of
    `whole_request` nobody asks.
    """
    changes = _CHANGES.get()
    if changes is not None:
        changes.are_possible = True


@contextmanager
def whole_request() -> Iterator[None]:
    """All steps of a request. Their errors say the outcome of the request,
    in `outcome` and in words.
    """
    changes = _Changes()
    before = _CHANGES.set(changes)
    try:
        yield
    except QmqError as failure:
        _correct_outcome(failure, changes)
        raise
    finally:
        _CHANGES.reset(before)


def _correct_outcome(failure: QmqError, changes: _Changes) -> None:
    if failure.outcome is not Outcome.NOT_STORED or isinstance(failure, CallerError):
        return
    if changes.are_possible:
        failure.outcome = Outcome.UNKNOWN
        failure.message += "; the change may be made, or a part of it: look before you repeat it"
    elif isinstance(failure, CoordinationUnavailable):
        failure.message += "; nothing was changed"
