"""Makes schemas from short texts, without a JVM."""

from __future__ import annotations

import re

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from pyspark_qmq.sink.options import Fields

_KINDS: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "timestamp": TimestampType(),
    "array<string>": ArrayType(StringType()),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
}


def schema_of(text: str) -> StructType:
    """The schema of a text such as "body binary, key string"."""
    return StructType([StructField(name, _KINDS[kind]) for name, kind in re.findall(r"(\w+) ([\w<>,]+?)(?:, |$)", text)])


def fields_of(text: str, *, has_subject: bool = True) -> Fields:
    """The same as the sink sees it."""
    return Fields.of(schema_of(text), has_subject=has_subject)
