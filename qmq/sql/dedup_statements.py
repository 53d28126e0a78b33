"""Every statement on the table of finished messages, as an expression of SQLAlchemy Core. Pure.

Rules:
* No statement fails because a record exists, since a failed statement would end the whole transaction on PostgreSQL: the result is the
  number of rows. MySQL can say that only by an error (1062), which costs its transaction nothing.
* Records expire by two statements: one selects keys and locks nothing, the other deletes each key if its record is still as old. A record
  that was touched in between stays, and no gap is locked in which others insert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import BigInteger, TableClause, bindparam, case, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.elements import ClauseElement

from qmq.sql.dedup_tables import Record, check_table
from qmq.sql.dialects import DIALECTS, Dialect, check_dialect
from qmq.sql.expressions import bytes_place, named_table, now_ms, number

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
    """The keys of the oldest records that are older than `keep` milliseconds, both by the database's clock and at the time `stored`."""
    expire: ClauseElement
    """Deletes one of these records, if it is still as old."""

    def parameters(self, record: Record) -> dict[str, Any]:
        """A record as the parameters of `add`, `touch` and `still_there`."""
        found = {"of_group": record.group, "of_subject": record.subject, "of_message": record.id, "by_token": record.token}
        if self.dialect.is_hex:  # binary columns, independent of the connection's character set
            found = {name: value.encode().hex() for name, value in found.items()}
        return {**found, "stored": record.stored_ms}


@lru_cache(maxsize=32)
def statements_for(dialect: str, table: str) -> DedupStatements:
    """The statements for a database. Raises InvalidArgument for an invalid dialect or table name."""
    known = check_dialect(dialect)
    records = named_table(check_table(table), *_KEY, "token", "recorded_ms")
    columns, now = records.c, now_ms(known)
    places = [bytes_place(known, name) for name in ("of_group", "of_subject", "of_message")]
    is_it = [columns[name] == place for name, place in zip(_KEY, places, strict=True)]
    token = bytes_place(known, "by_token")
    stored = bindparam("stored", type_=BigInteger)
    later, earlier = case((now > stored, now), else_=stored), case((now < stored, now), else_=stored)
    is_old = columns.recorded_ms < earlier - bindparam("keep")
    shown = [func.hex(columns[name]) if DIALECTS[known].is_hex else columns[name] for name in _KEY]
    return DedupStatements(
        DIALECTS[known],
        add=_unless_there(known, records, dict(zip(_KEY, places, strict=True)) | {"token": token, "recorded_ms": later}),
        still_there=select(func.count()).select_from(records).where(*is_it, columns.token == token),
        touch=update(records).values(recorded_ms=later).where(*is_it),
        expiring=select(*shown).where(is_old).order_by(columns.recorded_ms, *[columns[name] for name in _KEY]).limit(number(EXPIRE_BATCH)),
        expire=delete(records).where(*is_it, is_old),
    )


def _unless_there(dialect: str, records: TableClause, values: dict[str, Any]) -> ClauseElement:
    if DIALECTS[dialect].duplicate is not None:
        return insert(records).values(values)
    new = postgresql_insert(records) if dialect == "postgresql" else sqlite_insert(records)
    return new.values(values).on_conflict_do_nothing(index_elements=list(_KEY))
