"""How values are written: keys as people read and type them, text, `hex:00ff`, or `base64:AP8=`, so that a printed key is valid input;
times and durations exactly for programs, and shortly in tables for people.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from qmq.errors import InvalidArgument
from qmq.process.event_loop import time_of

HEX: Final = "hex:"
BASE64: Final = "base64:"


def key_text(key: bytes) -> str:
    """A key as text if it is printable and not ambiguous, otherwise in hexadecimal digits."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    is_plain = text.isprintable() and text == text.strip() and not text.startswith((HEX, BASE64))
    return text if text and is_plain else HEX + key.hex()


def parse_key(text: str) -> bytes:
    """Parse a key: text, hexadecimal digits or base64. Raises InvalidArgument."""
    try:
        if text.startswith(HEX):
            return bytes.fromhex(text.removeprefix(HEX))
        if text.startswith(BASE64):
            return base64.b64decode(text.removeprefix(BASE64), validate=True)
        return text.encode()  # arguments of a command may hold bytes that are no UTF-8
    except (ValueError, binascii.Error) as cause:
        raise InvalidArgument(f"{text!r} is not a key: {cause}; a key is text, hex:00ff or base64:AP8=") from None


class Time(str):
    """A time: as text in ISO 8601, UTC; in tables for people relative to now."""

    __slots__ = ("time_ms",)

    time_ms: int

    def __new__(cls, time_ms: int) -> Time:
        """`time_ms` is milliseconds since 1970; 0 means none, and the text is empty."""
        text = time_of(time_ms).isoformat(timespec="milliseconds") if time_ms else ""
        made = super().__new__(cls, text)
        made.time_ms = time_ms
        return made


class Duration(int):
    """A duration in milliseconds: a number for programs; in tables for people in words."""

    __slots__ = ()
