"""Benchmarks of the data source: rows per second compared with Parquet and with tuples; the fixed cost of a micro-batch; the sink.

All cases share one Spark session. They alternate within a round, so that ratios stay valid if the machine's speed changes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import qmq
from bench.lake import drained_files
from bench.processes import Node, in_loop

SUBJECT: Final = "bench"
COLUMNS: Final = "sequence bigint, key binary, body binary, create_time timestamp"
"""The columns read by both sides in the narrow cases."""
COLUMN_NAMES: Final = ("sequence", "key", "body", "create_time")
KEYS: Final = 100_000
ROUNDS: Final = 3
PARTS: Final = 8


async def fill(address: str, count: int, size: int) -> None:
    """`count` messages of `size` bytes with keys, as the batching producer sends them."""
    async with qmq.connect(address) as mq:
        producer = mq.producer(SUBJECT)
        for at in range(count // 1000):
            blob = os.urandom(1000 * size)  # All bodies differ, because Parquet would store equal ones once.
            bodies = [blob[begin : begin + size] for begin in range(0, len(blob), size)]
            producer.send_many(bodies, keys=[f"key-{(at * 7919 + number) % KEYS:06d}" for number in range(1000)])
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()


class Rows(DataSource):
    """A data source that returns tuples, to measure the cost of rows instead of columns. Reads the broker's folder through QMQ's reader."""

    @classmethod
    def name(cls) -> str:
        return "qmq-tuples"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TupleReader(dict(self.options), schema)


class TupleReader(DataSourceReader):
    """Wraps QMQ's reader and yields each row as a tuple."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        from pyspark_qmq import options as parsed
        from pyspark_qmq.reader import LogReader

        self._reader = LogReader(parsed.parse(options, is_stream=False), schema)

    def partitions(self) -> list[InputPartition]:
        """The partitions of the wrapped reader."""
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for batch in self._reader.read(partition):
            yield from zip(*[column.to_pylist() for column in batch.columns], strict=True)


def noop(frame: DataFrame) -> None:
    """Read all rows and discard them."""
    frame.write.format("noop").mode("overwrite").save()


