"""Transactions of SqlDedup by SQLAlchemy: connections and sessions, sync and async.

Statements on an async connection are also sync code, which SQLAlchemy runs by `run_sync`. If the handler itself commits, the event
before the commit refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from qmq.errors import InvalidArgument
from qmq.sql.database_connection import AlchemyConnection, Executor
from qmq.sql.dedup_transactions import NOT_YOURS, AsyncOpener, AsyncTransaction, Opener, T, Transaction, Work


class _Guard:
    """Refuses commits of one connection or session, but not of its savepoints. SQLAlchemy calls it before each commit."""

    def __init__(self, handed: Connection | Session) -> None:
        self.is_handed = False
        if isinstance(handed, Connection):
            event.listen(handed, "commit", self._connection_commits)
        else:
            event.listen(handed, "before_commit", self._session_commits)
        self._handed = handed

    def hand(self) -> None:
        """The handler gets the connection or session; for a session, also the connection of its transaction."""
        if isinstance(self._handed, Session):
            event.listen(self._handed.connection(), "commit", self._connection_commits)
        self.is_handed = True

    def _connection_commits(self, connection: Connection) -> None:
        if self.is_handed:
            # After an error here SQLAlchemy considers the transaction ended, and would return the connection to its pool unchanged.
            connection.connection.rollback()
            raise InvalidArgument(f"commit {NOT_YOURS}")

    def _session_commits(self, session: Session) -> None:
        """Called before commits of savepoints, too."""
        if self.is_handed and not session.in_nested_transaction():
            raise InvalidArgument(f"commit {NOT_YOURS}")


class _AlchemyTransaction:
    """A transaction on a Connection or a Session (`handed`)."""

    def __init__(self, handed: Connection | Session) -> None:
        self.handed = handed
        self.dialect = _connection_of(handed).dialect.name
        self._guard = _Guard(handed)

    def run(self, work: Work[T]) -> T:
        return _run(self.handed, work)

    def guard(self, is_handed: bool) -> None:
        if is_handed:
            self._guard.hand()
        else:
            self._guard.is_handed = False

    def commit(self) -> None:
        self.handed.commit()

    def rollback(self) -> None:
        self.handed.rollback()


class _AsyncAlchemyTransaction:
    """A transaction on an AsyncConnection or an AsyncSession (`handed`)."""

    def __init__(self, handed: AsyncConnection | AsyncSession, inner: _AlchemyTransaction) -> None:
        self.handed = handed
        self.dialect = inner.dialect
        self.guard = inner.guard

    async def run(self, work: Work[T]) -> T:
        return await self.handed.run_sync(lambda handed: _run(handed, work))

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
            yield _AlchemyTransaction(handed)

    return opened


def async_opener(connect: Callable[[], AbstractAsyncContextManager[AsyncConnection | AsyncSession]]) -> AsyncOpener:
    """Opens transactions for an event loop."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncTransaction]:
        async with connect() as handed:
            yield _AsyncAlchemyTransaction(handed, await handed.run_sync(_AlchemyTransaction))

    return opened
