"""Members of a group under their leases, the metaservers' leader, and what brokers' answers are
taken for.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from meta_support import Brokers, Watchful
from qmq_coordination.coordination_store import CoordinationStore, LeaseId
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.ordered_records import LEADER, MemberRecord, member_key
from qmq_ordering.changes import first_route
from qmq_ordering.lanes import Assignment, Lane, Readable
from qmq_ordering.routes import LpRange, PhysicalPartition
from support import eventually
from support.stores import Fault, FaultyStore

from qmq.errors import CoordinationError, CoordinationUnavailable, StaleDelivery
from qmq.meta.ordered.changes import spread
from qmq.meta.ordered.controller import ControllerElection
from qmq.meta.ordered.groups import LEASE_MS_MIN, GroupMember, Members
from qmq.meta.ordered.rounds import EVERYTHING, GroupLaneProgress
from qmq.proto.v1 import control_pb2 as control

X = GroupMember("s", "g", "x")


class Clock:
    """A clock that stops until a test moves it; the embedded store's leases follow it."""

    def __init__(self) -> None:
        self.ms = 1_000

    def now(self) -> int:
        return self.ms

    def seconds(self) -> float:
        return self.ms / 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def embedded(clock: Clock) -> EmbeddedStore:
    return EmbeddedStore(monotonic_s=clock.seconds)


def members(store: Any, clock: Clock) -> Members:
    return Members(store, clock.now, clock.now)


async def there(store: CoordinationStore) -> tuple[str, LeaseId] | None:
    found = await store.get(member_key(*X))
    return None if found is None else (MemberRecord.decode(found.value).incarnation, found.lease)


# --- living and leaving ---------------------------------------------------------------------------


async def test_a_consumer_lives_while_it_asks_and_is_gone_when_it_has_not_for_its_lease(
    embedded: EmbeddedStore, clock: Clock
) -> None:
    here = members(embedded, clock)
    assert await here.keep(X, "1", 3_000, generation=0)
    for _ in range(5):
        clock.ms += 2_000
        assert not await here.keep(X, "1", 3_000, generation=1)
        here.forget_silent()
        assert list(here.pairs) == [("s", "g")]
    clock.ms += 3_001
    here.forget_silent()
    assert (await there(embedded), list(here.pairs)) == (None, [])
    assert await here.keep(X, "1", 3_000, generation=1)
    await embedded.close()


@pytest.mark.parametrize(("asked_ms", "ms"), [(3_600_000, 300_000), (1, LEASE_MS_MIN)])
async def test_who_asks_for_an_hour_and_vanishes_is_gone_in_five_minutes(
    embedded: EmbeddedStore, clock: Clock, asked_ms: int, ms: int
) -> None:
    """And a lease is never shorter than two seconds."""
    here = members(embedded, clock)
    await here.keep(X, "1", asked_ms, generation=0)
    clock.ms += ms - 1
    assert await there(embedded) is not None
    clock.ms += 1
    assert await there(embedded) is None
    await embedded.close()


async def test_a_consumer_that_leaves_is_removed_at_once_and_alone(
    embedded: EmbeddedStore, clock: Clock
) -> None:
    here = members(embedded, clock)
    await here.keep(X, "1", 3_000, generation=0)
    await here.keep(GroupMember("s", "g", "y"), "1", 3_000, generation=0)
    await here.leave(X, "another life")
    assert await there(embedded) is not None
    await here.leave(X, "1")
    await here.leave(X, "1")
    assert (await there(embedded), list(here.pairs)) == (None, [("s", "g")])
    await here.leave(GroupMember("s", "g", "y"), "1")
    assert list(here.pairs) == []
    await embedded.close()


