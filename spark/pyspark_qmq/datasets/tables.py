"""The columns of the datasets, and their record batches.

All columns are nullable, as Spark requires. Times are milliseconds in the log and timestamps here.

`deliveries`: a row per range of sequences with the same outcome (deliveries.py lists the outcomes,
which are its `verdict`s)

    subject, partition, broker_group, consumer_group, consumer, first_sequence, last_sequence,
    attempt, pulled_time, settled_time (null: the current state), verdict, delay_ms; for ordered
    subjects first_lp, end_lp (only messages of these logical partitions; null: all); for parked
    messages key

`progress`: a row per second in which a group made progress on a queue (deliveries.py)

    subject, partition, broker_group, consumer_group, time, done_before, next_sequence, held,
    waiting, parked, expired, consumers

`schedules`: a row per delayed message in a delay group's files (schedules.py)

    subject, message_id, delay_group, due_time, append_time, create_time, state, bucket (when it
    begins), ordinal, is_recurring, is_directed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_qmq.datasets.deliveries import Delivery, GroupStanding
from qmq.errors import InvalidArgument

ROWS_MAX: Final = 16_384
"""Rows per record batch."""

DELIVERIES: Final[dict[str, DataType]] = {
    "subject": StringType(),
    "partition": IntegerType(),
    "broker_group": StringType(),
    "consumer_group": StringType(),
    "consumer": StringType(),
    "first_sequence": LongType(),
    "last_sequence": LongType(),
    "attempt": IntegerType(),
    "pulled_time": TimestampType(),
    "settled_time": TimestampType(),
    "verdict": StringType(),
    "delay_ms": LongType(),
    "first_lp": IntegerType(),
    "end_lp": IntegerType(),
    "key": BinaryType(),
}
PROGRESS: Final[dict[str, DataType]] = {
    "subject": StringType(),
    "partition": IntegerType(),
    "broker_group": StringType(),
    "consumer_group": StringType(),
    "time": TimestampType(),
    "done_before": LongType(),
    "next_sequence": LongType(),
    "held": LongType(),
    "waiting": LongType(),
    "parked": LongType(),
    "expired": LongType(),
    "consumers": IntegerType(),
}
SCHEDULES: Final[dict[str, DataType]] = {
    "subject": StringType(),
    "message_id": StringType(),
    "delay_group": StringType(),
    "due_time": TimestampType(),
    "append_time": TimestampType(),
    "create_time": TimestampType(),
    "state": StringType(),
    "bucket": TimestampType(),
    "ordinal": LongType(),
    "is_recurring": BooleanType(),
    "is_directed": BooleanType(),
}
COLUMNS: Final[dict[str, Mapping[str, DataType]]] = {
    "deliveries": DELIVERIES,
    "progress": PROGRESS,
    "schedules": SCHEDULES,
}
"""The schema of each dataset."""

_ARROW: Final[dict[type[DataType], pa.DataType]] = {
    BinaryType: pa.binary(),
    BooleanType: pa.bool_(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    StringType: pa.string(),
    TimestampType: pa.timestamp("us", tz="UTC"),
}
_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")


def struct(name: str) -> StructType:
    return StructType([StructField(column, kind, True) for column, kind in COLUMNS[name].items()])


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise InvalidArgument if the dataset lacks one of these columns."""
    for each in columns:
        if each not in COLUMNS[name]:
            raise InvalidArgument(
                f"{name} has no column {each!r}; columns: {', '.join(COLUMNS[name])}"
            )


def arrow_schema(name: str, columns: Sequence[str]) -> pa.Schema:
    """The schema of the dataset's record batches, exactly as Spark checks it."""
    return pa.schema(
        [pa.field(each, _ARROW[type(COLUMNS[name][each])], nullable=True) for each in columns]
    )


def record_batch(name: str, columns: Sequence[str], values: Mapping[str, Any]) -> pa.RecordBatch:
    """A record batch of these columns. `values`: lists, numpy arrays or Arrow arrays of equal
    length; times are milliseconds.
    """
    schema = arrow_schema(name, columns)
    return pa.RecordBatch.from_arrays(
        [_array(values[field.name], field.type) for field in schema], schema=schema
    )


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(_MILLISECONDS).cast(kind)
    return pa.array(values, kind)


def delivery_batches(
    broker_group: str, found: Iterable[Delivery], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Record batches of one broker group's deliveries, in order."""
    for rows in _chunks(found):
        keys, consumers, firsts, lasts, attempts, pulled, settled, fates, delays, lps, parked = zip(
            *rows, strict=True
        )
        yield record_batch(
            "deliveries",
            columns,
            {
                **_share_columns(broker_group, keys),
                "consumer": consumers,
                "first_sequence": firsts,
                "last_sequence": lasts,
                "attempt": attempts,
                "pulled_time": pulled,
                "settled_time": settled,
                "verdict": [str(each) for each in fates],
                "delay_ms": delays,
                "first_lp": [each and each.first for each in lps],
                "end_lp": [each and each.end for each in lps],
                "key": parked,
            },
        )


def progress_batches(
    broker_group: str, found: Iterable[GroupStanding], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Record batches of the groups' progress, in order of time."""
    for rows in _chunks(found):
        keys, times, done, following, held, waiting, parked, expired, consumers = zip(
            *rows, strict=True
        )
        yield record_batch(
            "progress",
            columns,
            {
                **_share_columns(broker_group, keys),
                "time": times,
                "done_before": done,
                "next_sequence": following,
                "held": held,
                "waiting": waiting,
                "parked": parked,
                "expired": expired,
                "consumers": consumers,
            },
        )


def _share_columns(broker_group: str, keys: Sequence[Any]) -> dict[str, list[Any]]:
    return {
        "subject": [each.subject for each in keys],
        "partition": [each.partition for each in keys],
        "broker_group": [broker_group] * len(keys),
        "consumer_group": [each.group for each in keys],
    }


def _chunks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(rows)
    while chunk := list(islice(rest, ROWS_MAX)):
        yield chunk
