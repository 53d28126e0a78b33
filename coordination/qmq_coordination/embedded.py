"""The coordination store for one node: etcd's semantics on SQLite, in process. For `qmq dev` and for tests. The data is not replicated.

A transaction is one SQLite transaction, committed with a full sync before it is answered. Watchers read the table by revision after they
are woken, so a lost wake-up, or a process killed between commit and wake-up, loses no event. A file lock refuses a second process on the
same file. Leases are counted by a monotonic clock and start over at a start, as etcd's do at a change of leader.

After a crash before COMMIT nothing was done. After a crash after COMMIT everything was done. The caller got no answer and must read the
outcome back.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from qmq.errors import Compacted, CoordinationError, DiskFull, FolderInUse, LeaseNotFound
from qmq.private_files import FILE_MODE, make_private
from qmq.request_changes import note_change
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
)
from qmq_coordination.sqlite_rows import Rows

OPERATIONS_MAX: Final = 128
"""The limit of operations in one transaction: etcd's default (--max-txn-ops), so that code that works here works on etcd."""
REQUEST_BYTES_MAX: Final = 3 << 19
"""The largest request, 1.5 MiB: etcd's default (--max-request-bytes). Only keys and values count here, without the few bytes that etcd
adds.
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

    def __init__(self, path: Path | None = None, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
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

    # --- reading -------------------------------------------------------------------------------------------------------

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
            raise Compacted(f"revision {revision} is compacted away; the oldest is {compacted}: list again and continue from there")

    # --- changing ------------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        return (await self.txn((), (Put(key, value, lease),))).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        return len((await self.txn((), (Delete(key, is_prefix),))).results[0])

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        _check_request(compares, success, failure)
        self.expire_leases()
        return self._txn(compares, success, failure)

    def _txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> TxnResult:
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

    # --- leases --------------------------------------------------------------------------------------------------------

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
        """End the expired leases; on a full disk, later: their keys can still be read until then."""
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

    # --- watching ------------------------------------------------------------------------------------------------------

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
            return self._rows.select(operation.key, is_prefix=operation.is_prefix, revision=self._revision)
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

    def _insert(self, key: str, created: int, version: int, value: bytes | None, lease: int) -> None:
        self._rows.insert(key, self._revision, self.count, created, version, value, lease)
        self.count += 1


def _require_key(key: str) -> None:
    if not key:
        raise CoordinationError("a key must not be empty")


def _check_request(compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> None:
    """Make etcd's checks before a comparison (server/etcdserver/api/v3rpc/key.go, checkTxnRequest)."""
    for compare in compares:
        _require_key(compare.key)
    if max(len(compares), len(success), len(failure)) > OPERATIONS_MAX:
        raise CoordinationError(f"too many operations in one transaction: at most {OPERATIONS_MAX} of a kind")
    size = 0
    for operations in (success, failure):
        _check_overlap(operations)
        size += sum(len(each.key.encode()) + len(each.value) for each in operations if isinstance(each, Put))
    if size > REQUEST_BYTES_MAX:
        raise CoordinationError(f"the request is too large: {size} bytes, at most {REQUEST_BYTES_MAX}")


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
            hit = next((key for key in puts if key == operation.key or (operation.is_prefix and key.startswith(operation.key))), None)
            if hit is not None:
                raise CoordinationError(f"{hit} is set and deleted in one transaction")


def _by_revision(events: list[WatchEvent]) -> list[WatchedChanges]:
    grouped: dict[int, list[WatchEvent]] = {}
    for event in events:
        grouped.setdefault(event.mod_revision, []).append(event)
    return [WatchedChanges(Revision(revision), tuple(group)) for revision, group in grouped.items()]


def _lock(path: Path) -> int:
    make_private(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))  # SQLite's journal files inherit these permissions
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise FolderInUse(f"{path} is used by another process: stop it first") from None
    return fd
