"""The door to a database: one way to say statements, whatever the application has: SQLAlchemy or a plain driver, sync or async.

    Door(connection).execute(Statement) ──▶ Answer (rows, how many were changed)

Rules:
* A door never begins, commits or rolls back: whose transaction it is, says who made the door (`outbox_runner.py`).
* What a driver gives is awaited if it can be. So one coroutine serves both kinds; with a sync connection it never waits for the event loop,
  and `finish` runs it in any thread, without a loop.
* Plain drivers are known by the name of their package; they need no SQLAlchemy.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Final, NamedTuple, TypeVar

from qmq.errors import InvalidArgument
from qmq.sql.outbox_statements import Statement
from qmq.sql.outbox_tables import check_dialect

_R = TypeVar("_R")
_PLACE: Final = re.compile(r":([a-z_]+[a-z0-9_]*)")

DRIVERS: Final = {
    "sqlite3": ("sqlite", "?"),
    "aiosqlite": ("sqlite", "?"),
    "psycopg": ("postgresql", "%s"),
    "psycopg2": ("postgresql", "%s"),
    "pymysql": ("mysql", "%s"),
    "MySQLdb": ("mysql", "%s"),
    "aiomysql": ("mysql", "%s"),
}
"""Package of a plain driver: dialect, and what it writes where a value goes."""


class Answer(NamedTuple):
    """What a statement gave."""

    rows: list[tuple[Any, ...]]
    changed: int


def finish(work: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine that never waits for the event loop, here and now."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise InvalidArgument("an async connection needs the asyncio client: give the blocking one a sync connection")


async def settle(given: Any) -> Any:
    """What a call of a driver gave: the driver's answer, awaited if it must be."""
    return await given if isawaitable(given) else given


def packages(thing: object) -> set[str]:
    """Of a thing's class and those that it derives from."""
    return {each.__module__.partition(".")[0] for each in type(thing).__mro__}


def driver_of(connection: object) -> tuple[str, str] | None:
    """(dialect, placeholder) of a plain driver's connection, also as a listener's handler gets it; None if it is none that is known."""
    if "qmq" in packages(connection):  # dedup's HandedConnection
        connection = getattr(connection, "_connection", connection)
    return next((found for name, found in DRIVERS.items() if name in packages(connection)), None)


class Door:
    def __init__(self, dialect: str) -> None:
        self.dialect = check_dialect(dialect)

    async def execute(self, statement: Statement) -> Answer:
        """Say a statement. Raises what the driver raises."""
        raise NotImplementedError


class AlchemyDoor(Door):
    """Through a `Connection` or an `AsyncConnection` of SQLAlchemy's."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection.dialect.name)
        self._connection = connection

    async def execute(self, statement: Statement) -> Answer:
        from sqlalchemy import text

        result = await settle(self._connection.execute(text(statement.text), dict(statement.values)))
        rows = [tuple(row) for row in result.all()] if result.returns_rows else []
        return Answer(rows, -1 if rows else result.rowcount)


class PlainDoor(Door):
    """Through a plain driver's connection."""

    def __init__(self, connection: Any) -> None:
        found = driver_of(connection)
        if found is None:
            raise InvalidArgument(
                f"a {type(connection).__module__}.{type(connection).__name__} is no connection that the outbox knows: give one of"
                f" SQLAlchemy 2 (Connection, Session, Engine, and their async forms), or of {', '.join(DRIVERS)}"
            )
        dialect, self._mark = found
        super().__init__(dialect)
        self._connection = connection

    async def execute(self, statement: Statement) -> Answer:
        text, values = positional(statement, self._mark)
        cursor = await settle(self._connection.cursor())
        try:
            await settle(cursor.execute(text, values))
            rows = [_plain(row) for row in await settle(cursor.fetchall())] if cursor.description is not None else []
            return Answer(rows, cursor.rowcount)
        finally:
            await settle(cursor.close())


def positional(statement: Statement, mark: str) -> tuple[str, list[Any]]:
    """A statement as drivers want it that take values by their place. Pure."""
    names = _PLACE.findall(statement.text)
    return _PLACE.sub(mark, statement.text), [statement.values[name] for name in names]


def _plain(row: Any) -> tuple[Any, ...]:
    """Also of cursors that the application made give mappings."""
    values: Sequence[Any] = list(row.values()) if isinstance(row, Mapping) else row
    return tuple(values)
