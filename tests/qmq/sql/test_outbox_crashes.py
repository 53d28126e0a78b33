"""Processes die anywhere between a transaction and a broker: what was committed arrives, with its
id; what was not never does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from outbox_support import (
    async_engine_of,
    client,
    committed_rows,
    engine_of,
    is_empty,
    left,
    received,
    watching,
)
from support.databases import Database

import qmq
from qmq.model import MessageId
from qmq.node.dev_node import Node
from qmq.sql.outbox import create_tables

pytestmark = pytest.mark.sampled

SENDERS = ("inserted", "committed", "sent", "deleted")
WATCHDOGS = ("watchdog_took_the_lease", "watchdog_sent")
SCRIPT = Path(__file__).with_name("outbox_crash.py")


async def crash(database: Database, node: Node, point: str) -> MessageId | None:
    """Run a process that dies there; its message's id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        database.sync_url,
        node.address,
        table_of(point),
        point,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 9, point
    return MessageId.parse(out.decode().strip()) if out else None


def table_of(point: str) -> str:
    return f"outbox_{point}"


async def test_a_message_arrives_if_and_only_if_it_was_committed_wherever_its_process_dies(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        for point in (*SENDERS, *WATCHDOGS):
            create_tables(engine, table_of(point))
        wanted = {
            point: committed_rows(engine, [(point, b"x", b"k")], table=table_of(point))[0]
            for point in WATCHDOGS
        }
        ids = await asyncio.gather(
            *[crash(database, node, point) for point in (*SENDERS, *WATCHDOGS)]
        )
        wanted |= {
            point: number
            for point, number in zip(SENDERS, ids[: len(SENDERS)], strict=True)
            if number is not None
        }
        assert left(engine, table=table_of("inserted")) == []
        assert left(engine, table=table_of("deleted")) == []
        assert [row.subject for row in left(engine, table=table_of("sent"))] == ["sent"]
        async with client(node.address) as mq, async_engine_of(database) as business:
            async with watching(mq, business, tables=[table_of(point) for point in wanted]):
                for point in wanted:
                    await is_empty(engine, table_of(point))
            for point, number in wanted.items():
                await mq.send(point, b"end")
                found = await received_until_end(mq, point)
                assert set(found) == ({number} if point != "inserted" else set()), point
                assert len(found) == {"inserted": 0, "sent": 2, "watchdog_sent": 2}.get(point, 1), (
                    point
                )


async def received_until_end(mq: qmq.Client, subject: str) -> list[MessageId]:
    """The ids of the messages before the message "end"."""
    found: list[MessageId] = []
    while (message := (await received(mq, subject, 1))[0]).body != b"end":
        found.append(message.id)
    return found
