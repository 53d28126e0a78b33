"""Support for the tests of the outbox: engines that are closed, the messages of a subject, the rows
left in the table.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from support.databases import Database

import qmq
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.producing.producer import new_producer_id
from qmq.model import MessageId
from qmq.sql.outbox import create_tables
from qmq.sql.outbox_message import MessageIds, new_message
from qmq.sql.outbox_statements import OutboxStatements
from qmq.sql.outbox_tables import TABLE
from qmq.sql.outbox_watchdog import Watchdogs

WITHIN_S = 120.0


@contextmanager
def engine_of(database: Database, *, with_tables: bool = True) -> Iterator[Engine]:
    """A sync engine; the outbox's tables are there, and one of the business."""
    engine = create_engine(database.sync_url)
    if with_tables:
        create_tables(engine)
        with engine.begin() as connection:
            connection.execute(
                text("CREATE TABLE IF NOT EXISTS business (name VARCHAR(100) PRIMARY KEY)")
            )
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def async_engine_of(database: Database, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An async engine."""
    engine = create_async_engine(database.async_url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


async def received(mq: qmq.Client, subject: str, count: int, group: str = "readers") -> list[Any]:
    """Receive and acknowledge the next messages of a subject; fails if there are not enough."""
    found: list[Any] = []
    consumer = mq.consumer(subject, group)
    async with asyncio.timeout(WITHIN_S):
        async for message in consumer:
            found.append(message)
            await message.ack_sync()
            if len(found) >= count:
                break
    await consumer.close()
    return found


async def bodies(mq: qmq.Client, subject: str, count: int, group: str = "readers") -> list[bytes]:
    """Their bodies."""
    return [message.body for message in await received(mq, subject, count, group)]


async def change(engine: Engine, statement: str) -> None:
    """Change rows in a transaction in a thread, so that the event loop runs on and a lock's holder
    there can release it.
    """

    def execute() -> None:
        with engine.begin() as connection:
            connection.execute(text(statement))

    await asyncio.to_thread(execute)


def left(engine: Engine, columns: str = "subject", table: str = "qmq_outbox") -> Sequence[Any]:
    """The rows of the outbox, in order."""
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT {columns} FROM {table} ORDER BY id")).all()


async def is_empty(engine: Engine, table: str = "qmq_outbox") -> None:
    """Wait until the outbox is empty."""
    async with asyncio.timeout(WITHIN_S):
        while await asyncio.to_thread(left, engine, "id", table):
            await asyncio.sleep(0.02)


def client(
    address: str, *, delivery_s: float = TIMING.outbox_delivery_s, **options: Any
) -> qmq.Client:
    """A client whose watchdogs look often."""
    return qmq.Client(
        address, timing=ClientTiming(outbox_look_s=0.05, outbox_delivery_s=delivery_s), **options
    )


IDS = MessageIds(new_producer_id())


def committed_rows(
    engine: Engine, rows: Sequence[tuple[str, bytes, bytes]], claim_ms: int = -1, table: str = TABLE
) -> list[MessageId]:
    """(subject, body, key) of messages whose sender died after the commit; their ids."""
    ids = [IDS() for _ in rows]
    say = OutboxStatements(engine.dialect.name, table)
    now_ns = time.time_ns()
    messages = [
        new_message(number, now_ns, subject, body, key=key)
        for number, (subject, body, key) in zip(ids, rows, strict=True)
    ]
    with engine.begin() as connection:
        for begin in range(0, len(messages), 50):
            statement = say.insert(
                [message.row() for message in messages[begin : begin + 50]], "dead", claim_ms
            )
            connection.execute(statement.expression, statement.values)
    return ids


def hold_lease(engine: Engine, lease_ms: int) -> None:
    """Another watchdog has the lease, for so long."""
    say = OutboxStatements(engine.dialect.name)
    view, create = say.view_lease(), say.create_lease()
    with engine.begin() as connection:
        if connection.execute(view.expression, view.values).first() is None:
            connection.execute(create.expression, create.values)
        leases = say.leases
        connection.execute(
            update(leases).values(
                holder="other", token=leases.c.token + 1, lease_until=say.now + lease_ms
            )
        )


@asynccontextmanager
async def watching(
    mq: qmq.Client, engine: object, lease_s: float = 10, tables: Sequence[str] = (TABLE,)
) -> AsyncIterator[Watchdogs]:
    """A watchdog that looks at the interval of the client's timing."""
    async with mq.outbox_watchdog(engine, tables=tables, lease=timedelta(seconds=lease_s)) as dogs:
        yield dogs
