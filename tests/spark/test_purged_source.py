"""A stream that has read everything continues after a purge of its source; one that has not says
what is gone. Without a JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from file_support import Traffic, checkpoint, mark
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType
from pyspark_qmq.stream import LogStreamReader
from sink_node import NodeThread, node_thread

import qmq
from qmq.columns.options import parse
from qmq.errors import MessagesExpired
from qmq.log.retention import drop, purge

Offset = dict[str, dict[str, int]]
BODY = StructType([StructField("body", BinaryType())])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    with node_thread(tmp_path_factory.mktemp("node")) as found:
        yield found


def driver(**options: str) -> LogStreamReader:
    found = LogStreamReader(
        parse({"startingOffsets": "earliest", "subscribe": "a", **options}, is_stream=True), BODY
    )
    found.stop()  # forgets what an earlier one knew
    return found


def micro_batch(reader: LogStreamReader, start: Offset) -> tuple[list[bytes], Offset]:
    """The bodies from an offset on, and the next offset."""
    end = reader.latestOffset(start, ReadAllAvailable())
    rows = [
        row
        for each in reader.partitions(start, end)
        for batch in reader.read(each)
        for row in batch["body"].to_pylist()
    ]
    return rows, end


def erase(traffic: Traffic, how: Callable[..., None]) -> None:
    """Purge or drop the queue, as the broker does."""
    queue = traffic.store.queue("a", 0)
    assert queue is not None
    how(traffic.store, queue)
    traffic.store.commit(traffic.store.index)


@pytest.mark.parametrize(("how", "has_checkpoint"), [(purge, False), (purge, True), (drop, False)])
def test_a_stream_from_files_that_has_read_everything_continues_after_an_erasure(
    traffic: Traffic, how: Callable[..., None], has_checkpoint: bool
) -> None:
    traffic.send("a", count=5)
    mark(traffic.store)
    living = driver(path=str(traffic.folder))
    rows, end = micro_batch(living, living.initialOffset())
    assert len(rows) == 5
    erase(traffic, how)
    traffic.send("a", count=3)
    mark(traffic.store)
    if has_checkpoint:
        checkpoint(traffic.store)
    assert len(micro_batch(living, end)[0]) == 3
    assert len(micro_batch(driver(path=str(traffic.folder)), end)[0]) == 3


def test_a_stream_from_brokers_that_has_read_everything_continues_after_a_purge(
    node: NodeThread,
) -> None:
    def send(*bodies: bytes) -> None:
        async def sent() -> None:
            async with qmq.connect(node.address) as mq:
                for body in bodies:
                    await mq.send("a", body)

        node.run(sent())

    node.create("a")
    send(b"1", b"2")
    options = {"qmq.servers": node.address}
    reader = driver(**options)
    rows, end = micro_batch(reader, reader.initialOffset())
    assert rows == [b"1", b"2"]
    node.ask(lambda metadata: metadata.purge_subject("a"))
    rows, behind = micro_batch(driver(**options), end)
    assert rows == []
    node.ask(lambda metadata: metadata.purge_subject("a"))
    send(b"3", b"4")
    assert micro_batch(driver(**options), end)[0] == [b"3", b"4"]
    assert micro_batch(driver(**options), behind)[0] == [b"3", b"4"]
    node.ask(lambda metadata: metadata.purge_subject("a"))
    send(b"5")
    reader = driver(**options)
    with pytest.raises(MessagesExpired, match="a purge"):
        micro_batch(reader, behind)
    reader.stop()
