"""The database handle that an application passes to an outbox: its own connection or session, or an engine.

    lent by the application (its transaction)     AlchemyTarget (Connection, Session, and async), PlainTarget (a driver's connection)
    opened by the outbox (a transaction of ours)  EngineTarget (Engine, AsyncEngine)

Rules:
* The outbox never begins, commits or rolls back a lent transaction. An autocommitting connection without a transaction is refused: there a
  message would be committed even if the rest is rolled back.
* `tells` is whether the commit is reported. A plain driver does not report it: the application calls `committed()`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from qmq.errors import InvalidArgument
from qmq.sql.database_connection import AlchemyConnection, DatabaseConnection, DriverConnection, settle
from qmq.sql.dialects import packages
from qmq.sql.outbox_runner import EngineRunner, LentRunner, Runner, check_engine

IsOver = Callable[[], bool]


class Target:
    tells = True

    @property
    def connection(self) -> Any:
        """The connection for the application's own statements."""
        raise NotImplementedError

    async def open(self) -> None: ...

    async def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The block has ended."""

    async def database(self) -> DatabaseConnection:
        """The connection through which messages are inserted. Raises InvalidArgument."""
        raise NotImplementedError

    def runner(self) -> tuple[object, Runner]:
        """A runner of the outbox's own transactions on the same database, and a key that identifies the database."""
        raise NotImplementedError

    def when(self, committing: Callable[[IsOver], None], rolled_back: Callable[[], None]) -> None:
        """Have one of the two functions called when the transaction ends."""
        raise NotImplementedError

    @property
    def is_in_transaction(self) -> bool:
        """Whether the application's transaction is still open."""
        raise NotImplementedError


class AlchemyTarget(Target):
    """A SQLAlchemy `Connection` or `AsyncConnection`, or the one that a session uses."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._connection: Any = None

    @property
    def connection(self) -> Any:
        return self._given

    async def database(self) -> DatabaseConnection:
        is_connection = hasattr(self._given, "get_transaction") and hasattr(self._given, "dialect")
        self._connection = self._given if is_connection else await settle(self._given.connection())
        if self._connection.get_transaction() is None:
            await settle(self._connection.exec_driver_sql("SELECT 1"))  # SQLAlchemy begins a transaction with the first statement
        if autocommits(await self._raw()):
            raise _autocommit()
        return AlchemyConnection(self._connection)

    async def _raw(self) -> Any:
        sync = self._sync
        if sync is self._connection:
            return sync.connection.driver_connection
        return (await self._connection.get_raw_connection()).driver_connection

    @property
    def _sync(self) -> Any:
        return getattr(self._connection, "sync_connection", self._connection)

    def runner(self) -> tuple[object, Runner]:
        """See `Target`. Engines that share a pool reach one database."""
        return self._sync.engine.pool, EngineRunner(self._connection.engine)

    def when(self, committing: Callable[[IsOver], None], rolled_back: Callable[[], None]) -> None:
        from qmq.sql.outbox_commits import when

        when(self._sync, committing, rolled_back)

    @property
    def is_in_transaction(self) -> bool:
        sync = self._sync
        return sync is not None and not sync.closed and bool(sync.in_transaction())


class EngineTarget(AlchemyTarget):
    """A transaction of the outbox's own: committed when the block ends, rolled back if the block raises."""

    def __init__(self, engine: Any) -> None:
        super().__init__(None)
        self._engine = check_engine(engine)
        self._is_async = hasattr(engine, "sync_engine")
        self._context: Any = None

    async def open(self) -> None:
        self._context = self._engine.begin()
        self._given = await self._context.__aenter__() if self._is_async else self._context.__enter__()

    async def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave = self._context.__aexit__ if self._is_async else self._context.__exit__
        await settle(leave(kind, error, trace))


class PlainTarget(Target):
    """A plain driver's connection."""

    tells = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._runner = LentRunner(connection)

    @property
    def connection(self) -> Any:
        return self._connection

    async def database(self) -> DatabaseConnection:
        if autocommits(self._connection):
            raise _autocommit()
        return DriverConnection(self._connection)

    def runner(self) -> tuple[object, Runner]:
        return self._connection, self._runner

    @property
    def is_in_transaction(self) -> bool:
        return in_transaction(self._connection)


def target_of(given: Any) -> Target:
    """The target for the application's handle. Raises InvalidArgument."""
    if isinstance(given, str):
        raise InvalidArgument("an outbox needs a connection, a session or an engine, not a URL")
    if "sqlalchemy" not in packages(given):
        return PlainTarget(given)
    if hasattr(given, "begin") and hasattr(given, "dispose"):
        return EngineTarget(given)
    if not hasattr(type(given), "connection"):
        raise InvalidArgument(f"an outbox needs a connection, a session or an engine, not a {type(given).__name__}")
    return AlchemyTarget(given)


def in_transaction(raw: Any) -> bool:
    """Whether a transaction is open on a plain driver's connection, as far as the driver knows."""
    if hasattr(raw, "in_transaction"):  # sqlite3, aiosqlite
        return bool(raw.in_transaction)
    if hasattr(raw, "get_transaction_status"):  # aiomysql, psycopg2
        return bool(raw.get_transaction_status())
    if hasattr(raw, "server_status"):  # PyMySQL
        return bool(raw.server_status & 1)
    status = getattr(getattr(raw, "info", None), "transaction_status", 0)  # psycopg
    return bool(status)


def autocommits(raw: Any) -> bool:
    """Whether a plain driver's connection would commit the next statement immediately."""
    if in_transaction(raw):
        return False
    if hasattr(raw, "in_transaction"):
        return raw.isolation_level is None or getattr(raw, "autocommit", None) is True  # the latter from Python 3.12 on
    if hasattr(raw, "get_autocommit"):
        return bool(raw.get_autocommit())
    return getattr(raw, "autocommit", False) is True


def _autocommit() -> InvalidArgument:
    return InvalidArgument(
        "the connection commits each statement immediately, so a message would be sent even after a rollback: begin a transaction first"
    )
