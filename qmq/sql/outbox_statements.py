"""Every statement that the outbox says to a database, in the one form that all drivers are given from: values are named, `:so`. Pure.

A statement with a list of values (`IN`) is made for as many as there are: `many("id", [7, 9])` gives `:id_0, :id_1` and the values.

Bytes go to MySQL as hexadecimal digits: with PyMySQL 1.2.3 and later aiomysql cannot pass them on (its issue 1080), and PyMySQL writes
digits itself.
"""

# ruff: noqa: S608 - of names there are tables' only, and those were checked

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from qmq.sql.outbox_tables import ASIDE, NOW, TABLE, WAITING, check_dialect, check_table, lease_table

MANY: Final = 500
"""Values in one list at most: older SQLite takes 999."""

_CONTENT: Final = (
    "message_id",
    "subject",
    "message_key",
    "key_hash",
    "tags",
    "headers",
    "body",
    "due_ms",
    "create_time_ms",
    "content_bytes",
)
_BYTES: Final = ("message_id", "message_key", "body")


class Statement(NamedTuple):
    """What is executed, and its values."""

    text: str
    values: Mapping[str, Any]


def many(name: str, items: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Placeholders for a list, and its values."""
    values = {f"{name}_{index}": item for index, item in enumerate(items)}
    return ", ".join(f":{each}" for each in values), values


class Statements:
    """Those of one outbox table in one dialect."""

    def __init__(self, dialect: str, table: str = TABLE) -> None:
        self.dialect = check_dialect(dialect)
        self.table = check_table(table)
        self.lease_table = lease_table(table)
        self._now = NOW[self.dialect]

    def _value(self, value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) and self.dialect == "mysql" else value

    def _place(self, name: str, is_bytes: bool) -> str:
        return f"UNHEX(:{name})" if is_bytes and self.dialect == "mysql" else f":{name}"

    # --- rows ----------------------------------------------------------------------------------------------------------

    def insert(self, rows: Sequence[Mapping[str, Any]], holder: str, grace_ms: int) -> Statement:
        """New messages, claimed for so long by who sends them after the commit."""
        values: dict[str, Any] = {"holder": holder, "grace": grace_ms}
        lines = []
        for index, row in enumerate(rows):
            values |= {f"{name}_{index}": self._value(row[name]) for name in _CONTENT}
            places = ", ".join([self._place(f"{name}_{index}", name in _BYTES) for name in _CONTENT])
            lines.append(f"({places}, {WAITING}, 0, :holder, {self._now} + :grace)")
        names = ", ".join((*_CONTENT, "state", "attempts", "claimed_by", "claimed_until"))
        return Statement(f"INSERT INTO {self.table} ({names}) VALUES {', '.join(lines)}", values)

    def find(self, message_ids: Sequence[bytes]) -> Statement:
        """(id, message id, how long it is still claimed) of those that wait: they are committed."""
        values = {f"message_id_{index}": self._value(each) for index, each in enumerate(message_ids)}
        places = ", ".join([self._place(name, True) for name in values])
        return Statement(
            f"SELECT id, message_id, claimed_until - {self._now} FROM {self.table} WHERE state = {WAITING} AND message_id IN ({places})",
            values,
        )

    def earliest(self, key_hashes: Sequence[int], besides: Sequence[int]) -> Statement:
        """(key hash, id) of the first message of each key that waits, not looking at some."""
        hashes, values = many("key_hash", key_hashes)
        ids, others = many("id", besides)
        return Statement(
            f"SELECT key_hash, MIN(id) FROM {self.table} WHERE key_hash IN ({hashes}) AND state = {WAITING} AND id NOT IN ({ids})"
            " GROUP BY key_hash",
            values | others,
        )

    def claim(self, ids: Sequence[int], grace_ms: int) -> Statement:
        """Claim them for so long from now on."""
        places, values = many("id", ids)
        return Statement(
            f"UPDATE {self.table} SET claimed_until = {self._now} + :grace WHERE id IN ({places})", values | {"grace": grace_ms}
        )

    def delete(self, ids: Sequence[int]) -> Statement:
        places, values = many("id", ids)
        return Statement(f"DELETE FROM {self.table} WHERE id IN ({places})", values)

    def failed(self, ids: Sequence[int], error: str, *, is_final: bool) -> Statement:
        """They could not be sent: they wait on, claimed by nobody, or are set aside."""
        places, values = many("id", ids)
        return Statement(
            f"UPDATE {self.table} SET attempts = attempts + 1, claimed_until = 0, last_error = :error,"
            f" state = {ASIDE if is_final else WAITING} WHERE id IN ({places})",
            values | {"error": error},
        )

    def waiting(self, after: int, limit: int, besides: Sequence[str]) -> Statement:
        """(id, subject, key hash, size, how long it is still claimed) of those behind `after`, but not of some subjects."""
        places, values = many("subject", besides)
        others = f" AND subject NOT IN ({places})" if besides else ""
        return Statement(
            f"SELECT id, subject, key_hash, content_bytes, claimed_until - {self._now} FROM {self.table}"
            f" WHERE state = {WAITING} AND id > :after{others} ORDER BY id LIMIT {int(limit)}",
            values | {"after": after},
        )

    def contents(self, ids: Sequence[int]) -> Statement:
        """The messages among these that wait, in order."""
        places, values = many("id", ids)
        return Statement(
            f"SELECT id, {', '.join(_CONTENT)} FROM {self.table} WHERE state = {WAITING} AND id IN ({places}) ORDER BY id",
            values,
        )

    # --- for people ----------------------------------------------------------------------------------------------------

    def list(self, after: int, limit: int, *, only_aside: bool) -> Statement:
        which = f" AND state = {ASIDE}" if only_aside else ""
        return Statement(
            "SELECT id, message_id, subject, message_key, content_bytes, due_ms, create_time_ms, state, attempts, claimed_by,"
            f" claimed_until - {self._now}, last_error FROM {self.table} WHERE id > :after{which} ORDER BY id LIMIT {int(limit)}",
            {"after": after},
        )

    def retry(self, ids: Sequence[int]) -> Statement:
        """Have some that were set aside wait again."""
        places, values = many("id", ids)
        return Statement(
            f"UPDATE {self.table} SET state = {WAITING}, claimed_until = 0 WHERE state = {ASIDE} AND id IN ({places})",
            values,
        )

    # --- the lease -----------------------------------------------------------------------------------------------------

    def view_lease(self) -> Statement:
        """(holder, token, how long it still holds)."""
        return Statement(
            f"SELECT holder, token, lease_until - {self._now} FROM {self.lease_table} WHERE name = :name", {"name": self.table}
        )

    def create_lease(self) -> Statement:
        """The first watchdog of a table makes its row; nobody holds it."""
        return Statement(
            f"INSERT INTO {self.lease_table} (name, holder, token, lease_until) VALUES (:name, '', 0, 0)", {"name": self.table}
        )

    def take_lease(self, holder: str, token: int, lease_ms: int) -> Statement:
        """Compare and set: nobody took it since `token` was read, and it is over. One row is changed, or none."""
        return Statement(
            f"UPDATE {self.lease_table} SET holder = :holder, token = token + 1, lease_until = {self._now} + :lease"
            f" WHERE name = :name AND token = :token AND lease_until <= {self._now}",
            {"name": self.table, "holder": holder, "token": token, "lease": lease_ms},
        )

    def renew_lease(self, token: int, lease_ms: int) -> Statement:
        """Go on holding it, also if it was over: nobody took it since. One row is changed, or none."""
        return Statement(
            f"UPDATE {self.lease_table} SET lease_until = {self._now} + :lease WHERE name = :name AND token = :token",
            {"name": self.table, "token": token, "lease": lease_ms},
        )

    def release_lease(self, token: int) -> Statement:
        """Let others have it at once."""
        return Statement(
            f"UPDATE {self.lease_table} SET lease_until = 0 WHERE name = :name AND token = :token",
            {"name": self.table, "token": token},
        )
