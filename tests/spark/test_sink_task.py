"""A task of the sink against a real node: what it stores and finds, and what remains if it dies at
any step and is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark_qmq.sink.cluster import SinkCluster, look_up
from pyspark_qmq.sink.left_over import refuse_other_subject
from pyspark_qmq.sink.requests import Ask, Look, LookedUp, Where
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from pyspark_qmq.sink.write_task import Counts
from sink_node import NodeThread, node_thread, record_batches, write
from support import NodeProcess

from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.log import ServerAddress
from qmq.errors import AccessDenied, InvalidArgument, NotConnected, OrderMismatch, UnknownSubject
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

ROWS = 1_000
BODIES = [b"%04d" % row for row in range(ROWS)]
KEYS = [b"key%d" % (row % 37) for row in range(ROWS)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    with node_thread(tmp_path_factory.mktemp("node"), delay=True, auto_create=True) as found:
        yield found


@pytest.fixture
def cluster(node: NodeThread) -> Iterator[SinkCluster]:
    found = SinkCluster(node.address)
    yield found
    found.close()


class Crash(Exception):
    """Simulates the death of the process."""


class Mortal:
    """A cluster for a task that dies at its n-th step: before a question, before or after a
    request.
    """

    def __init__(self, cluster: SinkCluster, steps: int) -> None:
        self._cluster = cluster
        self.left = steps

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def logical_partitions(self, subject: str, *, creates: bool) -> int:
        return self._cluster.logical_partitions(subject, creates=creates)

    def answer(self, ask: Ask, writer: RowWriter) -> Where | LookedUp:
        self._step()
        return self._cluster.answer(ask, writer)

    def may_skip(self, writer: RowWriter, to: RowTarget) -> bool:
        return self._cluster.may_skip(writer, to)

    def take(self, to: RowTarget) -> BlockingConnection:
        channel = self._cluster.take(to)
        send = channel.send

        def mortal_send(kind: int, *buffers: Any, deadline_ms: int = 0) -> int:
            self._step()
            number = send(kind, *buffers, deadline_ms=deadline_ms)
            self._step()
            return number

        channel.send = mortal_send  # type: ignore[method-assign]
        return channel

    def give(self, to: RowTarget, channel: BlockingConnection) -> None:
        channel.close()

    def doubt(self, to: RowTarget) -> None:
        self._cluster.doubt(to)


def plain() -> list[pa.RecordBatch]:
    return record_batches({"body": pa.array(BODIES, pa.binary())})


def keyed() -> list[pa.RecordBatch]:
    return record_batches(
        {"body": pa.array(BODIES, pa.binary()), "key": pa.array(KEYS, pa.binary())}
    )


def test_another_epoch_and_another_partition_are_other_rows(
    node: NodeThread, cluster: SinkCluster
) -> None:
    node.create("epochs")
    for writer in (
        RowWriter("query", 0, 0),
        RowWriter("query", 0, 1),
        RowWriter("query", 1, 1),
        RowWriter("other", 1, 1),
        RowWriter("query", 0, 1 << 20),
    ):
        assert write(cluster, "body binary", plain(), writer=writer, subject="epochs").found == 0
    assert Counter(node.bodies("epochs")) == Counter(dict.fromkeys(BODIES, 5))
    ids = [each for _, batch in node.batches("epochs") for each in batch.message_ids() or []]
    assert len(set(ids)) == 5 * ROWS


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 21])
def test_a_task_that_dies_at_any_step_leaves_each_row_once(
    node: NodeThread, cluster: SinkCluster, steps: int
) -> None:
    subject = f"dies{steps}"
    node.create(subject)
    with pytest.raises(Crash):
        write(Mortal(cluster, steps), "body binary", plain(), subject=subject)
    write(cluster, "body binary", plain(), subject=subject)
    assert node.bodies(subject) == BODIES


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 21, 55])
@pytest.mark.parametrize("own_ids", [False, True])
def test_a_task_that_dies_at_any_step_leaves_each_row_once_in_order(
    node: NodeThread, cluster: SinkCluster, steps: int, own_ids: bool
) -> None:
    subject = f"ordered{steps}{own_ids}"
    node.create(subject, partitions=2)
    columns = {"body": pa.array(BODIES, pa.binary()), "key": pa.array(KEYS, pa.binary())}
    schema = "body binary, key binary"
    if own_ids:
        columns["message_id"] = pa.array([f"{row:032x}" for row in range(ROWS)])
        schema += ", message_id string"
    for epoch in range(2):
        writer = RowWriter("query", 0, epoch, has_own_ids=own_ids)
        with pytest.raises(Crash):
            write(
                Mortal(cluster, steps),
                schema,
                record_batches(columns),
                writer=writer,
                subject=subject,
            )
        node.split(subject, 1 + epoch)
        write(cluster, schema, record_batches(columns), writer=writer, subject=subject)
    assert Counter(node.bodies(subject)) == Counter(dict.fromkeys(BODIES, 2))
    assert_in_order(node, subject)


def assert_in_order(node: NodeThread, subject: str, times: int = 2) -> None:
    """Check each key's order over its partitions; later partitions have higher numbers."""
    lines: dict[bytes, list[bytes]] = {}
    for _, batch in sorted(
        node.batches(subject), key=lambda each: (each[0], each[1].base_sequence)
    ):
        for key, body in zip(batch.keys() or [], batch.bodies(), strict=True):
            lines.setdefault(key, []).append(body)
    for key, bodies in lines.items():
        mine = [body for body, its_key in zip(BODIES, KEYS, strict=True) if its_key == key]
        assert bodies == mine * times


