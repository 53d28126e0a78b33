"""The embedded store's rows in SQLite: every version of every key. A change adds a row, and a deletion a row without a value.

kv(key, mod, sub, created, version, value, lease)      `sub` orders the changes within one revision
lease(id, ttl_s)                                       meta(name, number): revision, compacted, next lease

Beside the database is a file of RESERVE_BYTES, which is deleted when the disk is full and made again when there is room: so a process can
start, register and stop on a full disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qmq.errors import CoordinationUnavailable, DiskFull, LogDamaged
from qmq.limits import KIB
from qmq.private_files import FILE_MODE
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
RESERVE_BYTES: Final = 512 * KIB
"""Some dozen transactions, and SQLite's own files."""
_BLOCK_BYTES: Final = 4 * KIB
_COLUMNS: Final = "key, value, created, mod, version, lease"


class StoreFull(DiskFull, CoordinationUnavailable):
    """Nothing was changed. Whoever can wait for an etcd that does not answer can wait for room, too."""


class Rows:
    """The tables. Used by one thread."""

    def __init__(self, path: Path | None) -> None:
        """Open the database. Raises LogDamaged if it cannot be read, DiskFull."""
        self._reserve = path.with_name(path.name + ".reserve") if path is not None else None
        if self._free_bytes() < RESERVE_BYTES:
            self._release()
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        try:
            self._require_whole(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except BaseException as cause:
            self._db.close()
            self._raise_if_full(cause)
            raise
        if self._free_bytes() > 2 * RESERVE_BYTES:
            self._put_aside()

    def _free_bytes(self) -> int:
        if self._reserve is None:
            return 1 << 40
        found = os.statvfs(self._reserve.parent)
        return found.f_bavail * found.f_frsize

    def _put_aside(self) -> None:
        """Make the reserve, or as much of it as fits."""
        if self._reserve is not None and not self._reserve.exists():
            with suppress(OSError):
                self._reserve.touch(FILE_MODE)
                with self._reserve.open("wb", buffering=0) as file:
                    for _ in range(RESERVE_BYTES // _BLOCK_BYTES):
                        file.write(bytes(_BLOCK_BYTES))

    def _release(self) -> None:
        if self._reserve is not None:
            self._reserve.unlink(missing_ok=True)

    def _raise_if_full(self, cause: BaseException) -> None:
        """Raise StoreFull, and give up the reserve, if a full disk is the cause. SQLite says so only of its main file."""
        is_full = "full" in str(cause) or self._free_bytes() < _BLOCK_BYTES
        if is_full and isinstance(cause, sqlite3.OperationalError):
            self._release()
            raise StoreFull("no space left for the coordination store: free some space") from cause

    def _require_whole(self, path: Path | None) -> None:
        try:
            found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as cause:
            self._raise_if_full(cause)
            found = str(cause)
        if found != "ok":
            raise LogDamaged(
                f"the coordination store {path} is damaged ({found}): restore the file from a copy; or move it away, and start again with "
                "no subjects and groups, whose messages stay in the log"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: all or nothing, and on disk when the block ends. Raises DiskFull; the next one may use the reserve."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as cause:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._raise_if_full(cause)
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
        self._put_aside()


def _item(row: tuple[str, bytes, int, int, int, int]) -> KeyValue:
    return KeyValue(row[0], bytes(row[1]), row[2], row[3], row[4], LeaseId(row[5]))
