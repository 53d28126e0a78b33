"""The differences between SQLite, PostgreSQL, and MySQL or MariaDB, besides the migrations of the
tables: one `Dialect` for each. Pure.

This module does not need SQLAlchemy: the command line prints migrations without it. Code that opens
an outbox or a SqlDedup calls `check_installed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    """SQLAlchemy's name of the dialect. MariaDB is mysql."""
    now_ms: str
    """The database's clock in milliseconds since 1970. The value is constant within a statement, so
    that indexes can be used, and advances within a transaction.
    """
    is_hex: bool = False
    """Whether bytes are passed as hexadecimal digits: since PyMySQL 1.2.3 aiomysql cannot pass
    bytes (its issue 1080), and PyMySQL writes digits itself.
    """
    duplicate: int | None = None
    """The error number for an existing key. None: the statement says ON CONFLICT DO NOTHING and
    inserts no row.
    """
    no_table: tuple[str | int, ...] = ()
    """Marks of the error for a missing table: PostgreSQL's state, MySQL's number, or for SQLite a
    part of the text.
    """
    busy: tuple[str | int, ...] = ()
    """Marks of the error for a row or database that another transaction has locked: serialization
    failure, deadlock, lock timeout.
    """
    away: tuple[str, ...] = ()
    """Beginnings of states that mean that the database cannot be reached:
    connection, resources, operator.
    """


DIALECTS: Final[Mapping[str, Dialect]] = {
    each.name: each
    for each in (
        Dialect(
            "sqlite",
            "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
            no_table=("no such table",),
            busy=("is locked",),
        ),
        Dialect(
            "postgresql",
            # Not now(), which is the beginning of the transaction.
            "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)",
            no_table=("42P01",),
            busy=("40001", "40P01", "55P03"),
            away=("08", "53", "57"),
        ),
        Dialect(
            "mysql",
            # Not NOW(3), which uses the session's time zone, where an hour comes twice in autumn.
            "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000)",
            is_hex=True,
            duplicate=1062,
            no_table=(1146,),
            busy=(1205, 1213),
        ),
    )
}


class PlainDriver(NamedTuple):
    """A plain DB-API driver, or one with the same methods as coroutines."""

    dialect: str
    paramstyle: str
    is_async: bool = False


DRIVERS: Final[Mapping[str, PlainDriver]] = {
    "sqlite3": PlainDriver("sqlite", "qmark"),
    "aiosqlite": PlainDriver("sqlite", "qmark", is_async=True),
    "psycopg": PlainDriver("postgresql", "format"),
    "psycopg2": PlainDriver("postgresql", "format"),
    "pymysql": PlainDriver("mysql", "format"),
    "MySQLdb": PlainDriver("mysql", "format"),
    "aiomysql": PlainDriver("mysql", "format", is_async=True),
}
"""The dialects and paramstyles by the driver's package."""

PARAMSTYLES: Final = ("qmark", "format", "numeric", "named", "pyformat")
"""How DB-API drivers want parameters written."""


def check_installed() -> None:
    """Raise InvalidArgument if SQLAlchemy is not installed."""
    try:
        import sqlalchemy  # noqa: F401
    except ImportError:
        raise InvalidArgument(
            "the outbox and SqlDedup need SQLAlchemy: pip install 'qmq[sql]'"
        ) from None


def check_dialect(name: str) -> str:
    """Returns sqlite, postgresql or mysql (also for MariaDB).
    Raises InvalidArgument for another name.
    """
    found = "mysql" if name == "mariadb" else name
    if found not in DIALECTS:
        raise InvalidArgument(
            f"the dialect must be one of {', '.join(DIALECTS)} or mariadb, not {name!r}"
        )
    return found


def packages(thing: object) -> set[str]:
    """The packages of an object's class and of its base classes."""
    return {each.__module__.partition(".")[0] for each in type(thing).__mro__}


def driver_of(connection: object) -> PlainDriver | None:
    """The driver of a connection, also of one that SqlDedup passes to a handler. None if the driver
    is not known.
    """
    if "qmq" in packages(connection):  # dedup's HandedConnection
        connection = getattr(connection, "_connection", connection)
    found = packages(connection)
    return next((driver for package, driver in DRIVERS.items() if package in found), None)
