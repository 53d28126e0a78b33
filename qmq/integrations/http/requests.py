"""Parses requests to values. Pure; every function raises InvalidArgument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from qmq import limits
from qmq.errors import InvalidArgument
from qmq.integrations import cloud_event
from qmq.integrations.cloud_event import Event
from qmq.text import parse_json

MESSAGES_MAX: Final = 100
WAIT_S_MAX: Final = 30.0
INVISIBLE_S: Final = 30.0
INVISIBLE_S_MAX: Final = 12 * 3600.0
VERDICTS: Final = ("ack", "nack", "reject", "release")
DELAY_S_MAX: Final = limits.DELAY_MS_MAX / 1000
DEBEZIUM: Final = "x-debezium-"
"""Begins the headers with which Debezium Server's HTTP sink sends a record's own headers."""


@dataclass(frozen=True, slots=True)
class HttpMessage:
    """A message to send."""

    body: bytes
    headers: Mapping[str, str]
    key: str | None


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The query parameters of a request that sends. They apply to all messages of the request."""

    key: str | None
    tags: Sequence[str]
    delay: timedelta | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive up to `messages_max` messages; wait for the first one; each message is the caller's
    for `invisible_s`.
    """

    messages_max: int
    wait_s: float
    invisible_s: float


@dataclass(frozen=True, slots=True)
class Settle:
    """One verdict for messages."""

    receipts: Sequence[str]
    verdict: str
    delay: timedelta | None
    error: str


def messages_of(headers: Mapping[str, str], body: bytes) -> list[HttpMessage]:
    """The messages of a request that sends:
    CloudEvents in any mode, or a body that is a plain message.
    """
    media = headers.get(cloud_event.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if media == cloud_event.STRUCTURED:
        return [_of_event(cloud_event.of_structured(_json(body)))]
    if media == cloud_event.BATCH:
        return [_of_event(each) for each in cloud_event.of_batch(_json(body))]
    if cloud_event.is_event(headers):
        return [_of_event(cloud_event.of_headers(headers, body))]
    kept = {
        name: value
        for name, value in headers.items()
        if value and (name == cloud_event.CONTENT_TYPE or name.startswith(DEBEZIUM))
    }
    return [HttpMessage(body, kept, None)]


def _of_event(event: Event) -> HttpMessage:
    return HttpMessage(event.data, event.headers(), event.key)


def send_options(query: Mapping[str, str], tags: Sequence[str]) -> SendOptions:
    """Parse `?key=K&tag=T&tag=U&delay_s=60`."""
    delay = query.get("delay_s")
    return SendOptions(
        query.get("key"),
        tuple(tags),
        None if delay is None else timedelta(seconds=_number("delay_s", delay, 0, DELAY_S_MAX)),
    )


def receive_of(body: bytes) -> Receive:
    """Parse `{"messages_max": 10, "wait_s": 20, "invisible_s": 30}`; every field is optional."""
    found = _object(body, {"messages_max", "wait_s", "invisible_s"})
    return Receive(
        int(_number("messages_max", found.get("messages_max", 10), 1, MESSAGES_MAX)),
        _number("wait_s", found.get("wait_s", 0), 0, WAIT_S_MAX),
        _number("invisible_s", found.get("invisible_s", INVISIBLE_S), 1, INVISIBLE_S_MAX),
    )


def settle_of(body: bytes) -> Settle:
    """Parse `{"receipts": ["..."], "verdict": "nack", "delay_s": 5, "error": "why"}`."""
    found = _object(body, {"receipts", "verdict", "delay_s", "error"})
    receipts = found.get("receipts")
    if (
        not isinstance(receipts, list)
        or not 1 <= len(receipts) <= MESSAGES_MAX
        or not all(isinstance(each, str) for each in receipts)
    ):
        raise InvalidArgument(
            f"receipts must be an array of 1 to {MESSAGES_MAX} receipts as they were received"
        )
    verdict, error = found.get("verdict", "ack"), found.get("error", "")
    if verdict not in VERDICTS:
        raise InvalidArgument(f"verdict is one of {', '.join(VERDICTS)}, not {verdict!r}")
    if not isinstance(error, str):
        raise InvalidArgument(f"error is a string, not {error!r}")
    return Settle(receipts, verdict, _delay(found.get("delay_s")), error)


def _delay(given: object) -> timedelta | None:
    return None if given is None else timedelta(seconds=_number("delay_s", given, 0, DELAY_S_MAX))


def _json(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ValueError as cause:
        raise InvalidArgument(f"the body is not JSON: {cause}") from None


def _object(body: bytes, known: set[str]) -> dict[str, Any]:
    found = _json(body) if body else {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"the body is a JSON object, not {found!r:.100}")
    if found.keys() - known:
        raise InvalidArgument(
            f"unknown fields: {', '.join(sorted(found.keys() - known))}; known fields: "
            f"{', '.join(sorted(known))}"
        )
    return found


def _number(name: str, given: object, least: float, most: float) -> float:
    try:
        found = (
            math.nan
            if isinstance(given, bool) or not isinstance(given, str | int | float)
            else float(given)
        )
    except (ValueError, OverflowError):
        found = math.nan
    if not least <= found <= most or (name == "messages_max" and found != int(found)):
        raise InvalidArgument(f"{name} is a number from {least:g} to {most:g}, not {given!r:.100}")
    return found
