"""Runs statements on the application's database connection: SQLAlchemy's or a plain driver's, sync or async.

    DatabaseConnection(connection).execute(Statement) ──▶ Answer (rows, how many were changed)

Rules:
* A `DatabaseConnection` never begins, commits or rolls back: its maker does (`outbox_runner.py`, `dedup_transactions.py`).
* A driver's result is awaited if it is awaitable. So one coroutine serves both kinds; with a sync connection it never waits for the event
  loop,
  and `finish` runs it in any thread, without a loop.
* Both get the same text: expressions are compiled here, not by SQLAlchemy's `execute` (`expressions.py`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy.sql.elements import ClauseElement

from qmq.errors import InvalidArgument
from qmq.sql.dialects import DRIVERS, PlainDriver, check_dialect, driver_of
from qmq.sql.expressions import Statement, prepared

_R = TypeVar("_R")
_COUNTING: Final = {"preserve_rowcount": True}


class Answer(NamedTuple):
    """The result of a statement."""

    rows: list[tuple[Any, ...]]
    changed: int


def finish(work: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine that never waits for the event loop, in the calling thread."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise InvalidArgument("an async connection needs the asyncio client: give the blocking client a sync connection")


async def settle(given: Any) -> Any:
    """The result of a driver's call, awaited if it is awaitable."""
    return await given if isawaitable(given) else given


class DatabaseConnection:
    """Runs statements. `paramstyle` is the driver's parameter style, as in the DB-API."""

    def __init__(self, dialect: str, paramstyle: str) -> None:
        self.dialect = check_dialect(dialect)
        self._paramstyle = paramstyle

    async def execute(self, statement: Statement) -> Answer:
        """Run a statement. Raises what the driver raises."""
        said = prepared(statement.expression, self.dialect, self._paramstyle)
        return await self._execute(said.text, said.parameters(statement.values))

    async def execute_many(self, expression: ClauseElement, values: Sequence[Mapping[str, Any]]) -> None:
        """Run an expression once with each of these parameters. Raises what the driver raises."""
        said = prepared(expression, self.dialect, self._paramstyle)
        await self._execute_many(said.text, [said.parameters(each) for each in values])

    async def _execute(self, text: str, parameters: Any) -> Answer:
        raise NotImplementedError

    async def _execute_many(self, text: str, parameters: Sequence[Any]) -> None:
        raise NotImplementedError


class AlchemyConnection(DatabaseConnection):
    """Runs statements through a SQLAlchemy `Connection` or `AsyncConnection`."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection.dialect.name, connection.dialect.paramstyle)
        self._connection = connection

    async def _execute(self, text: str, parameters: Any) -> Answer:
        result = await settle(self._connection.exec_driver_sql(text, parameters or None, execution_options=_COUNTING))
        rows = [tuple(row) for row in result.all()] if result.returns_rows else []
        return Answer(rows, -1 if rows else result.rowcount)

    async def _execute_many(self, text: str, parameters: Sequence[Any]) -> None:
        await settle(self._connection.exec_driver_sql(text, parameters))


class DriverConnection(DatabaseConnection):
    """Runs statements on a plain driver's connection. For an unknown driver, the application gives dialect and paramstyle."""

    def __init__(self, connection: Any, driver: PlainDriver | None = None) -> None:
        found = driver or driver_of(connection)
        if found is None:
            raise InvalidArgument(
                f"a {type(connection).__module__}.{type(connection).__name__} is not a connection that the outbox supports: give one of"
                f" SQLAlchemy 2 (Connection, Session, Engine, and their async forms), or of {', '.join(DRIVERS)}"
            )
        super().__init__(found.dialect, found.paramstyle)
        self._connection = connection

    async def _execute(self, text: str, parameters: Any) -> Answer:
        cursor = await settle(self._connection.cursor())
        try:
            await settle(cursor.execute(text, parameters))
            rows = [_plain(row) for row in await settle(cursor.fetchall())] if cursor.description is not None else []
            return Answer(rows, cursor.rowcount)
        finally:
            await settle(cursor.close())

    async def _execute_many(self, text: str, parameters: Sequence[Any]) -> None:
        cursor = await settle(self._connection.cursor())
        try:
            await settle(cursor.executemany(text, parameters))
        finally:
            await settle(cursor.close())


def _plain(row: Any) -> tuple[Any, ...]:
    """Rows as tuples, also from cursors that the application made to return mappings."""
    values: Sequence[Any] = list(row.values()) if isinstance(row, Mapping) else row
    return tuple(values)


class Executor:
    """Runs statements without awaiting, on a sync connection."""

    def __init__(self, connection: DatabaseConnection) -> None:
        self._connection = connection

    def execute(self, expression: ClauseElement, values: Mapping[str, Any]) -> int:
        """Returns the number of changed rows. Raises what the driver raises."""
        return finish(self._connection.execute(Statement(expression, values))).changed

    def execute_many(self, expression: ClauseElement, values: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement once with each of these parameters."""
        finish(self._connection.execute_many(expression, values))

    def fetch(self, expression: ClauseElement, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        return finish(self._connection.execute(Statement(expression, values))).rows
