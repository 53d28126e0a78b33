"""Which columns of a DataFrame become what of a message; checked when a write is planned. Pure.

| column | type | |
|---|---|---|
| body (or `value`) | binary or string | needed; never null |
| subject (or `topic`) | string | null: the option `subject` |
| key | binary or string | null: none; an ordered subject needs it |
| tag | string | null: none |
| tags | array<string> | instead of `tag` |
| headers | map<string,string> or map<string,binary> | |
| delay_ms | bigint or int | delivered so many milliseconds later; null: at once |
| deliver_at | timestamp | instead of `delay_ms`: delivered then; null: at once |
| create_time | timestamp | when the message came about; never null; without the column: now |
| message_id | string | 32 hexadecimal digits, instead of the row's own; unique within an epoch |

Names are case-insensitive, as Spark's are. Any other column is refused: nobody shall believe that it was written.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import StructField, StructType

from qmq.errors import InvalidArgument

_TEXT: Final = ("string", "binary")
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "subject": ("string",),
    "key": _TEXT,
    "tag": ("string",),
    "tags": ("array<string>",),
    "headers": ("map<string,string>", "map<string,binary>"),
    "delay_ms": ("bigint", "int"),
    "deliver_at": ("timestamp",),
    "create_time": ("timestamp",),
    "message_id": ("string",),
}
_ALIASES: Final = {"value": "body", "topic": "subject"}
_ONE_OF: Final = (("tag", "tags"), ("delay_ms", "deliver_at"))


@dataclass(frozen=True, slots=True)
class Fields:
    """Where in a record batch each column lies; -1: there is none. Can be sent to executors."""

    body: int
    subject: int = -1
    key: int = -1
    tag: int = -1
    tags: int = -1
    headers: int = -1
    delay_ms: int = -1
    deliver_at: int = -1
    create_time: int = -1
    message_id: int = -1

    @property
    def has_delays(self) -> bool:
        """Whether rows may be delayed."""
        return self.delay_ms >= 0 or self.deliver_at >= 0

    @classmethod
    def of(cls, schema: StructType, *, has_subject: bool) -> Fields:
        """Read a DataFrame's schema. `has_subject`: there is a subject for rows that name none. Raises InvalidArgument."""
        places: dict[str, int] = {}
        for place, field in enumerate(schema.fields):
            name = _name_of(field)
            if name in places:
                raise InvalidArgument(f"columns {schema.fields[places[name]].name!r} and {field.name!r} both are the {name}: keep one")
            places[name] = place
        if "body" not in places:
            raise InvalidArgument("the rows have no column `body` (or `value`): it is what a message holds")
        if "subject" not in places and not has_subject:
            raise InvalidArgument("say where the rows go: option subject, or a column `subject`")
        for first, second in _ONE_OF:
            if first in places and second in places:
                raise InvalidArgument(f"columns {first!r} and {second!r} say the same thing in two ways: keep one")
        return cls(**places)


def _name_of(field: StructField) -> str:
    lower = field.name.lower()
    name = _ALIASES.get(lower, lower)
    if name not in COLUMNS:
        near = difflib.get_close_matches(lower, [*COLUMNS, *_ALIASES], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"drop it, or put it into `headers`; there are {', '.join(COLUMNS)}"
        raise InvalidArgument(f"a message has no column {field.name!r}: {hint}")
    kind = field.dataType.simpleString()
    if kind not in COLUMNS[name]:
        raise InvalidArgument(f"column {field.name!r} is {' or '.join(COLUMNS[name])}, not {kind}: cast it")
    return name
