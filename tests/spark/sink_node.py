"""A simulated cluster: queues with a broker's rules, routes that change, connections that break,
brokers that lag.

Connections keep their order; a broker answers refusals immediately and successes after any delay;
messages on a broken connection may still arrive.

Makes schemas from short texts, without a JVM.

A real node in a separate thread, and a task's cluster: for tests of blocking code.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
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
from pyspark_qmq.sink.cluster import SinkCluster
from pyspark_qmq.sink.options import Fields, SinkOptions
from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.requests import Ask, Locate, LookedUp, Prints, Where
from pyspark_qmq.sink.row_distribution import SubjectCore
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from pyspark_qmq.sink.write_task import Counts, WriteTask
from qmq_ordering.routes import LpRange
from support import node_config, running

from qmq.client.metadata.service import MetadataClient
from qmq.columns.model import ALL, QueuePiece, RoutePartition, Routes, SourceBatch
from qmq.columns.servers.log import ServerAddress
from qmq.errors import (
    NotConnected,
    NumberTaken,
    OutOfSequence,
    Overloaded,
    QmqError,
    ReadOnly,
    RouteChanged,
    Unavailable,
)
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.batch import BatchView

LPS = 16
KEYS = 12


def contents_of(load: Load) -> Prints:
    """The fingerprints of rows: their messages, which the load carries as its chunk."""
    found: Prints = np.asarray(load.chunk, np.uint64)[load.rows] + np.uint64(1)
    return found


@dataclass
class Stored:
    producer_id: int
    number: int
    rows: list[tuple[int, int]]
    """(epoch, row) of each."""
    contents: Prints
    packet: object
    """Whose bytes these are: another packet of the same rows has other times."""


@dataclass
class Queue:
    """One queue's log, with its broker's rules for accepting batches."""

    batches: list[Stored] = field(default_factory=list)
    is_sealed: bool = False
    is_known: bool = True
    is_drained: bool = False
    kept: int = 0
    """Batches before this one were taken by retention."""

    def produce(self, producer_id: int, request: Request, *, is_ordered: bool) -> None:
        number, packet = request.number, request.packet
        mine = {each.number: each for each in self.batches if each.producer_id == producer_id}
        if number in mine:
            if not is_ordered and mine[number].packet is not packet:
                raise NumberTaken("other content")
            return
        if not self.is_known or self.is_sealed:
            raise RouteChanged("sealed, or not known here yet")
        if self.is_drained:
            raise ReadOnly("drained")
        if is_ordered and number != max(mine, default=-1) + 1:
            raise OutOfSequence(f"{number} of {mine}")
        self.batches.append(
            Stored(producer_id, number, request.rows, contents_of(packet.load), packet)
        )

    def of(self, producer_id: int) -> list[Stored]:
        return [each for each in self.batches if each.producer_id == producer_id]


@dataclass
class Request:
    packet: Packet
    attempt: int
    number: int
    rows: list[tuple[int, int]]
    writer: RowWriter


class Cluster:
    """Queues by target, and the routes of one ordered subject."""

    def __init__(self, random_: random.Random, groups: list[str], *, is_ordered: bool) -> None:
        self.random = random_
        self.groups = groups
        self.is_ordered = is_ordered
        self.shows_later = True
        """Whether lookups say that there are rows of later epochs."""
        self.queues: dict[RowTarget, Queue] = {}
        self.routes: list[Routes] = []
        self.ghosts: list[Request] = []
        self.sealing: tuple[list[int], list[RoutePartition]] | None = None
        if is_ordered:
            first = RoutePartition(1, LpRange(0, LPS // 2), groups[0], 1)
            second = RoutePartition(2, LpRange(LPS // 2, LPS), groups[-1], 1)
            self.routes.append(Routes(LPS, 1, {1: first, 2: second}))

    def queue(self, target: RowTarget) -> Queue:
        return self.queues.setdefault(target, Queue())

    # --- routes -----------------------------------------------------------------------------------

    def open_parts(self) -> list[RoutePartition]:
        parts = self.routes[-1].partitions
        closed = {source for part in parts.values() for source in part.sources}
        return sorted(
            (part for part in parts.values() if part.number not in closed),
            key=lambda part: part.lps.first,
        )

    def change(self) -> None:
        """A step of a change: prepare one, seal a source of it, or publish it."""
        if self.sealing is None:
            self.sealing = self._prepared()
            return
        sources, targets = self.sealing
        parts = self.routes[-1].partitions
        unsealed = [number for number in sources if not self._part_queue(parts[number]).is_sealed]
        if unsealed:
            self._part_queue(parts[self.random.choice(unsealed)]).is_sealed = True
            return
        version = self.routes[-1].version + 1
        for part in targets:
            self._part_queue(part).is_known = self.random.random() < 0.6
        self.routes.append(
            Routes(LPS, version, {**parts, **{part.number: part for part in targets}})
        )
        self.sealing = None

    def _part_queue(self, part: RoutePartition) -> Queue:
        return self.queue(RowTarget("s", part.number, part.broker_group))

    def _prepared(self) -> tuple[list[int], list[RoutePartition]]:
        parts = self.open_parts()
        number, version = max(self.routes[-1].partitions) + 1, self.routes[-1].version + 1
        at = self.random.randrange(len(parts))
        part = parts[at]
        if self.random.random() < 0.4 and at + 1 < len(parts):
            other = parts[at + 1]
            merged = LpRange(part.lps.first, other.lps.end)
            return [part.number, other.number], [
                self._new(number, merged, version, (part.number, other.number))
            ]
        if part.lps.width > 1 and self.random.random() < 0.8:
            middle = self.random.randrange(part.lps.first + 1, part.lps.end)
            ranges = [LpRange(part.lps.first, middle), LpRange(middle, part.lps.end)]
            return [part.number], [
                self._new(number + i, lps, version, (part.number,)) for i, lps in enumerate(ranges)
            ]
        return [part.number], [self._new(number, part.lps, version, (part.number,))]

    def _new(
        self, number: int, lps: LpRange, version: int, sources: tuple[int, ...]
    ) -> RoutePartition:
        return RoutePartition(number, lps, self.random.choice(self.groups), version, sources)

    def hear(self) -> None:
        """Tell brokers of new partitions, or change which groups are drained."""
        for queue in self.queues.values():
            queue.is_known = True

    # --- what attempts ask ------------------------------------------------------------------------

    def ask(self, ask: Ask, writer: RowWriter) -> Where | LookedUp:
        """Raises NotConnected."""
        if self.random.random() < 0.1:
            raise NotConnected("away")
        if isinstance(ask, Locate):
            if self.is_ordered:
                return (
                    self.routes[-1]
                    if self.random.random() < 0.7
                    else self.random.choice(self.routes)
                )
            return {
                group: not self.queue(RowTarget("s", 0, group)).is_drained for group in self.groups
            }
        queue = self.queue(ask.target)
        if ask.is_final and not queue.is_sealed:
            raise NotConnected("not sealed there yet")
        mine = queue.of(writer.producer_id(ask.target))
        if not self.is_ordered:
            begin, end = writer.numbers_begin, writer.numbers_end
            runs = {
                each.number - begin: each.contents for each in mine if begin <= each.number < end
            }
            return LookedUp(
                runs=runs, has_later=self.shows_later and any(each.number >= end for each in mine)
            )
        number = max([each.number for each in mine], default=-1) + 1
        rows = {
            row: content
            for each in mine
            if each.number >= ask.from_number
            for (epoch, row), content in zip(each.rows, each.contents.tolist(), strict=True)
            if epoch == writer.epoch
        }
        prints = np.array([rows[row] for row in sorted(rows)], np.uint64)
        has_later = self.shows_later and any(
            epoch > writer.epoch for each in mine for epoch, _ in each.rows
        )
        return LookedUp(
            number, rows=np.array(sorted(rows), np.int64), prints=prints, has_later=has_later
        )

    def process(self, request: Request) -> QmqError | None:
        packet = request.packet
        try:
            if self.random.random() < 0.05:
                raise Overloaded("too much")
            producer_id = request.writer.producer_id(packet.to)
            self.queue(packet.to).produce(producer_id, request, is_ordered=self.is_ordered)
        except QmqError as failure:
            return failure
        return None


class Attempt:
    """A task's attempt: a core, and its connection to each broker group."""

    def __init__(
        self, cluster: Cluster, core: SubjectCore, writer: RowWriter, loads: list[Load]
    ) -> None:
        self.cluster, self.core, self.writer = cluster, core, writer
        self.loads = list(loads)
        self.asked: dict[str, list[Request]] = {}
        self.answers: dict[str, list[tuple[Request, QmqError | None]]] = {}
        self.now = 0.0

    @property
    def is_done(self) -> bool:
        return not self.loads and self.core.is_idle

    def step(self) -> None:
        """One possible step of the attempt."""
        chance = self.cluster.random
        self.now += chance.random()
        moves: list[Callable[[], None]] = [
            self._send,
            self._send,
            self._serve,
            self._serve,
            self._deliver,
            self._deliver,
            self._ask,
        ]
        if self.loads and self.core.pending_bytes < 40:
            moves.append(lambda: self.core.put(self.loads.pop(0)))
        if chance.random() < 0.03:
            moves = [self._break]
        chance.choice(moves)()

    def _ask(self) -> None:
        for ask in self.core.asks(self.now):
            try:
                found = self.cluster.ask(ask, self.writer)
            except QmqError as failure:
                self.core.failed(failure, self.now)
                return
            if isinstance(ask, Locate):
                self.core.located(found, self.now)  # type: ignore[arg-type]
            else:
                self.core.looked(ask.target, found, self.now)  # type: ignore[arg-type]

    def _send(self) -> None:
        packet = self.core.next(self.now)
        if packet is not None:
            rows = [(self.writer.epoch, row) for row in packet.load.rows.tolist()]
            request = Request(packet, packet.attempts, packet.number, rows, self.writer)
            self.asked.setdefault(packet.to.broker_group, []).append(request)

    def _serve(self) -> None:
        groups = [group for group, asked in self.asked.items() if asked]
        if groups:
            group = self.cluster.random.choice(groups)
            request = self.asked[group].pop(0)
            self.answers.setdefault(group, []).append((request, self.cluster.process(request)))

    def _deliver(self) -> None:
        groups = [group for group, answers in self.answers.items() if answers]
        if groups:
            answers = self.answers[self.cluster.random.choice(groups)]
            refusals = [at for at, (_, failure) in enumerate(answers) if failure is not None]
            at = refusals[0] if refusals and self.cluster.random.random() < 0.3 else 0
            request, failure = answers.pop(at)
            self.core.answered(request.packet, request.attempt, failure, self.now)

    def _break(self) -> None:
        group = self.cluster.random.choice(self.cluster.groups)
        self._lose(group)
        self.core.broken(group, NotConnected("broken"), self.now)

    def _lose(self, group: str) -> None:
        """Break the connection. A prefix of what was sent may still arrive later."""
        asked = self.asked.pop(group, [])
        self.answers.pop(group, None)
        self.cluster.ghosts += asked[: self.cluster.random.randrange(len(asked) + 1)]

    def die(self) -> None:
        for group in list(self.asked):
            self._lose(group)


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
    return StructType(
        [
            StructField(name, _KINDS[kind])
            for name, kind in re.findall(r"(\w+) ([\w<>,]+?)(?:, |$)", text)
        ]
    )


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
        config = (
            SubjectConfig(name, order=Order.STRICT, logical_partitions=64)
            if partitions
            else SubjectConfig(name)
        )

        async def created(metadata: MetadataClient) -> None:
            while True:
                # on a busy machine the node may not run for longer than a call waits
                with suppress(Unavailable):
                    await metadata.create_subject(config, partitions=partitions)
                    return

        self.ask(created)

    def split(self, name: str, partition: int) -> None:
        """Split a partition of an ordered subject in two."""
        self.ask(
            lambda metadata: metadata.change_route(
                name, split=pb.SplitOperation(partition=partition), reason="test"
            )
        )

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
def node_thread(
    data: Path, *, delay: bool = False, auto_create: bool = False
) -> Iterator[NodeThread]:
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


def write(
    cluster: Any,
    schema: str,
    batches: Iterable[pa.RecordBatch],
    *,
    writer: RowWriter = WRITER,
    may_repeat: bool = False,
    **options: str,
) -> Counts:
    """Run one write task in this thread. Names of options come without `qmq.`."""
    names = {
        name if name in ("subject", "createSubject") else f"qmq.{name}": value
        for name, value in options.items()
    }
    asked = SinkOptions.parse({"qmq.servers": "unused:1", "qmq.batchMessages": "50", **names})
    fields = fields_of(schema, has_subject=bool(asked.subject))
    return WriteTask(cluster, writer, fields, asked, may_repeat=may_repeat).run(batches)


__all__ = ["NodeThread", "SinkCluster", "node_thread", "record_batches", "write"]
