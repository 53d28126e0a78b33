"""QMQ's errors as RocketMQ's status codes, and the counts of calls by the client's language and by
status. Pure.

A code tells a client what to do: 4xxxx to correct the request, 42900 and 5xxxx to try again later.
RocketMQ's clients send again by themselves after any error except 42900, so a message that may have
been stored can be stored twice, with the same message id.

What is counted:

    Telemetry      each command, both sent and received ones
    other calls    by the status of the answer; for a stream, of the first answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from qmq import errors
from qmq.proto.rocketmq import definition_pb2 as api

OK: Final = api.Status(code=api.OK, message="OK")

_CODES: Final[tuple[tuple[type[errors.QmqError], api.Code.ValueType], ...]] = (
    (errors.NotAuthenticated, api.UNAUTHORIZED),
    (errors.AccessDenied, api.FORBIDDEN),
    (errors.QuotaExceeded, api.TOO_MANY_REQUESTS),
    (errors.Overloaded, api.TOO_MANY_REQUESTS),
    (errors.BufferFull, api.TOO_MANY_REQUESTS),
    (errors.UnknownSubject, api.TOPIC_NOT_FOUND),
    (errors.UnknownGroup, api.CONSUMER_GROUP_NOT_FOUND),
    (errors.MessageNotFound, api.MESSAGE_NOT_FOUND),
    (errors.TooLate, api.PRECONDITION_FAILED),
    (errors.MessageTooLarge, api.MESSAGE_BODY_TOO_LARGE),
    (errors.DelayTooLong, api.ILLEGAL_DELIVERY_TIME),
    (errors.OrderMismatch, api.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (errors.StaleDelivery, api.INVALID_RECEIPT_HANDLE),
    (errors.LaneLost, api.INVALID_RECEIPT_HANDLE),
    (errors.MessagesExpired, api.OFFSET_NOT_FOUND),
    (errors.NeverReached, api.PROXY_TIMEOUT),
    (errors.CallerError, api.BAD_REQUEST),
    (errors.NoQuorum, api.HA_NOT_AVAILABLE),
    (errors.DeadlineExceeded, api.PROXY_TIMEOUT),
    (errors.Unavailable, api.PROXY_TIMEOUT),
)
"""The first entry whose error class matches decides."""


class Refused(Exception):
    """A refused request: the client gets `code`, and a text that says what to do."""

    def __init__(self, code: api.Code.ValueType, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def status_of_failure(failure: Exception) -> api.Status:
    """The status that a client gets for a failure."""
    if isinstance(failure, Refused):
        return api.Status(code=failure.code, message=failure.message)
    code = next(
        (code for kind, code in _CODES if isinstance(failure, kind)), api.INTERNAL_SERVER_ERROR
    )
    text = str(failure) if isinstance(failure, errors.QmqError) else type(failure).__name__
    return api.Status(code=code, message=text)


def joined_status(statuses: Sequence[api.Status]) -> api.Status:
    """The status of a call with several entries: the entries' common status, if they all have the
    same code.
    """
    if not statuses:
        return api.Status(
            code=api.BAD_REQUEST, message="the request is empty: give it at least one entry"
        )
    if len({each.code for each in statuses}) == 1:
        return statuses[0]
    return api.Status(
        code=api.MULTIPLE_RESULTS,
        message="the entries have different results: look at the status of each",
    )


LANGUAGES_MAX = 32
LANGUAGE_CHARS_MAX = 32
"""Clients name their language themselves. The counters count languages beyond this number, and
longer names, as OTHER.
"""
OTHERS = "OTHER"


class AnsweredCall(NamedTuple):
    """A kind of call and of answer. `language` comes from the client's header; it is "" if the
    header is missing.
    """

    call: str
    language: str
    code: str


class CallCounters:
    """Counts the calls of one gateway."""

    def __init__(self) -> None:
        self.counts: Counter[AnsweredCall] = Counter()
        self._languages: set[str] = set()

    def note(self, call: str, language: str, code: api.Code.ValueType) -> None:
        """Count one answered call."""
        if language not in self._languages:
            if (
                len(self._languages) >= LANGUAGES_MAX
                or len(language) > LANGUAGE_CHARS_MAX
                or not language.isprintable()
            ):
                language = OTHERS
            self._languages.add(language)
        self.counts[AnsweredCall(call, language, api.Code.Name(code))] += 1
