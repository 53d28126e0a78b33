"""Spark's process of the comparison: `spark_job.py JARS` does what it is told on standard input, a
line of JSON for each command.

`JARS` is the class path of Spark's Kafka source, or "". All rows share one session, so that its JVM
is warm. A *way* names format, options, schema and columns of a read or write (`Way` in
spark_rows.py). Commands, and their answers:

* {"make": COUNT, "size": BYTES}: keep that many rows in memory. {"done": [COUNT, SUM]}
* {"read": WAY, "seconds": S, "at_least": TIMES}, and the same with "write": all rows, again until
  the time is over, and so often. {"done": [TIMES, SECONDS]}
* {"count": WAY}: how many rows are stored, and the sum of a hash of each key with its body.
  {"done": [COUNT, SUM]}

A command that fails answers {"failed": REASON}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark_qmq.session import session

MASTER: Final = "local[2]"
PARTS: Final = 8
KEYS: Final = 100_000
HASH_BYTES: Final = 64
SUM: Final = "coalesce(sum(pmod(xxhash64(key, body), 4294967296)), 0)"


class Job:
    def __init__(self, jars: str) -> None:
        conf = {
            "spark.driver.memory": "4g",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
        }
        self._spark = session(
            "qmq-peers",
            master=MASTER,
            conf=conf | ({"spark.driver.extraClassPath": f"{jars}/*"} if jars else {}),
        )
        self._rows: DataFrame | None = None

    def make(self, count: int, size: int) -> list[float]:
        if self._rows is not None:
            self._rows.unpersist(blocking=True)
        parts = ", ".join(
            f"sha2(concat(id, '-', {number}), 512)" for number in range(-(-size // HASH_BYTES))
        )
        self._rows = (
            self._spark.range(0, count, numPartitions=PARTS)
            .selectExpr(
                f"cast(concat('key-', lpad(pmod(id * 7919, {KEYS}), 6, '0')) as binary) key",
                f"substring(unhex(concat({parts})), 1, {size}) body",
                "id sequence",
                "timestamp_millis(1700000000000 + id) append_time",
            )
            .cache()
        )
        return summed(self._rows)

    def read(self, way: dict[str, Any], seconds: float, at_least: int) -> list[float]:
        return repeated(
            lambda: self._frame(way).write.format("noop").mode("overwrite").save(),
            seconds,
            at_least,
        )

    def write(self, way: dict[str, Any], seconds: float, at_least: int) -> list[float]:
        assert self._rows is not None
        rows = self._rows.selectExpr(*way["columns"])
        return repeated(
            lambda: (
                rows.write.format(way["format"]).mode("append").options(**way["options"]).save()
            ),
            seconds,
            at_least,
        )

    def count(self, way: dict[str, Any]) -> list[float]:
        return summed(self._frame(way))

    def _frame(self, way: dict[str, Any]) -> DataFrame:
        reader = self._spark.read.format(way["format"]).options(**way["options"])
        return (
            (reader.schema(way["schema"]) if way["schema"] else reader)
            .load()
            .selectExpr(*way["columns"])
        )


def summed(rows: DataFrame) -> list[float]:
    (found,) = rows.selectExpr("count(*)", SUM).collect()
    return list(found)


def repeated(work: Callable[[], None], seconds: float, at_least: int) -> list[float]:
    begin_s, times = time.monotonic(), 0
    while times < at_least or time.monotonic() - begin_s < seconds:
        work()
        times += 1
    return [times, time.monotonic() - begin_s]


def main() -> None:
    job = Job(*sys.argv[1:])
    for line in iter(sys.stdin.readline, ""):
        name, *_ = command = json.loads(line)
        try:
            answer: dict[str, object] = {"done": getattr(job, name)(command.pop(name), **command)}
        except Exception as failure:
            answer = {"failed": str(failure)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
