"""The table of finished messages, and every statement on it, for SQLite, PostgreSQL and MySQL or MariaDB. Pure.

A record is (group, subject, message id): that this group's effect of this message is there. Rules:

* Its three columns are the primary key and hold what they are given to the last byte. The longest names there are fit (a consumer of a
  broadcast group, a dead-letter queue); `check_width` refuses keys of the application's own that do not, so that no database ever cuts one
  and takes a message for another. Comparison is by bytes: on MySQL the columns are binary, since its text columns take "a" and "A", or
  "a" and "a ", for the same.
* `token` is the number of the transaction that wrote the record. Before it commits it looks for its own token (`still_there`): if that is
  gone, so are writes of the handler.
* Times are milliseconds since 1970 by the database's clock, so that the clocks of the machines do not matter.
* No statement fails because of a record that is there, as a failed one would end the whole transaction on PostgreSQL: the answer is the
  number of rows. MySQL can say that only by an error (1062), which costs its transaction nothing.
* Records expire by two statements: which ones (locks nothing), then each by its key if it is still as old. One that was touched in between
  stays, and no gap is locked in which others insert.

Statements have parameters as `:name`; `styled` rewrites them for a DB-API driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from qmq.errors import InvalidArgument

DIALECTS: Final = ("sqlite", "postgresql", "mysql")
TABLE: Final = "qmq_dedup"
KEY_BYTES_MAX: Final = 255
"""Of each of the three columns. A broadcast group's consumer has 127 + 1 + 127, a message id 32; three times this fits InnoDB's indexes."""
EXPIRE_BATCH: Final = 200

_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?\Z", re.ASCII)
_NAME_CHARS_MAX: Final = 50
"""Of a table, leaving room for the index's name within PostgreSQL's 63."""

_COLUMNS: Final = "group_name, subject, message_id"
_ADD: Final = "INSERT INTO {table} ({columns}, token, recorded_ms) VALUES ({group}, {subject}, {id}, {token}, {now})"
_UNLESS_THERE: Final = " ON CONFLICT ({columns}) DO NOTHING"
_KEY: Final = "group_name = {group} AND subject = {subject} AND message_id = {id}"
_STILL_THERE: Final = "SELECT COUNT(*) FROM {table} WHERE {key} AND token = {token}"
_TOUCH: Final = "UPDATE {table} SET recorded_ms = {now} WHERE {key}"
_EXPIRING: Final = "SELECT {shown} FROM {table} WHERE recorded_ms < {now} - :keep ORDER BY recorded_ms, {columns} LIMIT {batch}"
_EXPIRE: Final = "DELETE FROM {table} WHERE {key} AND recorded_ms < {now} - :keep"
_NOW: Final[Mapping[str, str]] = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    # Not clock_timestamp(): an index is of use only for what stays the same during a statement.
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) * 1000 AS BIGINT)",
    # Not NOW(3): an hour of local time comes twice a year.
    "mysql": "UNIX_TIMESTAMP() * 1000",
}
_TEXT_DDL: Final = """\
CREATE TABLE IF NOT EXISTS {table} (
    group_name VARCHAR(255){collation} NOT NULL,
    subject VARCHAR(255){collation} NOT NULL,
    message_id VARCHAR(255){collation} NOT NULL,
    token VARCHAR(32) NOT NULL,
    recorded_ms BIGINT NOT NULL,
    PRIMARY KEY (group_name, subject, message_id)
);
CREATE INDEX IF NOT EXISTS {index} ON {indexed} (recorded_ms);
"""
_MYSQL_DDL: Final = """\
CREATE TABLE IF NOT EXISTS {table} (
    group_name VARBINARY(255) NOT NULL,
    subject VARBINARY(255) NOT NULL,
    message_id VARBINARY(255) NOT NULL,
    token VARBINARY(32) NOT NULL,
    recorded_ms BIGINT NOT NULL,
    PRIMARY KEY (group_name, subject, message_id),
    KEY {index} (recorded_ms)
) ENGINE=InnoDB;
"""


@dataclass(frozen=True, slots=True)
class Record:
    """That `group`'s effect of a message is there, as the transaction `token` says."""

    group: str
    subject: str
    id: str
    token: str

    def check_width(self) -> Record:
        """Itself. Raises InvalidArgument if the table cannot hold it to the last byte."""
        for what, value in (("group", self.group), ("subject", self.subject), ("key", self.id)):
            if not isinstance(value, str) or not value or "\0" in value:
                raise InvalidArgument(f"the {what} of a finished message is text without NUL, at least a character, not {value!r}")
            try:
                size = len(value.encode())
            except UnicodeEncodeError as cause:
                raise InvalidArgument(f"the {what} {value!r} of a finished message cannot be written as UTF-8") from cause
            if size > KEY_BYTES_MAX:
                raise InvalidArgument(
                    f"the {what} of a finished message has {size} bytes, and {KEY_BYTES_MAX} are the most: give a shorter one, such as "
                    f"hashlib.sha256(long.encode()).hexdigest()"
                )
        return self


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements for one table in one dialect."""

    dialect: str
    add: str
    """One row: added. None (MySQL: error 1062): it is there."""
    still_there: str
    """One row with 1: this transaction's record is there. 0: something rolled it back."""
    touch: str
    """The record's time begins anew."""
    expiring: str
    """The keys of the oldest records that are older than `keep` milliseconds."""
    expire: str
    """Deletes one of them, if it is still as old."""

    def parameters(self, record: Record) -> dict[str, Any]:
        """A record as the parameters of `add`, `touch` and `still_there`."""
        found = {"group": record.group, "subject": record.subject, "id": record.id, "token": record.token}
        if self.dialect == "mysql":  # binary columns, whatever the connection's character set is; not every driver takes bytes
            return {name: value.encode().hex() for name, value in found.items()}
        return dict(found)


