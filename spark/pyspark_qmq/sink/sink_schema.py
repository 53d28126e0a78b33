"""Maps the columns of a DataFrame to the parts of a message, and checks them when a write is planned. Pure.

| column | type | |
|---|---|---|
| body (or `value`) | binary or string | required; never null |
| subject (or `topic`) | string | null: the option `subject` |
| key | binary or string | null: none; required by ordered subjects |
| tag | string | null: none |
| tags | array<string> | instead of `tag` |
| headers | map<string,string> or map<string,binary> | |
| delay_ms | bigint or int | delay in milliseconds; null: none |
| deliver_at | timestamp | instead of `delay_ms`: the due time; null: none |
| create_time | timestamp | the message's create time; never null; without the column: now |
| message_id | string | 32 hexadecimal digits, instead of the row's own; unique within an epoch |

Names are case-insensitive, as in Spark. Any other column is refused, because it would not be written.
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
    """The index of each column in a record batch; -1: absent. Picklable for executors."""

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
        """Read a DataFrame's schema. `has_subject`: rows without a subject have a default one. Raises InvalidArgument."""
        places: dict[str, int] = {}
        for place, field in enumerate(schema.fields):
            name = _name_of(field)
            if name in places:
                raise InvalidArgument(f"columns {schema.fields[places[name]].name!r} and {field.name!r} both are the {name}: keep one")
            places[name] = place
        if "body" not in places:
            raise InvalidArgument("the rows need a column `body` (or `value`)")
        if "subject" not in places and not has_subject:
            raise InvalidArgument("give the rows' subject: option subject, or a column `subject`")
        for first, second in _ONE_OF:
            if first in places and second in places:
                raise InvalidArgument(f"columns {first!r} and {second!r} have the same meaning: keep one")
        return cls(**places)


def _name_of(field: StructField) -> str:
    lower = field.name.lower()
    name = _ALIASES.get(lower, lower)
    if name not in COLUMNS:
        near = difflib.get_close_matches(lower, [*COLUMNS, *_ALIASES], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"drop it, or put it into `headers`; columns: {', '.join(COLUMNS)}"
        raise InvalidArgument(f"a message has no column {field.name!r}: {hint}")
    kind = field.dataType.simpleString()
    if kind not in COLUMNS[name]:
        raise InvalidArgument(f"column {field.name!r} must be {' or '.join(COLUMNS[name])}, not {kind}: cast it")
    return name
