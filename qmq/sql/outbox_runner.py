"""Runs work on a database in a separate short transaction, through an engine or through a lent
connection.

Work is a coroutine function that is given a connection. Its changes are committed when it returns,
and rolled back if it raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from qmq.errors import InvalidArgument
from qmq.sql.connection import (
    AlchemyConnection,
    DatabaseConnection,
    DriverConnection,
    finish,
    settle,
)
from qmq.sql.dialects import packages

_R = TypeVar("_R")
CONNECTIONS: Final = 4
"""The most connections in use at a time, independent of the number of subjects, because the pool
belongs to the application.
"""
END_S: Final = 5.0
"""How long a cancelled task waits for the end of its work."""
Work = Callable[[DatabaseConnection], Coroutine[Any, Any, _R]]


class EngineRunner:
    """Runs work through an `Engine`, in another thread because it blocks,
    or through an `AsyncEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = check_engine(engine)
        self._is_async = hasattr(engine, "sync_engine")
        self._room = asyncio.Semaphore(CONNECTIONS)
        self.dialect: str = engine.dialect.name

    async def run(self, work: Work[_R]) -> _R:
        """Run the work in a transaction. Raises what the driver raises; then nothing was changed,
        or the outcome is unknown.

        A caller that is cancelled waits for the end of the work: the work is short, and a driver
        must not lose its connection half-way.
        """
        async with self._room:
            task = asyncio.ensure_future(
                self._begin(work) if self._is_async else asyncio.to_thread(self.run_here, work)
            )
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task], timeout=END_S)
                if not task.cancelled() and task.done():
                    task.exception()  # the caller was cancelled
                raise

    async def _begin(self, work: Work[_R]) -> _R:
        async with self._engine.begin() as connection:
            return await work(AlchemyConnection(connection))

    def run_here(self, work: Work[_R]) -> _R:
        """Run on a sync engine in this thread."""
        with self._engine.begin() as connection:
            return finish(work(AlchemyConnection(connection)))


class LentRunner:
    """Runs work through a plain driver's connection, on which no transaction is open."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._database = DriverConnection(connection)
        self.dialect: str = self._database.dialect

    async def run(self, work: Work[_R]) -> _R:
        try:
            found = await work(self._database)
        except BaseException:
            await settle(self._connection.rollback())
            raise
        await settle(self._connection.commit())
        return found


Runner = EngineRunner | LentRunner


def check_engine(engine: Any) -> Any:
    """Returns a SQLAlchemy `Engine` or `AsyncEngine`. Raises InvalidArgument for anything else."""
    if "sqlalchemy" not in packages(engine) or not hasattr(engine, "dispose"):
        raise InvalidArgument(
            "an Engine or AsyncEngine of SQLAlchemy 2 is needed here, not a "
            f"{type(engine).__name__}"
        )
    return engine


def open_engine(url: str) -> Any:
    """An engine for a database's URL, async if its driver is. Raises InvalidArgument for an invalid
    URL, or a driver that is not installed.
    """
    try:
        parsed = make_url(url)
        if parsed.get_dialect().is_async:
            from sqlalchemy.ext.asyncio import create_async_engine

            return create_async_engine(parsed, pool_pre_ping=True)
        return create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ImportError) as cause:
        raise InvalidArgument(
            f"the database's URL cannot be used: {cause}"
        ) from None  # without the URL, which may contain a password
