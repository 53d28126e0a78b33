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

`txn_decided` finds the outcome of a transaction whose answer was lost, on any store. A lost answer
leaves three possibilities: the transaction was done; it was not done and never will be; or it is
not done *yet*, because the request is in the buffer of a stopped member, which executes it when it
continues. So the caller must not simply repeat the request. Instead one of its puts is a *proof*: a
value that no other process and no other attempt of ours ever writes (a new token for each attempt).
Then

    proof.key holds the value                                    DONE
    it held the value at a revision since the attempt began      DONE (read from the key's history,
                                                                 by a watch)
    neither, and one of the compares can never hold again        NOT_DONE (read before the history,
                                                                 so that no write is missed)
    neither, but the compares may hold now or later              NOT_YET
    there is no such key now, or the history is compacted away   CoordinationUnknown: written and
                                                                 deleted since, or never written

A compare can never hold again if it is `mod_revision = X` or `create_revision = X` (X a past
revision) and the key has another revision now, or is deleted: revisions only grow. If the compare
requires a key's absence and the key exists, the key may be deleted later, and the late transaction
would then be done. To have every case decided, let `proof.key` be a key that is never deleted, and
guard it by `unchanged(item)`.

Worked example: an election. /epoch (never deleted) was read at mod_revision 40.
txn([unchanged(epoch), absent(master)], [Put(epoch, "8 token-of-this-attempt"), Put(master, ...)]),
proof = the first put. There is no answer. /epoch is now at 47, written by another replica.
mod_revision = 40 never holds again. The history after the start shows our token at 43. The result
is DONE at 43, but another epoch has begun since: the caller reads the key again before it acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, NewType, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from qmq.errors import Compacted, CoordinationUnavailable, CoordinationUnknown, InvalidArgument

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


T = TypeVar("T")

WITHIN_S: Final = 30.0
"""Time after which the search for the outcome ends. It is longer than an election and a restart of
a member.
"""


class TxnFate(Enum):
    """The outcome of a transaction; see the module."""

    DONE = "done"
    NOT_DONE = "not done, and never will be"
    NOT_YET = "not done up to now"


@dataclass(frozen=True, slots=True)
class TxnDecision:
    """The outcome: DONE at `revision` (later changes may have overwritten the keys), or the outcome
    as far as `revision`.
    """

    fate: TxnFate
    revision: int


async def txn_decided(
    store: CoordinationStore,
    compares: Sequence[Compare],
    puts: Sequence[Operation],
    *,
    proof: Put,
    within_s: float = WITHIN_S,
) -> TxnDecision:
    """Execute a transaction and return its outcome. If the answer is lost, read the outcome back.
    `proof` is one of `puts`; its value must be unique to this call.

    Raises CoordinationUnknown if the outcome cannot be found within `within_s`;
    CoordinationUnavailable if the transaction was certainly not sent; and the store's refusals
    (LeaseNotFound, ...).
    """
    if proof not in puts:
        raise InvalidArgument("the proof must be one of the transaction's puts")
    before = (await store.list(proof.key, limit=1)).revision
    try:
        done = await store.txn(compares, puts)
    except CoordinationUnknown as lost:
        try:
            async with asyncio.timeout(within_s):
                return await _read_back(store, compares, proof, before)
        except TimeoutError:
            raise CoordinationUnknown(
                f"the outcome for {proof.key} could not be read back within {within_s:g} s"
            ) from lost
    return TxnDecision(TxnFate.DONE if done.succeeded else TxnFate.NOT_DONE, done.revision)


async def _read_back(
    store: CoordinationStore, compares: Sequence[Compare], proof: Put, before: int
) -> TxnDecision:
    is_over = False
    for compare in compares:
        # Read before the history: from here on the transaction cannot be executed any more, so the
        # history is complete.
        is_over = is_over or _never_again(
            compare, await _answered(partial(store.get, compare.key)), before
        )
    listing = await _answered(partial(store.list, proof.key, limit=1))
    item = listing.items[0] if listing.items and listing.items[0].key == proof.key else None
    if item is None:
        raise CoordinationUnknown(
            f"{proof.key} does not exist now: it was never written, or it was deleted later"
        )
    found = item.mod_revision if item.value == proof.value else None
    if found is None and item.mod_revision > before:
        found = await _in_history(store, proof, before + 1, item.mod_revision)
    if found is not None:
        return TxnDecision(TxnFate.DONE, found)
    return TxnDecision(TxnFate.NOT_DONE if is_over else TxnFate.NOT_YET, listing.revision)


def _never_again(compare: Compare, item: KeyValue | None, before: int) -> bool:
    """True if a compare does not hold now and never will again.
    `before` is a past revision. Pure.
    """
    if compare.op != "=" or compare.target not in (CompareTarget.MOD, CompareTarget.CREATE):
        return False
    if not isinstance(compare.value, int) or not 0 < compare.value <= before:
        return False
    return item is None or getattr(item, compare.target.value) != compare.value


async def _in_history(store: CoordinationStore, proof: Put, start: int, end: int) -> int | None:
    """Find the revision in [start, end] at which the key got the proof's value.
    The key was set at `end`.
    """
    async with AsyncExitStack() as stack:
        watch = store.watch(proof.key, start)
        if hasattr(watch, "aclose"):
            stack.push_async_callback(watch.aclose)
        try:
            async for changes in watch:
                for event in changes.events:
                    if (
                        event.key == proof.key
                        and event.now is not None
                        and event.now.value == proof.value
                    ):
                        return event.mod_revision
                if changes.revision >= end:
                    return None
        except Compacted as gone:
            raise CoordinationUnknown(
                f"{proof.key} was written by others since, and its history is compacted "
                "away: the outcome is unknown"
            ) from gone
    raise CoordinationUnknown(f"the store was closed before the history of {proof.key} was read")


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a read, with jitter, until it is answered. The caller sets the time limit."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(CoordinationUnavailable),
        wait=wait_random_exponential(multiplier=0.05, max=1),
    )
    return await retrying(ask)
