"""A group of an ordered subject is deleted completely despite a crash between any two steps, and no
request moves the group meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from meta_support import SUBJECT, KilledError, Killer, World
from qmq_coordination.ordered_records import (
    MemberRecord,
    assignment_key,
    group_record_key,
    member_key,
)
from qmq_coordination.subjects import PAUSES, settings_key
from qmq_ordering.lanes import Gate
from support.stores import Fault, FaultyStore

from qmq.errors import CoordinationUnknown, InvalidArgument, LaneNotOpen, NotConnected, UnknownGroup
from qmq.meta.ordered.groups import DELETE, Start

ARROWS = [
    "before delete",
    "behind delete",
    "before forget",
    "behind forget",
    "before delete record",
    "behind delete record",
]
KEPT = (
    assignment_key(SUBJECT, "g"),
    settings_key(SUBJECT, "g"),
    f"{PAUSES}group/{SUBJECT}/g",
    f"{PAUSES}consumer/{SUBJECT}/g/one",
)
OF_ANOTHER = (
    assignment_key(SUBJECT, "gg"),
    settings_key(SUBJECT, "gg"),
    f"{PAUSES}consumer/{SUBJECT}/gg/one",
)


@pytest.fixture
async def world() -> World:
    """Group g has done everything in two partitions, on broker groups a and b."""
    world = World()
    await world.create()
    for number in (1, 2):
        world.brokers.append(number)
    await world.placing().begin(SUBJECT, "g", Start.of_new("earliest"), Gate.LANES)
    for number in (1, 2):
        world.brokers.finish("g", number)
    for key in (*KEPT, *OF_ANOTHER):
        await world.embedded.put(key, b"{}")
    return world


async def is_gone(world: World) -> bool:
    found = [await world.embedded.get(key) for key in (group_record_key(SUBJECT, "g"), *KEPT)]
    return not any(found) and not any("g" in part.done for part in world.brokers.parts.values())


async def test_a_group_is_deleted_with_all_that_is_kept_of_it_and_nothing_else(
    world: World,
) -> None:
    assert await world.forgetting().delete(SUBJECT, "g") == 2
    assert await is_gone(world)
    assert all([await world.embedded.get(key) for key in OF_ANOTHER])
    with pytest.raises(UnknownGroup):
        await world.forgetting().delete(SUBJECT, "g")


async def test_a_group_with_members_is_not_deleted_and_they_are_named(world: World) -> None:
    await world.embedded.put(member_key(SUBJECT, "g", "one"), MemberRecord("one", "1").encode())
    with pytest.raises(InvalidArgument, match="stop them first: one"):
        await world.forgetting().delete(SUBJECT, "g")
    assert (await world.state()).groups["g"].is_ready


@pytest.mark.parametrize("arrow", ARROWS)
async def test_a_deletion_that_a_crash_cut_short_is_carried_on_by_another(
    world: World, arrow: str
) -> None:
    with pytest.raises(KilledError):
        await world.forgetting(arrow=Killer(arrow)).delete(SUBJECT, "g")
    if arrow == "before delete":
        assert (await world.state()).groups["g"].is_ready
        await world.forgetting().delete(SUBJECT, "g")
    await world.forgetting().carry_on(SUBJECT, "g")
    assert await is_gone(world)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("fault", list(Fault))
async def test_a_deletion_whose_answer_is_lost_ends_with_no_group(
    world: World, number: int, fault: Fault
) -> None:
    losing = FaultyStore(world.store, {number: fault})
    with (
        pytest.raises(CoordinationUnknown)
        if number == 2 and fault is not Fault.UNANSWERED
        else nullcontext()
    ):
        await world.forgetting(losing).delete(SUBJECT, "g")
    await world.forgetting().carry_on(SUBJECT, "g")
    assert not any(each.succeeded for each in await losing.deliver_delayed())
    assert await is_gone(world)


async def test_a_lost_broker_group_is_named_and_its_part_is_done_after_its_return(
    world: World,
) -> None:
    world.brokers.down.add("a")
    with pytest.raises(NotConnected, match="a: broker group a does not answer"):
        await world.forgetting().delete(SUBJECT, "g")
    assert world.brokers.forgotten == ["b"]
    assert (await world.state()).groups["g"].start == DELETE
    world.brokers.down.clear()
    await world.forgetting().carry_on(SUBJECT, "g")
    assert await is_gone(world)


async def test_nothing_moves_a_group_that_is_being_deleted(world: World) -> None:
    await world.placing().mark_for_deletion(SUBJECT, "g")
    assert not (await world.groups().round(SUBJECT, "g")).is_ready
    with pytest.raises(LaneNotOpen, match="is being deleted"):
        await world.placing().reset(SUBJECT, "g", Start.parse("reset:latest"), 1)
    with pytest.raises(LaneNotOpen, match="is being deleted"):
        await world.placing().make_ready(SUBJECT, "g")
    with pytest.raises(LaneNotOpen, match="is being deleted"):
        await world.placing().set_gate(SUBJECT, "g", Gate.STRICT)


async def test_a_late_deletion_leaves_a_group_alone_that_started_over(world: World) -> None:
    await world.forgetting().delete(SUBJECT, "g")
    await world.placing().begin(SUBJECT, "g", Start.of_new("earliest"), Gate.LANES)
    assert await world.forgetting().carry_on(SUBJECT, "g") == 0
    assert (await world.state()).groups["g"].is_ready