@pytest.mark.parametrize("partitions", [0, 1])
def test_two_attempts_at_the_same_time_store_each_row_once_in_order(
    node: NodeThread, partitions: int
) -> None:
    subject = f"twice{partitions}"
    node.create(subject, partitions=partitions)

    def attempt(_: int) -> Counts:
        mine = SinkCluster(node.address)
        try:
            return write(
                mine, "body binary, key binary", keyed(), subject=subject, batchMessages="7"
            )
        finally:
            mine.close()

    with ThreadPoolExecutor(3) as pool:
        attempts = [pool.submit(attempt, each) for each in range(3)]
        if partitions:
            for partition in (1, 2, 3):
                node.split(subject, partition)
        for each in attempts:
            assert each.result().rows == ROWS
    assert node.bodies(subject) == BODIES
    if partitions:
        assert_in_order(node, subject, times=1)


@pytest.mark.parametrize("steps", [0, 2, 5, 9])
def test_delayed_rows_go_to_the_delay_group_once(
    node: NodeThread, cluster: SinkCluster, steps: int
) -> None:
    subject, delays = f"later{steps}", [None if row % 3 else 3_600_000 for row in range(ROWS)]
    node.create(subject, partitions=2 if steps == 9 else 0)
    batches = record_batches(
        {
            "body": pa.array(BODIES, pa.binary()),
            "key": pa.array(KEYS, pa.binary()),
            "delay_ms": pa.array(delays, pa.int64()),
        }
    )
    schema = "body binary, key binary, delay_ms bigint"
    with pytest.raises(Crash):
        write(Mortal(cluster, steps), schema, batches, subject=subject)
    write(cluster, schema, batches, subject=subject)
    assert node.bodies(subject) == [
        body for body, delay in zip(BODIES, delays, strict=True) if delay is None
    ]
    assert pending(node, subject) == [
        body for body, delay in zip(BODIES, delays, strict=True) if delay is not None
    ]


def pending(node: NodeThread, subject: str) -> list[bytes]:
    """The pending messages of a subject at the delay group."""
    assert node.node.delay is not None
    store = node.node.delay.broker.store
    queue = store.queue(subject, 0)
    assert queue is not None

    async def read() -> list[bytes]:
        from qmq.wire.batch import BatchView

        found = []
        for _, entry in queue.index.scan(queue.index.first):
            envelope, region = store.read(queue, entry)
            found += BatchView.parse(envelope + region).bodies()
        return sorted(found)

    return node.run(read())


def test_rows_find_their_own_subjects(node: NodeThread, cluster: SinkCluster) -> None:
    for name in ("one", "two"):
        node.create(name)
    names = ["one" if row % 3 else None for row in range(ROWS)]
    batches = record_batches({"body": pa.array(BODIES, pa.binary()), "subject": pa.array(names)})
    write(cluster, "body binary, subject string", batches, subject="two")
    assert node.bodies("one") == [body for row, body in enumerate(BODIES) if row % 3]
    assert node.bodies("two") == [body for row, body in enumerate(BODIES) if not row % 3]


