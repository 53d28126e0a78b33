"""Exactly-once effects: a message's id is recorded in the transaction of its handler's writes.

docs/DEDUP.md says why it holds.

    dedup = SqlDedup(create_async_engine("postgresql+psycopg://..."))

    @mq.listener("orders", group="billing", idempotent=dedup)
    async def bill(order: Order, context: Context) -> None:
        await context.connection.execute(insert(invoice).values(...))

    open -> claim -> handler -> check -> commit -> (expire) -> close -> acknowledge
                 \\-> the record is there: close -> acknowledge

A crash before the commit leaves nothing, and the message is handed out again. A crash after it
leaves record and effect, and the next claim finds the record. No other outcome is possible.

The handler and the database must be of the same kind: `async def` with AsyncEngine or
async_sessionmaker, plain `def` with Engine, sessionmaker or a DB-API driver. A sync database under
an `async def` handler would block the event loop, and two handlers that want the same row would
deadlock: one waits for the row, the other for the loop.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Final

from qmq.client.listening.listener_options import IdempotentRun, Named
from qmq.errors import InvalidArgument
from qmq.sql import dedup_records
from qmq.sql.dedup_records import DedupStatements, statements_for
from qmq.sql.dedup_tables import KEY_BYTES_MAX, TABLE, Record, check_table
from qmq.sql.dedup_transactions import AsyncTransaction, Transaction, openers

log = logging.getLogger("qmq.sql")

KEEP: Final = timedelta(days=7)
KEEP_MIN: Final = timedelta(minutes=1)
EXPIRE_EVERY: Final = 100
"""Messages between two deletions of old records: each deletes twice as many as were added."""


class SqlDedup:
    """Records handled messages in the application's own database.

    `database` is an Engine, AsyncEngine, sessionmaker or async_sessionmaker of SQLAlchemy, or a
    function that returns a new DB-API connection; `dialect` and `paramstyle` are for an unknown
    driver. `table` must exist (`qmq dedup migration`, `create_tables`). Records are kept for `keep`
    since the message was last handed out: docs/DEDUP.md says what to choose. `key` gives a name of
    the application's own, text of up to 255 bytes, instead of the message id: then a message that
    was sent twice has one effect.

    Raises InvalidArgument.
    """

    def __init__(
        self,
        database: Any,
        table: str = TABLE,
        keep: timedelta = KEEP,
        *,
        key: Callable[[Any], str] | None = None,
        dialect: str | None = None,
        paramstyle: str | None = None,
    ) -> None:
        if not isinstance(keep, timedelta) or keep < KEEP_MIN:
            raise InvalidArgument(
                "keep is a timedelta of a minute at least, and should be days (see "
                f"docs/DEDUP.md), not {keep!r}"
            )
        self.table = check_table(table)
        self._keep_ms = keep // timedelta(milliseconds=1)
        self._key = key
        self._opener, self._async_opener = openers(database, dialect, paramstyle)
        self._turns = itertools.count()
        self._statements: DedupStatements | None = None

    def check_handler(self, *, is_async: bool) -> None:
        """Raise InvalidArgument if this kind of handler does not fit the database (see the
        module's docstring).
        """
        if is_async and self._async_opener is None:
            raise InvalidArgument(
                "an `async def` handler needs an AsyncEngine or async_sessionmaker, "
                "since a sync database holds up the event loop, perhaps forever: "
                "give SqlDedup one, or make the handler a plain `def`, which runs in a thread"
            )
        if not is_async and self._opener is None:
            raise InvalidArgument(
                "a plain `def` handler runs in a thread and needs an Engine, sessionmaker or "
                "DB-API connections: give SqlDedup one, or make the handler an `async def`"
            )

    # --- a message --------------------------------------------------------------------------------

    @contextmanager
    def once_sync(self, message: Named, group: str) -> Iterator[IdempotentRun]:
        """The transaction of one message, for a plain `def` handler; all of it in one thread.

        Raises on the way in InvalidArgument, and Unavailable if another transaction handles the
        message or the database cannot be reached; on the way out InvalidArgument if the handler let
        the transaction be rolled back, and the database's errors: then nothing was done, unless
        only the answer to the commit was lost, which the next claim finds out.
        """
        self.check_handler(is_async=False)
        assert self._opener is not None
        record = self._record(message, group)
        with ExitStack() as stack:
            with dedup_records.on_the_way_in(self.table):
                transaction = stack.enter_context(self._opener())
                statements = self._statements or self._prove(transaction)
                is_new = transaction.run(
                    lambda executor: dedup_records.claim(executor, statements, record)
                )
                if not is_new:
                    transaction.commit()
            if is_new:
                transaction.guard(True)
                yield IdempotentRun(True, transaction.handed)
                transaction.guard(False)
                transaction.run(lambda executor: dedup_records.check(executor, statements, record))
                transaction.commit()
            if self._is_time_to_expire():
                self._expire(transaction, statements, record.stored_ms)
        if not is_new:
            yield IdempotentRun(False, None)

    @asynccontextmanager
    async def once(self, message: Named, group: str) -> AsyncIterator[IdempotentRun]:
        """A message's transaction, for an `async def` handler."""
        self.check_handler(is_async=True)
        assert self._async_opener is not None
        record = self._record(message, group)
        async with AsyncExitStack() as stack:
            with dedup_records.on_the_way_in(self.table):
                transaction = await stack.enter_async_context(self._async_opener())
                statements = self._statements or await self._prove_async(transaction)
                is_new = await transaction.run(
                    lambda executor: dedup_records.claim(executor, statements, record)
                )
                if not is_new:
                    await transaction.commit()
            if is_new:
                transaction.guard(True)
                yield IdempotentRun(True, transaction.handed)
                transaction.guard(False)
                await transaction.run(
                    lambda executor: dedup_records.check(executor, statements, record)
                )
                await transaction.commit()
            if self._is_time_to_expire():
                await self._expire_async(transaction, statements, record.stored_ms)
        if not is_new:
            yield IdempotentRun(False, None)

    def _record(self, message: Named, group: str) -> Record:
        name = str(message.id) if self._key is None else self._key(message)
        return Record(
            group, message.subject, name, os.urandom(16).hex(), message.append_time_ms
        ).check_width()

    # --- before the first message -----------------------------------------------------------------

    def _prove(self, transaction: Transaction) -> DedupStatements:
        """Check that the table holds the longest record, and that a rollback removes it. That fails
        with autocommit, and on an engine without transactions (MyISAM).
        """
        statements, trial = statements_for(transaction.dialect, self.table), _trial()
        transaction.run(lambda executor: dedup_records.claim(executor, statements, trial))
        if not transaction.run(
            lambda executor: dedup_records.is_there(executor, statements, trial)
        ):
            raise _too_narrow(self.table)
        transaction.rollback()
        if transaction.run(lambda executor: dedup_records.is_there(executor, statements, trial)):
            raise _no_transactions(self.table)
        transaction.rollback()
        self._statements = statements
        return statements

    async def _prove_async(self, transaction: AsyncTransaction) -> DedupStatements:
        statements, trial = statements_for(transaction.dialect, self.table), _trial()
        await transaction.run(lambda executor: dedup_records.claim(executor, statements, trial))
        if not await transaction.run(
            lambda executor: dedup_records.is_there(executor, statements, trial)
        ):
            raise _too_narrow(self.table)
        await transaction.rollback()
        if await transaction.run(
            lambda executor: dedup_records.is_there(executor, statements, trial)
        ):
            raise _no_transactions(self.table)
        await transaction.rollback()
        self._statements = statements
        return statements

    # --- after some messages ----------------------------------------------------------------------

    def _is_time_to_expire(self) -> bool:
        return next(self._turns) % EXPIRE_EVERY == 0

    def _expire(
        self, transaction: Transaction, statements: DedupStatements, stored_ms: int
    ) -> None:
        """Delete old records; failures do not affect the message."""
        try:
            transaction.run(
                lambda executor: dedup_records.expire(
                    executor, statements, self._keep_ms, stored_ms
                )
            )
            transaction.commit()
        except Exception as failure:
            _log_expiry(self.table, failure)

    async def _expire_async(
        self, transaction: AsyncTransaction, statements: DedupStatements, stored_ms: int
    ) -> None:
        try:
            await transaction.run(
                lambda executor: dedup_records.expire(
                    executor, statements, self._keep_ms, stored_ms
                )
            )
            await transaction.commit()
        except Exception as failure:
            _log_expiry(self.table, failure)


def create_tables(
    database: Any, table: str = TABLE, *, dialect: str | None = None, paramstyle: str | None = None
) -> None:
    """Create the table if it does not exist. `database` is an Engine or sessionmaker of SQLAlchemy,
    or a function that returns a new DB-API connection. With an AsyncEngine: `create_tables_async`.
    Raises InvalidArgument, and the database's errors.
    """
    opener, _ = openers(database, dialect, paramstyle)
    if opener is None:
        raise InvalidArgument("this database is async: `await create_tables_async(...)`")
    with opener() as transaction:
        transaction.run(lambda executor: dedup_records.create(executor, transaction.dialect, table))
        transaction.commit()


async def create_tables_async(database: Any, table: str = TABLE) -> None:
    """Create the tables through an AsyncEngine or async_sessionmaker."""
    _, opener = openers(database, None, None)
    if opener is None:
        raise InvalidArgument("this database is sync: `create_tables(...)`")
    async with opener() as transaction:
        await transaction.run(
            lambda executor: dedup_records.create(executor, transaction.dialect, table)
        )
        await transaction.commit()


def _trial() -> Record:
    """The longest possible record; no subject has such a name."""
    longest = "%trial".ljust(KEY_BYTES_MAX, "%")
    return Record(longest, longest, longest[32:] + os.urandom(16).hex(), os.urandom(16).hex())


def _too_narrow(table: str) -> InvalidArgument:
    return InvalidArgument(
        f"table {table!r} truncates long names, and could confuse two messages: create it "
        "with the output of `qmq dedup migration`"
    )


def _no_transactions(table: str) -> InvalidArgument:
    return InvalidArgument(
        f"table {table!r} keeps rows that were rolled back: use an engine with transactions (on "
        "MySQL InnoDB, for the application's tables too) and connections without autocommit"
    )


def _log_expiry(table: str, failure: Exception) -> None:
    log.warning(
        "old records of %s could not be deleted, the next try is %d messages away: %s",
        table,
        EXPIRE_EVERY,
        failure,
    )
