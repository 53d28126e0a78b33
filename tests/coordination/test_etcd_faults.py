"""The etcd store when members are killed, stopped, cut off, and when answers are lost. Real
members, real sockets.

Each watch is compared with a second watch that met no fault. Both must give the same changes:
"every event, once, in order".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from qmq_coordination.coordination_store import (
    CoordinationStore,
    LeaseId,
    Put,
    unchanged,
)
from qmq_coordination.etcd.store import EtcdStore
from support import eventually
from support.etcd_process import EtcdCluster, EtcdProcess
from support.stores import FaultyStore, Follower, history, proxied, put_surely

from qmq.errors import (
    Compacted,
    CoordinationError,
    CoordinationUnavailable,
    CoordinationUnknown,
    LeaseNotFound,
    Outcome,
)

pytestmark = pytest.mark.sampled


@asynccontextmanager
async def opened(endpoints: list[str], total_s: float = 5.0) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(endpoints, namespace="/faults/", total_s=total_s)
    try:
        yield store
    finally:
        await store.close()


async def restart(server: EtcdProcess) -> None:
    server.spawn()
    await asyncio.to_thread(server.wait_healthy)


async def same_as_undisturbed(follower: Follower, store: EtcdStore, start: int, end: int) -> None:
    await follower.reaches(end)
    assert follower.found == await history(store, "w/", start, end)


async def test_a_watch_over_a_killed_and_restarted_server_gives_every_event_once(
    own_etcd: EtcdProcess,
) -> None:
    async with opened([own_etcd.endpoint]) as store:
        start = await store.put("w/0", b"")
        follower = Follower(store, "w/", start)
        for turn in range(3):
            for number in range(5):
                await put_surely(store, f"w/{number}", b"%d %d" % (turn, number))
            own_etcd.kill()
            await restart(own_etcd)
        end = await put_surely(store, "w/end", b"")
        await same_as_undisturbed(follower, store, start, end)
        assert len(follower.found) == 17
        await follower.stop()


async def test_with_the_contacted_member_stopped_calls_and_watches_continue(
    etcd_cluster: EtcdCluster,
) -> None:
    async with opened(etcd_cluster.endpoints) as store:
        start = await store.put("w/0", b"")
        lease = await store.grant(60)
        follower = Follower(store, "w/", start)
        await follower.reaches(start)
        etcd_cluster.members[0].pause()
        try:
            end = 0
            for number in range(20):
                end = await put_surely(store, f"w/{number}", b"%d" % number)
            assert await store.keep_alive(lease) == 60
            await same_as_undisturbed(follower, store, start, end)
        finally:
            etcd_cluster.members[0].resume()
        await follower.stop()


async def test_with_the_leader_killed_calls_and_watches_continue(etcd_cluster: EtcdCluster) -> None:
    async with opened(etcd_cluster.endpoints, total_s=15) as store:
        start = await store.put("w/0", b"")
        follower = Follower(store, "w/", start)
        leader = (await store.status()).leader
        for member in etcd_cluster.members:
            async with opened([member.endpoint]) as one:
                if (await one.status()).member == leader:
                    victim = member
        victim.kill()
        end = 0
        for number in range(20):
            end = await put_surely(store, f"w/{number}", b"%d" % number)
        await same_as_undisturbed(follower, store, start, end)
        assert (await store.status()).leader != leader
        await restart(victim)
        await follower.stop()


async def test_with_all_members_away_reads_say_so_and_watches_wait(
    etcd_cluster: EtcdCluster,
) -> None:
    async with opened(etcd_cluster.endpoints, total_s=1) as store:
        start = await store.put("w/0", b"")
        follower = Follower(store, "w/", start)
        await follower.reaches(start)
        for member in etcd_cluster.members:
            member.kill()
        with pytest.raises(CoordinationUnavailable, match="no etcd member answered"):
            await store.get("w/0")
        with pytest.raises((CoordinationUnavailable, CoordinationUnknown)):
            await store.put("w/1", b"never")
        for member in etcd_cluster.members:
            member.spawn()
        for member in etcd_cluster.members:
            await asyncio.to_thread(member.wait_healthy)
        end = await put_surely(store, "w/1", b"1")
        await same_as_undisturbed(follower, store, start, end)
        await follower.stop()


async def test_without_a_majority_no_call_succeeds_and_no_change_is_reported_done(
    etcd_cluster: EtcdCluster,
) -> None:
    async with opened(etcd_cluster.endpoints, total_s=2) as store:
        await store.put("k", b"1")
        for member in etcd_cluster.members[1:]:
            member.pause()
        try:
            with pytest.raises((CoordinationUnknown, CoordinationUnavailable)):
                await store.put("k", b"2")
            with pytest.raises(CoordinationUnavailable):
                await store.get("k")
        finally:
            for member in etcd_cluster.members[1:]:
                member.resume()
        await put_surely(store, "k", b"3")


async def test_a_change_over_a_connection_that_never_was_is_known_not_to_be_done(
    own_etcd: EtcdProcess,
) -> None:
    own_etcd.pause()
    try:
        async with opened([own_etcd.endpoint], total_s=1.5) as store:
            with pytest.raises(CoordinationUnavailable) as told:
                await store.put("k", b"")
            assert told.value.outcome is Outcome.NOT_STORED
    finally:
        own_etcd.resume()


async def test_a_call_under_way_when_the_store_is_closed_ends_with_an_error_of_ours(
    own_etcd: EtcdProcess,
) -> None:
    async with proxied(own_etcd.client_port) as proxy, opened([proxy.endpoint]) as store:
        await store.get("k")
        proxy.loses_answers = True
        calls = [
            asyncio.create_task(each)
            for each in (store.put("k", b""), store.get("k"), store.keep_alive(LeaseId(1)))
        ]
        await eventually(lambda: proxy.lost_bytes > 0)
        await store.close()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert type(errors[0]) is CoordinationUnknown
        assert [type(error) for error in errors[1:]] == [CoordinationError] * 2


async def test_a_call_that_is_cancelled_is_cancelled(own_etcd: EtcdProcess) -> None:
    async with proxied(own_etcd.client_port) as proxy, opened([proxy.endpoint]) as store:
        await store.get("k")
        proxy.loses_answers = True
        call = asyncio.create_task(store.get("k"))
        await eventually(lambda: proxy.lost_bytes > 0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_dead_endpoint_among_the_living_costs_nothing_but_a_try(
    own_etcd: EtcdProcess,
) -> None:
    async with opened(["127.0.0.1:1", own_etcd.endpoint]) as store:
        assert await store.put("k", b"") == 2
        lease = await store.grant(60)
        assert await store.keep_alive(lease) == 60


async def test_a_watch_that_was_cut_off_while_its_past_was_compacted_says_so(
    own_etcd: EtcdProcess,
) -> None:
    async with (
        proxied(own_etcd.client_port) as proxy,
        opened([proxy.endpoint]) as cut,
        opened([own_etcd.endpoint]) as direct,
    ):
        start = await direct.put("w/0", b"")
        follower = Follower(cut, "w/", start)
        await follower.reaches(start)
        proxy.refuses = True
        await proxy.cut()
        await direct.put("w/1", b"")
        end = await direct.put("w/2", b"")
        await direct.compact(end)
        proxy.refuses = False
        with pytest.raises(Compacted, match="list again"):
            await follower.result()
        listing = await cut.list("w/")
        again = Follower(cut, "w/", listing.revision + 1)
        await again.reaches(await direct.put("w/3", b""))
        await again.stop()


async def test_compaction_does_not_hurt_a_watch_that_keeps_up(own_etcd: EtcdProcess) -> None:
    async with opened([own_etcd.endpoint]) as store:
        start = await store.put("w/0", b"")
        follower = Follower(store, "w/", start)
        await follower.reaches(start)
        for _ in range(10):
            last = await store.put("other", b"")
        await store.compact(last)
        await follower.reaches(await store.put("w/1", b""))
        await follower.stop()


async def test_large_revisions_are_watched_whole(own_etcd: EtcdProcess) -> None:
    """Each transaction is 1.2 MB, so etcd cuts the backlog into fragments, within revisions."""
    async with opened([own_etcd.endpoint]) as store:
        start = (await store.list("")).revision + 1
        for turn in range(6):
            await store.txn([], [Put(f"w/{turn}/{number}", bytes(100_000)) for number in range(12)])
        found = await history(store, "w/", start, start + 5)
        assert [len(changes.events) for changes in found] == [12] * 6


async def test_a_watch_whose_member_falls_silent_continues_elsewhere(own_etcd: EtcdProcess) -> None:
    async with (
        proxied(own_etcd.client_port) as proxy,
        opened([proxy.endpoint, own_etcd.endpoint]) as store,
    ):
        start = await store.put("w/0", b"")
        follower = Follower(store, "w/", start)
        await follower.reaches(start)
        proxy.loses_answers = True
        async with opened([own_etcd.endpoint]) as direct:
            await follower.reaches(await direct.put("w/1", b""))
            assert len(follower.found) == 2
        await follower.stop()


async def test_a_lease_that_ended_while_the_server_was_stopped_is_lost(
    own_etcd: EtcdProcess,
) -> None:
    async with opened([own_etcd.endpoint], total_s=2.5) as store:
        lease = await store.grant(1)
        start = await store.put("w/l", b"", lease)
        follower = Follower(store, "w/", start)
        own_etcd.pause()
        try:
            with pytest.raises(CoordinationUnavailable):
                await store.keep_alive(lease)
        finally:
            own_etcd.resume()
        await follower.reaches(start + 1)
        assert follower.found[-1].events[0].now is None
        with pytest.raises(LeaseNotFound):
            await store.keep_alive(lease)
        await follower.stop()


async def test_a_grant_whose_answer_is_lost_is_repeated_and_finds_its_own_lease(
    own_etcd: EtcdProcess,
) -> None:
    async with proxied(own_etcd.client_port) as proxy, opened([proxy.endpoint]) as store:
        await store.get("k")
        proxy.loses_answers = True
        granting = asyncio.create_task(store.grant(60))
        await eventually(lambda: "leases" in own_etcd.call("/v3/lease/leases", {}))
        await proxy.heal()
        lease = await granting
        assert await store.keep_alive(lease) == 60
        assert own_etcd.call("/v3/lease/leases", {})["leases"] == [{"ID": str(lease)}]


# --- transactions whose answer is lost ------------------------------------------------------------


@asynccontextmanager
async def losing(server: EtcdProcess) -> AsyncIterator[tuple[CoordinationStore, EtcdStore]]:
    """A store that loses the answer to each transaction, and one that loses nothing."""
    async with (
        proxied(server.client_port) as proxy,
        opened([proxy.endpoint]) as lossy,
        opened([server.endpoint]) as direct,
    ):

        async def lose() -> None:
            proxy.loses_answers = True

        # Connected before anything is lost: without a connection nothing is sent, and so nothing
        # unknown.
        await lossy.get("k")
        yield FaultyStore(lossy, before=lose, after=proxy.heal), direct


async def test_a_lost_answer_is_reported_as_unknown_and_nothing_is_repeated(
    own_etcd: EtcdProcess,
) -> None:
    async with losing(own_etcd) as (lossy, direct):
        with pytest.raises(CoordinationUnknown, match="read back"):
            await lossy.txn([], [Put("k", b"1")])
        found = await direct.get("k")
        assert found is not None
        assert found.version == 1


async def test_a_member_that_wakes_with_an_old_request_cannot_undo_a_later_change(
    etcd_cluster: EtcdCluster,
) -> None:
    """The request waits in the stopped member's buffer, another client changes the guarded key, and
    the member continues.
    """
    async with opened(etcd_cluster.endpoints) as store, opened(etcd_cluster.endpoints[1:]) as other:
        await store.put("k", b"old")
        item = await store.get("k")
        assert item is not None

        async def stop_the_contacted() -> None:
            etcd_cluster.members[0].pause()

        async def change_the_key() -> None:
            await put_surely(other, "k", b"theirs")

        lossy = FaultyStore(store, before=stop_the_contacted, after=change_the_key)
        try:
            with pytest.raises(CoordinationUnknown):
                await lossy.txn([unchanged(item)], [Put("k", b"mine")])
        finally:
            etcd_cluster.members[0].resume()
        async with opened([etcd_cluster.members[0].endpoint], total_s=30) as woken:
            end = await put_surely(woken, "k", b"end")
        values = [
            changes.events[0].now.value
            for changes in await history(other, "k", item.mod_revision, end)
            if changes.events[0].now
        ]
        assert values[:2] == [b"old", b"theirs"]
        assert b"mine" not in values
