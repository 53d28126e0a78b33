"""Transactions of SqlDedup by a DB-API driver alone, each on a connection that the application's function returns.

The handler gets that connection without its `commit`, `rollback`, `close` and `with`: whoever has them could end the transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.sql.dedup_statements import PARAMSTYLES, check_dialect, styled
from qmq.sql.dedup_transactions import HandedConnection, T, Transaction, Work

_DIALECTS: Final[Mapping[str, str]] = {
    "sqlite3": "sqlite",
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pymysql": "mysql",
    "MySQLdb": "mysql",
}


class _DriverExecutor:
    def __init__(self, connection: Any, paramstyle: str) -> None:
        self._connection = connection
        self._paramstyle = paramstyle

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> int:
        with self._cursor() as cursor:
            text, names = styled(statement, self._paramstyle)
            cursor.execute(text, _arranged(parameters, names))
            return int(cursor.rowcount)

    def execute_many(self, statement: str, parameters: Sequence[Mapping[str, Any]]) -> None:
        with self._cursor() as cursor:
            text, names = styled(statement, self._paramstyle)
            cursor.executemany(text, [_arranged(each, names) for each in parameters])

    def fetch(self, statement: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        with self._cursor() as cursor:
            text, names = styled(statement, self._paramstyle)
            cursor.execute(text, _arranged(parameters, names))
            return list(cursor.fetchall())

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        cursor = self._connection.cursor()
        try:
            yield cursor
        finally:
            cursor.close()


def _arranged(parameters: Mapping[str, Any], names: Sequence[str] | None) -> Any:
    if names is not None:
        return tuple(parameters[name] for name in names)
    return parameters


class _DriverTransaction:
    def __init__(self, connection: Any, dialect: str, paramstyle: str) -> None:
        self.dialect = dialect
        self.handed = HandedConnection(connection)
        self._connection = connection
        self._executor = _DriverExecutor(connection, paramstyle)

    def run(self, work: Work[T]) -> T:
        return work(self._executor)

    def guard(self, is_handed: bool) -> None:
        """What is handed out cannot commit."""

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class DriverOpener:
    """A driver is known by the module of its connections' class, and says by `paramstyle` how it wants parameters."""

    def __init__(self, connect: Callable[[], Any], dialect: str | None, paramstyle: str | None) -> None:
        self._connect = connect
        self._dialect = None if dialect is None else check_dialect(dialect)
        self._paramstyle = paramstyle
        if paramstyle is not None and paramstyle not in PARAMSTYLES:
            raise InvalidArgument(f"paramstyle is one of {', '.join(PARAMSTYLES)}, not {paramstyle!r}")

    @contextmanager
    def __call__(self) -> Iterator[Transaction]:
        connection = self._connect()
        try:
            yield _DriverTransaction(connection, *self._spoken(connection))
        finally:
            with suppress(Exception):  # of a connection that broke there is nothing to roll back; what is raised already says more
                connection.rollback()
            connection.close()

    def _spoken(self, connection: Any) -> tuple[str, str]:
        module = type(connection).__module__.split(".")[0].lstrip("_")
        dialect = self._dialect or _DIALECTS.get(module)
        paramstyle = self._paramstyle or getattr(sys.modules.get(module), "paramstyle", None)
        if dialect is None or paramstyle not in PARAMSTYLES:
            raise InvalidArgument(
                f"which database {type(connection).__qualname__} of {module} speaks to is not known: say dialect='postgresql' (sqlite, "
                f"mysql) and paramstyle='pyformat' ({', '.join(PARAMSTYLES)})"
            )
        return dialect, str(paramstyle)
