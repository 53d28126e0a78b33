"""Chooses the opener of a database's transactions, by SQLAlchemy's objects or a function that connects."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from qmq.errors import InvalidArgument
from qmq.sql.dedup_alchemy import async_opener, opener
from qmq.sql.dedup_driver import DriverOpener
from qmq.sql.dedup_transactions import AsyncOpener, Opener


def openers(database: Any, dialect: str | None, paramstyle: str | None) -> tuple[Opener | None, AsyncOpener | None]:
    """The openers of a database's transactions: the first for threads, the second for an event loop; None if the kind does not apply.
    Raises InvalidArgument.
    """
    if isinstance(database, Engine | sessionmaker):
        return opener(database.connect if isinstance(database, Engine) else database), None
    if isinstance(database, AsyncEngine | async_sessionmaker):
        return None, async_opener(database.connect if isinstance(database, AsyncEngine) else database)
    if not callable(database):
        raise InvalidArgument(
            f"{database!r} is not a database: give an Engine, AsyncEngine, sessionmaker or async_sessionmaker of SQLAlchemy, or a function "
            f"that returns a new DB-API connection"
        )
    return DriverOpener(database, dialect, paramstyle), None
