"""The coordination store's interface: etcd v3's semantics, limited to the features of etcd 3.4.

* One *revision* counts all changes. Every change of a key records its `mod_revision`; a key also
  has a `create_revision` and a `version` (1 when it is new). All changes of one transaction share a
  revision.
* A *transaction* compares, then executes one of two lists of operations, atomically.
  Compare-and-swap is a transaction on `mod_revision`; a key that does not exist has mod_revision,
  create_revision and version 0.
* A *lease* ends if its owner does not renew it; the store then deletes its keys.
* A *watch* delivers every change from a revision on, once, in order, all changes of a revision
  together. A watch is a hint to read again, not a lock: transactions that depend on it compare
  revisions.
* If the answer to a transaction is lost, the transaction was done; or it was not done and never
  will be; or it is not done *yet*, because the request is in the buffer of a stopped member, which
  executes it when it continues. So the caller must not simply repeat it: it reads whether its own
  value is there, or repeats a transaction that cannot happen twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol

Revision = NewType("Revision", int)
LeaseId = NewType("LeaseId", int)

NO_LEASE: Final = LeaseId(0)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key at some revision. `lease` is 0 if the key has none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: LeaseId = NO_LEASE


class CompareTarget(Enum):
    """The field that a comparison tests."""

    VALUE = "value"
    VERSION = "version"
    CREATE = "create_revision"
    MOD = "mod_revision"


@dataclass(frozen=True, slots=True)
class Compare:
    """Compares the `target` field of `key` with `value` by the operator `op`
    ("=", "!=", "<", ">").
    """

    key: str
    target: CompareTarget
    op: str
    value: int | bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key. With `lease` 0 the key has no lease."""

    key: str
    value: bytes
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or with `is_prefix` all keys with this prefix."""

    key: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key, or with `is_prefix` all keys with this prefix, in order."""

    key: str
    is_prefix: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The result of a transaction: which list was executed, its revision, and the items that each
    operation read (Get) or deleted (Delete).
    """

    succeeded: bool
    revision: Revision
    results: tuple[tuple[KeyValue, ...], ...]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A key was set (`now`) or deleted (`now` is None)."""

    key: str
    mod_revision: int
    now: KeyValue | None


@dataclass(frozen=True, slots=True)
class WatchedChanges:
    """All events of one revision."""

    revision: Revision
    events: tuple[WatchEvent, ...]


@dataclass(frozen=True, slots=True)
class KeyListing:
    """Keys in order, as of `revision`: watch from `revision + 1` to miss nothing."""

    revision: Revision
    items: tuple[KeyValue, ...]


class CoordinationStore(Protocol):
    """The interface of a coordination store. Every call may raise CoordinationError."""

    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        """All keys that begin with `prefix`, in order,
        now or as of a revision. Raises Compacted.
        """
        ...

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """Set a key. Raises LeaseNotFound."""
        ...

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """Delete keys. Returns their number."""
        ...

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """Compare and act atomically. Raises LeaseNotFound."""
        ...

    async def grant(self, ttl_s: float) -> LeaseId: ...

    async def keep_alive(self, lease: LeaseId) -> float:
        """Renew the lease. Returns its seconds to live. Raises LeaseNotFound."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease now, with its keys. Raises LeaseNotFound."""
        ...

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """Iterate over every change under `prefix` from `start_revision` on. Raises Compacted if
        that revision is compacted.
        """
        ...

    async def compact(self, revision: int) -> None:
        """Drop the history before `revision`; current values stay. Raises Compacted if it was
        compacted before.
        """
        ...

    async def close(self) -> None:
        """Close the store. Watches end."""
        ...


def absent(key: str) -> Compare:
    """Compare that the key does not exist."""
    return Compare(key, CompareTarget.CREATE, "=", 0)


def unchanged(item: KeyValue) -> Compare:
    """Compare that the key has not changed since `item` was read."""
    return Compare(item.key, CompareTarget.MOD, "=", item.mod_revision)


def prefix_end(prefix: str) -> str | None:
    """The first key after all with this prefix; None if there is none."""
    for at in range(len(prefix) - 1, -1, -1):
        if ord(prefix[at]) < 0x10FFFF:
            return prefix[:at] + chr(ord(prefix[at]) + 1)
    return None