async def test_a_consumer_that_changes_its_metaserver_outlives_the_first_lease(
    store: CoordinationStore,
) -> None:
    clock = Clock()
    first, second = members(store, clock), members(store, clock)
    await first.keep(X, "1", 3_000, generation=0)
    before = await store.get(X.key)
    await second.keep(X, "1", 3_000, generation=1)
    after = await store.get(X.key)
    assert before is not None
    assert after is not None
    assert (before.value, before.lease != after.lease) == (after.value, True)
    await store.revoke(before.lease)
    assert await store.get(X.key) == after
    assert await first.keep(X, "1", 3_000, generation=1)  # and back again


async def test_a_lease_that_ended_while_the_process_stood_still_is_replaced(
    store: CoordinationStore,
) -> None:
    here = members(store, Clock())
    await here.keep(X, "1", 3_000, generation=0)
    found = await there(store)
    assert found is not None
    await store.revoke(found[1])
    assert await here.keep(X, "1", 3_000, generation=1)
    assert await there(store) is not None


# --- two lives ------------------------------------------------------------------------------------


async def test_two_lives_that_come_at_once_leave_one(embedded: EmbeddedStore, clock: Clock) -> None:
    places = [members(embedded, clock) for _ in range(4)]
    await asyncio.gather(
        *[each.keep(X, str(number), 3_000, generation=0) for number, each in enumerate(places)]
    )
    found = await there(embedded)
    assert found is not None
    again = await asyncio.gather(
        *[each.keep(X, str(number), 3_000, generation=0) for number, each in enumerate(places)],
        return_exceptions=True,
    )
    assert [isinstance(each, StaleDelivery) for each in again] == [
        str(number) != found[0] for number in range(4)
    ]
    await embedded.close()


@pytest.mark.parametrize("fault", Fault)
async def test_a_lost_answer_leaves_one_key_under_a_lease_that_is_kept(
    embedded: EmbeddedStore, clock: Clock, fault: Fault
) -> None:
    losing = FaultyStore(Watchful(embedded, Brokers()), {1: fault})
    here = members(losing, clock)
    await here.keep(X, "1", 3_000, generation=0)
    for late in losing.delayed:
        with pytest.raises(CoordinationError):  # its lease is given up, or its comparison fails
            done = await losing.inner.txn(*late)
            if not done.succeeded:
                raise CoordinationError("compared")
    for _ in range(5):
        clock.ms += 2_000
        await here.keep(X, "1", 3_000, generation=1)
        assert await there(embedded) is not None
    await embedded.close()


@pytest.mark.parametrize("fault", Fault)
async def test_leaving_is_certain_though_its_answer_is_lost(
    embedded: EmbeddedStore, clock: Clock, fault: Fault
) -> None:
    losing = FaultyStore(Watchful(embedded, Brokers()), {2: fault})
    here = members(losing, clock)
    await here.keep(X, "1", 3_000, generation=0)
    await here.leave(X, "1")
    assert await there(embedded) is None
    await here.keep(X, "2", 3_000, generation=0)
    await losing.deliver_delayed()
    assert await there(embedded) is not None
    await embedded.close()


# --- the leader -----------------------------------------------------------------------------------


async def test_one_metaserver_leads_and_another_one_when_it_is_gone(
    embedded: EmbeddedStore, clock: Clock
) -> None:
    first, second = (
        ControllerElection(embedded, "first", lease_s=3),
        ControllerElection(embedded, "second", lease_s=3),
    )
    assert await first.campaign()
    assert not await second.campaign()
    clock.ms += 2_000
    assert await first.campaign()
    clock.ms += 2_000
    assert not await second.campaign()
    clock.ms += 3_000
    assert await second.campaign()
    assert not await first.campaign()
    await second.stop()
    assert await embedded.get(LEADER) is None
    assert await first.campaign()
    await embedded.close()


@pytest.mark.parametrize(
    "failure",
    [CoordinationUnavailable("nobody answers"), ValueError("an answer that nobody understands")],
)
async def test_a_leader_that_cannot_reach_the_store_leads_no_more(
    embedded: EmbeddedStore, failure: Exception
) -> None:
    store = FaultyStore(embedded)
    leader = ControllerElection(store, "it", lease_s=0.03)  # type: ignore[arg-type]
    leader.start()
    async with asyncio.timeout(10):
        await eventually(lambda: leader.is_leader)
        store.cut("get", failure=failure)
        await eventually(lambda: not leader.is_leader)
        store.heal()
        await eventually(lambda: leader.is_leader)
    await leader.stop()
    await embedded.close()


