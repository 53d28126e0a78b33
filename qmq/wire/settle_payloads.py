"""The verdicts of consumers of unordered subjects: the payloads of SETTLE, SETTLED and BEGUN. Pure.

SETTLE    session, count, count * (first, last, verdict, delay_ms), then for each range that has
          one: (its number, an error's text)
SETTLED   the number of settled messages, the number of stale ones
BEGUN     session, first, last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from struct import Struct, error
from typing import Any, Final, NamedTuple

from qmq import limits
from qmq.errors import InvalidArgument, ProtocolViolation

_SETTLE: Final = Struct("<II")
_SETTLEMENT: Final = Struct("<qqII")
_ERROR_TEXT: Final = Struct("<IH")
_SETTLED: Final = Struct("<QQ")
_BEGUN: Final = Struct("<Iqq")


class Verdict(IntEnum):
    """A consumer's verdict on messages that it received."""

    ACK = 0
    NACK = 1
    """Processing failed: deliver the message again after `delay_ms`, with one attempt more."""
    RELEASE = 2
    """Not processed: deliver the message again, with the same attempt count."""
    DEAD = 3
    """Failed for good: move the message to the group's dead-letter queue. A NACK of the last
    attempt does the same.
    """


BY_GROUP_MS: Final = 0xFFFF_FFFF
"""The delay of a NACK that means: use the delay of the group's settings for this attempt."""
ERROR_CHARS_MAX: Final = 1_000
"""The longest error text of a verdict; a longer text is cut."""


class Settlement(NamedTuple):
    """A verdict on a range of pull sequences, both ends included."""

    first: int
    last: int
    verdict: int
    delay_ms: int
    error: str = ""
    """The error of a NACK or DEAD."""


def pack_settle(session: int, settlements: list[Settlement]) -> bytes:
    """The payload of SETTLE."""
    errors = [
        (at, each.error[:ERROR_CHARS_MAX].encode())
        for at, each in enumerate(settlements)
        if each.error
    ]
    parts = [_SETTLE.pack(session, len(settlements))]
    parts += [_SETTLEMENT.pack(*each[:4]) for each in settlements]
    parts += [part for at, text in errors for part in (_ERROR_TEXT.pack(at, len(text)), text)]
    return b"".join(parts)


def unpack_settle(payload: memoryview | bytes) -> tuple[int, list[Settlement]]:
    """Raises ProtocolViolation, InvalidArgument."""
    if len(payload) > limits.SETTLE_BYTES_MAX:
        raise InvalidArgument(
            f"a SETTLE has at most {limits.SETTLE_BYTES_MAX} bytes, not {len(payload)}: send "
            "several"
        )
    try:
        session, count = _SETTLE.unpack_from(payload)
        require_ranges("SETTLE", min(count, len(payload) // _SETTLEMENT.size))
        end = _SETTLE.size + count * _SETTLEMENT.size
        settlements = [
            Settlement(*each) for each in _SETTLEMENT.iter_unpack(payload[_SETTLE.size : end])
        ]
        for at, text in _error_texts(payload, end):
            settlements[at] = settlements[at]._replace(error=text)
    except (error, IndexError, UnicodeDecodeError):
        raise ProtocolViolation(
            "SETTLE is incomplete, or has an error for a range that it does not have"
        ) from None
    if len(settlements) != count or any(each.verdict > Verdict.DEAD for each in settlements):
        raise ProtocolViolation("SETTLE has a wrong number of ranges, or an unknown verdict")
    return session, settlements


def require_ranges(what: str, count: int) -> None:
    """Raise InvalidArgument for too many ranges, before they are packed."""
    if count > limits.SETTLE_RANGES_MAX:
        raise InvalidArgument(
            f"a {what} has at most {limits.SETTLE_RANGES_MAX} ranges, not {count}: send several"
        )


def _error_texts(payload: memoryview | bytes, at: int) -> Iterator[tuple[int, str]]:
    """The error texts after the ranges: (number of the range, text)."""
    while at < len(payload):
        number, size = _ERROR_TEXT.unpack_from(payload, at)
        at += _ERROR_TEXT.size
        if at + size > len(payload):
            raise error("cut short")
        yield number, bytes(payload[at : at + size]).decode()
        at += size


pack_begun: Final[Callable[[int, int, int], bytes]] = _BEGUN.pack
"""(session, first, last) -> the payload of BEGUN: these pull sequences, both ends included, were
given to a handler.
"""


def unpack_begun(payload: memoryview | bytes) -> tuple[int, int, int]:
    """(session, first, last). Raises ProtocolViolation."""
    session, first, last = _exactly(_BEGUN, payload, "BEGUN")
    return session, first, last


pack_settled: Final[Callable[[int, int], bytes]] = _SETTLED.pack
"""(settled messages, stale ones) -> the payload of SETTLED."""


def unpack_settled(payload: memoryview | bytes) -> tuple[int, int]:
    """(messages settled, messages that were no longer this consumer's).
    Raises ProtocolViolation.
    """
    settled, stale = _exactly(_SETTLED, payload, "SETTLED")
    return settled, stale


def _exactly(form: Struct, payload: memoryview | bytes, what: str) -> tuple[Any, ...]:
    try:
        return form.unpack(payload)
    except error:
        raise ProtocolViolation(f"{what} has {len(payload)} bytes, not {form.size}") from None
