"""The embedded store against etcd: random operations, the same answers, the same kinds of errors,
the same watch streams.

etcd is right by definition. Its revisions are those of the whole server, so they are compared
relative to the test's beginning.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    CoordinationStore,
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
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.store import EtcdStore
from support.etcd_process import EtcdProcess
from support.stores import Follower, unique_namespace

from qmq.errors import CoordinationError

KEYS = ["a", "a/1", "a/2", "a/2/x", "b", "c/☃", "é"]
PREFIXES = ["", "a", "a/", "a/2", "c/", "z"]
VALUES = [b"", b"0", b"1", b"2", b"\xff"]
OPERATIONS = 1200


class Side:
    """One store, with its revisions and leases counted from its beginning."""

    def __init__(self, store: CoordinationStore) -> None:
        self.store = store
        self.base = 0
        self.leases: list[LeaseId] = []

    async def begin(self) -> None:
        self.base = (await self.store.list("")).revision

    def lease(self, number: int) -> LeaseId:
        return (
            LeaseId(0)
            if number < 0
            else self.leases[number]
            if number < len(self.leases)
            else LeaseId(999_999_999)
        )

    def real(self, revision: int) -> int:
        return revision + self.base if revision > 0 else 0

    def seen(self, value: Any) -> Any:
        """A result with revisions from the beginning and leases by their number."""
        if isinstance(value, KeyValue):
            lease = LeaseId(self.leases.index(value.lease) + 1 if value.lease else 0)
            created, mod = value.create_revision - self.base, value.mod_revision - self.base
            return replace(value, create_revision=created, mod_revision=mod, lease=lease)
        if isinstance(value, KeyListing):
            return KeyListing(Revision(value.revision - self.base), self.seen(value.items))
        if isinstance(value, TxnResult):
            return TxnResult(
                value.succeeded, Revision(value.revision - self.base), self.seen(value.results)
            )
        if isinstance(value, WatchedChanges):
            return WatchedChanges(Revision(value.revision - self.base), self.seen(value.events))
        if isinstance(value, WatchEvent):
            return WatchEvent(
                value.key,
                value.mod_revision - self.base,
                None if value.now is None else self.seen(value.now),
            )
        if isinstance(value, tuple | list):
            return tuple(self.seen(each) for each in value)
        return value

    async def do(self, call: Callable[[Side], Awaitable[Any]]) -> Any:
        try:
            return self.seen(await call(self))
        except CoordinationError as error:
            return type(error)


class Generator:
    """Random calls; each is made once and then done on both sides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.leases = 0

    def call(self) -> Callable[[Side], Awaitable[Any]]:
        kinds = [
            self.put,
            self.put,
            self.delete,
            self.txn,
            self.txn,
            self.txn,
            self.get,
            self.list,
            self.list,
            self.lease,
        ]
        return self.random.choice([*kinds, self.compact] if self.random.random() < 0.1 else kinds)()

    def put(self) -> Callable[[Side], Awaitable[Any]]:
        key, value, lease = self.key(), self.value(), self.lease_number()

        async def do(side: Side) -> Any:
            return (await side.store.put(key, value, side.lease(lease))) - side.base

        return do

    def delete(self) -> Callable[[Side], Awaitable[Any]]:
        deletion = self.deletion()
        return lambda side: side.store.delete(deletion.key, is_prefix=deletion.is_prefix)

    def get(self) -> Callable[[Side], Awaitable[Any]]:
        key = self.key()
        return lambda side: side.store.get(key)

    def list(self) -> Callable[[Side], Awaitable[Any]]:
        prefix, limit = self.random.choice(PREFIXES), self.random.choice([0, 0, 1, 3])
        revision = self.random.choice([0, self.some_revision()])
        return lambda side: side.store.list(prefix, revision=side.real(revision), limit=limit)

    def txn(self) -> Callable[[Side], Awaitable[Any]]:
        compares = [self.compare() for _ in range(self.random.randrange(3))]
        success, failure = (
            [self.operation() for _ in range(self.random.randrange(4))] for _ in range(2)
        )

        def compare(side: Side, each: Compare) -> Compare:
            is_revision = each.target in (CompareTarget.MOD, CompareTarget.CREATE)
            return (
                replace(each, value=side.real(each.value))
                if is_revision and isinstance(each.value, int)
                else each
            )

        def operation(side: Side, each: Operation) -> Operation:
            return replace(each, lease=side.lease(each.lease)) if isinstance(each, Put) else each

        return lambda side: side.store.txn(
            [compare(side, each) for each in compares],
            [operation(side, each) for each in success],
            [operation(side, each) for each in failure],
        )

    def compact(self) -> Callable[[Side], Awaitable[Any]]:
        revision = max(1, self.some_revision())
        return lambda side: side.store.compact(side.real(revision))

    def lease(self) -> Callable[[Side], Awaitable[Any]]:
        kind, number = self.random.choice(["grant", "revoke", "keep"]), self.lease_number()
        if kind == "grant":
            self.leases += 1

        async def do(side: Side) -> Any:
            if kind == "grant":
                side.leases.append(await side.store.grant(500 + len(side.leases)))
                return None
            if kind == "keep":
                return await side.store.keep_alive(side.lease(max(number, 0)))
            return await side.store.revoke(side.lease(max(number, 0)))

        return do

    def compare(self) -> Compare:
        key, target = self.key(), self.random.choice(list(CompareTarget))
        value: int | bytes = self.value() if target is CompareTarget.VALUE else self.some_revision()
        if target is CompareTarget.VERSION:
            value = self.random.randrange(4)
        return Compare(key, target, self.random.choice(["=", "!=", "<", ">"]), value)

    def operation(self) -> Operation:
        kind = self.random.randrange(3)
        if kind == 0:
            return self.deletion()
        if kind == 1:
            return Put(self.key(), self.value(), LeaseId(self.lease_number()))
        is_prefix = self.random.random() < 0.5
        return Get(self.random.choice(PREFIXES) if is_prefix else self.key(), is_prefix)

    def deletion(self) -> Delete:
        is_prefix = self.random.random() < 0.3
        return Delete(self.random.choice(PREFIXES) if is_prefix else self.key(), is_prefix)

    def key(self) -> str:
        return self.random.choice(KEYS)

    def value(self) -> bytes:
        return self.random.choice(VALUES)

    def lease_number(self) -> int:
        return (
            self.random.randrange(-1 - self.leases, self.leases + 1)
            if self.random.random() < 0.5
            else -1
        )

    def some_revision(self) -> int:
        return max(0, self.now - self.random.choice([-2, -1, 0, 1, 2, 5, 10, 50]))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.smoke), 1, 2, 3, 4])
