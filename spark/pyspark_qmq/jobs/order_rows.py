"""The rows that an order audit looks at: messages of one subject, with what the routes say of their partitions.

By what the audit judges the order of sending is said by `--by`:

    create_time    milliseconds since 1970, when the message was handed to its producer
    header:NAME    a whole number, as text, in a header: whoever sends counts for each key
    json:FIELD     a whole number in a body that is a JSON object; `a.b` is field b of the object in a
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.source_model import Routes
from qmq.errors import InvalidArgument

COLUMNS: Final = (
    "partition",
    "broker_group",
    "sequence",
    "key",
    "message_id",
    "create_time",
    "append_time",
    "producer_id",
    "batch_sequence",
    "place",
    "logical_partition",
    "is_bent",
    "entry",
)
"""What an audit needs of the log's columns in any case."""

_FIELD: Final = re.compile(r"[^.'\[\]$*]+(\.[^.'\[\]$*]+)*")


class By(NamedTuple):
    """What says in which order the messages of a key were sent."""

    kind: str
    """create_time, header or json."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    @property
    def is_exact(self) -> bool:
        """Whether it is a number that rises with each message, not a time."""
        return self.kind != "create_time"

    @property
    def columns(self) -> tuple[str, ...]:
        """What it needs besides COLUMNS."""
        return {"header": ("headers",), "json": ("body",)}.get(self.kind, ())

    def number(self) -> Column:
        """It, of a message; null if the message does not have it."""
        if self.kind == "header":
            return F.col("headers")[self.name].cast("string").try_cast("bigint")
        if self.kind == "json":
            steps = "".join(f"['{step}']" for step in self.name.split("."))
            return F.get_json_object(F.col("body").cast("string"), f"${steps}").try_cast("bigint")
        return F.unix_millis("create_time")


def parse_by(text: str) -> By:
    """Raises InvalidArgument."""
    kind, colon, name = text.partition(":")
    if kind == "create_time" and not colon:
        return By(kind)
    if kind == "header" and name:
        return By(kind, name)
    if kind == "json" and _FIELD.fullmatch(name):
        return By(kind, name)
    raise InvalidArgument(f"--by {text!r} says nothing about order: write create_time, header:NAME or json:FIELD")


def prepare(messages: DataFrame, routes: Routes, by: By) -> DataFrame:
    """One row for each message, with only what the audit uses.

    Added: version, first_lp, end_lp, home (the broker group) and sealed_at of its partition, all null in one that no route has; `number`,
    by which it is judged; `sender`, the producer that its id names; is_carried, whether that is another than the one that stored it.
    """
    sender = F.substring("message_id", 1, 16)
    rows = messages.select(
        F.when(F.length("key") > 0, F.col("key")).alias("key"),
        "partition",
        "broker_group",
        "sequence",
        "message_id",
        sender.alias("sender"),
        (sender != F.col("producer_id")).alias("is_carried"),
        "producer_id",
        "batch_sequence",
        "place",
        by.number().alias("number"),
        F.unix_millis("create_time").alias("create_ms"),
        F.unix_millis("append_time").alias("append_ms"),
        "logical_partition",
        F.coalesce("is_bent", F.lit(False)).alias("is_bent"),
        "entry",
    )
    return rows.join(F.broadcast(_partitions(messages.sparkSession, routes)), "partition", "left")


def _partitions(spark: SparkSession, routes: Routes) -> DataFrame:
    parts = sorted(routes.partitions.values(), key=lambda part: part.number)
    table = pa.table(
        {
            "partition": pa.array([part.number for part in parts], pa.int32()),
            "version": pa.array([part.version for part in parts], pa.int64()),
            "first_lp": pa.array([part.lps.first for part in parts], pa.int32()),
            "end_lp": pa.array([part.lps.end for part in parts], pa.int32()),
            "home": pa.array([part.broker_group for part in parts], pa.string()),
            "sealed_at": pa.array([routes.sealed_at.get(part.number) for part in parts], pa.int64()),
        }
    )
    return spark.createDataFrame(table)
