"""The table of finished messages: what `qmq dedup migration` prints, and what may be written into
it. Pure, without SQLAlchemy.

A record is (group, subject, message id): this group's effect of this message is committed. Rules:

* The three columns are the primary key and hold every value to the last byte. The longest valid
  names fit (a consumer of a broadcast group, a dead-letter queue); `check_width` refuses keys of
  the application's own that do not, so that no database ever truncates a key and confuses two
  messages. Comparison is by bytes: on MySQL the columns are binary, since its text columns take "a"
  and "A", or "a" and "a ", for the same.
* `token` is the number of the transaction that wrote the record. Before it commits it looks for its
  own token (`still_there`): if that is gone, so are writes of the handler.
* Times are milliseconds since 1970 by the database's clock, so that the clocks of the machines do
  not matter, and never before the time at which a broker stored the message. Records expire by the
  earlier of the database's clock and the time at which a broker stored the last message. So the
  database's clock alone, ahead or behind, deletes no record early.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from qmq.errors import InvalidArgument
from qmq.model import utf8
from qmq.sql.dialects import check_dialect

TABLE: Final = "qmq_dedup"
KEY_BYTES_MAX: Final = 255
"""The width of each of the three columns. A broadcast group's consumer has 127 + 1 + 127, a message
id 32; three times this fits InnoDB's indexes.
"""

_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?\Z", re.ASCII)
_NAME_CHARS_MAX: Final = 50
"""The longest table name that leaves room for the index's name within
PostgreSQL's 63 characters.
"""

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
    """Records that `group` has handled a message, in the transaction `token`."""

    group: str
    subject: str
    id: str
    token: str
    stored_ms: int = 0
    """When a broker stored the message."""

    def check_width(self) -> Record:
        """Returns the key. Raises InvalidArgument if the table cannot hold it to the last byte."""
        for what, value in (("group", self.group), ("subject", self.subject), ("key", self.id)):
            if not isinstance(value, str) or not value or "\0" in value:
                raise InvalidArgument(
                    f"the {what} of a finished message must be a non-empty text without NUL, "
                    f"not {value!r}"
                )
            size = len(utf8(f"the {what} of a finished message", value))
            if size > KEY_BYTES_MAX:
                raise InvalidArgument(
                    f"the {what} of a finished message has {size} bytes, and at most "
                    f"{KEY_BYTES_MAX} are allowed: give a shorter one, "
                    f"such as hashlib.sha256(long.encode()).hexdigest()"
                )
        return self


def migration(dialect: str, table: str = TABLE) -> str:
    """The statements that create the table if it does not exist, each ended by a semicolon and a
    line break. Raises InvalidArgument.
    """
    known = check_dialect(dialect)
    check_table(table)
    schema, dot, name = table.rpartition(".")
    if known == "mysql":
        return _MYSQL_DDL.format(table=table, index=f"{name}_recorded")
    if known == "postgresql":
        return _TEXT_DDL.format(
            table=table, index=f"{name}_recorded", indexed=table, collation=' COLLATE "C"'
        )
    # On SQLite the index carries the schema's name.
    return _TEXT_DDL.format(
        table=table, index=f"{schema}{dot}{name}_recorded", indexed=name, collation=""
    )


def check_table(table: str) -> str:
    """A table's name, perhaps with its schema, that needs no quotes. Raises InvalidArgument."""
    if _TABLE.match(table) is None or max(map(len, table.split("."))) > _NAME_CHARS_MAX:
        raise InvalidArgument(
            f"table {table!r}: write a name of letters, digits and '_', "
            f"at most {_NAME_CHARS_MAX} characters, perhaps behind its schema's name and a dot"
        )
    return table
