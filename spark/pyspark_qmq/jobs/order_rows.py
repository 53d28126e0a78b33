"""Prepares the rows of an order audit: messages of one subject, joined with the routes' data about their partitions.

`--by` selects the source of the sending order:

    create_time    milliseconds since 1970 at which the message was passed to its producer
    header:NAME    an integer, as text, in a header that the application increments for each key
    json:FIELD     an integer in a body that is a JSON object; `a.b` is field b of the object in a
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
"""The columns of the log that every audit needs."""

_FIELD: Final = re.compile(r"[^.'\[\]$*]+(\.[^.'\[\]$*]+)*")


class By(NamedTuple):
    """The source of the sending order of a key's messages."""

    kind: str
    """create_time, header or json."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    @property
    def is_exact(self) -> bool:
        """Whether it is a number that increases with each message, rather than a time."""
        return self.kind != "create_time"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns needed in addition to COLUMNS."""
        return {"header": ("headers",), "json": ("body",)}.get(self.kind, ())

    def number(self) -> Column:
        """The number of a message; null if the message has none."""
        if self.kind == "header":
            return F.col("headers")[self.name].cast("string").try_cast("bigint")
        if self.kind == "json":
            steps = "".join(f"['{step}']" for step in self.name.split("."))
            return F.get_json_object(F.col("body").cast("string"), f"${steps}").try_cast("bigint")
        return F.unix_millis("create_time")


def parse_by(text: str) -> By:
    """Parse the value of `--by`. Raises InvalidArgument."""
    kind, colon, name = text.partition(":")
    if kind == "create_time" and not colon:
        return By(kind)
    if kind == "header" and name:
        return By(kind, name)
    if kind == "json" and _FIELD.fullmatch(name):
        return By(kind, name)
    raise InvalidArgument(f"--by {text!r} is not a source of order: write create_time, header:NAME or json:FIELD")


def prepare(messages: DataFrame, routes: Routes, by: By) -> DataFrame:
    """One row per message, with the columns that the audit uses.

    Added columns: version, first_lp, end_lp, home (the broker group) and sealed_at of its partition, all null if no route has the
    partition; `number`, by which the message is judged; `sender`, the producer in its id; is_carried, whether another producer stored it.
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
