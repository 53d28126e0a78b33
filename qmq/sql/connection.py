"""Runs statements on the application's database connection: SQLAlchemy's or a plain driver's, sync
or async.

    DatabaseConnection(connection).execute(Statement) ──▶ Answer (rows, how many were changed)

Rules:
* A `DatabaseConnection` never begins, commits or rolls back: its maker does (`outbox_runner.py`,
  `dedup_transactions.py`).
* A driver's result is awaited if it is awaitable. So one coroutine serves both kinds; with a sync
  connection it never waits for the event loop, and `finish` runs it in any thread, without a loop.
* Both get the same text: expressions are compiled here, not by SQLAlchemy's `execute`.

A SQLAlchemy Core expression becomes text and parameters for a driver, compiled once for each form:

    Statement(expression, values) ── prepared(expression, dialect, paramstyle)
    ──▶ text, parameters ──▶ any driver's cursor

SQLAlchemy's own `execute` makes a key of all expressions and values at each call, and compiles an
INSERT of several rows each time. An outbox inserts in the application's transaction, so the
compiled text is kept here, and connections of SQLAlchemy get it by `exec_driver_sql`, plain drivers
by their cursors.

Rules:
* Every value is a parameter, whose name is no column's name. The driver converts its type.
* A list of values (`IN`) has as many places as the next power of two, filled with the last value.
  So one statement has few forms.
* A table's name is written as the application gave it, without quotes, as in its migration.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import isawaitable
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Dialect,
    TableClause,
    bindparam,
    column,
    func,
    literal_column,
    table,
)
from sqlalchemy.dialects.mysql.base import MySQLDialect
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement, quoted_name

from qmq.errors import InvalidArgument
from qmq.sql.dialects import DIALECTS, DRIVERS, PlainDriver, check_dialect, driver_of

_COMPILING: Final[Mapping[str, type[Dialect]]] = {
    "sqlite": SQLiteDialect,
    "postgresql": PGDialect,
    "mysql": MySQLDialect,
}


class Statement(NamedTuple):
    """A statement and its values."""

    expression: ClauseElement
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A statement in the form that a driver takes."""

    text: str
    names: tuple[str, ...] | None
    """The parameters in the order of their placeholders; None if the driver takes them by name."""
    fixed: Mapping[str, Any]
    """Values that the dialect adds, such as an OFFSET of 0."""

    def parameters(self, values: Mapping[str, Any]) -> Any:
        found = {**self.fixed, **values} if self.fixed else values
        return dict(found) if self.names is None else tuple([found[name] for name in self.names])


@lru_cache(maxsize=512)
def prepared(expression: ClauseElement, dialect: str, paramstyle: str) -> Prepared:
    """Compile a statement to text and parameters. The text is cached."""
    compiled = expression.compile(dialect=_dialect(dialect, paramstyle))
    assert isinstance(compiled, SQLCompiler)
    fixed = {name: value for name, value in compiled.params.items() if value is not None}
    return Prepared(
        str(compiled), None if compiled.positiontup is None else tuple(compiled.positiontup), fixed
    )


@lru_cache(maxsize=32)
def _dialect(name: str, paramstyle: str) -> Dialect:
    return _COMPILING[name](paramstyle=paramstyle)  # type: ignore[call-arg]


def named_table(name: str, *columns: str) -> TableClause:
    """A table, perhaps in a schema: "shop.outbox"."""
    schema, _, bare = name.rpartition(".")
    return table(
        quoted_name(bare, quote=False),
        *[column(each) for each in columns],
        schema=quoted_name(schema, quote=False) if schema else None,
    )


def now_ms(dialect: str) -> ColumnElement[int]:
    """The database's clock, in milliseconds since 1970."""
    return literal_column(DIALECTS[dialect].now_ms, BigInteger)


def number(value: int) -> ColumnElement[int]:
    """A constant in the statement's text, so that the database can plan with it."""
    return literal_column(str(int(value)), BigInteger)


def bytes_place(dialect: str, name: str) -> ColumnElement[Any]:
    """A placeholder for bytes; its value is made by `bytes_value`."""
    return func.unhex(bindparam(name)) if DIALECTS[dialect].is_hex else bindparam(name)


def bytes_value(dialect: str, value: Any) -> Any:
    """Bytes, or None, in the form that the driver takes."""
    return value.hex() if DIALECTS[dialect].is_hex and value is not None else value


def places_for(count: int) -> int:
    """The number of placeholders for a list of `count` values."""
    return 1 << max(count - 1, 0).bit_length()


def places(name: str, count: int) -> list[BindParameter[Any]]:
    return [bindparam(f"{name}_{index}") for index in range(count)]


def listed(name: str, items: Sequence[Any]) -> dict[str, Any]:
    """The values of a list, at least one, for `places(name, places_for(len(items)))`."""
    last = len(items) - 1
    return {f"{name}_{index}": items[min(index, last)] for index in range(places_for(len(items)))}


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
    raise InvalidArgument(
        "an async connection needs the asyncio client: give the blocking client a sync connection"
    )


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

    async def execute_many(
        self, expression: ClauseElement, values: Sequence[Mapping[str, Any]]
    ) -> None:
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
        result = await settle(
            self._connection.exec_driver_sql(text, parameters or None, execution_options=_COUNTING)
        )
        rows = [tuple(row) for row in result.all()] if result.returns_rows else []
        return Answer(rows, -1 if rows else result.rowcount)

    async def _execute_many(self, text: str, parameters: Sequence[Any]) -> None:
        await settle(self._connection.exec_driver_sql(text, parameters))


class DriverConnection(DatabaseConnection):
    """Runs statements on a plain driver's connection. For an unknown driver, the application gives
    dialect and paramstyle.
    """

    def __init__(self, connection: Any, driver: PlainDriver | None = None) -> None:
        found = driver or driver_of(connection)
        if found is None:
            raise InvalidArgument(
                f"a {type(connection).__module__}.{type(connection).__name__} is not a connection "
                "that the outbox supports: give one of SQLAlchemy 2 (Connection, Session, Engine, "
                f"and their async forms), or of {', '.join(DRIVERS)}"
            )
        super().__init__(found.dialect, found.paramstyle)
        self._connection = connection

    async def _execute(self, text: str, parameters: Any) -> Answer:
        cursor = await settle(self._connection.cursor())
        try:
            await settle(cursor.execute(text, parameters))
            rows = (
                [_plain(row) for row in await settle(cursor.fetchall())]
                if cursor.description is not None
                else []
            )
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

    def fetch(
        self, expression: ClauseElement, values: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        return finish(self._connection.execute(Statement(expression, values))).rows
