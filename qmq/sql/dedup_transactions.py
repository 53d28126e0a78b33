"""The transactions of SqlDedup, by SQLAlchemy's connections and sessions, sync and async, or by a
DB-API driver alone.

An *opener*, chosen by SQLAlchemy's object or the function that connects, opens one transaction
after another. A transaction is closed when its block is left; uncommitted changes are rolled back.
It has the connection for the handler (`handed`), and runs our own statements in the same
transaction (`run`), as sync code on an `Executor`.

The handler must not end the transaction: after such a commit, a crash could lose its later writes
although the record exists. So commits are refused while the handler runs: SQLAlchemy's by the event
before the commit; a driver's connection, which the application's function returns, is handed
without `commit`, `rollback`, `close` and `with`.

Statements on an async connection are also sync code, which SQLAlchemy runs by `run_sync`.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from qmq.errors import InvalidArgument
from qmq.sql.connection import AlchemyConnection, DriverConnection, Executor
from qmq.sql.dialects import PARAMSTYLES, PlainDriver, check_dialect, driver_of

T = TypeVar("T")
Work = Callable[[Executor], T]

NOT_YOURS: Final = (
    "is for the listener to do: it commits when the handler returns, and rolls back when it raises"
)


class HandedConnection:
    """A DB-API connection for a handler, without the methods that end a transaction."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        # `executescript`, too: sqlite3's commits first
        if name in ("commit", "rollback", "close", "executescript"):
            raise InvalidArgument(f"{name} {NOT_YOURS}")
        if name == "cursor" and isinstance(self._connection, sqlite3.Connection):
            return lambda factory=_Cursor: self._connection.cursor(factory)
        return getattr(self._connection, name)


class _Cursor(sqlite3.Cursor):
    def executescript(self, _script: str) -> sqlite3.Cursor:
        raise InvalidArgument(f"executescript {NOT_YOURS}")


class _Guard:
    """Refuses commits of one connection or session, but not of its savepoints. SQLAlchemy calls it
    before each commit.
    """

    def __init__(self, handed: Connection | Session) -> None:
        self.is_handed = False
        if isinstance(handed, Connection):
            event.listen(handed, "commit", self._connection_commits)
        else:
            event.listen(handed, "before_commit", self._session_commits)
        self._handed = handed

    def hand(self) -> None:
        """The handler gets the connection or session;
        for a session, also the connection of its transaction.
        """
        if isinstance(self._handed, Session):
            event.listen(self._handed.connection(), "commit", self._connection_commits)
        self.is_handed = True

    def _connection_commits(self, connection: Connection) -> None:
        if self.is_handed:
            # After an error here SQLAlchemy considers the transaction ended, and would return the
            # connection to its pool unchanged.
            connection.connection.rollback()
            raise InvalidArgument(f"commit {NOT_YOURS}")

    def _session_commits(self, session: Session) -> None:
        """Called before commits of savepoints, too."""
        if self.is_handed and not session.in_nested_transaction():
            raise InvalidArgument(f"commit {NOT_YOURS}")


class AlchemyTransaction:
    """A transaction for a thread, on a Connection or a Session (`handed`). After its end,
    statements belong to another one.
    """

    def __init__(self, handed: Connection | Session) -> None:
        self.handed: Any = handed
        self.dialect: str = _connection_of(handed).dialect.name
        self._guard = _Guard(handed)

    def run(self, work: Work[T]) -> T:
        """Run statements in the transaction."""
        return _run(self.handed, work)

    def guard(self, is_handed: bool) -> None:
        """The handler gets the connection or returns it: whether `commit` is refused."""
        if is_handed:
            self._guard.hand()
        else:
            self._guard.is_handed = False

    def commit(self) -> None:
        self.handed.commit()

    def rollback(self) -> None:
        self.handed.rollback()


class AsyncTransaction:
    """A transaction for an event loop, on an AsyncConnection or an AsyncSession (`handed`)."""

    def __init__(self, handed: AsyncConnection | AsyncSession, inner: AlchemyTransaction) -> None:
        self.handed: Any = handed
        self.dialect = inner.dialect
        self.guard = inner.guard

    async def run(self, work: Work[T]) -> T:
        found: T = await self.handed.run_sync(lambda handed: _run(handed, work))
        return found

    async def commit(self) -> None:
        await self.handed.commit()

    async def rollback(self) -> None:
        await self.handed.rollback()


