"""The interface of transactions that SqlDedup needs.

An *opener* opens one transaction after another. A transaction is closed when its block is left; uncommitted changes are rolled back. It has
the connection for the handler (`handed`), and runs our own statements in the same transaction (`run`), as sync code on an `Executor`.

The handler must not end the transaction: after such a commit, a crash could lose its later writes although the record exists. So commits
are refused while the handler runs: SQLAlchemy's by an event (`dedup_alchemy.py`), a driver's by a wrapper without these methods
(`dedup_driver.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

from qmq.errors import InvalidArgument
from qmq.sql.database_connection import Executor

T = TypeVar("T")
Work = Callable[[Executor], T]

NOT_YOURS: Final = "is for the listener to do: it commits when the handler returns, and rolls back when it raises"


class Transaction(Protocol):
    """A transaction for a thread."""

    dialect: str
    handed: Any

    def run(self, work: Work[T]) -> T:
        """Run statements in the transaction."""
        ...

    def guard(self, is_handed: bool) -> None:
        """The handler gets the connection or returns it: whether `commit` is refused."""
        ...

    def commit(self) -> None:
        """Commit. Later statements belong to another transaction."""
        ...

    def rollback(self) -> None:
        """Roll back. Later statements belong to another transaction."""
        ...


class AsyncTransaction(Protocol):
    """A transaction for an event loop."""

    dialect: str
    handed: Any

    async def run(self, work: Work[T]) -> T:
        """Run statements in the transaction."""
        ...

    def guard(self, is_handed: bool) -> None:
        """The handler gets the connection or returns it: whether `commit` is refused."""
        ...

    async def commit(self) -> None:
        """Commit. Later statements belong to another transaction."""
        ...

    async def rollback(self) -> None:
        """Roll back. Later statements belong to another transaction."""
        ...


Opener = Callable[[], AbstractContextManager[Transaction]]
AsyncOpener = Callable[[], AbstractAsyncContextManager[AsyncTransaction]]


class HandedConnection:
    """A DB-API connection for a handler, without the methods that end a transaction."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        if name in ("commit", "rollback", "close", "executescript"):  # sqlite3's executescript commits first
            raise InvalidArgument(f"{name} {NOT_YOURS}")
        if name == "cursor" and isinstance(self._connection, sqlite3.Connection):
            return lambda factory=_Cursor: self._connection.cursor(factory)
        return getattr(self._connection, name)


class _Cursor(sqlite3.Cursor):
    def executescript(self, _script: str) -> sqlite3.Cursor:
        raise InvalidArgument(f"executescript {NOT_YOURS}")
