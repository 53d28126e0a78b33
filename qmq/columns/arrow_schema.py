"""The columns' Arrow types, exactly as Spark requires them.

Spark compares the first record batch of a task with its own schema: names, order, types, names of inner fields, and nullability. With a
large string, a dictionary, or a field that is wrongly nullable, the task fails. Spark does not check later batches, and would read another
type as garbage, so all batches are built with one schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
TAGS: Final = pa.list_(pa.field("element", pa.string(), nullable=True))
HEADERS: Final = pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary(), nullable=True))

TYPES: Final[dict[str, pa.DataType]] = {
    "subject": pa.string(),
    "partition": pa.int32(),
    "broker_group": pa.string(),
    "sequence": pa.int64(),
    "route_version": pa.int64(),
    "key": pa.binary(),
    "body": pa.binary(),
    "tags": TAGS,
    "headers": HEADERS,
    "message_id": pa.string(),
    "create_time": TIMESTAMP,
    "append_time": TIMESTAMP,
    "epoch": pa.int64(),
    "producer_id": pa.string(),
    "batch_sequence": pa.int64(),
    "place": pa.int32(),
    "logical_partition": pa.int32(),
    "is_bent": pa.bool_(),
    "entry": pa.int64(),
}
"""The types of all columns in `schema.COLUMNS` and `schema.MORE_COLUMNS`."""


def arrow_schema(schema: StructType | Sequence[str]) -> pa.Schema:
    """The schema of record batches with these columns, in this order. Raises InvalidArgument for an unknown column."""
    # StructType is not a Sequence. It is not imported here, because readers without Spark do not have it installed.
    nullable = dict.fromkeys(schema, True) if isinstance(schema, Sequence) else {each.name: each.nullable for each in schema.fields}
    unknown = [name for name in nullable if name not in TYPES]
    if unknown:
        raise InvalidArgument(f"the log has no column {unknown[0]!r}; columns: {', '.join(TYPES)}")
    return pa.schema([pa.field(name, TYPES[name], nullable=may_be) for name, may_be in nullable.items()])
