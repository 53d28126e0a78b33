"""DueDispatcher against brokers that fail in every way: each message is stored once, planned before
it is sent, and per key in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from fake_brokers import World, all_done, due, expected, keyed, places, played, until

from qmq import model
from qmq.client.metadata.cache import Placement
from qmq.delay.batches import SchedulePlace
from qmq.errors import DiskFull
from qmq.wire.batch_columns import BatchFlag

# --- unordered ------------------------------------------------------------------------------------


@played
async def test_delayed_messages_keep_all_fields_except_those_of_the_delay_server() -> None:
    world = World(1)
    world.add()
    dispatcher = world.dispatcher()
    sent = [
        due(
            1,
            key=b"k",
            tags=("a", "b"),
            headers={"h": b"1"},
            create_time_ms=90,
            flags=int(BatchFlag.RECURRING | BatchFlag.ORDERED),
        ),
        due(2, create_time_ms=70),
    ]
    dispatcher.put(sent)
    assert (dispatcher.waiting, dispatcher.planned) == (2, 0)
    await until(lambda: all_done(world, 2))
    (view,) = world.views()
    assert view.bodies() == [b"1", b"2"]
    assert view.keys() == [b"k", b""]
    assert view.tags() == [("a", "b"), ()]
    assert view.headers() == [{"h": b"1"}, {}]
    assert view.create_times_ms() == [90, 70]
    assert view.message_ids() == [message.message_id for message in sent]
    assert (view.header.flags, view.due_times_ms()) == (0, None)
    assert (dispatcher.waiting, dispatcher.planned, dispatcher.troubles()) == (0, 0, [])
    await dispatcher.stop()


@played
async def test_directed_messages_go_in_batches_of_their_own_for_each_group() -> None:
    world = World(1)
    world.add()
    dispatcher = world.dispatcher()
    messages = [
        due(n, headers={model.GROUP: b"G%d" % (n % 2)}, flags=int(BatchFlag.DIRECTED))
        if n % 3
        else due(n)
        for n in range(30)
    ]
    dispatcher.put(messages)
    await until(lambda: all_done(world, 30))
    sorts = [
        (view.header.flags, {each.get(model.GROUP) for each in view.headers() or [{}]})
        for view in world.views()
    ]
    assert sorted(map(repr, sorts)) == sorted(map(repr, [(0, {None}), (8, {b"G0"}), (8, {b"G1"})]))
    await dispatcher.stop()


@played
async def test_a_broker_group_that_is_away_holds_up_neither_its_subject_nor_others() -> None:
    world = World(2)
    world.add("both")
    world.add("only", groups=["g0"])
    world.add("other", groups=["g1"])
    world.away("g0")
    dispatcher = world.dispatcher()
    dispatcher.put([due(n, ("both", "only", "other")[n % 3]) for n in range(300)])
    await until(lambda: len(world.stored("both")) == len(world.stored("other")) == 100)
    await until(lambda: (dispatcher.waiting, dispatcher.planned) == (100, 0))
    ((subject, count, why),) = dispatcher.troubles()
    assert (subject, count) == ("only", 100)
    assert "g0" in why
    world.back("g0")
    await until(lambda: all_done(world, 300))
    assert dispatcher.troubles() == []
    await dispatcher.stop()


@played
async def test_unanswered_batches_stay_with_their_group_and_the_rest_goes_elsewhere() -> None:
    world = World(2)
    world.add()
    world.groups["g0"].is_silent = True
    dispatcher = world.dispatcher(batch_messages=10)
    dispatcher.put([due(n) for n in range(400)])
    await until(
        lambda: (
            dispatcher.waiting == 0
            and all(plan.broker_group == "g0" for plan in world.plan_log.open())
        ),
        30,
    )
    stuck = world.plan_log.open()
    assert 0 < dispatcher.planned <= 80
    assert sum(len(places(plan)) for plan in stuck) == dispatcher.planned
    await asyncio.sleep(3_600)
    assert world.plan_log.open() == stuck
    assert dispatcher.troubles()[0][:2] == ("s", dispatcher.planned)
    world.groups["g0"].is_silent = False
    await until(lambda: all_done(world, 400))
    assert sorted(map(int, world.stored())) == list(range(400))
    await dispatcher.stop()


@played
async def test_messages_of_a_drained_subject_wait_unplanned_and_leave_when_it_is_resumed() -> None:
    world = World(1)
    world.add()
    dispatcher = world.dispatcher()
    dispatcher.put([due(0)])
    await until(lambda: all_done(world, 1))
    world.groups["g0"].is_drained = True
    dispatcher.put([due(n) for n in range(1, 50)])
    await until(lambda: dispatcher.planned == 0 and dispatcher.troubles() != [], 60)
    assert (dispatcher.waiting, dispatcher.troubles()[0][:2]) == (49, ("s", 49))
    assert "drained" in dispatcher.troubles()[0][2]
    world.groups["g0"].is_drained = False
    await until(lambda: all_done(world, 50))
    await dispatcher.stop()


@played
async def test_while_the_only_group_refuses_the_log_does_not_grow() -> None:
    world = World(1)
    world.add()
    world.groups["g0"].failure = DiskFull("full")
    dispatcher = world.dispatcher(batch_messages=10)
    dispatcher.put([due(n) for n in range(1_000)])
    await asyncio.sleep(3_600)
    assert len(world.plan_log.log) <= 8
    assert len(world.groups["g0"].arrived) < 8_000
    assert dispatcher.troubles()[0][:2] == ("s", 1_000)
    world.groups["g0"].failure = None
    await until(lambda: all_done(world, 1_000))
    await dispatcher.stop()


# --- what only an operator can repair -------------------------------------------------------------


@played
async def test_messages_of_a_deleted_subject_wait_for_it_while_others_continue() -> None:
    world = World(1)
    world.add("there")
    dispatcher = world.dispatcher()
    dispatcher.put([due(n, ("gone", "there")[n % 2]) for n in range(20)])
    await until(lambda: len(world.stored("there")) == 10)
    await asyncio.sleep(3_600)
    assert 120 <= world.located.count("gone") < 250, "with rising pauses up to 30 s"
    ((subject, count, why),) = dispatcher.troubles()
    assert (subject, count) == ("gone", 10)
    assert "no subject" in why
    world.add("gone")
    await until(lambda: all_done(world, 20), 60)
    await dispatcher.stop()


@played
async def test_only_messages_that_are_too_large_wait_when_the_limit_is_lowered() -> None:
    world = World(1)
    world.add().body_bytes_max = 100
    dispatcher = world.dispatcher()
    large = {70, 71, 300}
    dispatcher.put([due(n, body=b"%d" % n if n not in large else b"x" * 101) for n in range(500)])
    await until(lambda: len(world.stored()) == 497)
    await until(lambda: dispatcher.planned == 0)
    ((_, count, why),) = dispatcher.troubles()
    assert (dispatcher.waiting, count) == (3, 3)
    assert "too large" in why
    assert dispatcher.withdraw(SchedulePlace(7, 71))
    world.subjects["s"].body_bytes_max = 1_000
    await until(lambda: len(world.stored()) == 499, 60)
    assert (dispatcher.waiting, dispatcher.troubles()) == (0, [])
    await dispatcher.stop()


@played
async def test_a_subject_that_became_ordered_is_sent_to_by_its_route() -> None:
    world = World(2)
    world.add()
    dispatcher = world.dispatcher()
    dispatcher.put([due(0, key=b"k")])
    await until(lambda: all_done(world, 1))
    world.add(is_ordered=True)
    later = keyed(60, begin=1)
    dispatcher.put(later)
    dispatcher.put([due(100)])
    await until(lambda: sum(map(len, world.per_key().values())) == 61, 60)
    await until(lambda: dispatcher.planned == 0)
    assert {
        key: [n for n in numbers if n] for key, numbers in world.per_key().items() if key != b"k"
    } == expected(later)
    ((_, count, why),) = dispatcher.troubles()
    assert count == 1
    assert "no key" in why
    await dispatcher.stop()


# --- cancel, and the end --------------------------------------------------------------------------


@played
async def test_a_message_can_be_withdrawn_until_planned_and_after_a_void_plan() -> None:
    world = World(2)
    world.add()
    for name in world.groups:
        world.away(name)
    dispatcher = world.dispatcher()
    dispatcher.put([due(n) for n in range(10)])
    assert dispatcher.withdraw(SchedulePlace(7, 3))
    assert not dispatcher.withdraw(SchedulePlace(7, 3))
    await asyncio.sleep(5)
    assert dispatcher.withdraw(SchedulePlace(7, 4))
    assert dispatcher.waiting == 8
    world.groups["g0"].failure = DiskFull("full")
    world.back("g0")
    await until(lambda: dispatcher.planned > 0)
    assert not dispatcher.withdraw(SchedulePlace(7, 0))
    world.groups["g0"].is_drained = True
    world.push(groups=["g0"])
    await until(lambda: dispatcher.planned == 0)
    assert dispatcher.withdraw(SchedulePlace(7, 0))
    world.back("g1")
    await until(lambda: all_done(world, 8 - 1) or len(world.stored()) == 7)
    await until(lambda: dispatcher.planned == 0)
    assert sorted(map(int, world.stored())) == [1, 2, 5, 6, 7, 8, 9]
    await dispatcher.stop()


@pytest.mark.parametrize("is_ordered", [False, True])
@played
async def test_after_stop_nothing_is_sent_and_the_ledger_is_not_called(is_ordered: bool) -> None:
    world = World(2)
    world.add(is_ordered=is_ordered)
    dispatcher = world.dispatcher(batch_messages=5)
    dispatcher.put(keyed(200))
    await until(lambda: len(world.stored()) > 10)
    await dispatcher.stop()
    world.plan_log.is_closed = True
    await asyncio.sleep(2)  # what was on its way arrives
    arrived = sum(len(group.arrived) for group in world.groups.values())
    dispatcher.put(keyed(10, begin=500))
    await asyncio.sleep(600)
    assert sum(len(group.arrived) for group in world.groups.values()) == arrived


@played
async def test_a_ledger_that_refuses_a_plan_ends_all_sending() -> None:
    world = World(1)
    world.add()
    dispatcher = world.dispatcher(batch_messages=5)
    world.plan_log.is_deposed = True
    dispatcher.put([due(n) for n in range(100)])
    await until(lambda: bool(world.plan_log.log))
    await asyncio.sleep(600)
    assert world.groups["g0"].arrived == []
    await dispatcher.stop()


@played
async def test_dispatchers_that_have_nothing_to_do_do_not_gather_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qmq.delay.dispatcher.SUBJECTS_MAX", 10)
    world = World(1)
    dispatcher = world.dispatcher()
    for number in range(60):
        world.add(f"s{number}")
        dispatcher.put([due(number, f"s{number}")])
        await until(lambda: dispatcher.planned + dispatcher.waiting == 0)
    assert dispatcher.subjects <= 10
    await dispatcher.stop()


class Surprising(World):
    """Metaservers whose first answer is an unexpected error."""

    surprises = 1

    def locate(self, subject: str) -> Awaitable[Placement]:
        """See World."""
        if self.surprises:
            self.surprises -= 1
            raise ValueError("no answer at all")
        return super().locate(subject)


@played
async def test_a_subject_is_located_again_whatever_went_wrong_before() -> None:
    world = Surprising(1)
    world.add()
    dispatcher = world.dispatcher()
    dispatcher.put([due(1)])
    await until(lambda: all_done(world, 1))
    assert world.surprises == 0
    await dispatcher.stop()
