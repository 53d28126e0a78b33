"""SqlDedup refuses unsuitable databases and handlers before it runs."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from dedup_ways import Way, effects, message, rows, ways
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database, sqlite_database

import qmq
from qmq.errors import InvalidArgument
from qmq.sql import SqlDedup
from qmq.sql.dedup import create_tables, create_tables_async


async def test_an_engine_without_transactions_is_refused(database: Database) -> None:
    """MyISAM keeps what was rolled back; the other two have no such tables."""
    if database.kind != "mariadb":
        return
    async with ways(database, "engine", "async-engine", "driver") as found:
        rows(database, "ALTER TABLE qmq_dedup ENGINE=MyISAM")
        for way in found:
            with pytest.raises(InvalidArgument, match="InnoDB"):
                await way.work(message(1))
        rows(database, "ALTER TABLE qmq_dedup ENGINE=InnoDB")
        assert [await way.work(message(1)) for way in found] == [True, False, False]


async def test_a_table_with_too_narrow_columns_is_refused(database: Database) -> None:
    """MySQL cuts what is too long without an error, unless its mode is strict; the others refuse.
    SQLite has no widths.
    """
    if database.kind == "sqlite":
        return

    def lax() -> Any:
        connection = database.connect()
        if database.kind == "mariadb":
            connection.cursor().execute("SET sql_mode = ''")
        return connection

    async with ways(database, "async-engine") as [way]:
        kind = "VARBINARY(99)" if database.kind == "mariadb" else "VARCHAR(99)"
        change = "MODIFY subject" if database.kind == "mariadb" else "ALTER COLUMN subject TYPE"
        rows(database, f"ALTER TABLE qmq_dedup {change} {kind}")
        for each in (way, Way("driver", database, lax)):
            with pytest.raises(Exception, match=r"too long|truncates long names"):
                await each.work(message(1))
        assert rows(database, "SELECT * FROM qmq_dedup") == []


async def test_connections_with_autocommit_are_refused(database: Database) -> None:
    def eager() -> Any:
        if database.kind == "sqlite":
            return sqlite3.connect(database.name, isolation_level=None)
        connection = database.connect()
        if database.kind == "postgresql":
            connection.autocommit = True
        else:
            connection.autocommit(True)
        return connection

    engine = create_engine(database.sync_url, isolation_level="AUTOCOMMIT")
    async_engine = create_async_engine(database.async_url, isolation_level="AUTOCOMMIT")
    async with ways(database, "driver"):
        for name, given in (("engine", engine), ("async-engine", async_engine), ("driver", eager)):
            with pytest.raises(InvalidArgument, match="autocommit"):
                await Way(name, database, given).work(message(1))
    assert effects(database) == []
    engine.dispose()
    await async_engine.dispose()


async def test_a_missing_table_is_reported_and_creating_it_twice_is_harmless(
    database: Database,
) -> None:
    async with ways(database) as found:
        rows(database, "DROP TABLE qmq_dedup")
        for way in found:
            with pytest.raises(InvalidArgument, match="qmq dedup migration"):
                await way.work(message(1))
        engine = create_async_engine(database.async_url)
        for _ in range(2):
            await create_tables_async(engine)
            create_tables(database.connect)
        await engine.dispose()
        assert [await way.work(message(1)) for way in found].count(True) == 1


async def test_a_table_of_another_name_and_schema_will_do(database: Database) -> None:
    table = {
        "sqlite": "main.done",
        "postgresql": "public.done",
        "mariadb": f"{database.name}.done",
    }[database.kind]
    create_tables(database.connect, table)
    async with ways(database, "engine", "driver", table=table) as [one, other]:
        rows(database, "DROP TABLE qmq_dedup")
        assert await one.work(message(1))
        assert not await other.work(message(1))


async def test_a_handler_that_does_not_fit_its_database_is_refused_at_registration(
    tmp_path: Path,
) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")

    async def in_the_loop(body: bytes) -> None: ...

    def in_a_thread(body: bytes) -> None: ...

    async with ways(database) as found, qmq.connect("127.0.0.1:1") as mq:
        for way in found:
            right, wrong = (
                (in_the_loop, in_a_thread) if way.is_async else (in_a_thread, in_the_loop)
            )
            mq.listen("orders", right, "g", idempotent=way.dedup)
            with pytest.raises(
                InvalidArgument, match="AsyncEngine" if wrong is in_the_loop else "sessionmaker"
            ):
                mq.listen("orders", wrong, "g", idempotent=way.dedup)
            with pytest.raises(InvalidArgument):
                if way.is_async:
                    with way.dedup.once_sync(message(1), "g"):
                        pytest.fail("a thread has no use for it")
                else:
                    async with way.dedup.once(message(1), "g"):
                        pytest.fail("it would hold up the loop")


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("sqlite:///file", {}),
        (sqlite3.connect, {"table": "qmq dedup"}),
        (sqlite3.connect, {"table": "x" * 51}),
        (sqlite3.connect, {"table": "a.b.c"}),
        (sqlite3.connect, {"keep": timedelta(seconds=59)}),
        (sqlite3.connect, {"keep": 7}),
        (sqlite3.connect, {"dialect": "oracle"}),
        (sqlite3.connect, {"paramstyle": "dollar"}),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_once(given: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        SqlDedup(given, **options)


async def test_an_unknown_driver_is_recognised_by_its_sql_dialect(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")

    class Wrapped:
        """A connection of a pool's own kind."""

        def __init__(self) -> None:
            self._inner = database.connect()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    async with ways(database, "driver") as [way]:
        with pytest.raises(InvalidArgument, match="paramstyle"):
            await Way("driver", database, Wrapped).work(message(1))
        assert await Way("driver", database, Wrapped, dialect="sqlite", paramstyle="named").work(
            message(1)
        )
        assert not await way.work(message(1))


_WITHOUT = """
import sys
sys.modules["sqlalchemy"] = None
from qmq.cli.app import COMMANDS, loaded
from qmq.errors import InvalidArgument
from qmq.sql.dedup_tables import migration
assert [loaded(each).name for each in COMMANDS] == list(COMMANDS)
assert migration("sqlite")
try:
    from qmq.sql import SqlDedup
except InvalidArgument as failure:
    assert "qmq[sql]" in str(failure)
else:
    sys.exit("it was imported")
"""


def test_without_sqlalchemy_commands_work_and_what_needs_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
