"""Ordered subjects through a metaserver's gRPC, with brokers that have only a control port: what
clients and operators see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from meta_support import Brokers as Lanes
from meta_support import Caller, FakeBroker, metaserver
from qmq_coordination.broker_groups import group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.ordered_records import LEADER, group_record_key
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import move
from qmq_ordering.lanes import GroupRecord
from support import eventually

from qmq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LaneNotOpen,
    NotConnected,
    OrderMismatch,
    Outcome,
    Overloaded,
    QmqError,
    RouteConflict,
    StaleDelivery,
    Stopping,
    SubjectExists,
    UnknownGroup,
    UnknownPartition,
)
from qmq.meta.calls import MetaTiming
from qmq.meta.ordered.changes import RouteChanges
from qmq.process.event_loop import SystemClock
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import answering

OFTEN = MetaTiming(sweep_s=0.1, reshard_s=0.05)
NEVER = MetaTiming(sweep_s=3_600, reshard_s=3_600)


class OrderedBroker(FakeBroker):
    """A master with partitions of ordered subjects; all brokers of a test share the partitions'
    content.
    """

    def __init__(self, group: str, lanes: Lanes) -> None:
        super().__init__(group, f"{group}-a")
        self.lanes = lanes
        self.loads: dict[int, list[float]] = {}
        self.rates: dict[int, float] = {}
        self.parked: list[control.ParkedKey] = []
        self.failure: QmqError | None = None

    @answering
    async def Seal(self, request: Any) -> Any:
        self._note("Seal")
        sequence = await self.lanes.seal(
            self.group, request.subject, request.partition, request.change_id, request.to_version
        )
        return control.SealResponse(sequence=sequence)

    @answering
    async def DescribeLanes(self, request: Any) -> Any:
        self._note("DescribeLanes")
        if not request.partitions:
            request.partitions.extend(self.lanes.parts)
        answer = await self.lanes.describe_lanes(self.group, request)
        for each in answer.partitions:
            each.messages_per_s = self.rates.get(each.partition, 0)
            if request.with_load:
                each.lp_load.extend(self.loads.get(each.partition, []))
        return answer

    @answering
    async def PlaceLanes(self, request: Any) -> Any:
        self._note("PlaceLanes")
        await self.lanes.place_lanes(self.group, request)
        return control.PlaceLanesResponse()

    @answering
    async def DeleteGroup(self, request: Any) -> Any:
        return control.DeleteGroupResponse(
            queues=await self.lanes.forget_group(self.group, request)
        )

    @answering
    async def DescribeParked(self, request: Any) -> Any:
        return control.DescribeParkedResponse(keys=self.parked)

    @answering
    async def Unpark(self, request: Any) -> Any:
        self._note("Unpark")
        if self.failure is not None:
            raise self.failure
        return control.UnparkResponse(messages=3)


class Here:
    """One metaserver and its brokers."""

    def __init__(
        self,
        store: CoordinationStore,
        call: Caller,
        view: ClusterView,
        brokers: dict[str, OrderedBroker],
        lanes: Lanes,
    ) -> None:
        self.store, self.call, self.view, self.brokers, self.lanes = (
            store,
            call,
            view,
            brokers,
            lanes,
        )

    async def create(self, *groups: str, **settings: Any) -> Any:
        asked = {
            "name": "s",
            "order": "strict",
            "logical_partitions": 100,
            "broker_groups": groups,
            **settings,
        }
        return await self.call(
            "CreateSubject", pb.CreateSubjectRequest(settings=pb.SubjectSettings(**asked))
        )

    async def locate(self) -> Any:
        return await self.call("Locate", pb.LocateRequest(subject="s"))

    async def route(self) -> list[tuple[int, int, int, str]]:
        found = (await self.locate()).route.partitions
        return [(each.number, each.lps.first, each.lps.end, each.broker_group) for each in found]

    async def until_route(self, parts: list[tuple[int, int, int, str]]) -> None:
        async with asyncio.timeout(20):
            while await self.route() != parts:
                await asyncio.sleep(0.02)

    async def split(
        self, partition: int, *at: int, groups: tuple[str, ...] = (), **more: Any
    ) -> Any:
        split = pb.SplitOperation(
            partition=partition, at=at, broker_groups=groups, parts=more.pop("parts", 0)
        )
        return await self.call(
            "ChangeRoute", pb.ChangeRouteRequest(subject="s", split=split, **more)
        )

    async def move(self, partition: int, group: str, **more: Any) -> Any:
        request = pb.ChangeRouteRequest(
            subject="s", move=pb.MoveOperation(partition=partition, broker_group=group), **more
        )
        return await self.call("ChangeRoute", request)

    async def sync(self, consumer: str, *, call: Caller | None = None, **more: Any) -> Any:
        asked = {"incarnation": f"{consumer}-1", "lease_ms": 30_000, "wait_ms": 20_000, **more}
        return await (call or self.call)(
            "SyncMember", pb.SyncMemberRequest(subject="s", group="g", consumer=consumer, **asked)
        )

    async def describe(self, version: int = 0) -> Any:
        return await self.call(
            "DescribeRoute", pb.DescribeRouteRequest(subject="s", version=version)
        )


def lanes_of(answer: Any) -> list[tuple[int, int, int, int]]:
    return [(each.partition, each.lps.first, each.lps.end, each.version) for each in answer.lanes]


@asynccontextmanager
async def ordered(store: CoordinationStore, *groups: str, **options: Any) -> AsyncIterator[Here]:
    lanes = Lanes()
    async with AsyncExitStack() as stack:
        brokers = {}
        for name in groups or ("a", "b"):
            broker = brokers[name] = OrderedBroker(name, lanes)
            await broker.start()
            stack.push_async_callback(broker.server.stop, None)
            registration = await broker.register(store)
            stack.push_async_callback(registration.stop)
        call, view = await stack.enter_async_context(metaserver(store, **options))
        yield Here(store, call, view, brokers, lanes)


# --- creating and locating ------------------------------------------------------------------------


async def test_an_ordered_subject_is_there_with_its_first_route_or_not_at_all(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        made = await here.create(partitions=4)
        assert (made.settings.order, made.settings.logical_partitions, made.settings.fencing) == (
            "strict",
            100,
            "lease",
        )
        assert await here.route() == [
            (1, 0, 25, "a"),
            (2, 25, 50, "b"),
            (3, 50, 75, "a"),
            (4, 75, 100, "b"),
        ]
        found = await here.locate()
        assert [
            (each.partition, each.broker_group, each.data_address) for each in found.routes
        ] == [(0, "a", "data-a-a:1"), (0, "b", "data-b-a:1")]
        assert (found.route.version, list(found.route.fenced)) == (1, [])
        await here.create(partitions=4)
        await here.create()
        with pytest.raises(SubjectExists, match="has 4 partitions, not 3"):
            await here.create(partitions=3)
        others: list[dict[str, Any]] = [
            {"logical_partitions": 50},
            {"order": "best-effort"},
            {"fencing": "majority"},
        ]
        for other in [*others, {"order": "", "logical_partitions": 0}]:
            with pytest.raises(SubjectExists):
                await here.create(**other)
        with pytest.raises(InvalidArgument, match="qmq route move s"):
            await here.call(
                "PlaceSubject", pb.PlaceSubjectRequest(subject="s", broker_groups=["a"])
            )
        with pytest.raises(InvalidArgument, match="not ordered, so it has no partitions"):
            await here.create(name="t", order="", logical_partitions=0, partitions=3)
        with pytest.raises(InvalidArgument, match="1 to 100"):
            await here.create(name="t", partitions=101)


async def test_an_unordered_subject_has_no_route(store: CoordinationStore) -> None:
    async with ordered(store) as here:
        await here.create(order="", logical_partitions=0)
        found = await here.locate()
        assert not found.HasField("route")
        with pytest.raises(OrderMismatch):
            await here.describe()
        with pytest.raises(OrderMismatch):
            await here.sync("x")


async def test_another_metaserver_locates_at_once_what_was_created_a_moment_ago(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here, metaserver(store) as (other, _):
        await here.create("a")
        found = await other("Locate", pb.LocateRequest(subject="s"))
        assert [each.number for each in found.route.partitions] == [1]


# --- changing routes ------------------------------------------------------------------------------


async def test_routes_are_split_merged_and_moved_and_located_at_once(
    store: CoordinationStore,
) -> None:
    async with ordered(store, "a", "b", "c", timing=NEVER) as here:
        await here.create("a")
        done = await here.split(1, 20, 60, groups=("a", "b", "c"), reason="for a test")
        assert (
            done.change.kind,
            done.change.phase,
            done.change.to_version,
            done.route.version,
        ) == ("split", "published", 2, 2)
        assert await here.route() == [(2, 0, 20, "a"), (3, 20, 60, "b"), (4, 60, 100, "c")]
        assert {each.broker_group for each in (await here.locate()).routes} == {"a", "b", "c"}
        await here.move(3, "c")
        merge = pb.MergeOperation(partitions=[5, 4])
        await here.call("ChangeRoute", pb.ChangeRouteRequest(subject="s", merge=merge))
        assert await here.route() == [(2, 0, 20, "a"), (6, 20, 100, "c")]
        # older versions are still read there
        assert {each.broker_group for each in (await here.locate()).routes} == {
            "a",
            "b",
            "c",
        }
        history = (await here.call("RouteHistory", pb.RouteHistoryRequest(subject="s"))).changes
        assert [
            (each.kind, each.to_version, list(each.sources), each.reason) for each in history
        ] == [("split", 2, [1], "for a test"), ("move", 3, [3], ""), ("merge", 4, [5, 4], "")]
        assert set(history[0].times_ms) == {"prepared", "sealed", "published"}
        assert dict(history[0].sealed) == {1: 0}


async def test_watchers_are_told_of_a_change(store: CoordinationStore) -> None:
    async with ordered(store) as here:
        await here.create("a")
        watch = here.call.stub.Watch(pb.WatchRequest())
        answers = aiter(watch)
        await anext(answers)
        await here.move(1, "b")
        async with asyncio.timeout(10):
            while list((await anext(answers)).subjects) != ["s"] or (await here.route()) != [
                (2, 0, 100, "b")
            ]:
                pass
        watch.cancel()


async def test_a_plan_changes_nothing(store: CoordinationStore) -> None:
    async with ordered(store) as here:
        await here.create("a")
        planned = await here.split(1, 30, dry_run=True)
        assert [(each.number, each.lps.end) for each in planned.route.partitions] == [
            (2, 30),
            (3, 100),
        ]
        with pytest.raises(RouteConflict):
            await here.split(1, 30, dry_run=True, from_version=4)
        assert (await here.route(), here.brokers["a"].asked) == ([(1, 0, 100, "a")], [])


async def test_without_cuts_a_partition_is_cut_by_load_and_spread_over_the_groups(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a", "b", partitions=1)
        here.lanes.part(1)
        here.brokers["a"].loads[1] = [1.0] * 10 + [0.0] * 90
        await here.split(1)
        assert await here.route() == [(2, 0, 5, "a"), (3, 5, 100, "b")]
        await here.split(3, parts=3)
        assert [each[3] for each in await here.route()] == ["a", "b", "b", "a"]


async def test_what_cannot_be_done_to_a_route_is_refused_with_a_reason(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        await here.call("SetGroupMode", pb.SetGroupModeRequest(broker_group="b", mode="read-only"))
        for asked, kind, says in (
            (here.move(1, "b"), InvalidArgument, "is drained"),
            (here.move(1, "x"), InvalidArgument, "no broker group x"),
            (here.move(7, "a"), UnknownPartition, "partition 7 was never there"),
            (here.split(9), UnknownPartition, "no partition 9"),
            (here.split(1, 100), InvalidArgument, "lie strictly inside"),
            (here.move(1, "a", from_version=3), RouteConflict, "at version 1, not 3"),
            (
                here.call("ChangeRoute", pb.ChangeRouteRequest(subject="s")),
                InvalidArgument,
                "split, merge or move",
            ),
        ):
            with pytest.raises(kind, match=says):
                await asked
        assert await here.route() == [(1, 0, 100, "a")]


async def test_a_partition_out_of_reach_is_fenced_until_its_group_says_where_it_sealed(
    store: CoordinationStore,
) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a")
        here.lanes.down.add("a")
        await store.delete(group_key("a", "master"))
        await here.move(1, "b")
        found = await here.locate()
        assert (
            list(found.route.fenced),
            [each.broker_group for each in found.route.partitions],
        ) == ([1], ["b"])
        history = await here.call("RouteHistory", pb.RouteHistoryRequest(subject="s"))
        assert history.changes[0].sealed[1] == -1
        here.lanes.down.clear()
        await here.brokers["a"].register(store, epoch=2)
        async with asyncio.timeout(20):
            while (await here.locate()).route.fenced:
                await asyncio.sleep(0.02)


async def test_a_repeated_request_gets_the_change_that_it_made(store: CoordinationStore) -> None:
    async with ordered(store) as here:
        await here.create("a")
        found = await asyncio.gather(
            *(here.split(1, 50, from_version=1, change_id="one") for _ in range(8))
        )
        assert {each.change.to_version for each in found} == {2}
        first = await here.split(1, 50, from_version=1, change_id="one")
        assert await here.split(1, 50, from_version=1, change_id="one") == first
        for other in ({"change_id": "two"}, {}):
            with pytest.raises(RouteConflict, match="at version 2, not 1: read the route again"):
                await here.split(1, 50, from_version=1, **other)
        history = (await here.call("RouteHistory", pb.RouteHistoryRequest(subject="s"))).changes
        assert history == [first.change]
        later = await here.move(2, "b", from_version=2, change_id="two")
        assert (await here.split(1, 50, from_version=1, change_id="one")).route == first.route
        assert (await here.describe()).latest_version == later.change.to_version == 3


async def test_with_fencing_by_majority_a_request_ends_and_its_change_continues(
    store: CoordinationStore,
) -> None:
    async with ordered(store, change_wait_s=0.3) as here:
        await here.create("a", fencing="majority")
        probed = asyncio.Event()

        async def fall_silent(_: str) -> None:
            if not probed.is_set():
                probed.set()
                here.lanes.down.add("a")

        here.lanes.before_seal = fall_silent
        with pytest.raises(
            DeadlineExceeded, match="is prepared, and continues by itself"
        ) as failure:
            await here.move(1, "b")
        assert failure.value.outcome is Outcome.STORED
        assert (await here.describe()).change.phase == "prepared"
        with pytest.raises(RouteConflict, match="under way"):
            await here.move(1, "b", from_version=1)
        here.lanes.down.clear()
        await here.until_route([(2, 0, 100, "b")])


async def test_a_change_whose_metaserver_died_is_carried_on_by_the_leader(
    store: CoordinationStore,
) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a")
        dead = RouteChanges(
            store, here.lanes, sleep=asyncio.sleep, now_ms=lambda: 1, new_id=lambda: "x"
        )
        await dead.prepare("s", lambda route: move(route, 1, "b", change_id="of the dead"))
        await here.until_route([(2, 0, 100, "b")])
        assert (await store.get(LEADER)) is not None


# --- consumers ------------------------------------------------------------------------------------


async def test_consumers_are_dealt_lanes_and_hear_at_once_when_they_change(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.part(1)
        first = await here.sync("x")
        assert lanes_of(first) == [(1, 0, 100, 1)]
        assert await here.sync("x", generation=first.generation, wait_ms=50) == first, "no news"
        waiting = asyncio.create_task(here.sync("x", generation=first.generation))
        known = await here.sync("y")
        # what was dealt before it came
        assert (known.generation, lanes_of(known)) == (
            first.generation,
            [],
        )
        second = await here.sync("y", generation=known.generation)
        assert lanes_of(await waiting) == [(1, 0, 50, 1)]
        assert lanes_of(second) == [(1, 50, 100, 1)]
        assert (await waiting).generation == second.generation
        waiting = asyncio.create_task(here.sync("x", generation=second.generation))
        await here.sync("y", leaves=True)
        assert lanes_of(await waiting) == [(1, 0, 100, 1)]


async def test_a_group_has_so_many_consumers_and_those_that_it_has_continue(
    store: CoordinationStore,
) -> None:
    async with ordered(store, consumers_max=2) as here:
        await here.create("a")
        here.lanes.part(1)
        for consumer in ("x", "y"):
            await here.sync(consumer, wait_ms=0)
        await eventually(lambda: set(here.view.members("s", "g")) == {"x", "y"})
        with pytest.raises(Overloaded, match="2 consumers, the limit"):
            await here.sync("ghost", wait_ms=0)
        await here.sync("y", wait_ms=0)
        await here.sync("x", leaves=True)
        await eventually(lambda: set(here.view.members("s", "g")) == {"y"})
        await here.sync("ghost", wait_ms=0)


async def test_a_group_follows_a_change_as_soon_as_its_consumers_have_finished(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.part(1)
        first = await here.sync("x")
        await here.split(1, 50, groups=("a", "b"))
        here.lanes.part(2), here.lanes.part(3)
        here.lanes.finish("g", 1)
        waiting = asyncio.create_task(here.sync("x", generation=first.generation))
        finished = [
            pb.AssignedLane(
                partition=1, lps=control.LpRange(first=0, end=100), broker_group="a", version=1
            )
        ]
        told = await here.sync("x", generation=first.generation, finished=finished)
        assert lanes_of(told) == lanes_of(await waiting) == [(2, 0, 50, 2), (3, 50, 100, 2)]
        async with asyncio.timeout(10):
            while (await here.call("RouteHistory", pb.RouteHistoryRequest(subject="s"))).changes[
                0
            ].phase != "done":
                await asyncio.sleep(0.01)


async def test_a_consumer_whose_metaserver_died_continues_at_another_one_with_its_lanes(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.part(1)
        async with metaserver(store) as (doomed, _):
            first = await here.sync("x", call=doomed)
        again = await here.sync("x", generation=first.generation, wait_ms=100)
        assert again == first
        assert list(here.view.members("s", "g")) == ["x"]


async def test_consumers_at_different_metaservers_are_one_group(store: CoordinationStore) -> None:
    async with ordered(store) as here, metaserver(store) as (other, _):
        await here.create("a")
        here.lanes.part(1)
        known = {"x": await here.sync("x"), "y": await here.sync("y", call=other)}
        places = {"x": here.call, "y": other}

        async def until(lanes: dict[str, list[tuple[int, int, int, int]]]) -> None:
            async with asyncio.timeout(20):
                while {name: lanes_of(each) for name, each in known.items()} != lanes:
                    name = next(each for each in known if lanes_of(known[each]) != lanes[each])
                    known[name] = await here.sync(
                        name, call=places[name], generation=known[name].generation
                    )

        await until({"x": [(1, 0, 50, 1)], "y": [(1, 50, 100, 1)]})
        await here.split(1, 50)
        here.lanes.finish("g", 1, 0, 50)
        await here.sync("x", generation=0, wait_ms=0, finished=[pb.AssignedLane(partition=1)])
        await until({"x": [(2, 0, 50, 2)], "y": [(1, 50, 100, 1)]})
        here.lanes.finish("g", 1, 50, 100)
        await here.sync(
            "y", call=other, generation=0, wait_ms=0, finished=[pb.AssignedLane(partition=1)]
        )
        await until({"x": [(2, 0, 50, 2)], "y": [(3, 50, 100, 2)]})


async def test_a_stopping_metaserver_answers_waiters_and_others_continue_its_changes(
    store: CoordinationStore,
) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a", fencing="majority")
        here.lanes.part(1)

        async def fall_silent(_: str) -> None:
            here.lanes.down.add("a")

        async with metaserver(store, timing=OFTEN) as (nearby, _):
            doomed = Caller(nearby.address)
            known = await here.sync("x", call=doomed)
            here.lanes.before_seal = fall_silent
            request = pb.ChangeRouteRequest(
                subject="s", move=pb.MoveOperation(partition=1, broker_group="b")
            )
            waiting = [
                asyncio.create_task(here.sync("x", call=doomed, generation=known.generation)),
                asyncio.create_task(doomed("ChangeRoute", request)),
            ]
            await eventually(lambda: "a" in here.lanes.down)
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [Stopping, Stopping]
        await doomed.channel.close()
        here.lanes.before_seal = _nothing
        here.lanes.down.clear()
        await here.until_route([(2, 0, 100, "b")])


async def _nothing(_: str) -> None:
    return None


async def test_a_restarted_consumer_replaces_the_older_one_at_every_metaserver(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here, metaserver(store) as (other, _):
        await here.create("a")
        here.lanes.part(1)
        old = await here.sync("x", incarnation="old")
        waiting = asyncio.create_task(here.sync("x", incarnation="old", generation=old.generation))
        new = await here.sync("x", call=other, incarnation="new", wait_ms=2_000)
        assert lanes_of(new) == [(1, 0, 100, 1)]
        with pytest.raises(StaleDelivery, match="started again elsewhere"):
            await waiting
        for call in (here.call, other):
            with pytest.raises(StaleDelivery):
                await here.sync("x", call=call, incarnation="old", generation=old.generation)
        await here.sync("x", incarnation="old", leaves=True)
        assert list(
            (
                await here.sync(
                    "x", call=other, incarnation="new", generation=new.generation, wait_ms=50
                )
            ).lanes
        ) == list(new.lanes)


async def test_the_leader_advances_a_group_that_no_consumer_polls(store: CoordinationStore) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a")
        here.lanes.part(1)
        await here.sync("x")
        await here.sync("x", leaves=True)
        await here.move(1, "b")
        here.lanes.finish("g", 1)
        async with asyncio.timeout(20):
            while (await here.describe()).groups[0].version < 2:
                await asyncio.sleep(0.02)
        assert not (await here.describe()).groups[0].lanes


async def test_a_group_from_latest_is_placed_at_the_partitions_ends_before_it_exists(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a", "b")
        here.lanes.append(1, 5)
        here.lanes.down.add("b")
        waiting = asyncio.create_task(here.sync("x", start="latest", gate="strict"))
        await eventually(lambda: "PlaceLanes" in here.brokers["b"].asked)
        record = await store.get(group_record_key("s", "g"))
        assert record is not None
        assert not GroupRecord.decode(record.value).is_ready
        here.lanes.down.clear()
        assert len((await waiting).lanes) == 2
        assert here.lanes.parts[1].done["g"] == [[0, 100, 5]]
        assert (await here.describe()).groups[0].gate == "strict"
        for wrong in ({"gate": "open"}, {"start": "middle", "consumer": "y"}):
            asked = {"subject": "s", "group": "h", "consumer": "x", "incarnation": "i", **wrong}
            with pytest.raises(InvalidArgument):
                await here.call("SyncMember", pb.SyncMemberRequest(**asked))


# --- operators ------------------------------------------------------------------------------------


async def test_a_route_is_described_with_its_groups_and_without_those_that_are_silent(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.append(1, 8)
        await here.sync("x")
        await here.move(1, "b")
        here.lanes.append(2, 4)
        here.brokers["b"].is_master = False
        found = await here.describe()
        assert (found.latest_version, found.route.version, list(found.silent_groups)) == (
            2,
            2,
            ["b"],
        )
        (group,) = found.groups
        assert (group.group, group.version, group.gate, group.is_ready, list(group.consumers)) == (
            "g",
            1,
            "lanes",
            True,
            ["x"],
        )
        assert [(each.lps.first, each.lps.end, each.version) for each in group.frontier] == [
            (0, 100, 1)
        ]
        assert [(each.partition, each.consumer) for each in group.lanes] == [(1, "x")]
        assert group.backlog >= 9
        assert (await here.describe(1)).route.partitions[0].number == 1
        with pytest.raises(InvalidArgument, match="no route version 9"):
            await here.describe(9)
        with pytest.raises(OrderMismatch, match="describe_route"):
            await here.call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="g"))


async def test_a_key_that_is_parked_in_two_partitions_is_counted_once(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.append(1, 8)
        await here.sync("x")
        await here.split(1, 50)
        here.lanes.part(1).parked["g"] = {b"low": 7, b"high": 60}
        here.lanes.part(2).parked["g"] = {b"low": 7}
        (group,) = (await here.describe()).groups
        assert group.parked_keys == 2


async def test_a_group_is_reset_over_all_versions_if_every_broker_answers(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.append(1, 8)
        first = await here.sync("x")
        await here.move(1, "b")
        here.lanes.append(2, 4)
        here.lanes.finish("g", 1)
        await here.sync("x", generation=first.generation, finished=[pb.AssignedLane(partition=1)])
        here.lanes.finish("g", 2)
        moved = (
            await here.call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="g", earliest=True)
            )
        ).moved
        assert {(each.partition, each.from_sequence, each.to_sequence) for each in moved} >= {
            (1, 9, 0),
            (2, 4, 0),
        }
        assert (await here.describe()).groups[0].version == 1
        with pytest.raises(InvalidArgument, match="the earliest, the latest, or a time"):
            await here.call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="g", sequence=4)
            )
        with pytest.raises(UnknownGroup):
            await here.call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="nobody", latest=True)
            )
        here.lanes.down.add("b")
        with pytest.raises(NotConnected, match="broker group 'b'"):
            await here.call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="g", latest=True)
            )
        assert (await here.describe()).groups[0].is_ready


class ClockOf1970(SystemClock):
    def time_ms(self) -> int:
        return 1


async def test_a_reset_to_a_time_trusts_no_clock_of_a_metaserver(store: CoordinationStore) -> None:
    async with ordered(store, clock=ClockOf1970()) as here:
        await here.create("a")
        await here.sync("x")
        here.lanes.append(1, 8)
        here.lanes.part(1).last_append_ms = 5_000_000
        await here.move(1, "b")
        await here.sync("x")
        await here.call(
            "ResetGroup", control.ResetGroupRequest(subject="s", group="g", time_ms=4_000_000)
        )
        assert (await here.describe()).groups[0].version == 1, (
            "messages stored since then are in the first version"
        )


async def test_parked_keys_are_gathered_and_put_back_at_their_partitions_master(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a", "b")
        await here.sync("x", wait_ms=0)
        for number, name in enumerate(("b", "a"), 1):
            here.brokers[name].parked = [
                control.ParkedKey(partition=3 - number, key=name.encode(), messages=number)
            ]
        found = await here.call(
            "DescribeParked", control.DescribeParkedRequest(subject="s", group="g")
        )
        assert [each.key for each in found.keys] == [b"a", b"b"]
        few = await here.call(
            "DescribeParked", control.DescribeParkedRequest(subject="s", group="g", keys_max=1)
        )
        assert [each.key for each in few.keys] == [b"a"]
        for replay in (True, False):
            request = control.UnparkRequest(
                subject="s", group="g", partition=2, key=b"b", replay=replay
            )
            assert (await here.call("Unpark", request)).messages == 3
        assert (
            here.brokers["a"].asked.count("Unpark"),
            here.brokers["b"].asked.count("Unpark"),
        ) == (0, 2)
        assert (await here.describe()).groups[0].is_ready
        for failure, is_ready in ((UnknownGroup, True), (NotConnected, False)):
            here.brokers["b"].failure = failure("in this test")
            request = control.UnparkRequest(
                subject="s", group="g", partition=2, key=b"b", replay=True
            )
            with pytest.raises(failure):
                await here.call("Unpark", request)
            assert (await here.describe()).groups[
                0
            ].is_ready == is_ready  # not, while it is not certain what the broker did, or will do
        with pytest.raises(LaneNotOpen, match="being started or moved"):
            await here.call("Unpark", request)
        with pytest.raises(UnknownPartition):
            await here.call("Unpark", control.UnparkRequest(subject="s", group="g", partition=9))


async def test_a_policy_is_kept_explained_and_wrong_ones_are_refused(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a", "b", partitions=1)
        here.lanes.part(1)
        here.brokers["a"].rates[1] = 700.0
        explained = await here.call("ExplainReshard", pb.ExplainReshardRequest(subject="s"))
        assert (explained.policy.is_enabled, explained.operation) == (False, "")
        policy = pb.ReshardPolicy(
            subject="s", is_enabled=True, split_messages_per_s=500, merge_messages_per_s=50
        )
        kept = await here.call("SetReshardPolicy", pb.SetReshardPolicyRequest(policy=policy))
        assert (kept.split_messages_per_s, kept.partitions_max) == (500, 64)
        explained = await here.call("ExplainReshard", pb.ExplainReshardRequest(subject="s"))
        assert explained.operation.startswith("split 1 at 50")
        assert "700 messages/s" in explained.reasons[0]
        policy.partitions_min = 90
        with pytest.raises(InvalidArgument, match="partitions_min"):
            await here.call("SetReshardPolicy", pb.SetReshardPolicyRequest(policy=policy))


async def test_a_hot_partition_is_split_by_the_leader_without_being_asked(
    store: CoordinationStore,
) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a", "b", partitions=1)
        here.lanes.part(1)
        here.brokers["a"].rates[1] = 700.0
        policy = pb.ReshardPolicy(
            subject="s",
            is_enabled=True,
            split_messages_per_s=500,
            merge_messages_per_s=50,
            cool_down_ms=1,
        )
        await here.call("SetReshardPolicy", pb.SetReshardPolicyRequest(policy=policy))
        async with asyncio.timeout(20):
            while len(await here.route()) < 2:
                await asyncio.sleep(0.02)
        history = await here.call("RouteHistory", pb.RouteHistoryRequest(subject="s"))
        assert history.changes[0].reason.startswith("automatic: Partition 1 takes 700 messages/s")
        async with asyncio.timeout(20):
            while not (
                found := await here.call("ExplainReshard", pb.ExplainReshardRequest(subject="s"))
            ).last_operation:
                await asyncio.sleep(0.02)
        assert found.last_operation.startswith("split 1 at 50")


async def test_an_ordered_subjects_groups_and_queues_are_asked_wherever_it_ever_was(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        await here.move(1, "b")
        for broker in here.brokers.values():
            broker.consumed.add("g")
        found = await here.call("DescribeGroups", control.DescribeGroupsRequest(subject="s"))
        assert sorted(each.broker_group for each in found.groups) == ["a", "b"]
        listed = await here.call("ListSubjects", pb.ListSubjectsRequest())
        assert sorted(each.broker_group for each in listed.subjects[0].queues) == ["a", "b"]


# --- deleting groups ------------------------------------------------------------------------------


async def test_the_leader_deletes_a_group_wholly_once_its_lost_broker_group_is_back(
    store: CoordinationStore,
) -> None:
    async with ordered(store, timing=OFTEN) as here:
        await here.create("a")
        here.lanes.part(1)
        await here.sync("x")
        await here.sync("x", leaves=True)
        here.lanes.down.add("a")
        with pytest.raises(
            NotConnected, match="the rest is done when these broker groups are back"
        ):
            await here.call("DeleteGroup", control.DeleteGroupRequest(subject="s", group="g"))
        with pytest.raises(LaneNotOpen, match="is being deleted"):
            await here.sync("y")
        here.lanes.down.clear()
        async with asyncio.timeout(20):
            while await store.get(group_record_key("s", "g")) is not None:
                await asyncio.sleep(0.02)
        with pytest.raises(UnknownGroup):
            await here.call("DeleteGroup", control.DeleteGroupRequest(subject="s", group="g"))


async def test_a_consumer_of_a_deleted_group_gets_an_error_and_a_new_one_starts_over(
    store: CoordinationStore,
) -> None:
    async with ordered(store) as here:
        await here.create("a")
        here.lanes.part(1)
        old = await here.sync("x")
        await here.sync("x", leaves=True)
        await here.call("DeleteGroup", control.DeleteGroupRequest(subject="s", group="g"))
        with pytest.raises(StaleDelivery, match="was deleted"):
            await here.sync("x", generation=old.generation)
        assert await store.get(group_record_key("s", "g")) is None
        assert lanes_of(await here.sync("y")) == [(1, 0, 100, 1)]
