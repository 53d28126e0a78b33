"""Shared by the jobs about consumption: other datasets, the current queues, and joins of messages with ranges of sequences."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.job import checked_source, projection, source_options
from qmq.columns import options
from qmq.columns.model import Topology
from qmq.columns.reading import address_of, log_at, look
from qmq.errors import InvalidArgument
from qmq.text import whole_number

QUEUE: Final = ("subject", "partition", "broker_group")
"""The columns that identify a queue."""
_BLOCK_BITS: Final = 6
"""Ranges and messages are joined by blocks of 64 sequences: a range of one message is compared with 64 messages, a long one is split."""
_BROADCAST_ROWS_MAX: Final = 300_000


def read_dataset(spark: SparkSession, args: argparse.Namespace, name: str, *, path: Sequence[str] = ()) -> DataFrame:
    """Another dataset, from the log given by the common arguments or from other folders. Raises InvalidArgument."""
    found = {key: value for key, value in source_options(args).items() if key.startswith("qmq.")}
    if path:
        found = {"qmq.path": ",".join(path)} | {key: value for key, value in found.items() if key == "qmq.committed"}
    return spark.read.format("qmq").options(**found).option("qmq.log", name).load()


def read_subjects(
    spark: SparkSession, args: argparse.Namespace, columns: Sequence[str], subjects: Sequence[str], *, is_whole: bool = False
) -> DataFrame:
    """Messages of other subjects than the arguments name. `is_whole`: ignore the arguments' time range."""
    found = {key: value for key, value in source_options(args).items() if key not in ("subscribe", "subscribePattern")}
    if is_whole:
        found = {key: value for key, value in found.items() if key.startswith("qmq.")} | {"failOnDataLoss": "false"}
    found["subscribe"] = ",".join(subjects)
    return spark.read.format("qmq").schema(projection(columns)).options(**checked_source(found)).load()


def queues_now(args: argparse.Namespace) -> Topology:
    """The queues selected by the arguments. Raises InvalidArgument, UnknownSubject, NotConnected, LogDamaged."""
    asked = options.parse(checked_source(source_options(args)), is_stream=False)
    return look(log_at(address_of(asked.where)), asked.choice)


def covered(messages: DataFrame, ranges: DataFrame) -> DataFrame:
    """Join each message with each range that contains it.

    `ranges` are deliveries: a queue, `first_sequence`, `last_sequence`, and possibly logical partitions. `messages` have `sequence` and
    `logical_partition`. Only the blocks of ranges are exploded, never their messages.
    """
    blocks = F.sequence(F.shiftright("first_sequence", _BLOCK_BITS), F.shiftright("last_sequence", _BLOCK_BITS))
    cut = ranges.withColumn("block", F.explode(blocks))
    keyed = messages.withColumn("block", F.shiftright("sequence", _BLOCK_BITS))
    is_in = (F.col("sequence") >= F.col("first_sequence")) & (F.col("sequence") <= F.col("last_sequence"))
    is_meant = F.col("first_lp").isNull() | F.col("logical_partition").between(F.col("first_lp"), F.col("end_lp") - 1)
    if cut.count() <= _BROADCAST_ROWS_MAX:  # Spark cannot know that they are small.
        cut = F.broadcast(cut)
    return keyed.join(cut, [*QUEUE, "block"]).where(is_in & is_meant).drop("block")


def of_groups(rows: DataFrame, groups: Sequence[str], subjects: Sequence[str]) -> DataFrame:
    """Rows of these consumer groups (empty: all) and subjects."""
    found = rows.where(F.col("subject").isin(list(subjects)))
    return found.where(F.col("consumer_group").isin(list(groups))) if groups else found


def now_ms(args: argparse.Namespace, known: Iterable[int]) -> int:
    """The current time for brokers, or the newest time found in files. Milliseconds since 1970."""
    if args.servers and not args.path:
        return int(time.time() * 1000)
    return max(known, default=0)


def utc(time_ms: int) -> datetime:
    """A time in UTC for reports. Spark returns local times without a zone."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def positive(text: str) -> int:
    """For argparse: an integer of 1 or more."""
    found = whole_number(text, least=1)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return found


def not_negative(text: str) -> int:
    """For argparse: an integer of 0 or more."""
    found = whole_number(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return found


def require_groups(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise InvalidArgument if a named group was not found."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        known = ", ".join(sorted(set(found))) or "none"
        raise InvalidArgument(f"no group {missing[0]!r} has consumed these subjects within the action log; groups: {known}")
