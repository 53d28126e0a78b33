"""Server-sent events of a subject. An event's id says how far each queue was read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qmq.errors import InvalidArgument
from qmq.text_numbers import whole_number

Positions = Mapping[tuple[str, int], int]
"""The next sequence of each queue, by broker group and partition."""

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
