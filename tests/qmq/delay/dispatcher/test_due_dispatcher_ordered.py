"""DueDispatcher of ordered subjects: the route is chosen when a message is due, and each key stays
in order through changes and crashes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fake_brokers import (
    KEYS,
    Fault,
    MemoryLedger,
    World,
    all_done,
    due,
    expected,
    keyed,
    lp,
    places,
    played,
    until,
)

from qmq.delay.batches import DueMessage
from qmq.errors import DiskFull


@played
async def test_the_rest_of_a_sealed_partition_goes_first_by_the_next_route() -> None:
    world = World(2)
    world.add(is_ordered=True)
    dispatcher = world.dispatcher(batch_messages=10)
    first = keyed(400)
    dispatcher.put(first)
    await until(lambda: len(world.queue("s", 1).log) > 3)
    world.seal("s", 1)
    await asyncio.sleep(1)
    newer = keyed(400, begin=400)
    dispatcher.put(newer)
    await asyncio.sleep(1)
    assert all(int(body) < 400 for body in world.stored() if lp(KEYS[int(body) % len(KEYS)]) < 4)
    world.publish("s", [1], [(0, 2, "g0"), (2, 4, "g1")])
    await until(lambda: all_done(world, 800))
    assert world.per_key() == expected(first + newer)
    voids = [plan.batch_sequence for what, plan in world.plan_log.log if what == "void"]
    assert len(voids) > 1
    assert voids == sorted(voids, reverse=True), (
        "a crash between them must leave no gap in what is open"
    )
    assert world.queue("s", 1).log
    assert world.queue("s", 3).log
    assert world.queue("s", 4).log
    await dispatcher.stop()


@played
async def test_hazard_17_a_delayed_message_gets_its_route_when_it_is_due() -> None:
    """A partition is closed, and its keys are elsewhere, by the time of delivery: the message goes
    where its key is then, and in order.
    """
    world = World(2)
    world.add(is_ordered=True)
    dispatcher = world.dispatcher()
    dispatcher.put(keyed(24))
    await until(lambda: all_done(world, 24))
    world.publish("s", [1], [(0, 4, "g1")])
    world.publish("s", [2, 3], [(0, 8, "g0")])
    dispatcher.put(keyed(24, begin=24))
    await until(lambda: all_done(world, 48))
    assert world.per_key() == expected(keyed(48))
    assert sorted(
        int(body) for each in world.queue("s", 4).log for body in each.view.bodies()
    ) == list(range(24, 48))
    assert world.queue("s", 3).log == []
    await dispatcher.stop()
    again = world.dispatcher()
    world.publish("s", [4], [(0, 4, "g0"), (4, 8, "g1")])
    again.put(keyed(24, begin=48))
    await until(lambda: all_done(world, 72))
    assert world.per_key() == expected(keyed(72))
    await again.stop()


@played
async def test_a_silent_fenced_partition_is_given_up_and_messages_keep_their_ids() -> None:
    world = World(2, [Fault.NONE, Fault.SILENT, Fault.SILENT])
    world.add(is_ordered=True, groups=["g0"])
    world.subjects["s"].groups.append(world.groups["g1"])
    dispatcher = world.dispatcher(batch_messages=10)
    messages = keyed(60, keys=KEYS)
    dispatcher.put(messages)
    await until(lambda: len(world.queue("s", 1).log) >= 3)
    world.away("g0")
    await asyncio.sleep(5)
    assert dispatcher.planned > 0
    world.publish("s", [1], [(0, 8, "g1")], fenced=True)
    world.push(subjects=["s"])
    world.groups["g1"].failure = DiskFull("full")
    await until(lambda: dispatcher.resent > 0)
    assert not any(
        dispatcher.withdraw(message.place) for message in messages if message.body in world.stored()
    ), "they may be delivered"
    world.groups["g1"].failure = None
    await until(lambda: all_done(world, 60))
    bodies = {
        view_id: body
        for view in world.views()
        for view_id, body in zip(view.message_ids() or [], view.bodies(), strict=True)
    }
    assert bodies == {message.message_id: message.body for message in messages}
    newer = {
        key: numbers[-len(expected(messages)[key]) :] for key, numbers in world.per_key().items()
    }
    assert all(numbers == sorted(numbers) for numbers in newer.values())
    await dispatcher.stop()


@played
async def test_a_message_too_large_for_its_ordered_subject_waits_alone() -> None:
    world = World(1)
    world.add(is_ordered=True).body_bytes_max = 10
    dispatcher = world.dispatcher(batch_messages=50)
    messages = keyed(300)
    messages[137] = due(137, key=KEYS[0], body=b"0" * 20)
    dispatcher.put(messages)
    await until(lambda: len(world.stored()) == 299)
    assert world.per_key() == expected(messages[:137] + messages[138:])
    assert dispatcher.troubles()[0][1] == 1
    world.subjects["s"].body_bytes_max = 30
    await until(lambda: all_done(world, 300), 60)
    await dispatcher.stop()


@played
async def test_a_partition_that_has_forgotten_the_producer_gets_a_new_one() -> None:
    world = World(1)
    world.add(is_ordered=True)
    dispatcher = world.dispatcher()
    dispatcher.put(keyed(12))
    await until(lambda: all_done(world, 12))
    world.queue("s", 1).bases.clear()
    dispatcher.put(keyed(12, begin=12))
    await until(lambda: all_done(world, 24))
    assert world.per_key() == expected(keyed(24))
    assert dispatcher.resent == 0
    await dispatcher.stop()


# --- after a crash --------------------------------------------------------------------------------


@played
async def test_a_plan_from_before_the_order_is_given_up_if_a_message_has_no_key() -> None:
    world = World(1)
    world.add()
    world.groups["g0"].is_silent = True
    first = world.dispatcher()
    messages = [due(0), *keyed(24, begin=1)]
    first.put(messages)
    await until(lambda: bool(world.plan_log.open()))
    await asyncio.sleep(0.1)
    await first.stop()
    world.groups["g0"].is_silent = False
    world.add(is_ordered=True)
    again = await after_crash(world, messages)
    await until(lambda: again.planned == 0 and len(world.stored()) == 24, 60)
    assert world.per_key() == expected(messages[1:])
    assert (again.waiting, again.set_aside) == (1, 1)
    await again.stop()


@played
async def test_plans_from_before_the_order_do_not_wait_for_their_broker_groups() -> None:
    """The subject was deleted since then, with all that those groups had of it."""
    world = World(2)
    world.add()
    for group in world.groups.values():
        group.is_silent = True
    first = world.dispatcher(batch_messages=5)
    messages = keyed(60, keys=KEYS[:4])
    first.put(messages)
    await until(lambda: len(world.plan_log.open()) == 12)
    await asyncio.sleep(0.1)
    await first.stop()
    gone, stays = dict.fromkeys(plan.broker_group for plan in world.plan_log.open())
    world.groups[stays].is_silent = False
    world.away(gone)
    world.add(is_ordered=True, groups=[stays])
    newer = keyed(40, begin=60, keys=KEYS[:4])
    again = await after_crash(world, [*messages, *newer], batch_messages=10)
    await until(lambda: again.planned == 0 and len(world.stored()) == 100, 60)
    assert world.per_key() == expected([*messages, *newer])
    assert (again.waiting, again.set_aside) == (0, 0)
    await again.stop()


async def after_crash(
    world: World, messages: list[DueMessage], *, kept: int | None = None, **options: int
) -> Any:
    """Another master takes over what of the log is left, and delivers on."""
    by_place = {message.place: message for message in messages}
    log = world.plan_log.log[
        : max(kept if kept is not None else len(world.plan_log.log), world.plan_log.committed)
    ]
    committed, world.plan_log = world.plan_log.committed, MemoryLedger(log)
    assert world.plan_log.committed >= committed
    dispatcher = world.dispatcher(**options)
    for plan in world.plan_log.open():
        dispatcher.resume(plan, [by_place[place] for place in places(plan)])
    states = world.plan_log.states
    dispatcher.put(
        [message for message in messages if states.get(message.place, "pending") == "pending"]
    )
    return dispatcher
