"""The columns of the data source, and the check of a user's schema.

    column          type
    subject         string
    partition       int                  of an ordered subject; 0 otherwise
    broker_group    string               with subject and partition it names the queue
    sequence        bigint               the message's number in its queue
    route_version   bigint               the version that opened the partition; null for
                                         unordered subjects, or if routes are unknown
    key             binary               null if there is none
    body            binary
    tags            array<string>        empty if there are none
    headers         map<string,binary>   only with `includeHeaders`, or named in a schema
    message_id      string               32 hexadecimal digits
    create_time     timestamp            when it was passed to the producer; milliseconds
    append_time     timestamp            when the broker stored it
    epoch           bigint               the master's term

A schema may name more columns: producer_id (string, 16 hexadecimal digits), batch_sequence (bigint)
and place (int): the producer, its batch and the place in the batch, even if `message_id` differs;
logical_partition (int, null for unordered subjects); is_bent (boolean); entry (bigint, the batch's
index over both logs of its broker group).
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS: Final[dict[str, DataType]] = {
    "subject": StringType(),
    "partition": IntegerType(),
    "broker_group": StringType(),
    "sequence": LongType(),
    "route_version": LongType(),
    "key": BinaryType(),
    "body": BinaryType(),
    "tags": ArrayType(StringType(), True),
    "headers": MapType(StringType(), BinaryType(), True),
    "message_id": StringType(),
    "create_time": TimestampType(),
    "append_time": TimestampType(),
    "epoch": LongType(),
}
"""The columns in Spark's order."""

MORE_COLUMNS: Final[dict[str, DataType]] = {
    "producer_id": StringType(),
    "batch_sequence": LongType(),
    "place": IntegerType(),
    "logical_partition": IntegerType(),
    "is_bent": BooleanType(),
    "entry": LongType(),
}
"""Columns only for a schema that names them."""


MAY_BE_NULL: Final = frozenset({"route_version", "key", "logical_partition"})
"""Nullable columns. Spark skips null checks for the others. (It treats all columns of a user's
schema as nullable.)
"""


def default_schema(*, with_headers: bool) -> StructType:
    """The schema of `load()` without a user's schema."""
    chosen = [(name, kind) for name, kind in COLUMNS.items() if with_headers or name != "headers"]
    return StructType([StructField(name, kind, name in MAY_BE_NULL) for name, kind in chosen])


def columns_of(schema: StructType) -> dict[str, bool]:
    """The columns of a checked schema, in its order, and whether they may be null."""
    return {field.name: field.nullable for field in schema.fields}


def check_schema(schema: StructType) -> None:
    """Check that a user's schema is a projection: known columns with their types, in any order.
    Raises InvalidArgument.
    """
    known = {**COLUMNS, **MORE_COLUMNS}
    for field in schema.fields:
        if field.name not in known:
            near = difflib.get_close_matches(field.name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; columns: {', '.join(known)}"
            raise InvalidArgument(f"the log has no column {field.name!r}{hint}")
        if field.dataType.simpleString() != known[field.name].simpleString():
            raise InvalidArgument(
                f"column {field.name!r} is {known[field.name].simpleString()}, not "
                f"{field.dataType.simpleString()}: read that, then cast"
            )
        if not field.nullable and field.name in MAY_BE_NULL:
            raise InvalidArgument(
                f"column {field.name!r} must be nullable in the schema: it may be null"
            )
