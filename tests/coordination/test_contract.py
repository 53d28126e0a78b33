"""What every coordination store must do. One suite for all implementations: SQLite in memory,
SQLite on disk, a real etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    CoordinationStore,
    Delete,
    Get,
    LeaseId,
    Operation,
    Put,
    WatchedChanges,
    absent,
    unchanged,
)
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.store import EtcdStore
from support.stores import unique_namespace

from qmq.errors import Compacted, CoordinationError, LeaseNotFound


@pytest.fixture(params=["memory", "disk", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CoordinationStore]:
    found: CoordinationStore
    if request.param == "etcd":
        server = request.getfixturevalue("shared_etcd")
        found = EtcdStore([server.endpoint], namespace=unique_namespace())
    else:
        found = EmbeddedStore(None if request.param == "memory" else tmp_path / "c.db")
    yield found
    if request.param == "etcd":
        # So that no lease takes keys away, and revisions, while a later test counts them.
        cleaner = EtcdStore([server.endpoint])
        await cleaner.delete("/test/", is_prefix=True)
        await cleaner.close()
    await found.close()


async def take(
    store: CoordinationStore, prefix: str, start: int, count: int
) -> list[WatchedChanges]:
    found: list[WatchedChanges] = []
    watch = store.watch(prefix, start)
    try:
        async with asyncio.timeout(10):
            async for changes in watch:
                found.append(changes)
                if len(found) == count:
                    break
    finally:
        await watch.aclose()  # type: ignore[attr-defined]
    return found


async def test_every_change_has_a_revision_of_its_own_and_versions_count(
    store: CoordinationStore,
) -> None:
    first = await store.put("k", b"1")
    second = await store.put("k", b"2")
    found = await store.get("k")
    assert second == first + 1
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.version) == (
        b"2",
        first,
        second,
        2,
    )
    assert await store.delete("k") == 1
    assert await store.get("k") is None
    assert await store.delete("k") == 0
    third = await store.put("k", b"3")
    again = await store.get("k")
    assert again is not None
    assert (again.create_revision, again.version) == (third, 1)


async def test_of_many_compare_and_swaps_exactly_one_wins(store: CoordinationStore) -> None:
    results = await asyncio.gather(
        *[store.txn([absent("m")], [Put("m", b"%d" % n)], [Get("m")]) for n in range(20)]
    )
    won = [result for result in results if result.succeeded]
    assert len(won) == 1
    winner = await store.get("m")
    assert winner is not None
    assert winner.mod_revision == won[0].revision
    assert all(result.results[0] == (winner,) for result in results if not result.succeeded)


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("k", CompareTarget.VALUE, "=", b"v"), True),
        (Compare("k", CompareTarget.VALUE, "!=", b"v"), False),
        (Compare("k", CompareTarget.VALUE, ">", b"a"), True),
        (Compare("k", CompareTarget.VERSION, "=", 1), True),
        (Compare("k", CompareTarget.VERSION, ">", 1), False),
        (Compare("k", CompareTarget.MOD, "<", 1 << 40), True),
        (Compare("none", CompareTarget.VERSION, "=", 0), True),
        (Compare("none", CompareTarget.CREATE, ">", 0), False),
        (Compare("none", CompareTarget.VALUE, "=", b""), False),
    ],
)
async def test_comparisons_look_at_what_they_name(
    store: CoordinationStore, compare: Compare, holds: bool
) -> None:
    await store.put("k", b"v")
    assert (await store.txn([compare], [])).succeeded is holds


async def test_a_transaction_is_one_revision_or_nothing(store: CoordinationStore) -> None:
    before = await store.put("a", b"1")
    done = await store.txn(
        [], [Put("b", b"2"), Delete("a"), Get("", is_prefix=True), Put("c", b"3")]
    )
    assert done.revision == before + 1
    assert [item.key for item in done.results[2]] == ["b"]
    with pytest.raises(LeaseNotFound):
        await store.txn([], [Put("d", b"4"), Put("e", b"5", LeaseId(12345))])
    with pytest.raises(CoordinationError):
        await store.txn([], [Put("d", b"4"), Put("d", b"5")])
    assert await store.get("d") is None
    assert (await store.list("")).revision == done.revision


async def test_a_swap_on_a_stale_read_fails(store: CoordinationStore) -> None:
    await store.put("k", b"1")
    seen = await store.get("k")
    assert seen is not None
    assert (await store.txn([unchanged(seen)], [Put("k", b"2")])).succeeded
    assert not (await store.txn([unchanged(seen)], [Put("k", b"3")])).succeeded


async def test_the_past_can_be_listed_until_it_is_compacted(store: CoordinationStore) -> None:
    first = await store.put("p/a", b"1")
    await store.put("p/b", b"2")
    await store.delete("p/a")
    last = await store.put("q", b"x")
    assert [item.key for item in (await store.list("p/", revision=first)).items] == ["p/a"]
    assert [item.key for item in (await store.list("p/")).items] == ["p/b"]
    assert [item.key for item in (await store.list("", limit=1)).items] == ["p/b"]
    await store.compact(last)
    with pytest.raises(Compacted, match="list again"):
        await store.list("p/", revision=first)
    with pytest.raises(Compacted):
        await store.compact(last)
    with pytest.raises(CoordinationError):
        await store.list("p/", revision=last + 1)
    assert [item.key for item in (await store.list("")).items] == ["p/b", "q"]


async def test_a_watch_gives_every_change_from_its_revision_once_in_order(
    store: CoordinationStore,
) -> None:
    start = await store.put("w/0", b"")
    watching = asyncio.create_task(take(store, "w/", start, 51))
    for number in range(1, 50):
        await store.put(f"w/{number % 7}", b"%d" % number)
        await store.put("other", b"")
    await store.txn([], [Put("w/x", b""), Delete("w/0"), Put("other", b"")])
    found = await watching
    revisions = [changes.revision for changes in found]
    assert revisions == sorted(set(revisions))
    assert [event.key for event in found[-1].events] == ["w/x", "w/0"]
    assert found[-1].events[1].now is None
    assert await take(store, "w/", start, 51) == found


async def test_a_watch_from_a_compacted_revision_says_so(store: CoordinationStore) -> None:
    first = await store.put("k", b"1")
    last = await store.put("k", b"2")
    await store.compact(last)
    with pytest.raises(Compacted):
        await take(store, "k", first, 1)
    assert (await take(store, "k", last, 1))[0].revision == last


@pytest.mark.longest
async def test_a_backlog_of_thousands_of_changes_is_watched_without_a_gap(
    store: CoordinationStore,
) -> None:
    start = await store.put("n", b"")
    for batch in range(25):
        await store.txn(
            [], [Put(f"n/{at:05}", b"") for at in range(batch * 100, batch * 100 + 100)]
        )
    for _ in range(1100):
        await store.put("n", b"")
    found = await take(store, "n", start, 1126)
    assert [changes.revision for changes in found] == list(range(start, start + 1126))
    assert sum(len(changes.events) for changes in found) == 3601


async def test_a_revoked_lease_takes_its_keys_with_it(store: CoordinationStore) -> None:
    lease, other = await store.grant(100), await store.grant(100)
    start = await store.put("l/a", b"", lease)
    await store.put("l/b", b"", lease)
    await store.put("l/b", b"", other)
    assert await store.keep_alive(lease) == 100
    await store.revoke(lease)
    assert [item.key for item in (await store.list("l/")).items] == ["l/b"]
    with pytest.raises(LeaseNotFound):
        await store.keep_alive(lease)
    with pytest.raises(LeaseNotFound):
        await store.put("l/c", b"", lease)
    assert (await take(store, "l/", start + 3, 1))[0].events[0].now is None


async def test_a_transaction_larger_than_etcd_takes_is_refused_everywhere(
    store: CoordinationStore,
) -> None:
    await store.txn([], [Put(f"k/{at}", b"") for at in range(128)])
    with pytest.raises(CoordinationError, match="too many operations"):
        await store.txn([], [Put(f"k/{at}", b"") for at in range(129)])
    with pytest.raises(CoordinationError, match="too large"):
        await store.put("k", bytes(3 << 19))


@pytest.mark.parametrize(
    "operations",
    [
        [Put("k", b"1"), Put("k", b"2")],
        [Put("k", b"1"), Delete("k")],
        [Delete("k"), Put("k", b"1")],
        [Delete("", is_prefix=True), Put("k", b"1")],
        [Put("", b"")],
        [Get("")],
    ],
)
async def test_a_transaction_that_contradicts_itself_is_refused_even_where_it_is_not_taken(
    store: CoordinationStore, operations: list[Operation]
) -> None:
    for success, failure in ((operations, []), ([], operations)):
        with pytest.raises(CoordinationError):
            await store.txn([], success, failure)
    assert (await store.list("")).items == ()


async def test_overlapping_deletions_are_one(store: CoordinationStore) -> None:
    await store.put("k/1", b"")
    done = await store.txn([], [Delete("k/1"), Delete("k", is_prefix=True), Get("k/1")])
    assert [len(result) for result in done.results] == [1, 0, 0]


async def test_the_empty_key_is_refused(store: CoordinationStore) -> None:
    for call in (store.get(""), store.put("", b""), store.delete("")):
        with pytest.raises(CoordinationError):
            await call


async def test_keys_are_listed_in_the_order_of_their_code_points(store: CoordinationStore) -> None:
    keys = ["a", "a/", "a/1", "a0", "b", "z", "é", "☃", "\U0001f600"]
    for key in reversed(keys):
        await store.put(key, b"")
    assert [item.key for item in (await store.list("")).items] == keys
    assert [item.key for item in (await store.list("a/")).items] == ["a/", "a/1"]
    assert [item.key for item in (await store.list("☃")).items] == ["☃"]


async def test_a_lease_that_is_not_kept_alive_takes_its_keys_with_it(
    store: CoordinationStore,
) -> None:
    lease = await store.grant(1)
    start = await store.put("l/a", b"", lease)
    assert [changes.events[0].now is None for changes in await take(store, "l/", start, 2)] == [
        False,
        True,
    ]
    with pytest.raises(LeaseNotFound):
        await store.keep_alive(lease)
    with pytest.raises(LeaseNotFound):
        await store.revoke(lease)


async def test_a_closed_store_ends_its_watches_and_refuses_calls(store: CoordinationStore) -> None:
    start = await store.put("k", b"")
    found: list[WatchedChanges] = []
    begun = asyncio.Event()

    async def follow() -> None:
        async for changes in store.watch("k", start):
            found.append(changes)
            begun.set()

    watching = asyncio.create_task(follow())
    await begun.wait()
    await store.close()
    async with asyncio.timeout(10):
        await watching
    assert len(found) == 1
    with pytest.raises(CoordinationError):
        await store.get("k")
    async for _ in store.watch("k", start):
        raise AssertionError("a closed store gives no events")
    await store.close()
