"""The coordinator's promises where answers get lost, on the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from qmq_coordination.broker_groups import EpochClaim, MasterRecord, group_key, read_group
from qmq_coordination.coordination_store import Compare, Operation, Put, TxnResult
from qmq_coordination.embedded import EmbeddedStore
from qmq_replication.coordinator import Coordinator, WonEpoch, found_group
from qmq_replication.membership import ReplicaMembership
from support.stores import Fault, FaultyStore

VOTERS = ("a", "b", "c")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    """An embedded store with losses."""
    embedded = EmbeddedStore(tmp_path / "store.db")
    yield FaultyStore(embedded)
    await embedded.close()


async def no_sleep(_: float) -> None:
    await asyncio.sleep(0)


ATTEMPTS = count(1)


def coordinator(store: FaultyStore, name: str) -> Coordinator:
    return Coordinator(
        store, "g", lambda: MasterRecord(name, 0), lambda: str(next(ATTEMPTS)), sleep=no_sleep
    )


async def test_the_first_one_founds_the_group_and_the_others_join_it(store: FaultyStore) -> None:
    store.fail_next(Fault.UNANSWERED)
    assert await found_group(store, "g", VOTERS) == ReplicaMembership(1, VOTERS)
    assert await found_group(store, "g", ("x",)) == ReplicaMembership(1, VOTERS)


async def test_epochs_rise_by_one_and_each_has_one_owner(store: FaultyStore) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await found_group(store, "g", VOTERS)
    assert await a.campaign() == WonEpoch(1, ReplicaMembership(1, VOTERS))
    assert await b.campaign() == WonEpoch(2, ReplicaMembership(1, VOTERS))
    state = await read_group(store, "g")
    assert state.claim.replica == "b"
    assert state.master is not None
    assert (state.master.replica, state.master.epoch) == ("b", 2)


async def test_a_campaign_waits_once_for_a_winner_since_the_last_promise(
    store: FaultyStore,
) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await found_group(store, "g", VOTERS)
    assert await a.campaign(0) == WonEpoch(1, ReplicaMembership(1, VOTERS))
    assert await b.campaign(0) is None
    assert await b.campaign(0) == WonEpoch(2, ReplicaMembership(1, VOTERS))
    assert await a.campaign(2) == WonEpoch(3, ReplicaMembership(1, VOTERS))


async def test_of_two_that_campaign_at_once_one_wins(store: FaultyStore) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await found_group(store, "g", VOTERS)
    store.do_before_next(b.campaign())
    assert await a.campaign() is None
    assert (await read_group(store, "g")).claim.replica == "b"


async def test_a_lost_answer_is_read_back_as_won(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    store.fail_next(Fault.UNANSWERED)
    assert await a.campaign() == WonEpoch(1, ReplicaMembership(1, VOTERS))


async def test_a_lost_request_is_read_back_as_not_won(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    store.fail_next(Fault.LOST)
    assert await a.campaign() is None
    assert await a.campaign() == WonEpoch(1, ReplicaMembership(1, VOTERS))


async def test_an_epoch_that_another_attempt_of_the_same_replica_won_is_not_ours(
    store: FaultyStore,
) -> None:
    """The claim carries the attempt: the same replica, restarted, may be at the store too."""
    before, after = coordinator(store, "a"), coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    store.do_before_next(after.campaign())
    store.fail_next(Fault.LOST)
    assert await before.campaign() is None
    assert (await read_group(store, "g")).claim.epoch == 1


async def test_only_voters_win_epochs(store: FaultyStore) -> None:
    x = coordinator(store, "x")
    await found_group(store, "g", VOTERS)
    assert await x.campaign() is None
    assert (await read_group(store, "g")).claim.epoch == 0


async def test_an_epoch_comes_with_the_membership_of_the_same_moment(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    after = ReplicaMembership(2, ("a", "b"))
    store.do_before_next(store.inner.put(group_key("g", "members"), after.encode()))
    assert await a.campaign() is None
    assert await a.campaign() == WonEpoch(1, after)


@pytest.mark.parametrize(
    "faults", [[], [Fault.LOST], [Fault.UNANSWERED], [Fault.LOST, Fault.UNANSWERED, Fault.LOST]]
)
async def test_a_change_is_repeated_until_its_outcome_is_certain(
    store: FaultyStore, faults: list[Fault]
) -> None:
    a = coordinator(store, "a")
    before = await found_group(store, "g", VOTERS)
    await a.campaign()
    after = before.with_learner("x")
    store.fail_next(*faults)
    assert await a.change(before, after) == after
    found = await store.get(group_key("g", "members"))
    assert found is not None
    assert ReplicaMembership.decode(found.value) == after


@pytest.mark.parametrize("faults", [[], [Fault.LOST]])
async def test_a_superseded_master_cannot_change_the_group(
    store: FaultyStore, faults: list[Fault]
) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    before = await found_group(store, "g", VOTERS)
    await a.campaign()
    await b.campaign()
    store.fail_next(*faults)
    assert await a.change(before, before.with_learner("x")) is None
    assert (await read_group(store, "g")).members == before.encode()


async def test_without_an_epoch_nothing_is_changed(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    before = await found_group(store, "g", VOTERS)
    assert await a.change(before, before.with_learner("x")) is None


async def test_a_lease_that_ended_is_replaced_and_the_key_set_again(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    await a.campaign()
    state = await read_group(store, "g")
    await store.revoke(state.items["master"].lease)
    assert (await read_group(store, "g")).master is None
    assert (await a.renew_key()).epoch == 1
    assert (await read_group(store, "g")).master == state.master


async def test_who_was_superseded_learns_it_and_does_not_set_the_key_again(
    store: FaultyStore,
) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await found_group(store, "g", VOTERS)
    await a.campaign()
    await b.campaign()
    await b.resign(2)
    assert (await a.renew_key()).epoch == 2
    assert (await read_group(store, "g")).master is None


async def test_a_replay_removes_its_parked_key_and_leaves_other_epochs(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    await a.campaign()
    await a.resign(7)
    assert (await read_group(store, "g")).master is not None
    await a.resign(1)
    assert (await read_group(store, "g")).master is None
    assert (await read_group(store, "g")).claim == EpochClaim(
        1, "a", (await read_group(store, "g")).claim.attempt
    )


async def test_a_campaign_that_cannot_reach_the_store_is_lost(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    store.cut("grant")
    assert await a.campaign() is None


async def test_a_second_campaign_at_the_same_time_is_refused(store: FaultyStore) -> None:
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    seconds: list[WonEpoch | None] = []

    async def second() -> None:
        seconds.append(await a.campaign())

    store.do_before_next(second())
    assert await a.campaign() is not None
    assert seconds == [None]


async def test_the_store_is_put_to_use_by_compare_alone(store: FaultyStore) -> None:
    """Every write of the group's keys has a comparison."""
    seen: list[Sequence[Compare]] = []
    real = store.txn

    async def txn(
        compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> TxnResult:
        assert all(isinstance(each, Put) for each in success)
        seen.append(compares)
        return await real(compares, success, failure)

    store.txn = txn  # type: ignore[method-assign]
    a = coordinator(store, "a")
    before = await found_group(store, "g", VOTERS)
    await a.campaign()
    await a.change(before, before.with_learner("x"))
    assert len(seen) == 3
    assert all(seen)


async def test_a_key_that_never_arrived_is_set_while_the_lease_lives(store: FaultyStore) -> None:
    """The simulator of ordered subjects found it: the put was lost, the lease lived on, and the
    group had no master for anybody.
    """
    a = coordinator(store, "a")
    await found_group(store, "g", VOTERS)
    await a.campaign()
    state = await read_group(store, "g")
    lease = state.items["master"].lease
    await store.delete(state.items["master"].key)
    held = await a.renew_key()
    assert (held.epoch, held.lease) == (1, lease)
    assert (await read_group(store, "g")).master == state.master
