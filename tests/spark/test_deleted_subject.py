"""A stream whose subject is deleted: an error with numbers, or, with failOnDataLoss=false, the rest
until the subject is there again. A real node, without a JVM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from uuid import uuid4

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType
from pyspark_qmq import stream
from pyspark_qmq.stream import LogStreamReader
from sink_node import NodeThread, node_thread

import qmq
from qmq.columns.options import parse
from qmq.errors import MessagesExpired, UnknownSubject

Offset = dict[str, dict[str, int]]
BODY = StructType([StructField("body", BinaryType())])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    with node_thread(tmp_path_factory.mktemp("node")) as found:
        yield found


@pytest.fixture(autouse=True)
def each_look_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
def subject(node: NodeThread) -> str:
    found = f"s-{uuid4().hex}"
    node.create(found)
    return found


class Query:
    """A query that lives through several micro-batches, or begins again from its checkpoint."""

    def __init__(self, node: NodeThread, subjects: str, **options: str) -> None:
        self.options = {
            "qmq.servers": node.address,
            "subscribe": subjects,
            "startingOffsets": "earliest",
            "qmq.reader": "copy",
            **options,
        }
        self.reader = self._begin()
        self.at: Offset = self.reader.initialOffset()

    def _begin(self) -> LogStreamReader:
        found = LogStreamReader(parse(self.options, is_stream=True), BODY)
        found.stop()  # forgets what an earlier one knew
        return found

    def restart(self) -> None:
        self.reader = self._begin()

    def end(self, rows_max: int | None = None) -> Offset:
        limit = ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)
        return self.reader.latestOffset(self.at, limit)

    def rows(self, end: Offset) -> list[bytes]:
        """The rows of a micro-batch, which is committed."""
        found = [
            row
            for each in self.reader.partitions(self.at, end)
            for batch in self.reader.read(each)
            for row in batch["body"].to_pylist()
        ]
        self.at = end
        return sorted(found)

    def micro_batch(self, rows_max: int | None = None) -> list[bytes]:
        return self.rows(self.end(rows_max))

    @property
    def lost(self) -> int:
        """As the progress of the query has it."""
        return stream.lost({"sources": [{"latestOffset": self.reader.reportLatestOffset()}]})


NUMBERS = count()


def send(node: NodeThread, subject: str, messages: int) -> list[bytes]:
    bodies = [b"%06d" % next(NUMBERS) for _ in range(messages)]

    async def sent() -> None:
        async with qmq.connect(node.address) as mq:
            await mq.send_many(subject, bodies)

    node.run(sent())
    return bodies


def delete(node: NodeThread, subject: str) -> None:
    node.ask(lambda metadata: metadata.delete_subject(subject))


def test_a_stream_goes_on_with_its_other_subjects_and_with_one_that_comes_back(
    node: NodeThread, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"{subject}-other"
    node.create(other)
    sent = send(node, subject, 5) + send(node, other, 2)
    query = Query(node, f"{subject},{other}", failOnDataLoss="false")
    assert query.micro_batch() == sorted(sent)
    send(node, subject, 3)
    query.end()
    delete(node, subject)
    more = send(node, other, 2)
    with caplog.at_level(logging.WARNING, "pyspark_qmq"):
        assert query.micro_batch() == more
        assert query.micro_batch() == []
    (said,) = [each.getMessage() for each in caplog.records if subject in each.getMessage()]
    assert "reader copy" in said
    assert f"messages 5 to 7 of {subject}/0@broker-0 (3)" in said
    assert query.lost == 3
    query.restart()
    assert query.micro_batch() == [], "a new driver continues, too"
    node.create(subject)
    again = send(node, subject, 4)
    assert query.micro_batch() == again


def test_a_micro_batch_whose_subject_is_deleted_keeps_its_tasks_and_loses_its_rows(
    node: NodeThread, subject: str
) -> None:
    send(node, subject, 9)
    query = Query(node, subject, failOnDataLoss="false")
    end = query.end(rows_max=6)
    tasks = query.reader.partitions(query.at, end)
    delete(node, subject)
    assert [row for each in tasks for row in query.reader.read(each)] == [], "they were planned"
    assert len(query.reader.partitions(query.at, end)) == len(tasks)
    query.restart()
    assert len(query.reader.partitions(query.at, end)) == len(tasks)
    assert query.rows(end) == []
    assert query.lost == 0, "this driver has not asked for the end yet"
    assert query.end() == query.at
    assert query.lost == 6


def test_without_leave_to_lose_a_deleted_subject_ends_the_stream_and_is_named(
    node: NodeThread, subject: str
) -> None:
    send(node, subject, 9)
    query = Query(node, subject)
    end = query.end(rows_max=6)
    tasks = query.reader.partitions(query.at, end)
    delete(node, subject)
    with pytest.raises(MessagesExpired, match=rf"messages 0 to 5 of {subject}/0@.*deleted"):
        [row for each in tasks for row in query.reader.read(each)]
    with pytest.raises(UnknownSubject, match=rf"reader copy: .*{subject}.*failOnDataLoss=false"):
        query.end()


def test_a_pattern_whose_subject_is_deleted_says_what_was_not_read(
    node: NodeThread, subject: str
) -> None:
    sent = send(node, subject, 5)
    query = Query(node, subject)
    query.options.pop("subscribe")
    query.options["subscribePattern"] = f"{subject}.*"
    query.restart()
    assert query.micro_batch() == sent
    send(node, subject, 4)
    query.end()
    delete(node, subject)
    with pytest.raises(MessagesExpired, match=rf"messages 5 to 8 of {subject}/0@broker-0 \(4\)"):
        query.end()


def test_a_stream_that_has_read_a_deleted_subject_by_a_pattern_goes_on(
    node: NodeThread, subject: str
) -> None:
    sent = send(node, subject, 5)
    query = Query(node, subject)
    query.options.pop("subscribe")
    query.options["subscribePattern"] = f"{subject}.*"
    query.restart()
    assert query.micro_batch() == sent
    query.end()
    delete(node, subject)
    assert query.micro_batch() == []


def test_a_subject_must_exist_when_a_stream_first_begins(node: NodeThread) -> None:
    with pytest.raises(UnknownSubject):
        Query(node, "there-is-none", failOnDataLoss="false")


def test_a_purge_that_ran_ahead_is_reported_and_counted_once(
    node: NodeThread, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(node, subject, 10)
    query = Query(node, subject, failOnDataLoss="false")
    query.micro_batch(rows_max=4)
    node.ask(lambda metadata: metadata.purge_subject(subject))
    kept = send(node, subject, 3)
    with caplog.at_level(logging.WARNING, "pyspark_qmq"):
        rows = query.micro_batch(rows_max=2)
        while (end := query.end(rows_max=2)) != query.at:
            rows += query.rows(end)
    assert rows == kept
    said = [each.getMessage() for each in caplog.records]
    assert [f"messages 4 to 9 of {subject}/0@broker-0 (6)" in each for each in said] == [True]
    assert "reader copy: 6 messages were deleted" in said[0]
    assert query.lost == 6
