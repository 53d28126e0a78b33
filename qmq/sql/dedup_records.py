"""The statements on the table of finished messages, as expressions of SQLAlchemy Core, and the
operations that run them inside one transaction, for SQLAlchemy and for DB-API drivers.

    claim     writes the record; False if it exists: then its time begins again, since the message
              is still delivered
    check     before the commit: the record is still this transaction's own
    expire    deletes a batch of old records

Why `check`: a handler may swallow an error after which the transaction is not what it was.
PostgreSQL answers a commit of a failed transaction with a rollback and no error; MySQL ends a
transaction on a deadlock, SQLite on a full disk, and what follows is another transaction without
the record. In each case the message would be acknowledged without its effect, or with half of it.

Rules:
* No statement fails because a record exists, since a failed statement would end the whole
  transaction on PostgreSQL: the result is the number of rows. MySQL can say that only by an error
  (1062), which costs its transaction nothing.
* Records expire by two statements: one selects keys and locks nothing, the other deletes each key
  if its record is still as old. A record that was touched in between stays, and no gap is locked in
  which others insert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    TableClause,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.elements import ClauseElement

from qmq.errors import InvalidArgument, NotConnected, Overloaded
from qmq.sql.connection import Executor, bytes_place, named_table, now_ms, number
from qmq.sql.dedup_tables import Record, check_table, migration
from qmq.sql.dialects import DIALECTS, Dialect, check_dialect

EXPIRE_BATCH: Final = 200
_KEY: Final = ("group_name", "subject", "message_id")


@dataclass(frozen=True, slots=True)
class DedupStatements:
    """The statements for one table in one dialect."""

    dialect: Dialect
    add: ClauseElement
    """One row: the record was added. No row (on MySQL error 1062): it existed."""
    still_there: ClauseElement
    """One row with 1: this transaction's record exists. 0: the record was rolled back."""
    touch: ClauseElement
    """Begins the record's time again."""
    expiring: ClauseElement
    """The keys of the oldest records that are older than `keep` milliseconds, both by the
    database's clock and at the time `stored`.
    """
    expire: ClauseElement
    """Deletes one of these records, if it is still as old."""

    def parameters(self, record: Record) -> dict[str, Any]:
        """A record as the parameters of `add`, `touch` and `still_there`."""
        found = {
            "of_group": record.group,
            "of_subject": record.subject,
            "of_message": record.id,
            "by_token": record.token,
        }
        if self.dialect.is_hex:  # binary columns, independent of the connection's character set
            found = {name: value.encode().hex() for name, value in found.items()}
        return {**found, "stored": record.stored_ms}


@lru_cache(maxsize=32)
def statements_for(dialect: str, table: str) -> DedupStatements:
    """The statements for a database. Raises InvalidArgument for an invalid
    dialect or table name.
    """
    known = check_dialect(dialect)
    records = named_table(check_table(table), *_KEY, "token", "recorded_ms")
    columns, now = records.c, now_ms(known)
    places = [bytes_place(known, name) for name in ("of_group", "of_subject", "of_message")]
    is_it = [columns[name] == place for name, place in zip(_KEY, places, strict=True)]
    token = bytes_place(known, "by_token")
    stored = bindparam("stored", type_=BigInteger)
    later, earlier = (
        case((now > stored, now), else_=stored),
        case((now < stored, now), else_=stored),
    )
    is_old = columns.recorded_ms < earlier - bindparam("keep")
    shown = [func.hex(columns[name]) if DIALECTS[known].is_hex else columns[name] for name in _KEY]
    return DedupStatements(
        DIALECTS[known],
        add=_unless_there(
            known,
            records,
            dict(zip(_KEY, places, strict=True)) | {"token": token, "recorded_ms": later},
        ),
        still_there=select(func.count()).select_from(records).where(*is_it, columns.token == token),
        touch=update(records).values(recorded_ms=later).where(*is_it),
        expiring=select(*shown)
        .where(is_old)
        .order_by(columns.recorded_ms, *[columns[name] for name in _KEY])
        .limit(number(EXPIRE_BATCH)),
        expire=delete(records).where(*is_it, is_old),
    )


def _unless_there(dialect: str, records: TableClause, values: dict[str, Any]) -> ClauseElement:
    if DIALECTS[dialect].duplicate is not None:
        return insert(records).values(values)
    new = postgresql_insert(records) if dialect == "postgresql" else sqlite_insert(records)
    return new.values(values).on_conflict_do_nothing(index_elements=list(_KEY))


# The connection may fail before it is known which database it is.
_NO_TABLE: Final = tuple([mark for dialect in DIALECTS.values() for mark in dialect.no_table])
_BUSY: Final = tuple([mark for dialect in DIALECTS.values() for mark in dialect.busy])
_AWAY: Final = tuple([state for dialect in DIALECTS.values() for state in dialect.away])
_TRANSIENT: Final = frozenset({"OperationalError", "InterfaceError", "TimeoutError"})
"""The names of errors: the DB-API's, in every driver and in SQLAlchemy; and an error for a time
that is over.
"""


