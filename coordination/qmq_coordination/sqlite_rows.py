"""The embedded store's rows in SQLite: every version of every key. A change adds a row, and a deletion a row without a value.

kv(key, mod, sub, created, version, value, lease)      `sub` orders the changes within one revision
lease(id, ttl_s)                                       meta(name, number): revision, compacted, next lease
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from qmq.errors import DiskFull, LogDamaged
from qmq_coordination.coordination_store import KeyValue, LeaseId, WatchEvent, prefix_end

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS kv(
    key TEXT NOT NULL, mod INTEGER NOT NULL, sub INTEGER NOT NULL, created INTEGER NOT NULL, version INTEGER NOT NULL,
    value BLOB, lease INTEGER NOT NULL, PRIMARY KEY(key, mod)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kv_mod ON kv(mod, sub);
CREATE TABLE IF NOT EXISTS lease(id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, number INTEGER NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('revision', 1), ('compacted', 0), ('lease', 1);
"""
_COLUMNS: Final = "key, value, created, mod, version, lease"


class Rows:
    """The tables. Used by one thread."""

    def __init__(self, path: Path | None) -> None:
        """Open the database. Raises LogDamaged if it cannot be read."""
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        try:
            self._require_whole(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    def _require_whole(self, path: Path | None) -> None:
        try:
            found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as cause:
            found = str(cause)
        if found != "ok":
            raise LogDamaged(
                f"the coordination store {path} is damaged ({found}): restore the file from a copy; or move it away, and start again with "
                "no subjects and groups, whose messages stay in the log"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: all or nothing, and on disk when the block ends. Raises DiskFull."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as cause:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(cause, sqlite3.OperationalError) and "full" in str(cause):
                raise DiskFull("no space left for the coordination store: free some space") from cause
            raise

    def number(self, name: str) -> int:
        """A counter of the meta table."""
        found: int = self._db.execute("SELECT number FROM meta WHERE name = ?", (name,)).fetchone()[0]
        return found

    def set_number(self, name: str, number: int) -> None:
        self._db.execute("UPDATE meta SET number = ? WHERE name = ?", (number, name))

    def select(self, key: str, *, is_prefix: bool, revision: int) -> list[KeyValue]:
        """Keys as of a revision, in order, without the deleted ones."""
        end = prefix_end(key) if is_prefix else key + "\0"
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM kv AS a WHERE key >= ? AND (? IS NULL OR key < ?) AND value IS NOT NULL AND mod = "  # noqa: S608
            "(SELECT max(mod) FROM kv AS b WHERE b.key = a.key AND b.mod <= ?) ORDER BY key",
            (key, end, end, revision),
        )
        return [_item(row) for row in found]

    def insert(self, key: str, mod: int, sub: int, created: int, version: int, value: bytes | None, lease: int) -> None:
        """Add a version of a key; a second one in the same revision replaces the first."""
        self._db.execute("INSERT OR REPLACE INTO kv VALUES (?,?,?,?,?,?,?)", (key, mod, sub, created, version, value, lease))

    def events(self, prefix: str, after: int) -> list[WatchEvent]:
        """Changes under a prefix after revision `after`, in order: about a thousand, always whole revisions."""
        end = prefix_end(prefix)
        under = "key >= :prefix AND (:end IS NULL OR key < :end) AND mod > :after"
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM kv WHERE {under} AND mod <= "  # noqa: S608
            f"(SELECT max(mod) FROM (SELECT mod FROM kv WHERE {under} ORDER BY mod LIMIT 1000)) ORDER BY mod, sub",
            {"prefix": prefix, "end": end, "after": after},
        )
        return [WatchEvent(row[0], row[3], None if row[1] is None else _item(row)) for row in found]

    def compact(self, revision: int) -> None:
        """Drop versions that were replaced or deleted at or before `revision`."""
        self._db.execute("DELETE FROM kv WHERE mod < (SELECT max(mod) FROM kv AS b WHERE b.key = kv.key AND b.mod <= ?)", (revision,))
        self._db.execute("DELETE FROM kv WHERE value IS NULL AND mod <= ?", (revision,))

    def leases(self) -> dict[LeaseId, float]:
        """All leases, with their times to live in seconds."""
        return {LeaseId(row[0]): row[1] for row in self._db.execute("SELECT id, ttl_s FROM lease")}

    def add_lease(self, ttl_s: float) -> LeaseId:
        """A new lease with a number never used before."""
        lease = self.number("lease")
        self.set_number("lease", lease + 1)
        self._db.execute("INSERT INTO lease VALUES (?, ?)", (lease, ttl_s))
        return LeaseId(lease)

    def drop_lease(self, lease: LeaseId) -> None:
        self._db.execute("DELETE FROM lease WHERE id = ?", (lease,))

    def keys_of_lease(self, lease: LeaseId, revision: int) -> list[KeyValue]:
        """The keys that belong to the lease."""
        return [item for item in self.select("", is_prefix=True, revision=revision) if item.lease == lease]

    def close(self) -> None:
        self._db.close()


def _item(row: tuple[str, bytes, int, int, int, int]) -> KeyValue:
    return KeyValue(row[0], bytes(row[1]), row[2], row[3], row[4], LeaseId(row[5]))
