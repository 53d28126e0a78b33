"""Messages in the application's own transactions: SQLAlchemy's connections, sessions and engines,
and plain drivers.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Mapping
from typing import Any

import aiomysql
import aiosqlite
import psycopg
import psycopg.rows
import pymysql.cursors
import pytest
from outbox_support import (
    async_engine_of,
    bodies,
    client,
    engine_of,
    is_empty,
    left,
    received,
    watching,
)
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from support.databases import Database

import qmq
import qmq.blocking
from qmq.client.interceptors import BaseInterceptor, Outgoing
from qmq.errors import InvalidArgument
from qmq.node.dev_node import Node
from qmq.sql.dedup_transactions import HandedConnection

BUSINESS = text("INSERT INTO business VALUES (:name)")


async def test_what_an_async_connection_commits_is_sent_and_what_it_rolls_back_never_is(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with async_engine_of(database) as business, client(node.address) as mq:
            async with business.connect() as connection:
                await connection.execute(BUSINESS, {"name": "one"})
                async with mq.outbox(connection) as box:
                    box.send("order", b"lost", key="1")
                await connection.rollback()
                assert await box.committed() is False
                await connection.execute(BUSINESS, {"name": "two"})
                async with mq.outbox(connection) as box:
                    number = box.send(
                        "order",
                        b"kept",
                        key="2",
                        tags=["eu"],
                        headers={"why": "ordered", "raw": b"\xff\x00"},
                    )
                with pytest.raises(InvalidArgument, match="still open"):
                    await box.committed()
                await connection.commit()
                assert await box.committed()
            (message,) = await received(mq, "order", 1)
            assert message.body == b"kept"
            assert message.key == "2"
            assert message.tags == ("eu",)
            assert message.id == number
            assert message.headers == {"why": b"ordered", "raw": b"\xff\x00"}
        assert left(engine) == []
        with engine.connect() as connection:
            assert connection.execute(text("SELECT name FROM business")).all() == [("two",)]


async def test_sessions_savepoints_and_sync_connections_are_followed(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq:
            with Session(engine) as session, session.begin():
                async with mq.outbox(session) as box:
                    box.send("order", b"of a session")
            assert await box.committed()
            with engine.connect() as connection, connection.begin():
                connection.execute(BUSINESS, {"name": "one"})
                savepoint = connection.begin_nested()
                async with mq.outbox(connection) as gone:
                    gone.send("order", b"of a savepoint that was rolled back")
                savepoint.rollback()
                async with mq.outbox(connection) as box:
                    box.send("order", b"of a connection")
            assert await box.committed()
            assert await gone.committed() is False
            async with async_engine_of(database) as business, AsyncSession(business) as own:
                async with mq.outbox(own) as box:
                    box.send("order", b"of an async session")
                await own.commit()
                assert await box.committed()
            assert await bodies(mq, "order", 3) == [
                b"of a session",
                b"of a connection",
                b"of an async session",
            ]
        assert left(engine) == []


async def test_an_engine_commits_at_the_end_of_the_block_and_rolls_back_when_it_raises(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with async_engine_of(database) as business, client(node.address) as mq:
            async with mq.outbox(business) as box:
                await box.connection.execute(BUSINESS, {"name": "one"})
                box.send("order", b"async")
            assert await box.committed()
            async with mq.outbox(engine) as box:
                box.connection.execute(BUSINESS, {"name": "two"})
                box.send("order", b"sync")
            assert await box.committed()
            for kind in (business, engine):
                with pytest.raises(RuntimeError, match="no stock"):
                    async with mq.outbox(kind) as box:
                        box.send("order", b"never")
                        raise RuntimeError("no stock")
                assert await box.committed() is False
            assert await bodies(mq, "order", 2) == [b"async", b"sync"]
        assert left(engine) == []
        assert [
            row.name for row in left(engine, "name", "(SELECT name, 1 AS id FROM business) AS b")
        ] in (["one", "two"], ["two", "one"])


def with_rows_of_its_own(connection: Any) -> Any:
    """Some applications have their rows as mappings."""
    if isinstance(connection, psycopg.Connection):
        connection.row_factory = psycopg.rows.dict_row
    elif isinstance(connection, sqlite3.Connection):
        connection.row_factory = sqlite3.Row
    else:
        connection.cursorclass = pymysql.cursors.DictCursor
    return connection


async def test_a_drivers_own_connection_says_committed_itself(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        connection = with_rows_of_its_own(database.connect())
        async with client(node.address) as mq:
            cursor = connection.cursor()
            cursor.execute("INSERT INTO business VALUES ('one')")
            async with mq.outbox(connection) as box:
                box.send("order", b"kept")
                box.send("other", b"other")
            with pytest.raises(InvalidArgument, match="still open"):
                await box.committed()
            assert left(engine) == []
            connection.commit()
            assert [row.subject for row in left(engine)] == ["order", "other"]
            first = box
            async with mq.outbox(connection) as box:
                box.send("order", b"lost")
            connection.rollback()
            assert await box.committed() is False
            assert await first.committed()
            assert await bodies(mq, "order", 1) == [b"kept"]
            assert await bodies(mq, "other", 1) == [b"other"]
        assert left(engine) == []
        cursor.close()
        connection.close()


async def _async_connection(database: Database) -> Any:
    if database.kind == "sqlite":
        return await aiosqlite.connect(database.name)
    assert database.server is not None
    if database.kind == "postgresql":
        return await psycopg.AsyncConnection.connect(
            host=str(database.server.folder), user="qmq", dbname=database.name
        )
    return await aiomysql.connect(unix_socket=database.server.socket, user="root", db=database.name)


async def test_an_async_drivers_own_connection_does_too(database: Database, node: Node) -> None:
    with engine_of(database) as engine:
        connection = await _async_connection(database)
        async with client(node.address) as mq:
            async with mq.outbox(connection) as box:
                box.send("order", b"kept", key="k")
            with pytest.raises(InvalidArgument, match="still open"):
                await box.committed()
            await connection.commit()
            assert await box.committed()
            assert await bodies(mq, "order", 1) == [b"kept"]
        assert left(engine) == []
        await (connection.ensure_closed() if database.kind == "mariadb" else connection.close())


def test_the_blocking_client_does_the_same_without_asyncio(
    database: Database, node_address: str
) -> None:
    with engine_of(database) as engine, qmq.blocking.connect(node_address) as mq:
        with engine.begin() as connection, mq.outbox(connection) as box:
            box.send("order", b"of a connection")
        assert box.committed()
        with mq.outbox(engine) as box:
            box.connection.execute(BUSINESS, {"name": "one"})
            box.send("order", b"of an engine")
        assert box.committed()
        plain = database.connect()
        with mq.outbox(plain) as box:
            box.send("order", b"of a driver")
        plain.commit()
        assert box.committed()
        plain.close()
        consumer = mq.consumer("order", "readers")
        found = iter(consumer)
        assert [next(found).body for _ in range(3)] == [
            b"of a connection",
            b"of an engine",
            b"of a driver",
        ]
        consumer.close()
        assert left(engine) == []


async def test_a_connection_that_commits_each_statement_is_refused(
    database: Database, node: Node
) -> None:
    with engine_of(database):
        engine = create_engine(database.sync_url, isolation_level="AUTOCOMMIT")
        async with client(node.address) as mq:
            with (
                engine.connect() as connection,
                pytest.raises(InvalidArgument, match="each statement"),
            ):
                async with mq.outbox(connection) as box:
                    box.send("order", b"unsafe")
        engine.dispose()


async def test_invalid_connections_and_sends_outside_the_block_are_refused(node: Node) -> None:
    async with client(node.address) as mq:
        for wrong in (object(), "sqlite://", None, sessionmaker()):
            with pytest.raises(InvalidArgument, match="connection"):
                mq.outbox(wrong)
        engine = create_engine("sqlite://")
        box = mq.outbox(engine)
        with pytest.raises(InvalidArgument, match="within the outbox's block"):
            box.send("order", b"early")
        with pytest.raises(InvalidArgument, match="Engine"):
            mq.outbox_watchdog("sqlite://")
        engine.dispose()


async def test_rows_that_are_sent_are_gone_and_many_of_many_subjects_are_sent_at_once(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq:
            with engine.begin() as connection:
                async with mq.outbox(connection) as box:
                    for number in range(300):
                        box.send(
                            f"order-{number % 3}", b"%d" % number + bytes(7_000), key=str(number)
                        )
            assert await box.committed()
            for remainder in range(3):
                found = await bodies(mq, f"order-{remainder}", 100)
                assert sorted(int(body.strip(b"\0")) for body in found) == list(
                    range(remainder, 300, 3)
                )
        await is_empty(engine)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_one_large_transaction_does_not_stop_the_event_loop(
    database: Database, node: Node
) -> None:
    with engine_of(database):
        # if it does, for 60 s
        async with (
            async_engine_of(database) as engine,
            client(node.address) as mq,
            asyncio.timeout(40),
        ):
            async with mq.outbox(engine) as box:
                for number in range(2_500):
                    box.send("order", b"%d" % number)
            assert sorted(map(int, await bodies(mq, "order", 2_500))) == list(range(2_500))


class Traced(BaseInterceptor):
    """Adds a header, and keeps the calls that it got."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def sending(self, outgoing: Outgoing) -> Mapping[str, str | bytes]:
        return {"trace": "of the transaction"}

    def sent(self, outgoing: Outgoing, receipts: object) -> None:
        self.told.append(outgoing.subject)

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        self.told.append(error)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_interceptors_see_each_message_once_when_it_is_put_in_the_outbox(
    database: Database, node: Node
) -> None:
    traced = Traced()
    with engine_of(database) as engine:
        async with client(node.address, interceptors=[traced]) as mq:
            async with mq.outbox(engine) as box:
                box.send("order", b"x", headers={"own": "1"})
            assert await box.committed()
            wrong = ValueError("no stock")
            with pytest.raises(ValueError, match="no stock"):
                async with mq.outbox(engine) as box:
                    box.send("order", b"y")
                    raise wrong
            (message,) = await received(mq, "order", 1)
        assert message.headers == {"own": b"1", "trace": b"of the transaction"}
        assert traced.told == ["order", wrong]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_outbox_is_used_once_and_a_missing_table_fails_the_transaction(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq:
            async with mq.outbox(engine) as box:
                pass
            assert await box.committed()
            with pytest.raises(InvalidArgument, match="used only once"):
                await box.__aenter__()
            with pytest.raises(OperationalError, match="no such table"):
                async with mq.outbox(engine, table="elsewhere") as box:
                    box.connection.execute(BUSINESS, {"name": "one"})
                    box.send("order", b"x")
            with pytest.raises(RuntimeError, match="closing"):
                await _close_while_open(engine, mq)
        assert left(engine, "name", "(SELECT name, 1 AS id FROM business) AS b") == []


async def _close_while_open(engine: Engine, mq: qmq.Client) -> None:
    """A client that is closed while a transaction is open leaves its messages to a watchdog."""
    with engine.connect() as connection, connection.begin():
        async with mq.outbox(connection) as box:
            box.send("order", b"x")
        await mq.close()
        raise RuntimeError("closing")


async def test_a_connection_that_a_listener_handed_out_takes_messages_but_no_commit(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        connection = database.connect()
        async with client(node.address) as mq:
            async with mq.outbox(HandedConnection(connection)) as box:
                box.send("order", b"kept")
            assert left(engine) == []
            connection.commit()
            assert [row.subject for row in left(engine)] == ["order"]
            async with watching(mq, engine):
                with engine.begin() as own:
                    own.execute(text("UPDATE qmq_outbox SET claimed_until = 0"))
                assert await bodies(mq, "order", 1) == [b"kept"]
                await is_empty(engine)
        connection.close()


_WITHOUT = """
import asyncio, sqlite3, sys
import qmq, qmq.blocking
assert not [name for name in sys.modules if name.startswith(("sqlalchemy", "qmq.sql"))]
sys.modules["sqlalchemy"] = None

async def refused():
    async with qmq.connect(sys.argv[1]) as mq:
        for use in (mq.outbox, mq.outbox_watchdog):
            try:
                use(sqlite3.connect(":memory:"))
            except qmq.errors.InvalidArgument as failure:
                assert "qmq[sql]" in str(failure)
            else:
                sys.exit(f"{use} is there")

asyncio.run(refused())
"""


async def test_database_modules_are_imported_at_first_use_and_need_sqlalchemy(node: Node) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _WITHOUT, node.address)
    assert await process.wait() == 0