def claim(executor: Executor, statements: DedupStatements, record: Record) -> bool:
    """Whether this transaction must make the effect. Waits for another transaction that handles the
    same message.
    """
    parameters = statements.parameters(record)
    if _add(executor, statements, parameters):
        return True
    if not executor.execute(statements.touch, parameters):
        # The record expired just now, but it existed (or, on MySQL, was touched in this millisecond
        # already).
        _add(executor, statements, parameters)
    return False


def _add(executor: Executor, statements: DedupStatements, parameters: Mapping[str, Any]) -> bool:
    try:
        return executor.execute(statements.add, parameters) == 1
    except Exception as failure:
        if statements.dialect.duplicate is not None and statements.dialect.duplicate in codes(
            failure
        ):
            return False
        raise


def check(executor: Executor, statements: DedupStatements, record: Record) -> None:
    """Raises InvalidArgument if the record is missing: then some of the handler's writes were
    rolled back, too, and must not be committed.
    """
    if not is_there(executor, statements, record):
        raise InvalidArgument(
            "the transaction of this message was rolled back while its handler ran, "
            "in whole or in part: let the error that did it leave the handler, "
            "or use a savepoint around what may fail"
        )


def is_there(executor: Executor, statements: DedupStatements, record: Record) -> bool:
    """Whether this transaction sees its own record."""
    return int(executor.fetch(statements.still_there, statements.parameters(record))[0][0]) == 1


def expire(executor: Executor, statements: DedupStatements, keep_ms: int, stored_ms: int) -> int:
    """Delete a batch of the oldest records that were not touched for `keep_ms`, by the earlier of
    the database's clock and `stored_ms`, when a message was stored that was handled just now.
    Returns the number of deleted records.
    """
    limits = {"keep": keep_ms, "stored": stored_ms}
    found = executor.fetch(statements.expiring, limits)
    if found:
        keys = [
            {"of_group": row[0], "of_subject": row[1], "of_message": row[2], **limits}
            for row in found
        ]
        executor.execute_many(statements.expire, keys)
    return len(found)


def create(executor: Executor, dialect: str, table: str) -> None:
    """Create the table if it does not exist. On MySQL this ends the transaction."""
    for statement in migration(dialect, table).split(";\n")[:-1]:
        executor.execute(text(statement), {})


# --- errors ---------------------------------------------------------------------------------------


def codes(failure: BaseException) -> list[Any]:
    """The codes of an error without SQLAlchemy's wrapper: PostgreSQL's state, MySQL's number."""
    failure = getattr(failure, "orig", None) or failure
    named = [getattr(failure, name, None) for name in ("sqlstate", "pgcode", "errno")]
    return [each for each in (*named, *failure.args[:1]) if isinstance(each, str | int)]


@contextmanager
def on_the_way_in(table: str) -> Iterator[None]:
    """Around everything before the handler: converts errors of the database that the application
    did not cause.

    Raises:
        NotConnected: the database cannot be reached. Overloaded: another transaction handles the
        message, or the database is busy, or its pool has no free connection. InvalidArgument: the
        table does not exist.
    """
    try:
        yield
    except PoolTimeout as failure:
        raise Overloaded(
            "no connection of the engine's pool came free, and nothing was done: give the pool as "
            f"many connections as handlers run at once, in all listeners that share it ({failure})"
        ) from failure
    except Exception as failure:
        found = codes(failure)
        if _says(failure, found, _NO_TABLE):
            raise InvalidArgument(
                f"the database has no table {table!r}: create it, see `qmq dedup migration`"
            ) from failure
        if _says(failure, found, _BUSY):
            raise Overloaded(
                f"another transaction handles this message, or table {table!r} is busy; "
                f"nothing was done: {failure}"
            ) from failure
        if _is_transient(failure, found):
            raise NotConnected(
                f"the database that has table {table!r} cannot be reached; nothing was done: "
                f"{failure}"
            ) from failure
        raise


def _says(failure: Exception, found: Iterable[Any], marks: Sequence[str | int]) -> bool:
    """Whether an error has one of these codes, or, for SQLite, which has no codes,
    contains the text.
    """
    return any(code in marks for code in found) or any(
        mark in str(failure) for mark in marks if isinstance(mark, str) and " " in mark
    )


def _is_transient(failure: Exception, found: Iterable[Any]) -> bool:
    names = {kind.__name__ for kind in type(failure).__mro__}
    is_away = any(
        isinstance(code, str) and len(code) == 5 and code.startswith(_AWAY) for code in found
    )
    return isinstance(failure, OSError) or not names.isdisjoint(_TRANSIENT) or is_away
