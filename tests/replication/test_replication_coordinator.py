"""The coordinator's promises where answers get lost, on the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.groups import Claim, Master, group_key, read_group
from qmq_coordination.store import Compare, Operation, Put, TxnResult
from qmq_replication.coordinator import Coordinator, Won
from qmq_replication.membership import Membership

from qmq.errors import CoordinationUnavailable, CoordinationUnknown

VOTERS = ("a", "b", "c")


class Lossy:
    """A store whose next transactions meet a fate: "fine", "lost" (nothing happens), "unanswered" (it happens), as listed."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.fates: list[str] = []
        self.before_next: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        """See CoordinationStore."""
        fate = self.fates.pop(0) if self.fates else "fine"
        if self.before_next:
            await self.before_next.pop(0)
        if fate != "lost":
            result = await self._store.txn(compares, success, failure)
            if fate == "fine":
                return result
        raise CoordinationUnknown("no answer")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Lossy]:
    """An embedded store with losses."""
    embedded = EmbeddedStore(tmp_path / "store.db")
    yield Lossy(embedded)
    await embedded.close()


async def no_sleep(_: float) -> None:
    await asyncio.sleep(0)


ATTEMPTS = count(1)


def coordinator(store: Lossy, name: str) -> Coordinator:
    return Coordinator(store, "g", Master(name, 0), lambda: str(next(ATTEMPTS)), sleep=no_sleep)


async def test_the_first_one_founds_the_group_and_the_others_join_it(store: Lossy) -> None:
    store.fates = ["unanswered"]
    assert await coordinator(store, "a").bootstrap(VOTERS) == Membership(1, VOTERS)
    assert await coordinator(store, "b").bootstrap(("x",)) == Membership(1, VOTERS)


async def test_epochs_rise_by_one_and_each_has_one_owner(store: Lossy) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await a.bootstrap(VOTERS)
    assert await a.campaign() == Won(1, Membership(1, VOTERS))
    assert await b.campaign() == Won(2, Membership(1, VOTERS))
    state = await read_group(store, "g")
    assert state.claim.replica == "b"
    assert state.master is not None
    assert (state.master.replica, state.master.epoch) == ("b", 2)


async def test_a_campaign_waits_once_for_somebody_who_won_since_the_last_promise(store: Lossy) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await a.bootstrap(VOTERS)
    assert await a.campaign(0) == Won(1, Membership(1, VOTERS))
    assert await b.campaign(0) is None
    assert await b.campaign(0) == Won(2, Membership(1, VOTERS))
    assert await a.campaign(2) == Won(3, Membership(1, VOTERS))


async def test_of_two_that_campaign_at_once_one_wins(store: Lossy) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await a.bootstrap(VOTERS)
    store.before_next = [b.campaign()]
    assert await a.campaign() is None
    assert (await read_group(store, "g")).claim.replica == "b"


