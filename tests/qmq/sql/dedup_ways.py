"""A common interface to the ways in which a handler can have its transaction: `Way.work` handles
one message as a listener does.
"""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from support.databases import Database

from qmq.model import MessageId
from qmq.sql.dedup import SqlDedup, create_tables

WAYS = ("engine", "async-engine", "session", "async-session", "driver")


@dataclass(frozen=True)
class Named:
    """A message's name."""

    subject: str = "orders"
    id: MessageId = field(default_factory=lambda: MessageId(7, 1, 0))
    append_time_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)


def message(number: int, subject: str = "orders") -> Named:
    return Named(subject, MessageId(7, number, 0))


class Boom(Exception):
    """The error of these tests' handlers."""


class Way:
    """One way into one database. `insert` is the handler's effect; `step` is what else a handler
    does.
    """

    def __init__(self, name: str, database: Database, given: Any, **options: Any) -> None:
        self.name = name
        self.is_async = name.startswith("async")
        self.database = database
        self.given = given
        self.dedup = SqlDedup(given, **options)

    async def work(
        self, each: Named, step: Callable[[Any], None] | None = None, group: str = "g"
    ) -> bool:
        """Whether the handler ran. `step` gets a sync Connection, Session or DB-API connection."""
        if not self.is_async:
            return await asyncio.to_thread(self.work_sync, each, step, group)
        async with self.dedup.once(each, group) as once:
            if once.is_new:
                await once.connection.run_sync(lambda handed: _handle(handed, each, step))
            return once.is_new

    def work_sync(self, each: Named, step: Callable[[Any], None] | None, group: str) -> bool:
        with self.dedup.once_sync(each, group) as once:
            if once.is_new:
                _handle(once.connection, each, step)
            return once.is_new


def _handle(handed: Any, each: Named, step: Callable[[Any], None] | None) -> None:
    say(handed, f"INSERT INTO effect VALUES ('{each.id}')")
    if step is not None:
        step(handed)


def say(handed: Any, statement: str) -> None:
    """Run a statement without parameters, with any kind of transaction that a handler gets."""
    if isinstance(handed, Connection | Session):
        handed.execute(text(statement))
    else:
        handed.cursor().execute(statement)


@asynccontextmanager
async def ways(
    database: Database, *names: str, keep: timedelta = timedelta(days=7), **options: Any
) -> AsyncIterator[list[Way]]:
    """Some ways into a database that has the tables."""
    engine = create_engine(database.sync_url, pool_size=10)
    async_engine = create_async_engine(database.async_url, pool_size=10)
    given = {
        "engine": engine,
        "async-engine": async_engine,
        "session": sessionmaker(engine),
        "async-session": async_sessionmaker(async_engine),
        "driver": database.connect,
    }
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS effect (id VARCHAR(64) NOT NULL)"))
    try:
        yield [Way(name, database, given[name], keep=keep, **options) for name in names or WAYS]
    finally:
        engine.dispose()
        await async_engine.dispose()


@contextmanager
def away(database: Database) -> Iterator[None]:
    """The server is down, and then up again. PyMySQL forgets the sockets of connections that are
    refused.
    """
    assert database.server is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
        database.server.stop()
        try:
            yield
        finally:
            database.server.start()
            gc.collect()


def effects(database: Database) -> list[str]:
    """Which messages had an effect, as often as they had it."""
    return sorted(str(row[0]) for row in rows(database, "SELECT id FROM effect"))


def rows(database: Database, statement: str) -> list[Any]:
    """The rows of a query, read on a new connection."""
    connection = database.connect()
    try:
        cursor = connection.cursor()
        cursor.execute(statement)
        found = list(cursor.fetchall()) if cursor.description is not None else []
        cursor.close()
        connection.commit()
        return found
    finally:
        connection.close()
