"""SQLAlchemy Core expressions as statements for a driver: text and parameters, compiled once for each form.

    Statement(expression, values) ── prepared(expression, dialect, paramstyle) ──▶ text, parameters ──▶ any driver's cursor

SQLAlchemy's own `execute` makes a key of all expressions and values at each call, and compiles an INSERT of several rows each time. An
outbox inserts in the application's transaction, so the compiled text is kept here, and connections of SQLAlchemy get it by
`exec_driver_sql`, plain drivers by their cursors.

Rules:
* Every value is a parameter, whose name is no column's name. The driver converts its type.
* A list of values (`IN`) has as many places as the next power of two, filled with the last value. So one statement has few forms.
* A table's name is written as the application gave it, without quotes, as in its migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import BigInteger, BindParameter, ColumnElement, Dialect, TableClause, bindparam, column, func, literal_column, table
from sqlalchemy.dialects.mysql.base import MySQLDialect
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement, quoted_name

from qmq.sql.dialects import DIALECTS

_COMPILING: Final[Mapping[str, type[Dialect]]] = {"sqlite": SQLiteDialect, "postgresql": PGDialect, "mysql": MySQLDialect}


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
    return Prepared(str(compiled), None if compiled.positiontup is None else tuple(compiled.positiontup), fixed)


@lru_cache(maxsize=32)
def _dialect(name: str, paramstyle: str) -> Dialect:
    return _COMPILING[name](paramstyle=paramstyle)  # type: ignore[call-arg]


def named_table(name: str, *columns: str) -> TableClause:
    """A table, perhaps in a schema: "shop.outbox"."""
    schema, _, bare = name.rpartition(".")
    return table(
        quoted_name(bare, quote=False), *[column(each) for each in columns], schema=quoted_name(schema, quote=False) if schema else None
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
