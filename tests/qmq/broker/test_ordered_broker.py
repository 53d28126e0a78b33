"""Ordered subjects at the broker, frame by frame over a real socket: writes, deliveries, and which
requests it trusts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lane_support import COUNT, SUBJECT, WHOLE, World, world
from qmq_coordination.broker_groups import MasterRecord, ReplicaRecord
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange, Route
from support import eventually

from qmq import limits
from qmq.broker.admin import lag_ms
from qmq.broker.broker import BrokerTurn
from qmq.broker.control import LaneAdmin
from qmq.errors import (
    InvalidArgument,
    LaneHeld,
    LaneLost,
    LaneNotOpen,
    MessagesExpired,
    OrderMismatch,
    OutOfSequence,
    Overloaded,
    RightLapsed,
    RouteChanged,
    RouteConflict,
    UnknownConsumer,
)
from qmq.log.lane_state import PARKED_BYTES_MAX
from qmq.meta.calls import Brokers, PartitionMasters
from qmq.meta.ordered.groups import Records
from qmq.meta.ordered.rounds import GroupRounds
from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.channel import MESSAGE_BYTES_MAX
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import LaneSettlement, LaneVerdict

KEYS = [b"key-%d" % n for n in range(40)]


class PatientBrokers(Brokers):
    """Masters on a machine that may be slow."""

    async def ask(
        self,
        group: str,
        place: MasterRecord | ReplicaRecord,
        method: str,
        request: Any,
        timeout_s: float = 0,
    ) -> Any:
        return await super().ask(group, place, method, request, 60)


def admin(found: World) -> LaneAdmin:
    return LaneAdmin(found.node.broker, "g1")


# --- writing --------------------------------------------------------------------------------------


async def test_a_producer_s_batches_are_taken_in_the_order_of_their_numbers_only(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        with pytest.raises(OutOfSequence):
            await it.produce(KEYS[:2], number=1)
        assert (await it.produce(KEYS[:2], number=0)).base_sequence == 0
        with pytest.raises(OutOfSequence):
            await it.produce(KEYS[:2], number=2)
        assert (await it.produce(KEYS[:2], number=1)).base_sequence == 2


async def test_hazard_7_a_sealed_partition_refuses_everything_behind_its_command_message(
    tmp_path: Path,
) -> None:
    """Hazard 7 (RocketMQ, availability first): never both parent and child writable."""
    async with world(tmp_path) as it:
        first = await it.produce(KEYS[:1])
        assert await it.produce(KEYS[:1]) == first
        for _ in range(2):
            assert await admin(it).seal(SUBJECT, 1, "c1", 2) == 1
        with pytest.raises(RouteConflict):
            await admin(it).seal(SUBJECT, 1, "c2", 2)
        assert await it.produce(KEYS[:1]) == first
        for number in (1, 2):
            with pytest.raises(RouteChanged) as refused:
                await it.produce(KEYS[:1], number=number)
            assert refused.value.outcome.value == 0
        with pytest.raises(RouteChanged):
            await it.produce(KEYS[:1], producer=8)


async def test_messages_without_key_or_of_other_logical_partitions_are_refused(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, (1, 0, 8), (2, 8, 16)) as it:
        lps = [logical_partition(key, COUNT) for key in KEYS]
        low, high = KEYS[lps.index(min(lps))], KEYS[lps.index(max(lps))]
        await it.produce([low], partition=1)
        with pytest.raises(InvalidArgument):
            await it.produce([high], producer=9, partition=1)
        with pytest.raises(RouteChanged):
            await it.produce([high], partition=3)


async def test_hazard_20_an_old_client_that_ignores_versions_is_refused_by_the_server(
    tmp_path: Path,
) -> None:
    """Hazard 20 (RocketMQ to-do): an unordered producer or consumer cannot touch an ordered
    subject.
    """
    async with world(tmp_path) as it:
        with pytest.raises(OrderMismatch):
            await it.produce(KEYS[:1], partition=0)
        for partition in (0, 1):
            old = wire.Attach(SUBJECT, partition, "g", "c", "i", -1, "earliest", 30_000, [], [])
            with pytest.raises(OrderMismatch):
                await it.connection.call(FrameKind.ATTACH, old.pack(), timeout_s=5)
        with pytest.raises(InvalidArgument, match="numbered from 1"):
            await admin(it).seal(SUBJECT, 0, "c1", 2)


async def test_a_master_without_its_lease_takes_no_ordered_messages(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.node.broker.turns.may_write = lambda: False
        with pytest.raises(RightLapsed):
            await it.produce(KEYS[:1])
        it.node.broker.turns.may_write = lambda: True
        await it.produce(KEYS[:1])


# --- reading --------------------------------------------------------------------------------------


async def test_a_whole_lane_gets_everything_and_the_end_behind_the_command_message(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        delivery, got = await it.pull(lane)
        assert [each.key for each in got] == KEYS
        assert (delivery.next_sequence, delivery.is_end) == (40, False)
        await admin(it).seal(SUBJECT, 1, "c1", 2)
        delivery, got = await it.pull(lane, 40, wait_ms=5000)
        assert (got, delivery.next_sequence, delivery.is_end) == ([], 41, True)


async def test_a_lane_s_pull_that_waits_needs_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as it:
        lane = await it.attach()
        lanes, scheduled = it.node.broker.lanes, list[object]()
        peer = lanes.sessions[lane.session].peer
        with monkeypatch.context() as patched:
            patched.setattr(BrokerTurn, "schedule", scheduled.append)
            lanes.pull(
                peer,
                99,
                wire.LanePull(lane.session, lane.token, lane.position, 10, 1000, 20_000),
                0,
            )
        assert not scheduled


async def test_lanes_of_a_partition_together_get_every_message_once_each_in_order(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        for number in range(5):
            await it.produce(KEYS, number=number)
        found: list[bytes] = []
        for first, end in ((0, 5), (5, 6), (6, 16)):
            lane = await it.attach(LpRange(first, end), consumer=f"c{first}")
            delivery, got = await it.pull(lane)
            assert delivery.next_sequence == 200
            assert [each.sequence for each in got] == sorted(each.sequence for each in got)
            assert all(first <= logical_partition(each.key, COUNT) < end for each in got)
            found += [each.body for each in got]
        assert sorted(found) == sorted(
            b"%s/%d/%d" % (key, number, at) for number in range(5) for at, key in enumerate(KEYS)
        )


async def test_a_lane_in_small_pulls_misses_and_repeats_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach(LpRange(0, 9))
        at, small = lane.position, []
        while at < 40:
            delivery, got = await it.pull(lane, at, messages_max=3)
            small += got
            at = delivery.next_sequence
        assert small == (await it.pull(lane))[1]


async def test_a_pull_cuts_a_batch_only_if_that_is_twice_as_long_as_the_pull(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        for number, count in enumerate((4, 6, 8)):
            await it.produce([b"k"] * count, number=number)
        lane = await it.attach()
        asked = (
            (1, 1, 1),
            (2, 1, 2),
            (3, 1, 4),
            (7, 1, 4),
            (8, 2, 10),
            (14, 2, 10),
            (15, 3, 18),
            (30, 3, 18),
        )
        for messages_max, batches, messages in asked:
            delivery, got = await it.pull(lane, 0, messages_max=messages_max)
            assert (delivery.batches, [each.sequence for each in got]) == (
                batches,
                list(range(messages)),
            )
            assert delivery.next_sequence == messages


async def test_finished_messages_are_not_handed_to_the_next_consumer(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        with pytest.raises(InvalidArgument):
            await it.settle(lane, (0, len(KEYS)))
        await it.settle(lane, (0, 9), (20, 29))
        await it.detach(lane)
        after = await it.attach(consumer="c2")
        assert after.position == 10
        _, got = await it.pull(after)
        assert [each.sequence for each in got] == [*range(10, 20), *range(30, 40)]


async def test_a_range_is_one_consumer_s_at_a_time(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        lane = await it.attach(LpRange(0, 8))
        with pytest.raises(LaneHeld):
            await it.attach(LpRange(7, 9), consumer="c2")
        await it.attach(LpRange(8, 16), consumer="c2")
        await it.detach(lane)
        await it.attach(LpRange(0, 8), consumer="c3")


async def test_hazard_12_a_lane_grant_is_logged_and_a_zombies_pulls_and_acks_are_void(
    tmp_path: Path,
) -> None:
    """Hazard 12 (QMQ branch, Kafka share groups): ownership is in the log, and every pull and ack
    is fenced by its token.
    """
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        zombie = await it.attach(lease_ms=1000)
        share = it.node.store.open_queue(SUBJECT, 1).lanes["g"]
        await eventually(lambda: not share.holders)
        heir_world = await it.another()
        heir = await heir_world.attach(consumer="c2")
        assert heir.token > zombie.token
        for attempt in (
            it.settle(zombie, (0, 39)),
            it.pull(zombie),
            it.settle(zombie, (0, 39), token=heir.token),
        ):
            with pytest.raises((LaneLost, UnknownConsumer)):
                await attempt
        assert share.done_before() == 0
        _, got = await heir_world.pull(heir)
        assert len(got) == 40
        heir_world.connection.close()
        await heir_world.connection.wait_closed()


async def test_a_consumer_that_reconnects_with_its_token_keeps_the_lane(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        other = await it.another()
        again = await other.attach(token=lane.token)
        assert (again.token, again.is_resumed) == (lane.token, 1)
        _, got = await other.pull(again, 17)
        assert [each.sequence for each in got] == list(range(17, 40))
        fresh = await other.attach(incarnation="next-life")
        assert fresh.token > lane.token
        other.connection.close()
        await other.connection.wait_closed()


async def test_hazard_1_what_the_group_has_not_come_to_is_not_open(tmp_path: Path) -> None:
    """Hazard 1 (Pulsar): a child is not readable before its parent is drained for this group."""
    async with world(tmp_path) as it:
        await it.put_route(Route(2, COUNT, 4, (it.part(2, 0, 8), it.part(3, 8, 16))))
        for number, lps in ((2, LpRange(0, 8)), (3, LpRange(8, 16))):
            for version in (1, 2):
                with pytest.raises(LaneNotOpen):
                    await it.attach(lps, partition=number, version=version)
        with pytest.raises(LaneNotOpen):
            await it.attach(group="unknown")
        await it.attach()
        await it.put_group(version=2)
        await it.attach(LpRange(0, 8), partition=2, version=2)


async def test_hazard_13_a_failed_message_keeps_its_attempt_for_the_next_consumer(
    tmp_path: Path,
) -> None:
    """Hazard 13 (PIP-379): redelivery keeps order: the message is where it was, and counted."""
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        await it.verdicts(lane, [LaneSettlement(5, 5, LaneVerdict.FAILED, 3)])
        await it.detach(lane)
        _, got = await it.pull(await it.attach(consumer="c2"))
        assert [each.sequence for each in got] == list(range(40))
        assert [each.attempt for each in got] == [1] * 5 + [4] + [1] * 34


async def test_a_parked_key_comes_back_in_order_when_it_is_replayed(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        keys = [b"a", b"b", b"a", b"c", b"a", b"b"]
        await it.produce(keys)
        lane = await it.attach()
        parked = [LaneSettlement(at, at, LaneVerdict.PARKED, 0) for at in (0, 2, 4)]
        await it.verdicts(lane, parked)
        await it.settle(lane, (0, 5))
        assert [
            (each.key, each.messages, each.first_sequence)
            for each in admin(it).parked(SUBJECT, "g", 0)
        ] == [(b"a", 3, 0)]
        again = await it.attach(token=lane.token)
        assert again.parked == [b"a".hex()]
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        with pytest.raises(RouteConflict):
            await admin(it).unpark(SUBJECT, "g", 1, b"a", replays=True, record_revision=held - 1)
        assert (
            await admin(it).unpark(SUBJECT, "g", 1, b"a", replays=True, record_revision=held) == 3
        )
        with pytest.raises((LaneLost, UnknownConsumer)):
            await it.pull(again)
        after = await it.attach()
        _, got = await it.pull(after)
        assert [(each.sequence, each.key) for each in got] == [(0, b"a"), (2, b"a"), (4, b"a")]
        assert after.parked == []


async def test_a_lane_with_too_many_parked_keys_stops_and_goes_on_when_keys_are_replayed(
    tmp_path: Path,
) -> None:
    long_keys = [b"%04d" % at + bytes(limits.KEY_BYTES_MAX - 4) for at in range(2_600)]
    async with world(tmp_path) as it:
        for number in range(0, len(long_keys), 100):
            await it.produce(long_keys[number : number + 100], number=number // 100)
        lane = await it.attach()
        size, first = limits.KEY_BYTES_MAX + 72, 0
        while first * size < PARKED_BYTES_MAX:
            _, got = await it.pull(lane, first)
            assert [each.sequence for each in got] == list(range(first, first + len(got))), (
                "not full: everything comes, in order"
            )
            await it.verdicts(
                lane,
                [
                    LaneSettlement(each.sequence, each.sequence, LaneVerdict.PARKED, 0)
                    for each in got
                ],
            )
            first += len(got)
        delivery, got = await it.pull(lane, first)
        assert (got, delivery.next_sequence) == ([], first), (
            "nothing more, and nothing counts as done"
        )
        (status,) = (
            await admin(it).describe(pb.DescribeLanesRequest(subject=SUBJECT, group="g"))
        ).partitions
        assert (status.is_full, status.parked_messages) == (True, first)
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        for key in long_keys[: first - PARKED_BYTES_MAX // size]:
            await admin(it).unpark(SUBJECT, "g", 1, key, replays=True, record_revision=held)
        after = await it.attach()
        replayed = first - PARKED_BYTES_MAX // size
        delivery, got = await it.pull(after)
        assert [each.sequence for each in got] == list(range(replayed))
        got = []
        while not got and delivery.next_sequence < len(long_keys):
            delivery, got = await it.pull(after, delivery.next_sequence)
        assert got[0].sequence == first, "and newer messages come again"


async def test_a_group_cannot_park_without_end(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        many = [
            (at % COUNT, b"%05d" % at + bytes(795))
            for at in range(2 * PARKED_BYTES_MAX // 864 + COUNT)
        ]
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        for lp in range(COUNT):
            keys = [each for each in many if each[0] == lp]
            await admin(it).inherit(
                SUBJECT, "g", 1, LpRange(lp, lp + 1), keys, record_revision=held
            )
        lane = await it.attach()
        with pytest.raises(Overloaded, match="replay or skip keys"):
            await it.verdicts(lane, [LaneSettlement(0, 0, LaneVerdict.PARKED, 0)])
        await it.settle(lane, (0, 0))


async def test_no_verdict_parks_more_of_a_logical_partition_than_travels_with_the_route(
    tmp_path: Path,
) -> None:
    """All parked keys of one logical partition are in one entry of the next partition's log: its
    readers have a bound.
    """
    keys = [
        b"%05d" % at + bytes(limits.KEY_BYTES_MAX - 5)
        for at in range(2 * PARKED_BYTES_MAX // limits.KEY_BYTES_MAX + 100)
    ]
    async with world(tmp_path) as it:
        for number, at in enumerate(range(0, len(keys), 1000)):
            await it.produce(
                keys[at : at + 1000], number=number, lps=[3] * len(keys[at : at + 1000])
            )
        lane = await it.attach()
        parks = [LaneSettlement(at, at, LaneVerdict.PARKED, 0) for at in range(len(keys))]
        with pytest.raises(Overloaded, match="replay or skip keys"):
            await it.verdicts(lane, parks)
        most = 2 * PARKED_BYTES_MAX // (limits.KEY_BYTES_MAX + 72)
        await it.verdicts(lane, parks[:most])
        await it.settle(lane, (most, len(keys) - 1))
        await admin(it).seal(SUBJECT, 1, "c1", 2)
        await it.settle(lane, (len(keys), len(keys)))
        brokers = PatientBrokers(it.node.view)
        records = Records(it.node.coordination)
        try:
            await it.put_route(Route(2, COUNT, 3, (it.part(2),)))
            await GroupRounds(records, PartitionMasters(brokers)).round(SUBJECT, "g")
        finally:
            await brokers.close()
        assert (await records.record(SUBJECT, "g"))[1].frontier.version == 2
        assert len(it.node.store.open_queue(SUBJECT, 2).lanes["g"].parked) == most
        assert [each.key for each in admin(it).parked(SUBJECT, "g", 0, keys[most - 1])] == [
            keys[most - 1]
        ] * 2


async def test_more_parked_keys_than_fit_into_a_request_or_an_answer_travel_with_the_route(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        await admin(it).seal(SUBJECT, 1, "c1", 2)
        await it.settle(lane, (0, len(KEYS)))
        many = {
            b"%05d" % at + bytes(limits.KEY_BYTES_MAX - 5): at % COUNT
            for at in range(MESSAGE_BYTES_MAX // limits.KEY_BYTES_MAX + COUNT)
        }
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        for lp in range(COUNT):
            keys = [(lp, key) for key, its_lp in many.items() if its_lp == lp]
            await admin(it).inherit(
                SUBJECT, "g", 1, LpRange(lp, lp + 1), keys, record_revision=held
            )
        name, brokers = it.node.config.broker.name, PatientBrokers(it.node.view)
        masters, records = PartitionMasters(brokers), Records(it.node.coordination)
        request = pb.DescribeLanesRequest(subject=SUBJECT, group="g", with_parked=True)
        try:
            (status,) = (await masters.describe_lanes(name, request)).partitions
            assert {each.key: each.logical_partition for each in status.parked} == many
            with pytest.raises(Overloaded, match="replay or skip keys"):
                await admin(it).describe(request)  # as a metaserver of release 0.2 does
            first = admin(it).parked(SUBJECT, "g", 0)
            assert 0 < len(first) < len(many), "as many as fit"
            await it.put_route(Route(2, COUNT, 3, (it.part(2),)))
            await GroupRounds(records, masters).round(SUBJECT, "g")
        finally:
            await brokers.close()
        _, record = await records.record(SUBJECT, "g")
        assert record.frontier.version == 2
        assert {
            key: each.lp
            for key, each in it.node.store.open_queue(SUBJECT, 2).lanes["g"].parked.items()
        } == many


async def test_an_idle_lane_hears_how_far_others_messages_have_gone(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        lps = [logical_partition(key, COUNT) for key in KEYS]
        absent = next(lp for lp in range(COUNT) if lp not in lps[:6])
        await it.produce(KEYS[:6])
        lane = await it.attach(LpRange(absent, absent + 1))
        delivery, got = await it.pull(lane, wait_ms=50)
        assert (got, delivery.next_sequence) == ([], 6)


async def test_progress_reports_a_partition_finished_after_its_command_message(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach(LpRange(0, 8))
        await admin(it).seal(SUBJECT, 1, "c1", 2)
        queue = it.node.store.open_queue(SUBJECT, 1)
        await it.settle(lane, (0, 39))
        asked = pb.DescribeLanesRequest(subject=SUBJECT, partitions=[1], group="g")
        (before,) = (await admin(it).describe(asked)).partitions
        assert not any(part.is_finished for part in before.progress)
        await it.settle(lane, (40, 40))
        (after,) = (await admin(it).describe(asked)).partitions
        assert [(part.lps.first, part.lps.end) for part in after.progress if part.is_finished] == [
            (0, 8)
        ]
        share = queue.lanes["g"]
        assert not queue.is_finished(share, LpRange(0, 9))
        assert not queue.is_finished(share, WHOLE)


async def test_a_command_message_that_is_left_has_no_age(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        command = await admin(it).seal(SUBJECT, 1, "c1", 2)
        queue = it.node.store.open_queue(SUBJECT, 1)
        later_ms = queue.last_append_ms + 60_000
        assert lag_ms(queue, command - 1, later_ms) >= 60_000
        assert lag_ms(queue, command, later_ms) == 0


async def test_hazard_6_retention_that_deletes_a_slow_groups_messages_is_logged(
    tmp_path: Path,
) -> None:
    """Hazard 6 (Pravega #7343): the group neither skips messages silently nor stops: the error says
    what is gone and what to do.
    """
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        lane = await it.attach()
        queue = it.node.store.open_queue(SUBJECT, 1)
        queue.start_sequence = 10
        with pytest.raises(MessagesExpired, match="0 to 9"):
            await it.pull(lane)
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        await admin(it).place(
            SUBJECT,
            "g",
            [pb.LanePlace(partition=1, earliest=True)],
            moves=True,
            record_revision=held,
        )
        after = await it.attach()
        assert after.position == 10
        assert len((await it.pull(after))[1]) == 30


async def test_a_group_put_at_the_end_of_a_partition_begins_there_and_only_if_it_is_new(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        await admin(it).place(SUBJECT, "g", [pb.LanePlace(partition=1, latest=True)], moves=False)
        await it.produce(KEYS, number=1)
        await admin(it).place(SUBJECT, "g", [pb.LanePlace(partition=1, latest=True)], moves=False)
        lane = await it.attach()
        assert lane.position == 40


async def test_a_move_of_a_group_that_comes_too_late_moves_nothing(tmp_path: Path) -> None:
    """The record that held the group was replaced: the late request must not move the group."""
    async with world(tmp_path) as it:
        await it.produce(KEYS)
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        await it.put_group()
        lane = await it.attach()
        with pytest.raises(RouteConflict):
            await admin(it).place(
                SUBJECT,
                "g",
                [pb.LanePlace(partition=1, latest=True)],
                moves=True,
                record_revision=held,
            )
        assert len((await it.pull(lane))[1]) == 40


async def test_a_deleted_group_loses_lanes_and_parked_keys_and_late_requests_fail(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce([b"a", b"b", b"a"])
        lane = await it.attach()
        await it.verdicts(lane, [LaneSettlement(0, 0, LaneVerdict.PARKED, 0)])
        held = await it.node.broker.routing.group_revision(SUBJECT, "g")
        with pytest.raises(RouteConflict):
            await admin(it).delete_group(SUBJECT, "g", record_revision=held - 1)
        assert await admin(it).delete_group(SUBJECT, "g", record_revision=held) == 1
        with pytest.raises((LaneLost, UnknownConsumer)):
            await it.pull(lane)
        assert not admin(it).parked(SUBJECT, "g", 0)
        with pytest.raises(RouteConflict):
            await admin(it).place(
                SUBJECT,
                "g",
                [pb.LanePlace(partition=1, latest=True)],
                moves=False,
                record_revision=held - 1,
            )
        after = await it.attach()
        assert after.position == 0
        assert len((await it.pull(after))[1]) == 3
