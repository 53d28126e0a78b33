"""The coordination store for one node: etcd's semantics on SQLite, in process. For `qmq dev` and
for tests. The data is not replicated.

A transaction is one SQLite transaction, committed with a full sync before it is answered. Watchers
read the table by revision after they are woken, so a lost wake-up, or a process killed between
commit and wake-up, loses no event. A file lock refuses a second process on the same file. Leases
are counted by a monotonic clock and start over at a start, as etcd's do at a change of leader.

After a crash before COMMIT nothing was done. After a crash after COMMIT everything was done. The
caller got no answer and must read the outcome back.

SQLite has a row for every version of every key. A change adds a row, and a deletion a row without a
value.

    kv(key, mod, sub, created, version, value, lease)      `sub` orders the changes within one
                                                           revision
    lease(id, ttl_s)                                       meta(name, number): revision, compacted,
                                                           next lease

Beside the database is a file of RESERVE_BYTES, which is deleted when the disk is full and made
again when there is room: so a process can start, register and stop on a full disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qmq.errors import (
    Compacted,
    CoordinationError,
    CoordinationUnavailable,
    DiskFull,
    FolderInUse,
    LeaseNotFound,
    LogDamaged,
)
from qmq.limits import KIB
from qmq.process.files import FILE_MODE, make_private
from qmq.rpc.request_changes import note_change
from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    CompareTarget,
    Delete,
    Get,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
    WatchedChanges,
    WatchEvent,
    prefix_end,
)

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS kv(
    key TEXT NOT NULL, mod INTEGER NOT NULL, sub INTEGER NOT NULL, created INTEGER NOT NULL,
    version INTEGER NOT NULL, value BLOB, lease INTEGER NOT NULL,
    PRIMARY KEY(key, mod)) WITHOUT ROWID;
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
    """Nothing was changed. Whoever can wait for an etcd that does not answer can
    wait for room, too.
    """


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
            # One transaction: each one that changes the file waits for the disk.
            self._db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
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
        """Raise StoreFull, and give up the reserve, if a full disk is the cause. SQLite says so
        only of its main file.
        """
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
                f"the coordination store {path} is damaged ({found}): restore the file from "
                "a copy; or move it away, and start again with "
                "no subjects and groups, whose messages stay in the log"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: all or nothing, and on disk when the block ends. Raises DiskFull; the next
        one may use the reserve.
        """
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
        found: int = self._db.execute("SELECT number FROM meta WHERE name = ?", (name,)).fetchone()[
            0
        ]
        return found

    def set_number(self, name: str, number: int) -> None:
        self._db.execute("UPDATE meta SET number = ? WHERE name = ?", (number, name))

    def select(self, key: str, *, is_prefix: bool, revision: int) -> list[KeyValue]:
        """Keys as of a revision, in order, without the deleted ones."""
        end = prefix_end(key) if is_prefix else key + "\0"
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM kv AS a WHERE key >= ? AND (? IS NULL OR key < ?) AND "  # noqa: S608
            "value IS NOT NULL AND mod = "
            "(SELECT max(mod) FROM kv AS b WHERE b.key = a.key AND b.mod <= ?) ORDER BY key",
            (key, end, end, revision),
        )
        return [_item(row) for row in found]

    def insert(
        self,
        key: str,
        mod: int,
        sub: int,
        created: int,
        version: int,
        value: bytes | None,
        lease: int,
    ) -> None:
        """Add a version of a key; a second one in the same revision replaces the first."""
        self._db.execute(
            "INSERT OR REPLACE INTO kv VALUES (?,?,?,?,?,?,?)",
            (key, mod, sub, created, version, value, lease),
        )

    def events(self, prefix: str, after: int) -> list[WatchEvent]:
        """Changes under a prefix after revision `after`, in order:
        about a thousand, always whole revisions.
        """
        end = prefix_end(prefix)
        under = "key >= :prefix AND (:end IS NULL OR key < :end) AND mod > :after"
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM kv WHERE {under} AND mod <= "  # noqa: S608
            f"(SELECT max(mod) FROM (SELECT mod FROM kv WHERE {under} ORDER BY mod LIMIT "
            "1000)) ORDER BY mod, sub",
            {"prefix": prefix, "end": end, "after": after},
        )
        return [WatchEvent(row[0], row[3], None if row[1] is None else _item(row)) for row in found]

    def compact(self, revision: int) -> None:
        """Drop versions that were replaced or deleted at or before `revision`."""
        self._db.execute(
            (
                "DELETE FROM kv WHERE mod < (SELECT max(mod) FROM kv AS b WHERE b.key = kv.key "
                "AND b.mod <= ?)"
            ),
            (revision,),
        )
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
        return [
            item
            for item in self.select("", is_prefix=True, revision=revision)
            if item.lease == lease
        ]

    def close(self) -> None:
        self._db.close()
        self._put_aside()


def _item(row: tuple[str, bytes, int, int, int, int]) -> KeyValue:
    return KeyValue(row[0], bytes(row[1]), row[2], row[3], row[4], LeaseId(row[5]))


