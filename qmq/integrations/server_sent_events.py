"""Server-sent events of a subject. An event's id says how far each queue was read. Pure.

    g1/0/7,g2/0/9~SEAL        the stream continues with message 7 of queue 0 of broker group g1, and message 9 of queue 0 of g2

A browser sends any id that it wants to, so an id has a seal: an HMAC by a key that only the web servers have, over the positions, the
subject and the selection. So a browser continues where it was, and reads neither older messages nor another selection's part of the log.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.text import whole_number

Positions = Mapping[tuple[str, int], int]
"""The next sequence of each queue, by broker group and partition."""

RESET: Final = "event: reset\ndata:\n\n"
"""Tells a page that its stream does not continue where it was, so that the page may ask for the present state."""
KEY_BYTES_MIN: Final = 16
_PARTITION_MAX = (1 << 31) - 1
_LINE_END = re.compile(r"\r\n|\r|\n")
_POSITION = re.compile(r"([^/,]+)/([^/,]+)/([^/,]+)")


def event(id: str, data: str) -> str:
    """The text of one event: each line of the data has its own field, as the format requires."""
    return f"id: {id}\n" + "".join(f"data: {line}\n" for line in _LINE_END.split(data)) + "\n"


def position_text(positions: Positions) -> str:
    """Positions as an event's id: GROUP/PARTITION/SEQUENCE, separated by commas."""
    return ",".join(f"{group}/{partition}/{sequence}" for (group, partition), sequence in sorted(positions.items()))


def positions_of(text: str) -> dict[tuple[str, int], int]:
    """The positions of an event's id; none for "". Raises InvalidArgument."""
    found = {}
    for each in text.split(",") if text else ():
        match = _POSITION.fullmatch(each)
        partition = whole_number(match[2].removeprefix("-"), _PARTITION_MAX) if match else None
        sequence = whole_number(match[3]) if match else None
        if match is None or partition is None or sequence is None:
            raise InvalidArgument(f"Last-Event-ID is {text[:200]!r}, which is not an id of these events: leave it out to start now")
        found[match[1], -partition if match[2].startswith("-") else partition] = sequence
    return found


class EventIds:
    """Seals and opens the ids of one stream: of a subject, and of what `selection` chooses there."""

    def __init__(self, key: bytes, subject: str, selection: Mapping[str, Any]) -> None:
        self._key, self._bound = key, json.dumps([subject, {name: _plain(value) for name, value in sorted(selection.items())}])

    def sealed(self, positions: Positions) -> str:
        """The id of an event after which the stream continues at `positions`."""
        text = position_text(positions)
        return f"{text}~{self._seal(text)}"

    def opened(self, text: str) -> dict[tuple[str, int], int]:
        """The positions of an id that `sealed` made for the same subject and selection by the same key. Raises InvalidArgument."""
        told, _, seal = text.rpartition("~")
        if not hmac.compare_digest(self._seal(told).encode(), seal.encode()):
            raise InvalidArgument("Last-Event-ID is no id of this stream: its seal is wrong")
        return positions_of(told)

    def _seal(self, text: str) -> str:
        made = hmac.digest(self._key, json.dumps([self._bound, text]).encode(), "sha256")
        return base64.urlsafe_b64encode(made[:18]).decode()


def _plain(value: Any) -> str | list[str] | None:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(map(repr, value))
    return None if value is None else repr(value)