def timed(work: Callable[[], None]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def source(spark: SparkSession, count: int, size: int, *, with_servers: bool = True) -> dict[str, float]:
    """Rows per second of each way to read `count` messages of `size` bytes, and ratios within each round."""
    node = Node()
    folder = Path(tempfile.mkdtemp(prefix="qmq-spark-"))
    try:
        in_loop(fill, node.address, count, size)
        return _source(spark, node, folder, count, with_servers)
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _source(spark: SparkSession, node: Node, folder: Path, count: int, with_servers: bool) -> dict[str, float]:
    def log(columns: str = "", **more: str) -> DataFrame:
        reader = spark.read.format("qmq").option("subscribe", SUBJECT).options(**more)
        return (reader.schema(columns) if columns else reader).load()

    path, servers = {"qmq.path": str(node.data)}, {"qmq.servers": node.address}
    time.sleep(1.5)  # the commit mark is written once a second
    for codec in ("uncompressed", "zstd"):
        log(**path).write.option("compression", codec).parquet(str(folder / codec))

    def parquet(codec: str, columns: str = "") -> DataFrame:
        reader = spark.read
        return (reader.schema(columns) if columns else reader).parquet(str(folder / codec))

    spark.dataSource.register(Rows)
    cases: dict[str, Callable[[], DataFrame]] = {
        "files, all columns": lambda: log(**path),
        "parquet uncompressed, all columns": lambda: parquet("uncompressed"),
        "parquet zstd, all columns": lambda: parquet("zstd"),
        "files, 4 columns": lambda: log(COLUMNS, **path),
        "parquet uncompressed, 4 columns": lambda: parquet("uncompressed", COLUMNS),
        "parquet zstd, 4 columns": lambda: parquet("zstd", COLUMNS),
    }
    lake = drained_files({"qmq.path": str(node.data)}, str(folder), count)
    cases["lake files, all columns"] = lambda: spark.read.parquet(*lake)
    cases["lake files, 4 columns"] = lambda: spark.read.parquet(*lake).select(*COLUMN_NAMES)
    if with_servers:
        cases["brokers, all columns"] = lambda: log(**servers)
        cases["brokers, 4 columns"] = lambda: log(COLUMNS, **servers)
        with_lake = {**servers, "qmq.lake": f"sqlite:///{folder}/catalog.db"}
        cases["lake by the source, all columns"] = lambda: log(**with_lake)
        cases["lake by the source, 4 columns"] = lambda: log(COLUMNS, **with_lake)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name, make in cases.items():  # A warm-up that also checks that all rows are there.
        assert make().count() == count, name
    for _ in range(ROUNDS):
        for name, make in cases.items():
            times[name].append(timed(lambda make=make: noop(make())))
    few = {"startingOffsets": "earliest", "endingOffsets": f'{{"{SUBJECT}":{{"0":{min(count, 400_000)}}}}}'}
    tuples = [timed(lambda: noop(spark.read.format("qmq-tuples").schema(COLUMNS).options(subscribe=SUBJECT, **path, **few).load()))]
    columns = [timed(lambda: noop(log(COLUMNS, **path, **few)))]
    found = {f"{name}, rows/s": count / statistics.median(values) for name, values in times.items()}
    found["tuples, 4 columns, rows/s"] = min(count, 400_000) / statistics.median(tuples)
    found["files over tuples, ratio"] = statistics.median(tuples) / statistics.median(columns)
    for which in ("all columns", "4 columns"):
        for codec in ("uncompressed", "zstd"):
            pairs = zip(times[f"parquet {codec}, {which}"], times[f"files, {which}"], strict=True)
            found[f"files over parquet {codec}, {which}, ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
        for ours in ("files", *(["brokers"] if with_servers else [])):
            pairs = zip(times[f"{ours}, {which}"], times[f"lake files, {which}"], strict=True)
            found[f"lake files over {ours}, {which}, ratio"] = statistics.median(log_s / lake_s for log_s, lake_s in pairs)
        for other in ("brokers", "lake files") if with_servers else ():
            pairs = zip(times[f"{other}, {which}"], times[f"lake by the source, {which}"], strict=True)
            found[f"lake by the source over {other}, {which}, ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return found


def micro_batches(spark: SparkSession, batches: int = 60) -> dict[str, float]:
    """The time of a micro-batch of 100 rows, without pauses between triggers, in milliseconds."""
    node = Node()
    folder = Path(tempfile.mkdtemp(prefix="qmq-spark-"))
    try:
        in_loop(fill, node.address, (batches + 20) * 1000, 100)
        query = (
            spark.readStream.format("qmq")
            .option("qmq.servers", node.address)
            .option("subscribe", SUBJECT)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "1000")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = [each for each in query.recentProgress if each["numInputRows"]][10:]
        return {
            "trigger, ms": statistics.median(each["durationMs"]["triggerExecution"] for each in progress),
            "of which latestOffset, ms": statistics.median(each["durationMs"].get("latestOffset", 0) for each in progress),
            "of which addBatch, ms": statistics.median(each["durationMs"]["addBatch"] for each in progress),
        }
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def sink(spark: SparkSession, count: int, size: int) -> dict[str, float]:
    """Rows a second written to one broker, keys included."""
    node = Node()
    try:
        frame = spark.range(0, count, numPartitions=PARTS).selectExpr(
            "cast(id % 1000 as string) key", f"cast(lpad(cast(id as string), {size}, 'x') as binary) body"
        )
        frame.write.format("qmq").mode("append").option("qmq.servers", node.address).option("subject", SUBJECT).option(
            "createSubject", "true"
        ).save()
        computed = timed(lambda: noop(frame))
        took = timed(lambda: frame.write.format("qmq").mode("append").option("qmq.servers", node.address).option("subject", SUBJECT).save())
        return {"rows/s": count / took, "rows/s, without making the rows": count / max(took - computed, 1e-9)}
    finally:
        node.stop()


@cache
def session() -> SparkSession:
    """A session as users get it, with two cores and enough memory for large reads."""
    from pyspark_qmq.session import session as make

    folder = str(Path(__file__).parent)  # where Spark's Python processes find the data source of tuples
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    return make("qmq-bench", master="local[2]", conf={"spark.driver.memory": "4g", "spark.ui.enabled": "false"})
