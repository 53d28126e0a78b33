"""Makes schemas from short texts, without a JVM.

A real node in a separate thread, and a task's cluster: for tests of blocking code.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from pyspark_qmq.servers.server_address import ServerAddress
from pyspark_qmq.sink.cluster import SinkCluster
from pyspark_qmq.sink.options import Fields, SinkOptions
from pyspark_qmq.sink.row_identity import RowWriter
from pyspark_qmq.sink.write_task import Counts, WriteTask
from pyspark_qmq.source_model import ALL, QueuePiece, SourceBatch
from support import node_config, running

from qmq.client.metadata.service import MetadataClient
from qmq.errors import Unavailable
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.batch import BatchView

_KINDS: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "timestamp": TimestampType(),
    "array<string>": ArrayType(StringType()),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
}


def schema_of(text: str) -> StructType:
    """The schema of a text such as "body binary, key string"."""
    return StructType([StructField(name, _KINDS[kind]) for name, kind in re.findall(r"(\w+) ([\w<>,]+?)(?:, |$)", text)])


def fields_of(text: str, *, has_subject: bool = True) -> Fields:
    """The same as the sink sees it."""
    return Fields.of(schema_of(text), has_subject=has_subject)


_R = TypeVar("_R")
WRITER = RowWriter("query", 0)


class NodeThread:
    """The node, and the loop in which it lives."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self.node = node
        self.address = node.address
        self.loop = loop

    def run(self, act: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine in the node's loop."""
        return asyncio.run_coroutine_threadsafe(act, self.loop).result(180)

    def ask(self, act: Callable[[MetadataClient], Coroutine[Any, Any, _R]]) -> _R:
        """Call the metaserver."""

        async def asked() -> _R:
            metadata = MetadataClient([self.address])
            try:
                return await act(metadata)
            finally:
                await metadata.close()

        return self.run(asked())

    def create(self, name: str, *, partitions: int = 0) -> None:
        """Create a subject: an ordered one if `partitions` is given."""
        config = SubjectConfig(name, order=Order.STRICT, logical_partitions=64) if partitions else SubjectConfig(name)

        async def created(metadata: MetadataClient) -> None:
            while True:
                with suppress(Unavailable):  # on a busy machine the node may not run for longer than a call waits
                    await metadata.create_subject(config, partitions=partitions)
                    return

        self.ask(created)

    def split(self, name: str, partition: int) -> None:
        """Split a partition of an ordered subject in two."""
        self.ask(lambda metadata: metadata.change_route(name, split=pb.SplitOperation(partition=partition), reason="test"))

    def batches(self, subject: str) -> list[tuple[int, BatchView]]:
        """(partition, batch) of all committed batches."""
        log = ServerAddress(self.address, 10_000).open()
        try:
            queues = log.topology([subject]).queues
            return [
                (key.partition, view(each))
                for key, queue in queues.items()
                for each in log.read(QueuePiece(key, queue.start, queue.end), ALL, skips_lost=False)
            ]
        finally:
            log.close()

    def bodies(self, subject: str) -> list[bytes]:
        """All bodies, sorted."""
        return sorted(body for _, each in self.batches(subject) for body in each.bodies())

    def heads(self, subject: str, size: int) -> list[bytes]:
        """The first bytes of all bodies, sorted."""
        return [body[:size] for body in self.bodies(subject)]


def view(batch: SourceBatch) -> BatchView:
    return BatchView(batch.envelope, bytes(batch.region))


@contextmanager
def node_thread(data: Path, *, delay: bool = False, auto_create: bool = False) -> Iterator[NodeThread]:
    """A running node, until the block ends."""
    ready: list[NodeThread] = []
    is_up, is_over = threading.Event(), asyncio.Event()

    async def live() -> None:
        try:
            async with running(node_config(data, auto_create=auto_create, delay=delay)) as node:
                ready.append(NodeThread(node, asyncio.get_running_loop()))
                is_up.set()
                await is_over.wait()
        finally:
            is_up.set()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert is_up.wait(60)
    found = ready[0]
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(is_over.set)
        thread.join(60)


def record_batches(columns: dict[str, pa.Array], rows_max: int = 100) -> list[pa.RecordBatch]:
    """The record batches as Spark passes them."""
    return pa.table(columns).to_batches(max_chunksize=rows_max)


def write(cluster: Any, schema: str, batches: Iterable[pa.RecordBatch], *, writer: RowWriter = WRITER, **options: str) -> Counts:
    """Run one write task in this thread. Names of options come without `qmq.`."""
    names = {name if name in ("subject", "createSubject") else f"qmq.{name}": value for name, value in options.items()}
    asked = SinkOptions.parse({"qmq.servers": "unused:1", "qmq.batchMessages": "50", **names})
    return WriteTask(cluster, writer, fields_of(schema, has_subject=bool(asked.subject)), asked).run(batches)


__all__ = ["NodeThread", "SinkCluster", "node_thread", "record_batches", "write"]
