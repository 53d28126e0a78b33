"""Checks that each message has the logical partition of its key.

Spark has no CRC-32C function, so the driver hashes each distinct key, up to a limit. Beyond the limit, a key with two logical partitions is
still found by comparing its messages with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from qmq_ordering.hashing import logical_partition

from pyspark_qmq.jobs.order_rules import finding, violations

KEYS_MAX: Final = 1_000_000
"""Keys hashed by the driver; each needs about 100 bytes of memory."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The result of the check."""

    keys: int
    """The number of distinct keys."""
    hashed: int
    """The number of keys checked against the hash."""
    violations: DataFrame | None
    """The violations; None if there are none."""


def check_hashes(keyed: DataFrame, logical_partitions: int, keys_max: int = KEYS_MAX) -> Hashed:
    """Compare logical partitions with keys. `keyed`: messages with keys that are not bent, with `logical_partition`."""
    lps = F.min("logical_partition").alias("least"), F.max("logical_partition").alias("most")
    keys = keyed.groupBy("key").agg(*lps)
    chosen = keys.limit(keys_max + 1).toArrow()
    count = chosen.num_rows
    if count > keys_max:
        count = keys.count()
        is_sure = F.col("least") == F.col(
            "most"
        )  # Keys with two logical partitions must be wrong, so they are checked beyond the limit, too.
        chosen = keys.orderBy(is_sure).limit(keys_max).toArrow()
    wrong = _wrong(chosen, logical_partitions)
    hashed = min(count, keys_max)
    if not wrong:
        return Hashed(count, hashed, None)
    table = pa.table({"key": pa.array([key for key, _ in wrong], pa.binary()), "right": pa.array([lp for _, lp in wrong], pa.int32())})
    suspects = keyed.join(keyed.sparkSession.createDataFrame(table), "key")
    return Hashed(count, hashed, violations(suspects, finding("wrong_hash", F.col("logical_partition") != F.col("right"))))


def _wrong(keys: pa.Table, logical_partitions: int) -> list[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []
    for key, least, most in zip(*(keys.column(name).to_pylist() for name in ("key", "least", "most")), strict=True):
        right = logical_partition(key, logical_partitions)
        if least is not None and not least == right == most:
            found.append((key, right))
    return found
