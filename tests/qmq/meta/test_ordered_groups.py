"""Rounds of a group: it advances one version at a time and only after brokers call the version
finished; start, moves, and assignment of lanes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from meta_support import LPS, SUBJECT, KilledError, Killer, Lanes, World
from qmq_coordination.ordered_records import (
    MemberRecord,
    assignment_key,
    group_record_key,
    member_key,
)
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.lanes import Assignment, Frontier, Gate, GroupRecord, first_frontier
from qmq_ordering.routes import LpRange, Route
from support.stores import Fault, FaultyStore

from qmq.errors import InvalidArgument, LaneNotOpen, NotConnected, UnknownGroup
from qmq.meta.ordered.groups import Start
from qmq.meta.ordered.rounds import RoundOutcome, mark_passed
from qmq.proto.v1 import control_pb2 as control

EARLIEST, LATEST = Start.of_new("earliest"), Start.of_new("latest")
Lanes_ = list[tuple[int, int, int, str]]


class Grouped(World):
    """A world with one partition on broker group a, and a group g with members."""

    async def begun(self, *members: str, start: Start = EARLIEST, gate: Gate = Gate.LANES) -> None:
        await self.create(partitions=1, groups=("a",))
        self.brokers.part(1)
        for name in members:
            await self.join(name)
        await self.placing().begin(SUBJECT, "g", start, gate)
        await self.placing().make_ready(SUBJECT, "g")

    async def join(self, name: str) -> None:
        await self.embedded.put(member_key(SUBJECT, "g", name), MemberRecord(name, "1").encode())

    async def change(
        self, kind: str, *numbers: int, at: Iterable[int] = (), groups: Iterable[str] = ()
    ) -> None:
        def make(route: Route) -> object:
            if kind == "split":
                return split(
                    route, numbers[0], list(at), change_id=self.new_id(), groups=list(groups)
                )
            if kind == "merge":
                return merge(route, numbers, change_id=self.new_id())
            return move(route, numbers[0], next(iter(groups), "b"), change_id=self.new_id())

        changes = self.changes()
        change = await changes.prepare(SUBJECT, make)  # type: ignore[arg-type]
        await changes.carry_on(SUBJECT, change.to_version)
        for part in change.targets:
            self.brokers.parts[part.number] = Lanes(part.range)

    async def round(self) -> RoundOutcome:
        return await self.groups().round(SUBJECT, "g")

    async def record(self) -> GroupRecord:
        found = await self.embedded.get(group_record_key(SUBJECT, "g"))
        assert found is not None
        return GroupRecord.decode(found.value)

    async def pieces(self) -> list[tuple[int, int, int]]:
        return [
            (piece.range.first, piece.range.end, piece.version)
            for piece in (await self.record()).frontier.pieces
        ]

    async def assignment(self) -> Assignment:
        found = await self.embedded.get(assignment_key(SUBJECT, "g"))
        return Assignment() if found is None else Assignment.decode(found.value)

    async def lanes(self) -> Lanes_:
        return [
            (lane.partition, lane.range.first, lane.range.end, owner)
            for lane, owner in (await self.assignment()).lanes
        ]

    def frontiers(self) -> list[Frontier]:
        """Every frontier that was ever stored."""
        key = group_record_key(SUBJECT, "g")
        return [
            GroupRecord.decode(value).frontier for each, value in self.store.history if each == key
        ]


@pytest.fixture
def world() -> Grouped:
    return Grouped()


# --- advancing ------------------------------------------------------------------------------------


async def test_hazard_1_a_child_is_not_assigned_before_its_parent_is_finished(
    world: Grouped,
) -> None:
    await world.begun("x")
    world.brokers.append(1, 10)
    await world.change("split", 1, at=[50])
    assert (await world.round()).steps == 0
    assert await world.lanes() == [(1, 0, 100, "x")]
    assert await world.pieces() == [(0, 100, 1)]
    world.brokers.finish("g", 1)
    assert (await world.round()).steps == 1
    assert await world.lanes() == [(2, 0, 50, "x"), (3, 50, 100, "x")]


async def test_with_a_strict_gate_nothing_opens_before_all_sources_are_finished(
    world: Grouped,
) -> None:
    await world.begun("x", gate=Gate.STRICT)
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    await world.round()
    await world.change("merge", 2, 3)
    world.brokers.finish("g", 2, 0, 50)
    assert (await world.round()).steps == 0
    assert await world.lanes() == [(3, 50, 100, "x")]  # what is finished is nobody's any more
    world.brokers.finish("g", 3, 50, 100)
    assert (await world.round()).steps == 1
    assert await world.lanes() == [(4, 0, 100, "x")]


async def test_a_merge_opens_range_by_range_and_as_one_lane_when_both_sources_are_finished(
    world: Grouped,
) -> None:
    await world.begun("x")
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    await world.round()
    await world.change("merge", 2, 3)
    world.brokers.finish("g", 2, 0, 50)
    await world.round()
    assert await world.pieces() == [(0, 50, 3), (50, 100, 2)]
    world.brokers.finish("g", 3, 50, 100)
    await world.round()
    assert await world.lanes() == [(4, 0, 100, "x")]


async def test_hazard_2_a_group_from_the_earliest_reads_parents_closed_before_it(
    world: Grouped,
) -> None:
    await world.create(partitions=1, groups=("a",))
    world.brokers.append(1, 5)
    await world.change("split", 1, at=[50])
    await world.change("move", 2)
    await world.join("x")
    await world.placing().begin(SUBJECT, "g", EARLIEST, Gate.LANES)
    await world.round()
    assert await world.lanes() == [(1, 0, 100, "x")]


async def test_hazard_3_a_group_from_the_latest_reads_new_partitions_from_their_begin(
    world: Grouped,
) -> None:
    await world.create(partitions=1, groups=("a",))
    world.brokers.append(1, 5)
    with pytest.raises(KilledError):
        await world.placing(arrow=Killer("behind begin")).begin(SUBJECT, "g", LATEST, Gate.LANES)
    await world.change("split", 1, at=[50])
    world.brokers.append(2, 3)
    await world.join("x")
    assert not (await world.round()).is_ready
    assert await world.lanes() == []
    await world.placing().make_ready(SUBJECT, "g")
    assert [
        (request.moves, [(place.partition, place.latest) for place in request.places])
        for request in world.brokers.placed
    ] == [(False, [(1, True)])]
    await world.round()
    assert await world.lanes() == [(2, 0, 50, "x"), (3, 50, 100, "x")]
    assert "g" not in world.brokers.parts[2].done


async def test_hazard_4_progress_that_is_missing_never_counts_as_done(world: Grouped) -> None:
    await world.begun("x")
    await world.change("split", 1, at=[50])
    assert world.brokers.parts[1].done == {}
    assert (await world.round()).steps == 0
    world.brokers.finish("g", 1, 0, 30)
    world.brokers.finish("g", 1, 40, 100)
    await world.round()
    assert await world.pieces() == [(0, 30, 2), (30, 40, 1), (40, 100, 2)]


async def test_hazard_4_a_broker_group_that_is_silent_finished_nothing_and_keeps_its_lanes(
    world: Grouped,
) -> None:
    await world.begun("x", "y")
    await world.round()
    before = await world.assignment()
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    world.brokers.down.add("a")
    outcome = await world.round()
    assert (outcome.steps, outcome.silent, outcome.is_assigned) == (0, {"a"}, False)
    assert await world.assignment() == before
    world.brokers.down.clear()
    assert (await world.round()).steps == 1


async def test_a_silent_group_holds_up_only_its_own_ranges(world: Grouped) -> None:
    await world.create(partitions=2, groups=("a", "b"))
    world.brokers.parts.update({1: Lanes(LpRange(0, 50)), 2: Lanes(LpRange(50, 100))})
    await world.join("x")
    await world.placing().begin(SUBJECT, "g", EARLIEST, Gate.LANES)
    await world.round()
    await world.change("move", 1, groups=["c"])
    await world.change("move", 2, groups=["c"])
    world.brokers.finish("g", 1, 0, 50)
    world.brokers.finish("g", 2, 50, 100)
    world.brokers.down.add("b")
    await world.round()
    assert await world.pieces() == [(0, 50, 3), (50, 100, 2)]
    assert await world.lanes() == [(2, 50, 100, "x"), (3, 0, 50, "x")]


async def test_parked_keys_are_parked_behind_a_change_before_it_opens(world: Grouped) -> None:
    await world.begun("x")
    world.brokers.append(1, 10)
    world.brokers.part(1).parked["g"] = {b"low": 7, b"high": 60}
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    assert (await world.round()).steps == 1
    assert {number: world.brokers.part(number).parked.get("g") for number in (2, 3)} == {
        2: {b"low": 7},
        3: {b"high": 60},
    }
    revisions = {each.record_revision for each in world.brokers.inherited}
    assert len(revisions) == 1


async def test_parked_keys_pass_versions_without_messages(world: Grouped) -> None:
    await world.begun("x")
    world.brokers.part(1).parked["g"] = {b"k": 7}
    await world.change("split", 1, at=[50])
    await world.change("merge", 2, 3)
    for number in (1, 2, 3):
        part = world.brokers.part(number)
        world.brokers.finish("g", number, *part.range)
    await world.round()
    assert await world.pieces() == [(0, 100, 3)]
    assert world.brokers.part(4).parked["g"] == {b"k": 7}


async def test_partitions_with_unknown_parked_keys_do_not_open_and_others_do(
    world: Grouped,
) -> None:
    await world.create(partitions=2, groups=("a", "b"))
    world.brokers.parts.update({1: Lanes(LpRange(0, 50)), 2: Lanes(LpRange(50, 100))})
    await world.join("x")
    await world.placing().begin(SUBJECT, "g", EARLIEST, Gate.LANES)
    world.brokers.part(1).parked["g"] = {b"k": 7}
    await world.change("move", 1, groups=["c"])
    await world.change("move", 2, groups=["d"])
    world.brokers.finish("g", 1, 0, 50)
    world.brokers.finish("g", 2, 50, 100)
    world.brokers.down.add("c")
    await world.round()
    assert await world.pieces() == [(0, 50, 1), (50, 100, 3)]
    world.brokers.down.clear()
    await world.round()
    assert await world.pieces() == [(0, 100, 3)]
    assert world.brokers.part(3).parked["g"] == {b"k": 7}


@pytest.mark.parametrize(
    ("version", "parked_in", "silent", "passed"),
    [
        (1, [1], (), [False]),  # the group has not come to a later partition
        (2, [1], (), [True]),
        (2, [1, 2], (), [False, False]),
        (2, [1], ("a",), [False]),  # nobody knows what is parked there
    ],
)
def test_a_key_may_be_passed_where_a_later_partition_does_not_know_of_it(
    version: int, parked_in: list[int], silent: tuple[str, ...], passed: list[bool]
) -> None:
    first = first_route(LPS, 1, ["a"])
    routes = {1: first, 2: next_route(first, split(first, 1, [50], change_id="x"))}
    keys = [
        control.ParkedKey(key=b"k", partition=number, logical_partition=7, messages=1)
        for number in parked_in
    ]
    mark_passed(keys, first_frontier(LPS, version), routes, silent)
    assert [each.may_be_passed for each in keys] == passed


async def test_hazard_5_vanished_progress_closes_no_lane_and_opens_none(world: Grouped) -> None:
    await world.begun("x")
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1, 0, 50)
    await world.round()
    world.brokers.parts[1].done.clear()
    assert (await world.round()).steps == 0
    assert await world.pieces() == [(0, 50, 2), (50, 100, 1)]


async def test_hazard_6_a_parent_emptied_by_retention_is_passed_as_its_broker_says(
    world: Grouped,
) -> None:
    await world.begun("x")
    world.brokers.append(1, 9)
    await world.change("split", 1, at=[50])
    world.brokers.parts[1].is_forgotten = True
    assert (await world.round()).steps == 1
    assert await world.pieces() == [(0, 100, 2)]


async def test_hazard_9_a_crash_after_the_publication_does_not_affect_consumers(
    world: Grouped,
) -> None:
    await world.begun("x")
    changes = world.changes(arrow=Killer("behind publish"))
    await changes.prepare(SUBJECT, lambda route: split(route, 1, [50], change_id="c"))
    with pytest.raises(KilledError):
        await changes.carry_on(SUBJECT, 2)
    world.brokers.parts.update({2: Lanes(LpRange(0, 50)), 3: Lanes(LpRange(50, 100))})
    world.brokers.finish("g", 1)
    await world.round()
    assert await world.pieces() == [(0, 100, 2)]
    assert await world.changes().finish(SUBJECT, 2)


async def test_hazard_10_a_group_passes_versions_one_at_a_time_however_fast_they_come(
    world: Grouped,
) -> None:
    await world.begun("x")
    for number in range(1, 7):
        await world.change("move", number, groups=["b" if number % 2 else "a"])
        world.brokers.finish("g", number)
    outcome = await world.round()
    assert (outcome.steps, outcome.version) == (6, 7)
    assert [frontier.version for frontier in world.frontiers()] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "arrow", ["before advance", "behind advance", "before assign", "behind assign"]
)
async def test_after_a_metaserver_is_killed_in_a_round_another_one_continues_the_group(
    world: Grouped, arrow: str
) -> None:
    await world.begun("x")
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    with pytest.raises(KilledError):
        await world.groups(arrow=Killer(arrow)).round(SUBJECT, "g")
    await world.round()
    assert await world.pieces() == [(0, 100, 2)]
    assert await world.lanes() == [(2, 0, 50, "x"), (3, 50, 100, "x")]


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_lost_answer_in_a_round_is_seen_by_the_next_one(
    world: Grouped, number: int, fault: Fault
) -> None:
    await world.begun("x")
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    losing = FaultyStore(world.store, {number: fault})
    assert (await world.groups(losing).round(SUBJECT, "g")).is_lost
    await world.round()
    assert not any(each.succeeded for each in await losing.deliver_delayed())
    assert await world.pieces() == [(0, 100, 2)]
    assert [frontier.version for frontier in world.frontiers()] == [1, 2]
    assert (await world.assignment()).generation == 1


async def test_an_answer_of_a_broker_does_not_count_for_a_frontier_that_a_reset_put_since(
    world: Grouped,
) -> None:
    await world.begun("x")
    await world.change("move", 1)
    world.brokers.finish("g", 1)

    async def arrow(name: str) -> None:
        if name == "before advance":
            await world.placing().reset(SUBJECT, "g", Start.parse("reset:earliest"), 1)

    assert (await world.groups(arrow=arrow).round(SUBJECT, "g")).is_lost
    assert await world.pieces() == [(0, 100, 1)]
    assert (await world.round()).steps == 0


# --- the assignment -------------------------------------------------------------------------------


async def test_who_comes_gets_its_share_and_who_goes_leaves_it_to_the_others(
    world: Grouped,
) -> None:
    await world.begun("x")
    await world.round()
    assert await world.lanes() == [(1, 0, 100, "x")]
    await world.join("y")
    assert (await world.round()).is_assigned
    assert sorted(lane[3] for lane in await world.lanes()) == ["x", "y"]
    assert not (await world.round()).is_assigned
    await world.embedded.delete(member_key(SUBJECT, "g", "x"))
    await world.round()
    assert await world.lanes() == [(1, 0, 100, "y")]
    await world.embedded.delete(member_key(SUBJECT, "g", "y"))
    await world.round()
    assert (await world.assignment()).lanes == ()


async def test_who_finished_a_sealed_partition_keeps_its_lane_until_there_is_a_successor(
    world: Grouped,
) -> None:
    await world.begun("x", "y")
    await world.round()
    before = await world.assignment()
    changes = world.changes(arrow=Killer("behind sealed"))
    await changes.prepare(SUBJECT, lambda route: split(route, 1, [50], change_id="c"))
    with pytest.raises(KilledError):
        await changes.carry_on(SUBJECT, 2)
    world.brokers.finish("g", 1, 0, 50)
    await world.round()
    assert await world.assignment() == before
    await world.changes().carry_on(SUBJECT, 2)
    await world.round()
    assert await world.lanes() == [(1, 50, 100, "y"), (2, 0, 50, "x")]


async def test_a_partition_without_messages_is_open_and_not_finished(world: Grouped) -> None:
    await world.begun("x")
    world.brokers.parts.clear()
    assert not (await world.round()).silent
    assert await world.lanes() == [(1, 0, 100, "x")]
    await world.join("y")
    await world.round()
    await world.embedded.delete(member_key(SUBJECT, "g", "y"))
    await world.round()
    assert await world.lanes() == [(1, 0, 100, "x")]


async def test_a_backlog_draws_more_consumers(world: Grouped) -> None:
    await world.begun(*"wxyz")
    await world.change("split", 1, at=[50])
    world.brokers.finish("g", 1)
    world.brokers.append(2, 300)
    world.brokers.append(3, 100)
    await world.round()
    assert [lane[0] for lane in await world.lanes()] == [2, 2, 2, 3]


async def test_a_group_that_does_not_exist_has_no_rounds(world: Grouped) -> None:
    await world.create()
    assert await world.round() == RoundOutcome()
    with pytest.raises(UnknownGroup):
        await world.placing().make_ready(SUBJECT, "g")


# --- beginning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrow",
    [
        "before begin",
        "behind begin",
        "before place",
        "behind place",
        "before ready",
        "behind ready",
    ],
)
async def test_an_unfinished_start_at_latest_is_finished_by_the_next_finder(
    world: Grouped, arrow: str
) -> None:
    await world.create(partitions=2, groups=("a", "b"))
    world.brokers.append(1, 4)
    world.brokers.append(2, 6)
    placing = world.placing(arrow=Killer(arrow))
    with pytest.raises(KilledError):
        await placing.begin(SUBJECT, "g", LATEST, Gate.LANES)
        await placing.make_ready(SUBJECT, "g")
    world.brokers.append(1)
    await world.placing().begin(SUBJECT, "g", LATEST, Gate.LANES)
    assert (await world.placing().make_ready(SUBJECT, "g")).is_ready
    done = [world.brokers.parts[number].done["g"][0][2] for number in (1, 2)]
    assert done == [4 if arrow in ("behind place", "before ready", "behind ready") else 5, 6]


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_lost_answer_while_a_group_begins_makes_no_second_group(
    world: Grouped, number: int, fault: Fault
) -> None:
    await world.create(partitions=1, groups=("a",))
    losing = FaultyStore(world.store, {number: fault})
    placing = world.placing(losing)
    await placing.begin(SUBJECT, "g", LATEST, Gate.STRICT)
    await placing.make_ready(SUBJECT, "g")
    await placing.make_ready(SUBJECT, "g")
    assert not any(each.succeeded for each in await losing.deliver_delayed())
    record = await world.record()
    assert (record.is_ready, record.gate, record.start) == (True, Gate.STRICT, "latest")


async def test_a_group_is_created_only_after_the_silent_broker_answered(world: Grouped) -> None:
    await world.create(partitions=2, groups=("a", "b"))
    world.brokers.down.add("b")
    assert not (await world.placing().begin(SUBJECT, "g", LATEST, Gate.LANES)).is_ready
    with pytest.raises(NotConnected):
        await world.placing().make_ready(SUBJECT, "g")
    assert not (await world.record()).is_ready
    world.brokers.down.clear()
    assert (await world.placing().make_ready(SUBJECT, "g")).is_ready


async def test_an_existing_group_keeps_its_kind_whatever_a_new_consumer_asks_for(
    world: Grouped,
) -> None:
    await world.begun()
    before = await world.record()
    assert await world.placing().begin(SUBJECT, "g", LATEST, Gate.STRICT) == before
    await world.placing().set_gate(SUBJECT, "g", Gate.STRICT)
    assert (await world.record()).gate is Gate.STRICT


# --- being moved ----------------------------------------------------------------------------------


async def three_versions(world: Grouped) -> None:
    """Version 1: 1 [0, 100). Version 2: 2 [0, 50), 3 [50, 100). Version 3: 2, and 4 [50, 100) on c.
    All consumed.
    """
    await world.begun("x")
    for number, messages, change in (
        (1, 10, ("split", 1, [50], ["a", "b"])),
        (3, 20, ("move", 3, [], ["c"])),
    ):
        world.brokers.append(number, messages)
        world.now_ms += 60_000
        await world.change(change[0], change[1], at=change[2], groups=change[3])
        world.brokers.finish(
            "g",
            number,
            world.brokers.parts[number].range.first,
            world.brokers.parts[number].range.end,
        )
        await world.round()
    world.brokers.append(4, 30)
    world.brokers.finish("g", 4, 50, 100)
    assert await world.pieces() == [(0, 100, 3)]


def placed(world: Grouped) -> dict[int, str]:
    return {
        place.partition: place.WhichOneof("target") or ""
        for request in world.brokers.placed
        for place in request.places
    }


@pytest.mark.parametrize(
    ("start", "version", "places"),
    [
        ("reset:earliest", 1, {1: "earliest", 2: "earliest", 3: "earliest", 4: "earliest"}),
        ("reset:latest", 3, {1: "latest", 2: "latest", 3: "latest", 4: "latest"}),
        ("reset:1", 1, {1: "time_ms", 2: "earliest", 3: "earliest", 4: "earliest"}),
        ("reset:1001", 2, {1: "latest", 2: "time_ms", 3: "time_ms", 4: "earliest"}),
        ("reset:1000", 1, {1: "time_ms", 2: "earliest", 3: "earliest", 4: "earliest"}),
        ("reset:2001", 3, {1: "latest", 2: "time_ms", 3: "latest", 4: "time_ms"}),
        ("reset:9999999", 3, {1: "latest", 2: "time_ms", 3: "latest", 4: "time_ms"}),
    ],
)
async def test_hazard_18_a_reset_names_a_version_its_places_and_later_begins(
    world: Grouped, start: str, version: int, places: dict[int, str]
) -> None:
    await three_versions(world)
    state = await world.state()
    found = Start.parse(start)
    assert found.version(state.routes, {1: 1000, 3: 2000, 4: 3000}) == version
    assert (await world.placing().reset(SUBJECT, "g", found, version)).is_ready
    assert placed(world) == places
    assert all(request.moves for request in world.brokers.placed)
    assert await world.pieces() == [(0, 100, version)]
    await world.round()
    assert {lane[0] for lane in await world.lanes()} <= set(places)


@pytest.mark.parametrize(
    "arrow",
    [
        "before reset",
        "behind reset",
        "before place",
        "behind place",
        "before ready",
        "behind ready",
    ],
)
async def test_a_reset_cut_short_by_a_crash_is_finished_before_anyone_reads(
    world: Grouped, arrow: str
) -> None:
    await three_versions(world)
    start = Start.parse("reset:earliest")
    with pytest.raises(KilledError):
        await world.placing(arrow=Killer(arrow)).reset(SUBJECT, "g", start, 1)
    record = await world.record()
    assert record.is_ready == (arrow in ("before reset", "behind ready"))
    assert record.frontier == first_frontier(LPS, 3 if arrow == "before reset" else 1)
    assert (await world.round()).is_ready == record.is_ready
    await world.placing().make_ready(SUBJECT, "g")
    assert (await world.record()).is_ready
    assert placed(world).keys() == (set() if arrow == "before reset" else {1, 2, 3, 4})


@pytest.mark.parametrize("fault", Fault)
async def test_a_reset_whose_answer_is_lost_is_done_once(world: Grouped, fault: Fault) -> None:
    await three_versions(world)
    losing = FaultyStore(world.store, {1: fault})
    await world.placing(losing).reset(SUBJECT, "g", Start.parse("reset:latest"), 3)
    assert not any(each.succeeded for each in await losing.deliver_delayed())
    assert (await world.record()).is_ready
    assert sorted(
        place.partition for request in world.brokers.placed for place in request.places
    ) == [1, 2, 3, 4]


async def test_messages_replayed_in_a_partition_that_was_left_come_before_newer_ones(
    world: Grouped,
) -> None:
    await three_versions(world)
    part = (await world.state()).partition(1)
    assert part is not None
    await world.placing().set_back(SUBJECT, "g", part, 60, "first")
    # the same attempt again, behind a lost answer
    await world.placing().set_back(SUBJECT, "g", part, 60, "first")
    assert not (await world.record()).is_ready
    with pytest.raises(LaneNotOpen, match="being started or moved"):
        await world.placing().set_back(SUBJECT, "g", part, 61, "second")
    # what a replay does
    world.brokers.parts[1].done["g"] = [
        [0, 60, 11],
        [60, 61, 3],
        [61, 100, 11],
    ]
    await world.placing().make_ready(SUBJECT, "g")
    await world.round()
    assert await world.pieces() == [(0, 60, 3), (60, 61, 1), (61, 100, 3)]
    assert (1, 60, 61, "x") in await world.lanes()
    assert not any(lane[0] == 4 and lane[1] <= 60 < lane[2] for lane in await world.lanes())
    world.brokers.finish("g", 1)
    assert (await world.round()).steps == 2
    assert await world.pieces() == [(0, 100, 3)]


async def test_a_replay_in_a_partition_that_is_still_read_does_not_move_the_group(
    world: Grouped,
) -> None:
    await world.begun("x")
    part = (await world.state()).partition(1)
    assert part is not None
    await world.placing().set_back(SUBJECT, "g", part, 7, "first")
    await world.placing().make_ready(SUBJECT, "g")
    assert await world.pieces() == [(0, 100, 1)]


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "middle", "reset:", "reset:x", "5"])
def test_a_start_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Start.parse(text)


def test_sequences_say_nothing_about_an_ordered_subject() -> None:
    for request in (control.ResetGroupRequest(sequence=5), control.ResetGroupRequest()):
        with pytest.raises(InvalidArgument, match="the earliest, the latest, or a time"):
            Start.of_reset(request)
    with pytest.raises(InvalidArgument):
        Start.of_new("reset:latest")