async def test_a_lost_answer_is_read_back_as_won(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    store.fates = ["unanswered"]
    assert await a.campaign() == Won(1, Membership(1, VOTERS))


async def test_a_lost_request_is_read_back_as_not_won(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    store.fates = ["lost"]
    assert await a.campaign() is None
    assert await a.campaign() == Won(1, Membership(1, VOTERS))


async def test_an_epoch_that_another_attempt_of_the_same_replica_won_is_not_ours(store: Lossy) -> None:
    """The claim carries the attempt: the same replica, restarted, may be at the store too."""
    before, after = coordinator(store, "a"), coordinator(store, "a")
    await before.bootstrap(VOTERS)
    store.before_next = [after.campaign()]
    store.fates = ["lost"]
    assert await before.campaign() is None
    assert (await read_group(store, "g")).claim.epoch == 1


async def test_only_voters_win_epochs(store: Lossy) -> None:
    x = coordinator(store, "x")
    await x.bootstrap(VOTERS)
    assert await x.campaign() is None
    assert (await read_group(store, "g")).claim.epoch == 0


async def test_an_epoch_comes_with_the_membership_of_the_same_moment(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    after = Membership(2, ("a", "b"))
    store.before_next = [store._store.put(group_key("g", "members"), after.encode())]
    assert await a.campaign() is None
    assert await a.campaign() == Won(1, after)


@pytest.mark.parametrize("fates", [["fine"], ["lost", "fine"], ["unanswered"], ["lost", "unanswered", "lost"]])
async def test_a_change_is_repeated_until_its_outcome_is_certain(store: Lossy, fates: list[str]) -> None:
    a = coordinator(store, "a")
    before = await a.bootstrap(VOTERS)
    await a.campaign()
    after = before.with_learner("x")
    store.fates = fates
    assert await a.change(before, after) == after
    found = await store.get(group_key("g", "members"))
    assert found is not None
    assert Membership.decode(found.value) == after


@pytest.mark.parametrize("fates", [[], ["lost"]])
async def test_whoever_was_superseded_changes_nothing(store: Lossy, fates: list[str]) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    before = await a.bootstrap(VOTERS)
    await a.campaign()
    await b.campaign()
    store.fates = fates
    assert await a.change(before, before.with_learner("x")) is None
    assert (await read_group(store, "g")).members == before.encode()


async def test_without_an_epoch_nothing_is_changed(store: Lossy) -> None:
    a = coordinator(store, "a")
    before = await a.bootstrap(VOTERS)
    assert await a.change(before, before.with_learner("x")) is None


async def test_a_lease_that_ended_is_replaced_and_the_key_set_again(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    await a.campaign()
    state = await read_group(store, "g")
    await store.revoke(state.items["master"].lease)
    assert (await read_group(store, "g")).master is None
    assert (await a.hold()).epoch == 1
    assert (await read_group(store, "g")).master == state.master


async def test_who_was_superseded_learns_it_and_does_not_set_the_key_again(store: Lossy) -> None:
    a, b = coordinator(store, "a"), coordinator(store, "b")
    await a.bootstrap(VOTERS)
    await a.campaign()
    await b.campaign()
    await b.resign(2)
    assert (await a.hold()).epoch == 2
    assert (await read_group(store, "g")).master is None


async def test_what_is_given_back_is_gone_and_another_epoch_s_is_left(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    await a.campaign()
    await a.resign(7)
    assert (await read_group(store, "g")).master is not None
    await a.resign(1)
    assert (await read_group(store, "g")).master is None
    assert (await read_group(store, "g")).claim == Claim(1, "a", (await read_group(store, "g")).claim.attempt)


async def test_a_campaign_that_cannot_reach_the_store_is_lost(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)

    async def fail(ttl_s: float) -> int:
        raise CoordinationUnavailable("no member answers")

    store.grant = fail  # type: ignore[method-assign]
    assert await a.campaign() is None


async def test_a_second_campaign_at_the_same_time_is_refused(store: Lossy) -> None:
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    seconds: list[Won | None] = []

    async def second() -> None:
        seconds.append(await a.campaign())

    store.before_next = [second()]
    assert await a.campaign() is not None
    assert seconds == [None]


async def test_the_store_is_put_to_use_by_compare_alone(store: Lossy) -> None:
    """Nothing of the group is ever written without a comparison."""
    seen: list[Sequence[Compare]] = []
    real = store.txn

    async def txn(compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        assert all(isinstance(each, Put) for each in success)
        seen.append(compares)
        return await real(compares, success, failure)

    store.txn = txn  # type: ignore[method-assign]
    a = coordinator(store, "a")
    before = await a.bootstrap(VOTERS)
    await a.campaign()
    await a.change(before, before.with_learner("x"))
    assert len(seen) == 3
    assert all(seen)


async def test_a_key_that_never_arrived_is_set_while_the_lease_lives(store: Lossy) -> None:
    """The simulator of ordered subjects found it: the put was lost, the lease lived on, and the group had no master for anybody."""
    a = coordinator(store, "a")
    await a.bootstrap(VOTERS)
    await a.campaign()
    state = await read_group(store, "g")
    lease = state.items["master"].lease
    await store.delete(state.items["master"].key)
    held = await a.hold()
    assert (held.epoch, held.lease) == (1, lease)
    assert (await read_group(store, "g")).master == state.master
