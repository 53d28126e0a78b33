"""Batches that a broker refuses before it stores a byte of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hostile import HARMLESS_AT_INTAKE, LIES, region_of, sent

from qmq import limits
from qmq.broker.produce_checks import Destination, read_batches
from qmq.errors import InvalidArgument, MessageTooLarge
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.process.event_loop import SystemClock
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return open_store(tmp_path, LogConfig(), SystemClock()).open_queue("s", 0)


def take(queue: Queue, batch: bytes) -> int:
    return len(
        read_batches(
            memoryview(batch),
            lambda _subject, _partition: Destination(queue, limits.BODY_BYTES_MAX),
        )
    )


def batch_of(columns: Columns) -> bytes:
    return b"".join(encode(b"s", columns, producer_id=1, batch_sequence=1, create_time_ms=1))


@pytest.mark.parametrize("name", sorted(LIES.keys() - HARMLESS_AT_INTAKE))
def test_a_batch_that_no_reader_could_copy_is_refused(queue: Queue, name: str) -> None:
    with pytest.raises(InvalidArgument):
        take(queue, sent(region_of(name)))


@pytest.mark.parametrize("count", [1, 40])
def test_headers_of_one_message_are_bounded_whatever_the_others_have(
    queue: Queue, count: int
) -> None:
    most = limits.STORED_HEADER_BYTES_MAX
    plain: list[dict[str, bytes]] = [{"a": b"1"}] * (count - 1)
    assert (
        take(queue, batch_of(Columns([b""] * count, headers=[*plain, {"h": bytes(most - 2)}]))) == 1
    )
    with pytest.raises(MessageTooLarge, match="headers"):
        take(queue, batch_of(Columns([b""] * count, headers=[*plain, {"h": bytes(most)}])))


def test_many_messages_may_have_headers_that_are_long_together(queue: Queue) -> None:
    assert take(queue, batch_of(Columns([b""] * 50, headers=[{"h": bytes(10_000)}] * 50))) == 1


def test_a_tag_is_bounded(queue: Queue) -> None:
    assert take(queue, batch_of(Columns([b""], tags=[("x" * limits.TAG_BYTES_MAX,)]))) == 1
    with pytest.raises(InvalidArgument, match="tag"):
        take(queue, batch_of(Columns([b""], tags=[("x" * (limits.TAG_BYTES_MAX + 1),)])))