# --- what brokers say -----------------------------------------------------------------------------


def status(
    number: int, next_sequence: int, *rows: tuple[int, int, int, bool]
) -> control.PartitionStatus:
    found = control.PartitionStatus(partition=number, next_sequence=next_sequence)
    for first, end, done, is_finished in rows:
        found.progress.add(
            lps=control.LpRange(first=first, end=end), done_before=done, is_finished=is_finished
        )
    return found


def progress(*statuses: control.PartitionStatus) -> GroupLaneProgress:
    found = GroupLaneProgress()
    found.add(control.DescribeLanesResponse(partitions=statuses))
    return found


def test_a_range_is_finished_if_brokers_say_so_of_every_part_of_it() -> None:
    said = progress(
        status(1, 9, (0, 10, 9, True), (10, 20, 9, True), (20, 30, 9, False), (40, 50, 9, True))
    )
    for first, end in ((0, 20), (5, 15), (40, 50)):
        assert said.is_finished(1, LpRange(first, end))
    for first, end in ((10, 21), (20, 30), (29, 41), (45, 60)):
        assert not said.is_finished(1, LpRange(first, end))
    assert not said.is_finished(2, LpRange(0, 1))


def test_cuts_hold_every_logical_partition_once_for_any_load() -> None:
    for said in (
        progress(),
        progress(status(1, 0)),
        progress(status(1, 9, (5, 10, 1, False), (20, 30, 2, True))),
    ):
        cuts = said.cuts(1)
        assert (cuts[0].first, cuts[-1].end) == EVERYTHING
        assert all(a.end == b.first for a, b in pairwise(cuts))


def test_finished_ranges_close_and_silent_ones_keep_their_consumer() -> None:
    part, silent = (
        PhysicalPartition(1, LpRange(0, 50), "a"),
        PhysicalPartition(2, LpRange(50, 100), "b"),
    )
    said = progress(
        status(1, 9, (0, 10, 9, True), (10, 20, 3, False), (20, 30, 9, True), (30, 50, 0, False))
    )
    readable = [Readable(part, part.range, 4), Readable(silent, silent.range, 4)]
    before = Assignment(
        3, ((Lane(2, LpRange(50, 60), "b", 4), "x"), (Lane(2, LpRange(60, 80), "b", 3), "x"))
    )

    def opened(closed: set[int], previous: Assignment) -> list[tuple[int, int, int]]:
        return [
            (each.partition.number, *each.range)
            for each in said.open_lanes(readable, closed, previous)
        ]

    assert opened({1, 2}, before) == [(1, 10, 20), (1, 30, 50), (2, 50, 60)]
    assert opened({1, 2}, Assignment())[-1] == (2, 50, 100)
    assert opened(set(), before) == [(1, 0, 50), (2, 50, 100)]


def test_a_backlog_is_spread_over_the_partitions_width() -> None:
    said = progress(status(1, 100, (0, 50, 100, False), (50, 100, 20, False)), status(2, 70))
    assert [said.backlog(1, LpRange(*lps)) for lps in ((0, 50), (50, 100), (50, 75), (25, 75))] == [
        0,
        40,
        20,
        20,
    ]
    assert (
        said.backlog(1, EVERYTHING),
        said.backlog(2, EVERYTHING),
        said.backlog(3, EVERYTHING),
    ) == (40, 70, 0)


def test_parts_go_to_the_groups_with_fewest_partitions_and_rather_stay() -> None:
    route = first_route(100, 3, ["a", "b", "a"])
    source = route.partitions[0]
    assert spread(route, source, 2, ["a", "b", "c"]) == ("c", "a")
    assert spread(route, source, 3, ["a"]) == ("a", "a", "a")
