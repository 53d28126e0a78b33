"""Knowing another producer's id and numbers does not let a client suppress its messages: the broker
answers as a duplicate only a batch with the same content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import node_config, running

import qmq
from qmq.client.connection.connection import Connection, connect
from qmq.errors import NumberTaken, Outcome
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

PRODUCER = 7


def batch(number: int, body: bytes, *, due_ms: int | None = None) -> bytes:
    columns = Columns([body], due_times_ms=None if due_ms is None else [due_ms])
    return b"".join(
        encode(b"s", columns, producer_id=PRODUCER, batch_sequence=number, create_time_ms=1)
    )


async def produce(connection: Connection, *batches: bytes) -> list[int]:
    answer = await connection.call(FrameKind.PRODUCE, b"".join(batches), timeout_s=10)
    return [each.base_sequence for each in wire.unpack_produced(answer.payload)]


@asynccontextmanager
async def connected(folder: Path, *, delayed: bool = False) -> AsyncIterator[Connection]:
    """A connection to a node's master, or to its delay server."""
    async with running(node_config(folder, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        (route,) = (await mq.metadata.routes("s", delayed=delayed)).routes
        connection = await connect(route.address, "somebody")
        yield connection
        connection.close()
        await connection.wait_closed()


async def test_a_number_that_a_stranger_took_is_refused_and_not_called_stored(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as connection:
        assert await produce(connection, batch(0, b"forged")) == [0]
        with pytest.raises(NumberTaken) as refused:
            await produce(connection, batch(0, b"mine"))
        assert refused.value.outcome is Outcome.NOT_STORED
        assert await produce(connection, batch(0, b"forged")) == [0]
        assert await produce(connection, batch(1, b"mine")) == [1]


async def test_of_two_requests_in_one_turn_the_second_is_refused(tmp_path: Path) -> None:
    async with connected(tmp_path) as connection:
        asked = [
            produce(connection, batch(0, body), batch(1, b"both")) for body in (b"forged", b"mine")
        ]
        first, second = await asyncio.gather(*asked, return_exceptions=True)
        assert first == [0, 1]
        assert isinstance(second, NumberTaken)


async def test_a_delayed_message_is_swallowed_by_no_other_either(tmp_path: Path) -> None:
    due_ms = int(time.time() * 1000) + 3_600_000
    async with connected(tmp_path, delayed=True) as connection:
        await produce(connection, batch(0, b"forged", due_ms=due_ms))
        with pytest.raises(NumberTaken):
            await produce(connection, batch(0, b"mine", due_ms=due_ms))
        await produce(connection, batch(0, b"forged", due_ms=due_ms))