def _run(handed: Connection | Session, work: Work[T]) -> T:
    return work(Executor(AlchemyConnection(_connection_of(handed))))


def _connection_of(handed: Connection | Session) -> Connection:
    """A session's own connection; the session's pending writes are flushed first."""
    if isinstance(handed, Session):
        handed.flush()
        return handed.connection()
    return handed


def opener(connect: Callable[[], AbstractContextManager[Connection | Session]]) -> Opener:
    """Opens transactions on connections or sessions, for threads."""

    @contextmanager
    def opened() -> Iterator[Transaction]:
        with connect() as handed:
            yield AlchemyTransaction(handed)

    return opened


def async_opener(
    connect: Callable[[], AbstractAsyncContextManager[AsyncConnection | AsyncSession]],
) -> AsyncOpener:
    """Opens transactions for an event loop."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncTransaction]:
        async with connect() as handed:
            yield AsyncTransaction(handed, await handed.run_sync(AlchemyTransaction))

    return opened


class DriverTransaction:
    """A transaction of a DB-API driver, for a thread."""

    def __init__(self, connection: Any, driver: PlainDriver) -> None:
        self.dialect: str = driver.dialect
        self.handed: Any = HandedConnection(connection)
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


Transaction = AlchemyTransaction | DriverTransaction
Opener = Callable[[], AbstractContextManager[Transaction]]
AsyncOpener = Callable[[], AbstractAsyncContextManager[AsyncTransaction]]


class DriverOpener:
    """Opens transactions of a driver. The driver is known by the module of its connections' class;
    its `paramstyle` is the form of parameters.
    """

    def __init__(
        self, connect: Callable[[], Any], dialect: str | None, paramstyle: str | None
    ) -> None:
        self._connect = connect
        self._dialect = None if dialect is None else check_dialect(dialect)
        self._paramstyle = paramstyle
        if paramstyle is not None and paramstyle not in PARAMSTYLES:
            raise InvalidArgument(
                f"paramstyle is one of {', '.join(PARAMSTYLES)}, not {paramstyle!r}"
            )

    @contextmanager
    def __call__(self) -> Iterator[Transaction]:
        connection = self._connect()
        try:
            yield DriverTransaction(connection, self._driver(connection))
        finally:
            # A broken connection has nothing to roll back, and the exception under way says more.
            with suppress(Exception):
                connection.rollback()
            connection.close()

    def _driver(self, connection: Any) -> PlainDriver:
        module = type(connection).__module__.partition(".")[0].lstrip("_")
        known = driver_of(connection)
        if known is not None and known.is_async:
            known = None
        dialect = self._dialect or (known.dialect if known else None)
        paramstyle = self._paramstyle or (
            known.paramstyle if known else getattr(sys.modules.get(module), "paramstyle", None)
        )
        if dialect is None or paramstyle not in PARAMSTYLES:
            raise InvalidArgument(
                f"which database {type(connection).__qualname__} of {module} uses is not "
                "known: give dialect='postgresql' (sqlite, "
                f"mysql) and paramstyle='pyformat' ({', '.join(PARAMSTYLES)})"
            )
        return PlainDriver(dialect, str(paramstyle))


def openers(
    database: Any, dialect: str | None, paramstyle: str | None
) -> tuple[Opener | None, AsyncOpener | None]:
    """The openers of a database's transactions: the first for threads, the second for an event
    loop; None if the kind does not apply. Raises InvalidArgument.
    """
    if isinstance(database, Engine | sessionmaker):
        return opener(database.connect if isinstance(database, Engine) else database), None
    if isinstance(database, AsyncEngine | async_sessionmaker):
        return None, async_opener(
            database.connect if isinstance(database, AsyncEngine) else database
        )
    if not callable(database):
        raise InvalidArgument(
            f"{database!r} is not a database: give an Engine, AsyncEngine, sessionmaker or "
            "async_sessionmaker of SQLAlchemy, or a function that returns a new DB-API connection"
        )
    return DriverOpener(database, dialect, paramstyle), None
