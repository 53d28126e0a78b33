"""The columns of a subject's table, and the name of the table. Pure."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pyspark_qmq.arrow_schema import TYPES
from pyspark_qmq.lake.typed_columns import arrow_type
from qmq.schemas.field_types import Struct

COLUMNS: Final = (
    "partition",
    "broker_group",
    "sequence",
    "route_version",
    "logical_partition",
    "key",
    "body",
    "tags",
    "headers",
    "message_id",
    "create_time",
    "append_time",
    "epoch",
)
"""The table's columns, in order. There is no column `subject`, because a table has one subject."""

_NULLABLE: Final = frozenset({"route_version", "logical_partition", "key"})

SCHEMA: Final = pa.schema([pa.field(name, TYPES[name], nullable=name in _NULLABLE) for name in COLUMNS])
"""The exact schema of the files."""

VALUE: Final = "value"
"""The column of a typed table that has the decoded body."""

REJECTED_SCHEMA: Final = pa.schema(
    [*SCHEMA, pa.field("reason", pa.string(), nullable=False), pa.field("schema_version", pa.int32(), nullable=False)]
)
"""The schema of the files with messages that do not fit their subject's schema."""


def typed_schema(struct: Struct) -> pa.Schema:
    """The schema of a typed table's files; that of an untyped table if there are no fields."""
    return pa.schema([*SCHEMA, pa.field(VALUE, arrow_type(struct))]) if struct.fields else SCHEMA


WITHOUT_BOUNDS: Final = ("body", "tags.element", "headers.key", "headers.value", "message_id")
"""Queries do not search by ranges of these columns, and their minima and maxima would take time and space in each file."""

ORDER: Final = ("logical_partition", "key", "route_version", "partition", "sequence")
"""How a compacted file is sorted: a key's messages lie together, in the order of the log."""


def table_name(subject: str, *, is_rejected: bool = False) -> str:
    """The table of a subject, or of its rejected messages. Engines take a dot for a level of the name, so it becomes an underscore."""
    return subject.replace(".", "_") + ("__rejected" if is_rejected else "")