def test_an_unknown_subject_is_refused_or_created(node: NodeThread, cluster: SinkCluster) -> None:
    with pytest.raises(UnknownSubject, match="nowhere"):
        write(cluster, "body binary", plain(), subject="nowhere", createSubject="false")
    write(cluster, "body binary", plain(), subject="nowhere")
    assert node.bodies("nowhere") == BODIES


def test_rows_without_keys_are_refused_by_an_ordered_subject(
    node: NodeThread, cluster: SinkCluster
) -> None:
    node.create("keyless", partitions=2)
    with pytest.raises(OrderMismatch, match="column `key`"):
        write(cluster, "body binary", plain(), subject="keyless")


def test_rows_that_changed_between_two_attempts_are_noticed(
    node: NodeThread, cluster: SinkCluster
) -> None:
    node.create("changed")
    node.create("unchanged")
    for wanted in (["changed", "unchanged"], ["unchanged", "changed"]):
        names = wanted * (ROWS // 2)
        batches = record_batches(
            {"body": pa.array(BODIES, pa.binary()), "subject": pa.array(names)}
        )
        if wanted[0] == "changed":
            write(cluster, "body binary, subject string", batches)
            continue
        with pytest.raises(InvalidArgument, match="not deterministic"):
            write(cluster, "body binary, subject string", batches)


Columns = dict[str, tuple[str, list[Any]]]
KINDS: dict[str, Columns] = {
    "plain": {},
    "ordered": {"key": ("binary", KEYS)},
    "own-ids": {"message_id": ("string", [f"{row:032x}" for row in range(ROWS)])},
    "ordered-own-ids": {
        "key": ("binary", KEYS),
        "message_id": ("string", [f"{row:032x}" for row in range(ROWS)]),
    },
    "delayed": {"delay_ms": ("bigint", [3_600_000] * ROWS)},
}
TYPES = {"binary": pa.binary(), "string": pa.string(), "bigint": pa.int64()}


@pytest.mark.parametrize(
    "moved", [range(500), range(100, 900), range(20, ROWS)], ids=["shorter", "moved", "front-lost"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_repetition_with_other_rows_than_those_stored_is_refused(
    node: NodeThread, cluster: SinkCluster, kind: str, moved: range
) -> None:
    subject, own_ids = f"refused-{kind}-{moved.start}", "own-ids" in kind
    node.create(subject, partitions=2 if kind.startswith("ordered") else 0)
    columns = {"body": ("binary", BODIES), **KINDS[kind]}
    schema, writer = (
        ", ".join(f"{name} {each[0]}" for name, each in columns.items()),
        RowWriter("query", 0, has_own_ids=own_ids),
    )

    def rows(which: range) -> list[pa.RecordBatch]:
        return record_batches(
            {
                name: pa.array([values[at] for at in which], TYPES[kind])
                for name, (kind, values) in columns.items()
            }
        )

    assert (
        write(
            cluster, schema, rows(range(700)), writer=writer, subject=subject, batchMessages="30"
        ).rows
        == 700
    )
    with pytest.raises(InvalidArgument, match="an earlier attempt of this epoch stored row"):
        write(cluster, schema, rows(moved), writer=writer, subject=subject, batchMessages="30")
    assert (
        write(
            cluster, schema, rows(range(ROWS)), writer=writer, subject=subject, batchMessages="70"
        ).found
        >= 700
    ), "the same plan"
    assert (pending(node, subject) if kind == "delayed" else node.bodies(subject)) == BODIES


@pytest.mark.parametrize("kind", ["plain", "ordered", "own-ids", "delayed"])
def test_an_older_checkpoint_is_refused_unless_its_epochs_have_the_same_rows(
    node: NodeThread, cluster: SinkCluster, kind: str
) -> None:
    subject = f"put-back-{kind}"
    node.create(subject, partitions=2 if kind == "ordered" else 0)
    columns = {"body": ("binary", BODIES), **KINDS[kind]}
    schema = ", ".join(f"{name} {each[0]}" for name, each in columns.items())

    def epoch(number: int, which: range) -> Counts:
        rows = record_batches(
            {
                name: pa.array([values[at] for at in which], TYPES[of])
                for name, (of, values) in columns.items()
            }
        )
        writer = RowWriter("query", 0, number, has_own_ids=kind == "own-ids")
        return write(cluster, schema, rows, writer=writer, subject=subject, batchMessages="30")

    for number in range(4):
        epoch(number, range(number * 100, number * 100 + 100))
    assert epoch(1, range(100, 200)).found == 100, "the same rows"
    with pytest.raises(InvalidArgument, match="the checkpoint is an older copy"):
        epoch(1, range(100, 400))
    assert (pending(node, subject) if kind == "delayed" else node.bodies(subject)) == BODIES[:400]


def test_a_sink_that_must_not_browse_knows_stored_rows_by_their_numbers() -> None:
    writer = RowWriter("query", 0, 2)

    def call(kind: int, payload: bytes) -> memoryview:
        if kind == FrameKind.FETCH:
            raise AccessDenied("may not browse")
        before = wire.Find.unpack(memoryview(payload)).before
        return memoryview(
            wire.FoundBatches(
                [[writer.number_of(7), 70, 3]] if before > writer.number_of(7) else []
            ).pack()
        )

    found = look_up(Look(RowTarget("s", 0, "g1")), writer, call)
    assert {first: prints.tolist() for first, prints in found.runs.items()} == {7: [0, 0, 0]}


def test_a_cluster_that_is_away_fails_the_task_when_its_patience_ends() -> None:
    nowhere = SinkCluster("127.0.0.1:1")
    with pytest.raises(NotConnected):
        write(nowhere, "body binary", plain(), subject="s", retryMs="100")
    nowhere.close()


@pytest.mark.sampled
def test_a_broker_that_is_killed_in_the_middle_and_comes_back_gets_each_row_once(
    tmp_path: Path,
) -> None:
    node = NodeProcess(tmp_path / "node")
    node.start()
    ports = (
        "--port",
        node.address.rpartition(":")[2],
        "--data-port",
        node.data_address.rpartition(":")[2],
    )
    node.kill()
    node.options = ports

    def rows() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(plain()):
            if at in (3, 6):
                node.kill()
                node.start()
            yield batch

    cluster = SinkCluster(node.address)
    try:
        node.start()
        assert write(cluster, "body binary", rows(), subject="killed").rows == ROWS
        again = write(cluster, "body binary", plain(), subject="killed")
        assert (again.batches, again.found) == (0, ROWS)
        log = ServerAddress(node.address).open()
        assert sum(queue.end for queue in log.topology(["killed"]).queues.values()) == ROWS
        log.close()
    finally:
        cluster.close()
        node.kill()


# --- what is there of other epochs, and elsewhere -------------------------------------------------


@pytest.mark.parametrize("partitions", [0, 2])
def test_a_task_without_later_rows_of_its_own_sees_those_of_other_tasks(
    node: NodeThread, cluster: SinkCluster, partitions: int
) -> None:
    subject = f"older{partitions}"
    node.create(subject, partitions=partitions)
    options = {"schema": "body binary, key binary", "subject": subject}
    for epoch in (0, 1):
        write(cluster, batches=keyed(), writer=RowWriter("query", 0, epoch), **options)
    again = write(
        cluster, batches=keyed(), writer=RowWriter("query", 0, 0), may_repeat=True, **options
    )
    assert again.found == ROWS
    with pytest.raises(InvalidArgument, match="the checkpoint is an older copy"):
        write(cluster, batches=keyed(), writer=RowWriter("query", 5, 0), may_repeat=True, **options)
    assert len(node.bodies(subject)) == 2 * ROWS
    write(cluster, batches=keyed(), writer=RowWriter("query", 5, 1), may_repeat=True, **options)
    assert len(node.bodies(subject)) == 3 * ROWS


@pytest.mark.parametrize("partitions", [0, 2])
def test_a_query_whose_rows_are_in_another_subject_alone_is_refused(
    node: NodeThread, cluster: SinkCluster, partitions: int
) -> None:
    first, second = f"first{partitions}", f"second{partitions}"
    for subject in (first, second):
        node.create(subject, partitions=partitions)

    def begin(subject: str, query: str, *, may_delay: bool = False) -> None:
        refuse_other_subject(
            cluster.answer,
            cluster.answer,
            RowWriter(query, 3, 2),
            subject,
            cluster.subjects,
            may_delay=may_delay,
        )

    schema, writer = "body binary, key binary", RowWriter(f"moved{partitions}", 1, 1)
    write(cluster, schema, keyed(), writer=writer, subject=first)
    begin(first, writer.name)
    begin(second, "a query without rows", may_delay=True)
    with pytest.raises(InvalidArgument, match=f"its checkpoint belongs to '{first}'"):
        begin(second, writer.name)
    write(cluster, schema, keyed(), writer=writer, subject=second)
    begin(second, writer.name)
