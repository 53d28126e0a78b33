"""The sink in Spark: repeated tasks, and a driver that is killed and restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter
from sink_node import NodeThread, node_thread
from support import eventually, forms

import qmq

HERE = Path(__file__).parent
FILES, LINES = (6, 1_000) if forms.FORM == "all" else (4, 500)
KILLED_AT = (5 / 4, 11 / 4, 18 / 4) if forms.FORM == "all" else (5 / 4,)
"""When a driver is killed: so many files' lines are stored."""
ROWS = 4_000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    with node_thread(tmp_path_factory.mktemp("node")) as found:
        yield found


def test_what_was_written_comes_back_by_a_read(spark: SparkSession, node: NodeThread) -> None:
    node.create("flights", partitions=2)
    rows = spark.range(3_000).select(
        f.col("id").cast("string").alias("body"),
        (f.col("id") % 7).cast("string").alias("key"),
        f.array(f.lit("a"), (f.col("id") % 2).cast("string")).alias("tags"),
        f.create_map(f.lit("n"), f.col("id").cast("string")).alias("headers"),
        f.timestamp_millis(f.col("id")).alias("create_time"),
    )
    rows.write.format("qmq").mode("append").option("qmq.servers", node.address).option(
        "subject", "flights"
    ).save()
    read = (
        spark.read.format("qmq")
        .option("qmq.servers", node.address)
        .option("subscribe", "flights")
        .option("includeHeaders", True)
        .load()
    )
    columns = [
        f.col("body").cast("string"),
        f.col("key").cast("string"),
        "tags",
        f.col("headers")["n"].cast("string"),
        "create_time",
    ]
    assert sorted(read.select(*columns).collect()) == sorted(rows.select(*columns).collect())
    assert read.select("message_id").distinct().count() == 3_000


def test_a_batch_that_is_written_again_under_its_txn_id_is_stored_once(
    spark: SparkSession, node: NodeThread
) -> None:
    node.create("loaded")
    rows = spark.range(0, 1_000, numPartitions=3).select(f.col("id").cast("string").alias("value"))
    writer = (
        rows.write.format("qmq")
        .mode("append")
        .option("qmq.servers", node.address)
        .option("topic", "loaded")
    )
    for _ in range(2):
        writer.option("qmq.txnId", "load-1").save()
    assert node.bodies("loaded") == sorted(b"%d" % row for row in range(1_000))


def test_a_batch_written_again_by_fewer_tasks_says_that_rows_may_be_there_twice(
    spark: SparkSession, node: NodeThread
) -> None:
    for subject, partitions in {"fewer": 0, "fewer-in-order": 2}.items():
        node.create(subject, partitions=partitions)
        rows = spark.range(0, 1_000, numPartitions=4).select(
            f.col("id").cast("string").alias("body"), f.lit("k").alias("key")
        )
        options = {"qmq.servers": node.address, "subject": subject, "qmq.txnId": "load-2"}
        rows.write.format("qmq").mode("append").options(**options).save()
        with pytest.raises(
            PySparkException, match=r"stored rows of Spark partition 1 in 'fewer.*perhaps twice"
        ):
            rows.coalesce(1).write.format("qmq").mode("append").options(**options).save()


def test_a_column_that_no_message_has_is_refused_before_anything_is_written(
    spark: SparkSession, node: NodeThread
) -> None:
    wrong = spark.range(1).select(f.lit("x").alias("body"), f.lit("k").alias("kye"))
    with pytest.raises((AnalysisException, PySparkException), match="did you mean 'key'"):
        wrong.write.format("qmq").mode("append").option("qmq.servers", node.address).option(
            "subject", "flights"
        ).save()


@pytest.mark.long
def test_a_stream_whose_checkpoint_is_put_back_ends_and_stores_nothing_twice(
    spark: SparkSession, node: NodeThread, tmp_path: Path
) -> None:
    node.create("in")
    node.create("out")
    checkpoint, older = tmp_path / "checkpoint", tmp_path / "older"

    def copy(messages: range) -> None:
        async def send() -> None:
            async with qmq.connect(node.address) as mq:
                await mq.send_many("in", [b"%03d" % number for number in messages])

        node.run(send())
        rows = (
            spark.readStream.format("qmq")
            .option("qmq.servers", node.address)
            .option("subscribe", "in")
        )
        writer = (
            rows.option("startingOffsets", "earliest")
            .load()
            .select("body")
            .writeStream.format("qmq")
        )
        writer = (
            writer.option("qmq.servers", node.address)
            .option("subject", "out")
            .option("checkpointLocation", str(checkpoint))
        )
        writer.trigger(availableNow=True).start().awaitTermination()

    copy(range(50))
    shutil.copytree(checkpoint, older)
    copy(range(50, 80))
    copy(range(80, 110))
    shutil.rmtree(checkpoint)
    shutil.copytree(older, checkpoint)
    with pytest.raises(PySparkException, match="the checkpoint is an older copy"):
        copy(range(110, 120))
    assert node.bodies("out") == [b"%03d" % number for number in range(110)]


