"""The flights in the order of their departure, and their messages.

A flight's message is sent when it leaves, under the key of its aircraft; a cancelled flight's when
it should have left. Tables group flights by their scheduled time, so a late departure is late data:
the longest delay is 21 hours and 41 minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from ..flights import columns

SUBJECT: Final = "flights.departed"
TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
NOT_KNOWN: Final = "NA"


@dataclass(frozen=True, slots=True)
class Departure:
    """A flight's message."""

    key: str
    """Its aircraft; where that is not known, its service."""
    body: bytes
    """A JSON object by SCHEMA."""


_NUMBER: Final = {"type": "integer", "format": "int32"}
_NUMBER_OR_NULL: Final = {"type": ["integer", "null"], "format": "int32"}
_TEXT: Final = {"type": "string"}
_TIME: Final = {"type": "string", "format": "date-time"}
FIELDS: Final[dict[str, dict[str, object]]] = {
    "number": _NUMBER,  # its place in the order of departure
    "day": {"type": "string", "format": "date"},  # in New York
    "scheduled": _TIME,
    "departed": _TIME,
    "carrier": _TEXT,
    "flight": _NUMBER,
    "aircraft": _TEXT,
    "origin": _TEXT,
    "destination": _TEXT,
    "delay_min": _NUMBER_OR_NULL,  # of the departure; null: cancelled
    "arrival_delay_min": _NUMBER_OR_NULL,  # null: it did not arrive there
}
SCHEMA: Final = json.dumps(
    {"type": "object", "properties": FIELDS, "required": list(FIELDS)}, indent=1
)
"""The subject's JSON Schema, which makes the Iceberg table's columns."""


def departures(count: int) -> Iterator[Departure]:
    """The first `count` departures of 2013, in their order."""
    table = {column[0]: column[1:] for column in columns()}
    scheduled = [
        datetime.fromisoformat(hour) + timedelta(minutes=int(minute))
        for hour, minute in zip(table["time_hour"], table["minute"], strict=True)
    ]
    departed = [
        at if delay == NOT_KNOWN else at + timedelta(minutes=int(delay))
        for at, delay in zip(scheduled, table["dep_delay"], strict=True)
    ]
    order = sorted(range(len(scheduled)), key=lambda row: (departed[row], row))
    for number, row in enumerate(order[:count]):
        values = {name: column[row] for name, column in table.items()}
        aircraft = values["tailnum"]
        message = {
            "number": number,
            "day": f"{values['year']}-{values['month']:0>2}-{values['day']:0>2}",
            "scheduled": scheduled[row].strftime(TIME),
            "departed": departed[row].strftime(TIME),
            "carrier": values["carrier"],
            "flight": int(values["flight"]),
            "aircraft": aircraft,
            "origin": values["origin"],
            "destination": values["dest"],
            "delay_min": _minutes(values["dep_delay"]),
            "arrival_delay_min": _minutes(values["arr_delay"]),
        }
        key = f"{values['carrier']}{values['flight']}" if aircraft == NOT_KNOWN else aircraft
        yield Departure(key, json.dumps(message).encode())


def _minutes(text: str) -> int | None:
    return None if text == NOT_KNOWN else int(text)