OPERATIONS_MAX: Final = 128
"""The limit of operations in one transaction: etcd's default (--max-txn-ops), so that code that
works here works on etcd.
"""
REQUEST_BYTES_MAX: Final = 3 << 19
"""The largest request, 1.5 MiB: etcd's default (--max-request-bytes). Only keys and values count
here, without the few bytes that etcd adds.
"""
KEEP_REVISIONS: Final = 10_000
_COMPACT_EVERY: Final = 2_000
_LEASE_CHECK_S: Final = 0.1

_RELATIONS: Final[dict[str, Callable[[int | bytes, int | bytes], bool]]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,  # type: ignore[operator]
    ">": lambda a, b: a > b,  # type: ignore[operator]
}


class EmbeddedStore:
    """A CoordinationStore in this process. `monotonic_s` is the clock of the leases."""

    def __init__(
        self, path: Path | None = None, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Open `path`, or a store in memory. Raises FolderInUse, LogDamaged, DiskFull."""
        self._lock = _lock(path) if path is not None else None
        try:
            self._rows = Rows(path)
        except BaseException:
            if self._lock is not None:
                os.close(self._lock)
            raise
        self._monotonic_s = monotonic_s
        self._until = {lease: monotonic_s() + ttl_s for lease, ttl_s in self._rows.leases().items()}
        self._changed: set[asyncio.Event] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._is_closed = False

    # --- reading ----------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        _require_key(key)
        self.expire_leases()
        found = self._rows.select(key, is_prefix=False, revision=self._revision())
        return found[0] if found else None

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        self.expire_leases()
        now = self._revision()
        self._require_kept(revision or now)
        if revision > now:
            raise CoordinationError(f"revision {revision} is in the future: now is {now}")
        items = self._rows.select(prefix, is_prefix=True, revision=revision or now)
        return KeyListing(Revision(now), tuple(items[:limit] if limit else items))

    def _revision(self) -> int:
        if self._is_closed:
            raise CoordinationError("the coordination store is closed")
        return self._rows.number("revision")

    def _require_kept(self, revision: int) -> None:
        compacted = self._rows.number("compacted")
        if revision < compacted:
            raise Compacted(
                f"revision {revision} is compacted away; the oldest is {compacted}: list "
                "again and continue from there"
            )

    # --- changing ---------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        return (await self.txn((), (Put(key, value, lease),))).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        return len((await self.txn((), (Delete(key, is_prefix),))).results[0])

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        _check_request(compares, success, failure)
        self.expire_leases()
        return self._txn(compares, success, failure)

    def _txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation],
    ) -> TxnResult:
        before = self._revision()
        with self._rows.transaction():
            succeeded = all(self._holds(compare, before) for compare in compares)
            operations = success if succeeded else failure
            change = _Change(self._rows, before + 1, set(self._until))
            results = tuple(tuple(change.do(operation)) for operation in operations)
            revision = before + 1 if change.count else before
            if change.count:
                self._rows.set_number("revision", revision)
                self._compact_old(revision)
        if change.count:
            note_change()
            self._wake()
        return TxnResult(succeeded, Revision(revision), results)

    def _holds(self, compare: Compare, revision: int) -> bool:
        found = self._rows.select(compare.key, is_prefix=False, revision=revision)
        if compare.target is CompareTarget.VALUE:
            actual: int | bytes | None = found[0].value if found else None
        else:
            actual = getattr(found[0], compare.target.value) if found else 0
        return actual is not None and _RELATIONS[compare.op](actual, compare.value)

    def _compact_old(self, revision: int) -> None:
        oldest = revision - KEEP_REVISIONS
        if revision % _COMPACT_EVERY == 0 and oldest > self._rows.number("compacted"):
            self._rows.compact(oldest)
            self._rows.set_number("compacted", oldest)

    async def compact(self, revision: int) -> None:
        now = self._revision()
        if revision > now:
            raise CoordinationError(f"revision {revision} is in the future: now is {now}")
        if revision <= self._rows.number("compacted"):
            raise Compacted(f"revision {revision} is already compacted away")
        with self._rows.transaction():
            self._rows.compact(revision)
            self._rows.set_number("compacted", revision)

    # --- leases -----------------------------------------------------------------------------------

    async def grant(self, ttl_s: float) -> LeaseId:
        self._revision()
        with self._rows.transaction():
            lease = self._rows.add_lease(ttl_s)
        self._until[lease] = self._monotonic_s() + ttl_s
        self._watch_leases()
        return lease

    async def keep_alive(self, lease: LeaseId) -> float:
        self.expire_leases()
        self._require_lease(lease)
        ttl_s = self._rows.leases()[lease]
        self._until[lease] = self._monotonic_s() + ttl_s
        return ttl_s

    async def revoke(self, lease: LeaseId) -> None:
        self.expire_leases()
        self._require_lease(lease)
        self._end_lease(lease)

    def _require_lease(self, lease: LeaseId) -> None:
        if lease not in self._until:
            raise LeaseNotFound(f"lease {lease} has ended")

    def _end_lease(self, lease: LeaseId) -> None:
        keys = self._rows.keys_of_lease(lease, self._revision())
        if keys:
            self._txn((), [Delete(item.key) for item in keys], ())
        with self._rows.transaction():
            self._rows.drop_lease(lease)
        del self._until[lease]

    def expire_leases(self) -> None:
        """End the expired leases; on a full disk, later:
        their keys can still be read until then.
        """
        now = self._monotonic_s()
        with suppress(DiskFull):
            for lease in [each for each, until in self._until.items() if until <= now]:
                self._end_lease(lease)

    def _watch_leases(self) -> None:
        if self._reaper is None and self._until and not self._is_closed:
            self._reaper = asyncio.get_running_loop().call_later(_LEASE_CHECK_S, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        self.expire_leases()
        self._watch_leases()

    # --- watching ---------------------------------------------------------------------------------

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        changed = asyncio.Event()
        self._changed.add(changed)
        after = start_revision - 1
        try:
            while not self._is_closed:
                changed.clear()
                self._require_kept(after + 1)
                now = self._revision()
                found = _by_revision(self._rows.events(prefix, after))
                for changes in found:
                    after = changes.revision
                    yield changes
                    changed.set()
                if not found:
                    # Compactions up to the current revision lose no event of this watch.
                    after = max(after, now)
                self._watch_leases()
                await changed.wait()
        finally:
            self._changed.discard(changed)

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        self._wake()
        self._rows.close()
        if self._lock is not None:
            os.close(self._lock)


class _Change:
    """The operations of one transaction, executed one after another at one revision."""

    def __init__(self, rows: Rows, revision: int, leases: set[LeaseId]) -> None:
        self._rows = rows
        self._revision = revision
        self._leases = leases
        self.count = 0

    def do(self, operation: Operation) -> list[KeyValue]:
        if isinstance(operation, Get):
            return self._rows.select(
                operation.key, is_prefix=operation.is_prefix, revision=self._revision
            )
        if isinstance(operation, Put):
            self._put(operation)
            return []
        return self._delete(operation)

    def _put(self, put: Put) -> None:
        if put.lease and put.lease not in self._leases:
            raise LeaseNotFound(f"lease {put.lease} has ended: {put.key} was not set")
        found = self._rows.select(put.key, is_prefix=False, revision=self._revision)
        created = found[0].create_revision if found else self._revision
        version = found[0].version + 1 if found else 1
        self._insert(put.key, created, version, put.value, put.lease)

    def _delete(self, delete: Delete) -> list[KeyValue]:
        found = self._rows.select(delete.key, is_prefix=delete.is_prefix, revision=self._revision)
        for item in found:
            self._insert(item.key, 0, 0, None, 0)
        return found

    def _insert(
        self, key: str, created: int, version: int, value: bytes | None, lease: int
    ) -> None:
        self._rows.insert(key, self._revision, self.count, created, version, value, lease)
        self.count += 1


def _require_key(key: str) -> None:
    if not key:
        raise CoordinationError("a key must not be empty")


def _check_request(
    compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]
) -> None:
    """Make etcd's checks before a comparison
    (server/etcdserver/api/v3rpc/key.go, checkTxnRequest).
    """
    for compare in compares:
        _require_key(compare.key)
    if max(len(compares), len(success), len(failure)) > OPERATIONS_MAX:
        raise CoordinationError(
            f"too many operations in one transaction: at most {OPERATIONS_MAX} of a kind"
        )
    size = 0
    for operations in (success, failure):
        _check_overlap(operations)
        size += sum(
            len(each.key.encode()) + len(each.value) for each in operations if isinstance(each, Put)
        )
    if size > REQUEST_BYTES_MAX:
        raise CoordinationError(
            f"the request is too large: {size} bytes, at most {REQUEST_BYTES_MAX}"
        )


def _check_overlap(operations: Sequence[Operation]) -> None:
    """Refuse a transaction that sets a key twice, or sets and deletes it."""
    puts: set[str] = set()
    for operation in operations:
        if isinstance(operation, Put) or not operation.is_prefix:
            _require_key(operation.key)
        if isinstance(operation, Put):
            if operation.key in puts:
                raise CoordinationError(f"{operation.key} is set twice in one transaction")
            puts.add(operation.key)
    for operation in operations:
        if isinstance(operation, Delete):
            hit = next(
                (
                    key
                    for key in puts
                    if key == operation.key
                    or (operation.is_prefix and key.startswith(operation.key))
                ),
                None,
            )
            if hit is not None:
                raise CoordinationError(f"{hit} is set and deleted in one transaction")


def _by_revision(events: list[WatchEvent]) -> list[WatchedChanges]:
    grouped: dict[int, list[WatchEvent]] = {}
    for event in events:
        grouped.setdefault(event.mod_revision, []).append(event)
    return [WatchedChanges(Revision(revision), tuple(group)) for revision, group in grouped.items()]


def _lock(path: Path) -> int:
    make_private(path.parent)
    os.close(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    )  # SQLite's journal files inherit these permissions
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise FolderInUse(f"{path} is used by another process: stop it first") from None
    return fd
