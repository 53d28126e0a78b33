"""Changes of a route: with a crash at any arrow, any lost answer, and any race there is one
outcome, and sealing before publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from meta_support import SUBJECT, KilledError, Killer, World, numbers
from qmq_coordination.broker_groups import group_key
from qmq_coordination.ordered_records import FENCES, change_key, fence_key
from qmq_ordering.changes import merge, move, split
from qmq_ordering.routes import FENCED, Change, Phase, Route
from support.stores import Fault, FaultyStore

from qmq.errors import (
    CoordinationUnknown,
    NotConnected,
    OrderMismatch,
    RouteConflict,
    UnknownPartition,
    UnknownSubject,
)
from qmq.model import Fencing

Make = Callable[[Route], Change]


def operation(name: str, change_id: str) -> Make:
    if name == "split":
        return lambda route: split(
            route, 1, [20, 30], change_id=change_id, groups=["a", "b", "c"], reason="test"
        )
    if name == "merge":
        return lambda route: merge(route, [1, 2], change_id=change_id, group="c")
    return lambda route: move(route, 1, "c", change_id=change_id)


OPERATIONS = ("split", "merge", "move")
STEPS = ("prepare", "seal", "sealed", "publish")
TARGETS = {"split": [3, 4, 5, 2], "merge": [3], "move": [3, 2]}


async def run(world: World, name: str, store: object = None, arrow: Killer | None = None) -> Change:
    """A metaserver that was asked for a change."""
    changes = world.changes(store, arrow or Killer(""))
    change = await changes.prepare(SUBJECT, operation(name, world.new_id()))
    return await changes.carry_on(SUBJECT, change.to_version)


async def take_over(world: World, name: str) -> None:
    """Another metaserver continues the change, or is asked for it."""
    state = await world.state()
    if state.pending is not None:
        await world.changes().carry_on(SUBJECT, state.pending.to_version)
    elif state.latest == 1:
        await run(world, name)


# --- killed at every arrow ------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_metaserver_killed_at_any_arrow_leaves_a_change_that_another_one_finishes(
    name: str, step: str, side: str
) -> None:
    for nth in range(1, 3 if name == "merge" and step == "seal" else 2):
        world = World()
        await world.create()
        arrow = Killer(f"{side} {step}", nth)
        with pytest.raises(KilledError):
            await run(world, name, arrow=arrow)
        await take_over(world, name)
        state = await world.check(latest=2)
        assert state.route is not None
        assert numbers(state.route.partitions) == TARGETS[name]
        assert sorted(world.brokers.calls) == [
            f"seal {number}" for number in state.changes[2].sources
        ]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_answer_of_the_store_that_is_lost_at_any_step_changes_nothing(
    name: str, number: int, fault: Fault, is_killed: bool
) -> None:
    world = World()
    await world.create()
    losing = FaultyStore(world.store, {number: fault})
    if is_killed:
        # The process dies before it could look what became of its transaction.
        steps = ("prepare", "sealed", "publish")

        class Dying(FaultyStore):
            async def txn(self, *arguments: object) -> object:  # type: ignore[override]
                try:
                    return await super().txn(*arguments)
                except CoordinationUnknown:
                    raise KilledError(steps[self.count - 1]) from None

        losing = Dying(world.store, {number: fault})
        with pytest.raises(KilledError):
            await run(world, name, losing)
        await take_over(world, name)
    else:
        await run(world, name, losing)
    late = await losing.deliver_delayed()
    assert not any(each.succeeded for each in late)
    state = await world.check(latest=2)
    assert len([key for key, _ in world.store.history if key == change_key(SUBJECT, 2)]) == 3
    assert state.changes[2].phase is Phase.PUBLISHED


async def test_a_prepared_change_whose_fate_cannot_be_read_back_is_not_called_undone() -> None:
    world = World()
    await world.create()

    async def leave() -> None:
        way.cut("txn")

    way = FaultyStore(world.store, {1: Fault.UNANSWERED}, after=leave)
    with pytest.raises(CoordinationUnknown, match="continues by itself"):
        await run(world, "split", way)
    await take_over(world, "split")
    await world.check(latest=2)


# --- hazards --------------------------------------------------------------------------------------


async def test_hazard_7_nothing_is_published_while_a_source_takes_messages() -> None:
    world = World()
    await world.create(fencing=Fencing.MAJORITY)
    changes = world.changes()
    change = await changes.prepare(SUBJECT, operation("merge", "m"))
    world.brokers.down.add("b")
    going = asyncio.create_task(changes.carry_on(SUBJECT, change.to_version))
    for _ in range(50):
        await asyncio.sleep(0)
    assert (await world.state()).latest == 1
    assert world.brokers.calls == []  # nor is the one sealed while the other one cannot be
    world.brokers.down.clear()
    await going
    await world.check(latest=2)


async def test_hazard_8_a_crash_between_seal_and_route_leaves_a_successor_to_publish() -> None:
    world = World()
    await world.create()
    with pytest.raises(KilledError):
        await run(world, "split", arrow=Killer("behind seal"))
    assert world.brokers.parts[1].sealed_by == "change-1"
    pending = (await world.state()).pending
    assert pending is not None
    assert (pending.id, pending.phase) == ("change-1", Phase.PREPARED)
    await world.changes().carry_on(SUBJECT, 2)
    assert (await world.check(latest=2)).changes[2].sealed == {1: 0}


# --- races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
async def test_metaservers_that_carry_the_same_change_on_publish_it_once(seed: int) -> None:
    world = World(Random(seed))
    await world.create()
    await world.changes().prepare(SUBJECT, operation(OPERATIONS[seed % 3], "x"))
    await asyncio.gather(*[world.changes().carry_on(SUBJECT, 2) for _ in range(4)])
    await world.check(latest=2)
    assert len([key for key, _ in world.store.history if key == change_key(SUBJECT, 2)]) == 3


@pytest.mark.parametrize("seed", range(10))
async def test_of_two_changes_at_once_one_is_prepared_and_the_other_refused(seed: int) -> None:
    world = World(Random(seed))
    await world.create()
    found = await asyncio.gather(
        *[run(world, name) for name in ("split", "move")], return_exceptions=True
    )
    (told,) = [each for each in found if isinstance(each, BaseException)]
    # both close partition 1: under way, or gone
    assert isinstance(told, RouteConflict | UnknownPartition)
    await world.check(latest=2)


async def test_a_change_from_another_version_or_over_another_one_is_refused() -> None:
    world = World()
    await world.create()
    changes = world.changes()
    with pytest.raises(RouteConflict, match="at version 1, not 7"):
        await changes.prepare(SUBJECT, operation("split", "x"), from_version=7)
    await changes.prepare(SUBJECT, operation("split", "x"), from_version=1)
    with pytest.raises(RouteConflict, match=r"another change .* is under way"):
        await changes.prepare(SUBJECT, operation("move", "y"))
    with pytest.raises(RouteConflict, match="no change leads"):
        await changes.carry_on(SUBJECT, 9)
    with pytest.raises(UnknownSubject):
        await changes.prepare("nothing", operation("move", "y"))
    await world.embedded.put("/qmq/subjects/plain", b'{"name": "plain"}')
    with pytest.raises(OrderMismatch):
        await changes.prepare("plain", operation("move", "y"))


# --- fencing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "behind", *Fault])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_unreachable_group_is_fenced_even_if_servers_die_at_the_fence(
    name: str, side: str | Fault
) -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    losing = FaultyStore(world.store)
    if not isinstance(side, Fault):
        with pytest.raises(KilledError):
            await run(world, name, arrow=Killer(f"{side} fence"))
        await take_over(world, name)
    else:
        losing.faults = {2: side}
        await run(world, name, losing)
        await losing.deliver_delayed()
    state = await world.check(latest=2)
    assert state.changes[2].sealed[1] == FENCED
    assert state.fenced == [1]
    fences = [item.key for item in (await world.embedded.list(FENCES)).items]
    assert fences == [fence_key("a", SUBJECT, 1)]


async def test_nothing_is_fenced_while_the_masters_lease_runs() -> None:
    world = World()
    await world.create()
    world.brokers.down.add("a")
    going = asyncio.create_task(run(world, "split"))
    for _ in range(200):
        await asyncio.sleep(0)
    assert world.now_ms > 1_005_000
    assert not (await world.embedded.list(FENCES)).items
    await world.embedded.delete(group_key("a", "master"))
    await going
    assert (await world.check(latest=2)).fenced == [1]


async def test_a_fence_that_races_a_new_master_fails_and_the_new_master_seals() -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    is_first = True

    async def arrow(name: str) -> None:
        nonlocal is_first
        if name == "before fence" and is_first:
            is_first = False
            await world.elect("a", 2)
            world.brokers.down.clear()

    changes = world.changes(arrow=arrow)
    await changes.prepare(SUBJECT, operation("split", "x"))
    await changes.carry_on(SUBJECT, 2)
    assert not is_first
    assert (await world.check(latest=2)).changes[2].sealed == {1: 0}
    assert not (await world.embedded.list(FENCES)).items


async def test_a_fence_that_races_the_same_master_setting_its_key_again_fails() -> None:
    world = World()
    await world.create()
    found = await world.embedded.get(group_key("a", "master"))
    assert found is not None
    await world.lose_master("a")
    count = 0

    async def arrow(name: str) -> None:
        nonlocal count
        if name == "before fence":
            count += 1
            if count == 1:
                await world.embedded.put(found.key, found.value)
            world.brokers.down.clear()

    changes = world.changes(arrow=arrow)
    await changes.prepare(SUBJECT, operation("move", "x"))
    await changes.carry_on(SUBJECT, 2)
    assert count == 1
    assert not (await world.embedded.list(FENCES)).items


async def test_a_fence_holds_against_a_master_that_won_and_died_meanwhile() -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    epochs = iter([2, 3])

    async def arrow(name: str) -> None:
        if name == "before fence" and (epoch := next(epochs, 0)):
            await world.elect("a", epoch)
            await world.embedded.delete(group_key("a", "master"))

    changes = world.changes(arrow=arrow)
    await changes.prepare(SUBJECT, operation("move", "x"))
    await changes.carry_on(SUBJECT, 2)
    # two fences failed since the epoch was another one, the third was put
    assert next(epochs, None) is None
    assert (await world.check(latest=2)).fenced == [1]


async def test_of_several_sources_the_one_that_is_out_of_reach_is_closed_first() -> None:
    world = World()
    await world.create()
    world.brokers.down.add("b")
    going = asyncio.create_task(run(world, "merge"))
    for _ in range(200):
        await asyncio.sleep(0)
    assert world.brokers.calls == []  # writers to partition 1 continue while b's lease runs
    await world.lose_master("b")
    await going
    state = await world.check(latest=2)
    assert state.changes[2].sealed == {1: 0, 2: FENCED}


async def test_the_seal_of_a_fenced_group_is_learnt_after_its_return() -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    world.brokers.append(1, 7)
    await run(world, "move")
    changes = world.changes()
    assert not await changes.learn_sealed(SUBJECT, 2)
    assert (await world.state()).fenced == [1]
    world.brokers.down.clear()
    assert await changes.learn_sealed(SUBJECT, 2)
    assert await changes.learn_sealed(SUBJECT, 2)
    state = await world.check(latest=2)
    assert (state.fenced, state.changes[2].sealed) == ([], {1: 7})


async def fences(world: World) -> list[str]:
    return [item.key for item in (await world.embedded.list(FENCES)).items]


async def test_a_fence_is_removed_when_its_seal_is_known_and_not_before() -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    await run(world, "move")
    changes = world.changes()
    await changes.sealing.lift("a", SUBJECT, 1)
    assert await fences(world) == [fence_key("a", SUBJECT, 1)]
    world.brokers.down.clear()
    assert await changes.learn_sealed(SUBJECT, 2)
    losing = FaultyStore(world.store, {1: Fault.UNANSWERED})
    with pytest.raises(CoordinationUnknown):
        await world.changes(losing).sealing.lift("a", SUBJECT, 1)
    await changes.sealing.lift("a", SUBJECT, 1)
    assert await fences(world) == []


async def test_a_fence_that_its_deleted_subject_left_is_removed() -> None:
    world = World()
    await world.create()
    await world.lose_master("a")
    await run(world, "move")
    await world.embedded.delete(f"/qmq/routes/{SUBJECT}/", is_prefix=True)
    await world.changes().sealing.lift("a", SUBJECT, 1)
    assert await fences(world) == []


async def test_a_fence_that_is_put_late_fails_once_its_change_went_on() -> None:
    """Its subject may have been deleted and created again: the fence would close a partition of the
    new one.
    """
    world = World()
    await world.create()
    await world.lose_master("a")
    late = FaultyStore(world.store, {2: Fault.DELAYED})
    await run(world, "move", late)
    await world.embedded.delete(fence_key("a", SUBJECT, 1))
    assert not any(each.succeeded for each in await late.deliver_delayed())
    assert await fences(world) == []


async def test_with_majority_fencing_a_silent_source_refuses_a_change_unwritten() -> None:
    world = World()
    await world.create(fencing=Fencing.MAJORITY)
    await world.lose_master("b")
    before = (await world.state()).items
    with pytest.raises(NotConnected):
        await run(world, "merge")
    assert (await world.state()).items == before
    await run(world, "split")


async def test_with_fencing_by_majority_a_change_waits_in_prepared_and_is_never_fenced() -> None:
    world = World()
    await world.create(fencing=Fencing.MAJORITY)
    change = await world.changes().prepare(SUBJECT, operation("move", "x"))
    await world.lose_master("a")
    going = asyncio.create_task(world.changes().carry_on(SUBJECT, change.to_version))
    for _ in range(500):
        await asyncio.sleep(0)
    assert world.now_ms > 1_020_000
    pending = (await world.state()).pending
    assert pending is not None
    assert pending.phase is Phase.PREPARED
    assert not (await world.embedded.list(FENCES)).items
    world.brokers.down.clear()
    await going
    assert (await world.check(latest=2)).changes[2].sealed == {1: 0}


async def test_carrying_on_survives_a_store_that_is_away_for_a_while() -> None:
    world = World()
    await world.create()
    await world.changes().prepare(SUBJECT, operation("split", "x"))
    way = FaultyStore(world.store)
    way.cut("get", times=6)
    await world.changes(way).carry_on(SUBJECT, 2)
    await world.check(latest=2)


# --- done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["", "before done", "behind done"])
async def test_a_change_is_done_when_every_group_is_there_and_not_before(at: str) -> None:
    world = World()
    await world.create()
    await run(world, "split")
    world.brokers.finish("g", 1)
    record = b'{"frontier": [[0, 100, %d]], "gate": "lanes", "start": "", "is_ready": true}'
    await world.embedded.put("/qmq/routes/s/g/h", record % 1)
    changes = world.changes()
    assert not await changes.finish(SUBJECT, 2)
    await world.embedded.put("/qmq/routes/s/g/h", record % 2)
    if at:
        with pytest.raises(KilledError):
            await world.changes(arrow=Killer(at)).finish(SUBJECT, 2)
    assert await changes.finish(SUBJECT, 2)
    assert await changes.finish(SUBJECT, 2)
    assert (await world.check(latest=2)).changes[2].phase is Phase.DONE
