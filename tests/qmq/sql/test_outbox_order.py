"""Messages of a key keep the order of their rows, whichever process sends them; delayed ones are
delivered when they are due.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest
from outbox_support import (
    async_engine_of,
    change,
    client,
    committed_rows,
    engine_of,
    is_empty,
    left,
    received,
    watching,
)
from support import node_config, running
from support.databases import Database

import qmq
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node

FLOW = SubjectConfig("flow", order=Order.STRICT, logical_partitions=16)


async def in_order(mq: qmq.Client, count: int) -> dict[str | None, list[bytes]]:
    """The messages of each key on the ordered subject."""
    found: dict[str | None, list[bytes]] = {}
    async with asyncio.timeout(20):
        async with mq.ordered_consumer("flow", "readers") as consumer:
            async for message in consumer:
                found.setdefault(message.key, []).append(message.body)
                message.ack_later()
                if sum(map(len, found.values())) >= count:
                    break
    return found


async def test_new_rows_go_behind_rows_of_the_same_key_left_by_a_dead_process(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq, async_engine_of(database) as business:
            await mq.metadata.create_subject(FLOW)
            committed_rows(engine, [("flow", b"1", b"left"), ("flow", b"2", b"left")])
            async with mq.outbox(business) as behind:
                behind.send("flow", b"3", key="left")
                behind.send("flow", b"4", key="left")
            async with mq.outbox(business) as box:
                box.send("flow", b"1", key="free")
            assert await box.committed()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):  # who stops waiting stops nothing else
                    await behind.committed()
            assert [row.body for row in left(engine, "body")] == [b"1", b"2", b"3", b"4"]
            async with watching(mq, business):
                assert await behind.committed()
            assert await in_order(mq, 5) == {"left": [b"1", b"2", b"3", b"4"], "free": [b"1"]}
        assert left(engine) == []


async def test_transactions_one_after_another_are_sent_in_their_order(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq, async_engine_of(database) as business:
            await mq.metadata.create_subject(FLOW)
            async with business.connect() as connection:
                for number in range(60):
                    async with connection.begin(), mq.outbox(connection) as box:
                        for key in ("a", "b", "c"):
                            box.send("flow", b"%d" % number, key=key)
            found = await in_order(mq, 180)
            assert found == {
                key: [b"%d" % number for number in range(60)] for key in ("a", "b", "c")
            }
            await is_empty(engine)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_without_the_key_that_it_needs_fails_alone(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq:
            await mq.metadata.create_subject(FLOW)
            async with mq.outbox(engine) as box:
                for number in range(7):
                    box.send("flow", b"%d" % number, key=None if number == 3 else "k")
            assert await box.committed() is False
            assert await in_order(mq, 6) == {"k": [b"0", b"1", b"2", b"4", b"5", b"6"]}
            (row,) = left(engine, "body, state, last_error")
            assert (row.body, row.state) == (b"3", 1)
            assert "need keys" in row.last_error


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_delayed_message_comes_when_it_is_due_and_keeps_its_id(
    database: Database, tmp_path: Path
) -> None:
    async with running(node_config(tmp_path / "node", delay=True)) as node:
        with engine_of(database) as engine:
            async with client(node.address) as mq:
                sent_ms = time.time_ns() // 1_000_000
                async with mq.outbox(engine) as box:
                    number = box.send("order", b"later", key="k", delay=timedelta(seconds=1))
                    box.send("order", b"now", tags=["t"])
                assert await box.committed()
                now, later = await received(mq, "order", 2)
                assert (now.body, now.tags) == (b"now", ("t",))
                assert (later.body, later.key, later.id) == (b"later", "k", number)
                assert later.append_time_ms >= sent_ms + 1_000
                assert abs(later.create_time_ms - sent_ms) < 1_000
            assert left(engine) == []


async def test_a_row_that_keeps_being_claimed_holds_back_its_key_until_it_is_sent(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq, async_engine_of(database) as business:
            await mq.metadata.create_subject(FLOW)
            committed_rows(engine, [("flow", b"1", b"k")], claim_ms=3_600_000)
            async with mq.outbox(business) as box:
                box.send("flow", b"2", key="k")
            async with watching(mq, business):
                await mq.send("flow", b"0", key="other")
                assert await in_order(mq, 1) == {"other": [b"0"]}
                assert [row.body for row in left(engine, "body")] == [b"1", b"2"]
                await change(engine, "UPDATE qmq_outbox SET claimed_until = 0 WHERE id = 1")
                assert await in_order(mq, 2) == {"k": [b"1", b"2"]}
                assert await box.committed()