async def test_the_embedded_store_answers_as_etcd_does(seed: int, shared_etcd: EtcdProcess) -> None:
    generator = Generator(seed)
    ours, real = (
        Side(EmbeddedStore()),
        Side(EtcdStore([shared_etcd.endpoint], namespace=unique_namespace())),
    )
    followers: list[Follower] = []
    try:
        for side in (ours, real):
            await side.begin()
            followers += [Follower(side.store, prefix, side.real(1)) for prefix in ("", "a/")]
            # A watch that has caught up is not hurt by compaction; one that is still being opened
            # may be.
            start = await side.store.put("a/begin", b"")
            for follower in followers[-2:]:
                await follower.reaches(start)
        generator.now = 1
        for number in range(OPERATIONS):
            call = generator.call()
            answer = await ours.do(call)
            assert answer == await real.do(call), f"seed {seed}, operation {number}"
            generator.now = (await ours.store.list("", limit=1)).revision - ours.base
        end = generator.now + 1
        for side in (ours, real):
            await side.store.put("a/end", b"")
        for follower, side in zip(followers, (ours, ours, real, real), strict=True):
            await follower.reaches(side.real(end))
        everything, some = ours.seen(followers[0].found), ours.seen(followers[1].found)
        assert everything == real.seen(followers[2].found)
        assert some == real.seen(followers[3].found)
        assert len(everything) > OPERATIONS / 4
    finally:
        for follower in followers:
            await follower.stop()
        await real.store.delete("", is_prefix=True)
        for side in (ours, real):
            await side.store.close()
