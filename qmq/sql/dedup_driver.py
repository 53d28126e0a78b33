"""Transactions of SqlDedup by a DB-API driver alone, each on a connection that the application's function returns.

The handler gets that connection without `commit`, `rollback`, `close` and `with`, which could end the transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from qmq.errors import InvalidArgument
from qmq.sql.database_connection import DriverConnection, Executor
from qmq.sql.dedup_transactions import HandedConnection, T, Transaction, Work
from qmq.sql.dialects import PARAMSTYLES, PlainDriver, check_dialect, driver_of


class _DriverTransaction:
    def __init__(self, connection: Any, driver: PlainDriver) -> None:
        self.dialect = driver.dialect
        self.handed = HandedConnection(connection)
        self._connection = connection
        self._executor = Executor(DriverConnection(connection, driver))

    def run(self, work: Work[T]) -> T:
        return work(self._executor)

    def guard(self, is_handed: bool) -> None:
        """A wrapper of the connection that cannot commit, for the handler."""

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class DriverOpener:
    """Opens transactions of a driver. The driver is known by the module of its connections' class; its `paramstyle` is the form of
    parameters.
    """

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
            yield _DriverTransaction(connection, self._driver(connection))
        finally:
            with suppress(Exception):  # a broken connection has nothing to roll back, and the exception under way says more
                connection.rollback()
            connection.close()

    def _driver(self, connection: Any) -> PlainDriver:
        module = type(connection).__module__.partition(".")[0].lstrip("_")
        known = driver_of(connection)
        if known is not None and known.is_async:
            known = None
        dialect = self._dialect or (known.dialect if known else None)
        paramstyle = self._paramstyle or (known.paramstyle if known else getattr(sys.modules.get(module), "paramstyle", None))
        if dialect is None or paramstyle not in PARAMSTYLES:
            raise InvalidArgument(
                f"which database {type(connection).__qualname__} of {module} uses is not known: give dialect='postgresql' (sqlite, "
                f"mysql) and paramstyle='pyformat' ({', '.join(PARAMSTYLES)})"
            )
        return PlainDriver(dialect, str(paramstyle))
