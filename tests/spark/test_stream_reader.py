"""Streams by a real Spark from a real node: offsets, admission, restarts, route changes,
retention.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import change_route, create_ordered, send, send_ordered, until_in_files
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark_qmq.stream import lag
from support import NodeProcess

from qmq.proto.v1 import meta_pb2 as pb


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for all of these tests; each has its own subjects."""
    found = NodeProcess(tmp_path_factory.mktemp("node"))
    found.start()
    yield found
    found.kill()


def text_of(value: Any) -> str:
    return "" if value is None else bytes(value).decode()


class Stream:
    """A query over a subject that keeps what each micro-batch gave, and can be run again and again
    from its checkpoint.
    """

    def __init__(
        self, spark: SparkSession, server: str, folder: Path, subject: str, **options: Any
    ) -> None:
        self.folder = folder
        self.batches: dict[int, list[tuple[int, int, str, str]]] = {}
        self.raises_in: int | None = None
        self.after_batch: dict[int, Callable[[], None]] = {}
        """What happens in the driver right after a micro-batch's rows were kept."""
        given = {"subscribe": subject, "startingOffsets": "earliest", **options}
        if "subscribePattern" in given:
            del given["subscribe"]
        if "startingTimestamp" in given:
            del given["startingOffsets"]
        self.frame = (
            spark.readStream.format("qmq").option("qmq.servers", server).options(**given).load()
        )

    def start(self, **trigger: Any) -> StreamingQuery:
        """Run until it is stopped, or as the trigger says."""
        writer = self.frame.writeStream.foreachBatch(self._keep)
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self) -> StreamingQuery:
        """Run until the stream has returned everything."""
        query = self.start(availableNow=True)
        query.awaitTermination()
        return query

    def _keep(self, frame: DataFrame, number: int) -> None:
        rows = frame.select("partition", "sequence", "key", "body").collect()
        self.batches[number] = [(row[0], row[1], text_of(row[2]), text_of(row[3])) for row in rows]
        if number == self.raises_in:
            raise RuntimeError("injected")
        self.after_batch.get(number, lambda: None)()

    @property
    def all(self) -> list[str]:
        """Bodies of all micro-batches, sorted."""
        return sorted(row[3] for rows in self.batches.values() for row in rows)

    def offsets(self, number: int) -> Any:
        """The offsets in the checkpoint of a micro-batch."""
        found = json.loads(
            (self.folder / "checkpoint" / "offsets" / str(number)).read_text().splitlines()[-1]
        )
        assert all(queues.pop("messagesPerTask") > 0 for queues in found.values()), (
            "of an unordered subject: where it was cut into tasks"
        )
        return found


def test_a_stream_continues_where_its_checkpoint_ends_and_gives_each_message_once(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "goes-on", [f"{number:04}" for number in range(100)])
    stream = Stream(spark, node.address, tmp_path, "goes-on")
    stream.run()
    send(node.address, "goes-on", [f"{number:04}" for number in range(100, 150)])
    stream.run()
    assert stream.all == [f"{number:04}" for number in range(150)]
    assert stream.offsets(0) == {"goes-on": {"0@broker-0": 100}}
    assert stream.offsets(1) == {"goes-on": {"0@broker-0": 150}}


def test_a_trigger_takes_no_more_than_it_may_and_available_now_comes_to_an_end(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "limited", [f"{number:04}" for number in range(100)])
    stream = Stream(spark, node.address, tmp_path, "limited", maxOffsetsPerTrigger="30")
    progress = stream.run().recentProgress
    assert [len(rows) for rows in stream.batches.values()] == [30, 30, 30, 10]
    assert json.loads(progress[0]["sources"][0]["latestOffset"]) == {"limited": {"0@broker-0": 100}}
    assert [lag(each) for each in progress if each["numInputRows"]] == [70, 40, 10, 0], (
        "what is there and was not read yet"
    )


def test_a_micro_batch_that_failed_is_repeated_row_for_row(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "again", [f"{number:04}" for number in range(50)])
    stream = Stream(spark, node.address, tmp_path, "again")
    stream.raises_in = 0
    with pytest.raises(Exception, match="injected"):
        stream.run()
    before, stream.raises_in = stream.batches[0], None
    send(node.address, "again", ["came later"])
    stream.run()
    assert stream.batches[0] == before
    assert stream.batches[1] == [(0, 50, "", "came later")]