def statements(dialect: str, table: str) -> Statements:
    """What to say to a database. Raises InvalidArgument for a dialect or a table's name that cannot be."""
    spoken = check_dialect(dialect)
    check_table(table)
    is_binary = spoken == "mysql"
    words = {name: f"UNHEX(:{name})" if is_binary else f":{name}" for name in ("group", "subject", "id", "token")}
    words |= {"key": _KEY.format(**words), "table": table, "columns": _COLUMNS, "now": _NOW[spoken], "batch": str(EXPIRE_BATCH)}
    words["shown"] = "HEX(group_name), HEX(subject), HEX(message_id)" if is_binary else _COLUMNS
    add = _ADD if is_binary else _ADD + _UNLESS_THERE
    return Statements(spoken, *[each.format(**words) for each in (add, _STILL_THERE, _TOUCH, _EXPIRING, _EXPIRE)])


def migration(dialect: str, table: str = TABLE) -> str:
    """The statements that create the table unless it is there, each ended by a semicolon and a line break. Raises InvalidArgument."""
    spoken = check_dialect(dialect)
    check_table(table)
    schema, dot, name = table.rpartition(".")
    if spoken == "mysql":
        return _MYSQL_DDL.format(table=table, index=f"{name}_recorded")
    if spoken == "postgresql":
        return _TEXT_DDL.format(table=table, index=f"{name}_recorded", indexed=table, collation=' COLLATE "C"')
    # On SQLite it is the index that has a schema.
    return _TEXT_DDL.format(table=table, index=f"{schema}{dot}{name}_recorded", indexed=name, collation="")


def check_dialect(dialect: str) -> str:
    """The dialect by its one name ("mariadb" is "mysql" here). Raises InvalidArgument."""
    spoken = "mysql" if dialect == "mariadb" else dialect
    if spoken not in DIALECTS:
        raise InvalidArgument(f"finished messages are recorded on {', '.join(DIALECTS)} or mariadb, not {dialect!r}")
    return spoken


def check_table(table: str) -> str:
    """A table's name, perhaps with its schema's in front, that needs no quotes. Raises InvalidArgument."""
    if _TABLE.match(table) is None or max(map(len, table.split("."))) > _NAME_CHARS_MAX:
        raise InvalidArgument(
            f"table {table!r}: write a name of letters, digits and '_', at most {_NAME_CHARS_MAX} characters, perhaps behind its schema's "
            f"name and a dot"
        )
    return table


# --- DB-API ----------------------------------------------------------------------------------------------------------------

_PARAMETER: Final = re.compile(r":([a-z]+)")
_PLACES: Final[Mapping[str, Callable[[str, int], str]]] = {
    "qmark": lambda name, place: "?",
    "format": lambda name, place: "%s",
    "numeric": lambda name, place: f":{place}",
    "named": lambda name, place: f":{name}",
    "pyformat": lambda name, place: f"%({name})s",
}
PARAMSTYLES: Final = tuple(_PLACES)


def styled(statement: str, paramstyle: str) -> tuple[str, Sequence[str] | None]:
    """A statement for a DB-API driver, and its parameters' names in their order; None if they are given by name."""
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        names.append(found[1])
        return _PLACES[paramstyle](found[1], len(names))

    text = _PARAMETER.sub(place, statement)
    return text, None if paramstyle in ("named", "pyformat") else names
