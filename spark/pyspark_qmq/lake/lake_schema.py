"""The columns of a subject's table, and the name of the table. Pure."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pyspark_qmq.arrow_schema import TYPES

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
"""In the order of the table. `subject` is not among them: a table has one."""

_NULLABLE: Final = frozenset({"route_version", "logical_partition", "key"})

SCHEMA: Final = pa.schema([pa.field(name, TYPES[name], nullable=name in _NULLABLE) for name in COLUMNS])
"""The schema of the files, exactly."""

WITHOUT_BOUNDS: Final = ("body", "tags.element", "headers.key", "headers.value", "message_id")
"""Queries do not search by ranges of these columns, and their minima and maxima would take time and space in each file."""

ORDER: Final = ("logical_partition", "key", "route_version", "partition", "sequence")
"""How a compacted file is sorted: a key's messages lie together, in the order of the log."""


def table_name(subject: str) -> str:
    """The table of a subject. Engines take a dot for a level of the name, so it becomes an underscore."""
    return subject.replace(".", "_")