def test_a_stream_follows_splits_merges_and_moves_and_each_key_stays_in_order(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    create_ordered(node.address, "follows", partitions=1)
    sent = 0

    def more(count: int) -> None:
        nonlocal sent
        send_ordered(
            node.address,
            "follows",
            [(f"k{number % 11}", f"{number:05}") for number in range(sent, sent + count)],
        )
        sent += count

    more(300)
    stream = Stream(spark, node.address, tmp_path, "follows", maxOffsetsPerTrigger="200")
    stream.run()
    change_route(node.address, "follows", split=pb.SplitOperation(partition=1, at=[300, 700]))
    more(300)
    change_route(node.address, "follows", merge=pb.MergeOperation(partitions=[2, 3]))
    change_route(node.address, "follows", split=pb.SplitOperation(partition=4, at=[900]))
    more(300)
    stream.run()
    assert stream.all == [f"{number:05}" for number in range(sent)]
    newest: dict[str, str] = {}
    for number in sorted(stream.batches):
        for key in {row[2] for row in stream.batches[number]}:
            of_key = [row for row in stream.batches[number] if row[2] == key]
            assert len({row[0] for row in of_key}) == 1, "of one partition"
            assert min(row[3] for row in of_key) > newest.get(key, "")
            newest[key] = max(row[3] for row in of_key)


def keys_in_order(batches: dict[int, list[tuple[int, int, str, str]]]) -> bool:
    """Whether the bodies of each key ascend, over micro-batches and by sequence."""
    newest: dict[str, str] = {}
    for number in sorted(batches):
        for key in {row[2] for row in batches[number]}:
            of_key = sorted(row for row in batches[number] if row[2] == key)
            texts = [row[3] for row in of_key]
            if texts != sorted(texts) or texts[0] <= newest.get(key, ""):
                return False
            newest[key] = texts[-1]
    return True


@pytest.mark.long
@pytest.mark.smoke
def test_available_now_ends_at_the_ends_of_its_start_though_routes_change(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    create_ordered(node.address, "under-way", partitions=2)
    sent = 0

    def more(count: int = 200) -> None:
        nonlocal sent
        pairs = [(f"k{number % 13}", f"{number:05}") for number in range(sent, sent + count)]
        send_ordered(node.address, "under-way", pairs)
        sent += count

    def split_and_send() -> None:
        change_route(node.address, "under-way", split=pb.SplitOperation(partition=1, at=[200]))
        more()

    def move_and_send() -> None:
        move = pb.MoveOperation(partition=3, broker_group="broker-0")
        change_route(node.address, "under-way", move=move)
        more()

    more()
    stream = Stream(spark, node.address, tmp_path, "under-way", maxOffsetsPerTrigger="80")
    stream.after_batch = {0: split_and_send}
    stream.run()
    assert stream.all == [f"{number:05}" for number in range(200)], "what was there at the start"
    change_route(node.address, "under-way", merge=pb.MergeOperation(partitions=[4, 2]))
    broken = max(stream.batches) + 2
    stream.after_batch, stream.raises_in = {broken - 1: move_and_send}, broken
    with pytest.raises(Exception, match="injected"):
        stream.run()
    before, stream.raises_in, stream.after_batch = stream.batches[broken], None, {}
    stream.run()
    assert stream.batches[broken] == before, "repeated with the routes of then"
    assert stream.all == [f"{number:05}" for number in range(sent)]
    assert keys_in_order(stream.batches)


@pytest.mark.long
@pytest.mark.smoke
def test_a_stream_waits_for_the_fewest_messages_that_a_trigger_may_take(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "enough", [f"{number:03}" for number in range(10)])
    stream = Stream(
        spark,
        node.address,
        tmp_path,
        "enough",
        minOffsetsPerTrigger="100",
        maxOffsetsPerTrigger="150",
        maxTriggerDelay="1d",
    )
    query = stream.start()
    try:
        query.processAllAvailable()
        assert stream.all == []
        send(node.address, "enough", [f"{number:03}" for number in range(10, 160)])
        query.processAllAvailable()
        assert [len(rows) for rows in stream.batches.values() if rows] == [150]
    finally:
        query.stop()
    stream.run()
    assert stream.all == [f"{number:03}" for number in range(160)], "AvailableNow takes the rest"


@pytest.mark.long
@pytest.mark.smoke
def test_options_select_subjects_keys_tags_and_times_of_a_stream(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    for subject in ("chosen.a", "chosen.b", "other"):
        send(node.address, subject, [f"old {subject}"], keys=["k1"], tags=[["x"]])
    old = (
        spark.read.format("qmq")
        .options(**{"qmq.servers": node.address, "subscribePattern": r"chosen\..|other"})
        .load()
        .agg(f.max(f.unix_millis("append_time")))
        .first()
    )
    assert old is not None
    start_ms = old[0] + 1
    while time.time_ns() // 1_000_000 < start_ms:
        pass
    for subject in ("chosen.a", "chosen.b", "other"):
        keys, tags = ["k1", "k2", "k1", "k3"], [["x"], ["x"], ["y"], ["x", "y"]]
        send(node.address, subject, [f"{at} {subject}" for at in range(4)], keys=keys, tags=tags)
    wanted = {
        "startingTimestamp": str(start_ms),
        "subscribePattern": r"chosen\..",
        "keys": "k1,k2",
        "tags": "x",
    }
    stream = Stream(spark, node.address, tmp_path, "", **wanted)
    stream.run()
    assert stream.all == ["0 chosen.a", "0 chosen.b", "1 chosen.a", "1 chosen.b"]


def test_a_stream_from_the_latest_gives_what_comes_behind_its_start(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "latest", ["old"])
    stream = Stream(spark, node.address, tmp_path, "latest", startingOffsets="latest")
    stream.run()
    send(node.address, "latest", ["new"])
    stream.run()
    assert stream.all == ["new"]


def test_a_subject_that_appears_later_is_read_from_its_beginning(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    send(node.address, "grows.a", ["1"])
    frame = (
        spark.readStream.format("qmq")
        .option("qmq.servers", node.address)
        .option("subscribePattern", r"grows\..")
        .option("startingOffsets", "earliest")
        .load()
    )
    stream = Stream(spark, node.address, tmp_path, "grows.a")
    stream.frame = frame
    stream.run()
    send(node.address, "grows.b", ["2"])
    stream.run()
    assert stream.all == ["1", "2"]


def test_an_ordered_stream_from_files_needs_to_know_the_routes(
    spark: SparkSession, node: NodeProcess, tmp_path: Path
) -> None:
    create_ordered(node.address, "routes")
    send_ordered(node.address, "routes", [("k", "1")])
    until_in_files(node.data, "routes", 1)
    query = (
        spark.readStream.format("qmq")
        .option("qmq.path", str(node.data))
        .option("subscribe", "routes")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match=r"qmq\.routes"):
        query.awaitTermination()