@pytest.mark.long
def test_a_checkpoint_that_is_used_for_another_subject_ends_before_a_row_is_stored(
    spark: SparkSession, node: NodeThread, tmp_path: Path
) -> None:
    for subject in ("one-source", "right", "wrong"):
        node.create(subject)

    def copy(subject: str, *bodies: bytes) -> None:
        node.run(send_all(node, "one-source", bodies))
        write_stream(
            source(spark, node, "one-source").writeStream.format("qmq"),
            tmp_path,
            **{"qmq.servers": node.address, "subject": subject},
        )

    copy("right", b"a", b"b")
    with pytest.raises(PySparkException, match="its checkpoint belongs to 'right'"):
        copy("wrong", b"c")
    assert node.bodies("wrong") == []
    copy("right", b"d")
    assert node.bodies("right") == [b"a", b"b", b"c", b"d"]


@pytest.mark.long
def test_batches_of_foreach_batch_are_told_apart_under_one_txn_id(
    spark: SparkSession, node: NodeThread, tmp_path: Path
) -> None:
    node.create("ticks")
    node.create("ticked")

    def store(rows: DataFrame, _: int) -> None:
        options = {"qmq.servers": node.address, "subject": "ticked", "qmq.txnId": "ticks"}
        rows.write.format("qmq").mode("append").options(**options).save()

    def copy(folder: str, *bodies: bytes) -> None:
        node.run(send_all(node, "ticks", bodies))
        rows = source(spark, node, "ticks")
        write_stream(rows.writeStream.foreachBatch(store), tmp_path / folder)

    copy("first", b"tick")
    copy("first", b"tick")
    assert node.bodies("ticked") == [b"tick", b"tick"]
    for name in ("1", ".1.crc"):
        (tmp_path / "first" / "commits" / name).unlink()
    copy("first")
    assert node.bodies("ticked") == [b"tick", b"tick"], "a repeated batch is found"
    with pytest.raises(PySparkException, match="rows of later epochs are"):
        copy("second", b"tock")  # its batch 0 has what batches 0 and 1 of the first one had
    assert node.bodies("ticked") == [b"tick", b"tick"]


def source(spark: SparkSession, node: NodeThread, subject: str) -> DataFrame:
    """The bodies of a subject as a stream, from the beginning."""
    options = {"qmq.servers": node.address, "subscribe": subject, "startingOffsets": "earliest"}
    return spark.readStream.format("qmq").options(**options).load().select("body")


def write_stream(writer: DataStreamWriter, checkpoint: Path, **options: str) -> None:
    """All that is there now."""
    writer = writer.options(**options, checkpointLocation=str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


async def send_all(node: NodeThread, subject: str, bodies: Sequence[bytes]) -> None:
    async with qmq.connect(node.address) as mq:
        for body in bodies:
            await mq.send(subject, body)


@pytest.mark.long
@pytest.mark.xdist_group("drivers")
def test_tasks_that_fail_in_their_middle_leave_each_row_once_when_they_are_repeated(
    node: NodeThread,
) -> None:
    subjects = {"retried": 0, "retried-in-order": 3}
    for subject, partitions in subjects.items():
        node.create(subject, partitions=partitions)
    command = [
        sys.executable,
        "driver_programs.py",
        "retries",
        node.address,
        ",".join(subjects),
        str(ROWS),
    ]
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count(f"{ROWS} rows") == len(subjects), done.stderr[-3000:]
    assert ", 0 were stored already" not in done.stderr
    for subject in subjects:
        assert node.heads(subject, 6) == [b"%06d" % row for row in range(ROWS)]


@pytest.mark.long
@pytest.mark.xdist_group("drivers")
def test_a_stream_whose_driver_is_killed_leaves_each_row_once(
    node: NodeThread, tmp_path: Path
) -> None:
    node.create("killed")
    node.create("killed-in-order", partitions=2)
    lines = [[f"{number:02d}-{line:04d}" for line in range(LINES)] for number in range(FILES)]
    folder = tmp_path / "input"
    folder.mkdir()
    for number, each in enumerate(lines):
        (folder / f"{number}.txt").write_text("".join(f"{line}\n" for line in each))
    checkpoint = str(tmp_path / "checkpoint")
    command = [
        sys.executable,
        "driver_programs.py",
        "stream",
        node.address,
        str(folder),
        checkpoint,
        "killed,killed-in-order",
    ]
    for files in KILLED_AT:
        enough = int(LINES * files)
        driver = subprocess.Popen(
            command,
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        node.run(
            eventually(
                lambda enough=enough, driver=driver: (
                    stored(node) >= enough or driver.poll() is not None
                ),
                within_s=120,
            )
        )
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for subject, first in (("killed", 0), ("killed-in-order", 1)):
        assert node.heads(subject, 7) == [
            line.encode() for each in lines for line in each[first::2]
        ]


def stored(node: NodeThread) -> int:
    """Messages in subjects of streams that are killed, so far."""
    queues = list(node.node.store.queues.items())
    return sum(queue.next_sequence for (name, _), queue in queues if name.startswith(b"killed"))
