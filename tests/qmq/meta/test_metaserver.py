"""A metaserver's answers: routes, placement, what is asked of brokers, watching; two of them on one
store; the store away.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import grpc
import pytest
from meta_support import Caller, FakeBroker, brokers, metaserver
from qmq_coordination.broker_groups import (
    REPLICAS,
    EpochClaim,
    MasterRecord,
    Registration,
    ReplicaRecord,
    group_key,
    replica_key,
)
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.subjects import subject_key
from qmq_replication.membership import ReplicaMembership
from support import eventually
from support.etcd_process import EtcdProcess

from qmq.errors import (
    CoordinationUnavailable,
    InvalidArgument,
    MessageNotFound,
    NotConnected,
    Overloaded,
    ReadOnly,
    SubjectExists,
    UnknownGroup,
    UnknownSubject,
)
from qmq.meta import watchers as watching
from qmq.meta.calls import TIMING
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import typed_error

SETTINGS = pb.SubjectSettings(name="s")


async def create(call: Caller, name: str, *groups: str) -> list[str]:
    request = pb.CreateSubjectRequest(settings=pb.SubjectSettings(name=name, broker_groups=groups))
    return list((await call("CreateSubject", request)).settings.broker_groups)


async def change(call: Caller, name: str) -> None:
    """Change a subject's settings."""
    await call("SetSubjectFlush", pb.SetSubjectFlushRequest(subject=name, flush="sync"))


async def routes(call: Caller, name: str) -> list[tuple[str, str, int, bool]]:
    found = await call("Locate", pb.LocateRequest(subject=name))
    return [
        (each.broker_group, each.data_address, each.epoch, each.is_writable)
        for each in found.routes
    ]


# --- subjects and where they are ------------------------------------------------------------------


async def test_a_subject_is_placed_where_there_are_fewest_and_located_there(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2", "g3"), metaserver(store) as (call, _):
        assert await create(call, "a") == ["g1", "g2"]
        assert await create(call, "b") == ["g3", "g1"]
        assert await create(call, "c", "g2") == ["g2"]
        assert await routes(call, "a") == [
            ("g1", "data-g1-a:1", 1, True),
            ("g2", "data-g2-a:1", 1, True),
        ]
        assert (
            await call("Locate", pb.LocateRequest(subject="d", create_if_missing=True))
        ).settings.broker_groups == ["g3", "g1"]
        assert await create(call, "a") == ["g1", "g2"]
        with pytest.raises(SubjectExists):
            await create(call, "a", "g3")
        with pytest.raises(InvalidArgument, match="no broker group g9"):
            await create(call, "e", "g9")
        with pytest.raises(UnknownSubject, match="qmq subject create x"):
            await call("Locate", pb.LocateRequest(subject="x"))


async def test_sending_creates_no_subject_if_it_may_not(store: CoordinationStore) -> None:
    async with brokers(store, "g1"), metaserver(store, auto_create=False) as (call, _):
        with pytest.raises(UnknownSubject):
            await call("Locate", pb.LocateRequest(subject="x", create_if_missing=True))


async def test_without_a_broker_no_subject_can_be_placed(store: CoordinationStore) -> None:
    async with metaserver(store) as (call, _):
        with pytest.raises(NotConnected, match="no broker is registered"):
            await create(call, "a")


async def test_a_drained_group_takes_nothing_new_and_is_still_consumed(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2"), metaserver(store) as (call, _):
        await create(call, "a")
        assert (
            await call("SetGroupMode", pb.SetGroupModeRequest(broker_group="g1", mode="read-only"))
        ).mode == "read-only"
        assert [(route[0], route[3]) for route in await routes(call, "a")] == [
            ("g1", False),
            ("g2", True),
        ]
        assert await create(call, "b") == ["g2"]
        await call("SetGroupMode", pb.SetGroupModeRequest(broker_group="g2", mode="read-only"))
        with pytest.raises(ReadOnly, match="qmq broker resume"):
            await create(call, "c")
        await call("SetGroupMode", pb.SetGroupModeRequest(broker_group="g1", mode="read-write"))
        assert [(route[0], route[3]) for route in await routes(call, "a")] == [
            ("g1", True),
            ("g2", False),
        ]
        with pytest.raises(InvalidArgument, match="read-write or read-only"):
            await call("SetGroupMode", pb.SetGroupModeRequest(broker_group="g1", mode="off"))
        with pytest.raises(InvalidArgument, match="no broker group g9: there are g1, g2"):
            await call("SetGroupMode", pb.SetGroupModeRequest(broker_group="g9", mode="read-only"))


async def test_a_subject_that_moves_is_consumed_from_where_it_was(store: CoordinationStore) -> None:
    async with brokers(store, "g1", "g2", "g3"), metaserver(store) as (call, _):
        await create(call, "a", "g1", "g2")
        moved = await call(
            "PlaceSubject", pb.PlaceSubjectRequest(subject="a", broker_groups=["g3", "g2"])
        )
        assert moved.settings.broker_groups == ["g3", "g2"]
        assert [(route[0], route[3]) for route in await routes(call, "a")] == [
            ("g3", True),
            ("g2", True),
            ("g1", False),
        ]
        await call("PlaceSubject", pb.PlaceSubjectRequest(subject="a", broker_groups=["g1"]))
        assert [(route[0], route[3]) for route in await routes(call, "a")] == [
            ("g1", True),
            ("g3", False),
            ("g2", False),
        ]
        for groups, says in (([], "one broker group at least"), (["g9"], "no broker group g9")):
            with pytest.raises(InvalidArgument, match=says):
                await call(
                    "PlaceSubject", pb.PlaceSubjectRequest(subject="a", broker_groups=groups)
                )
        with pytest.raises(UnknownSubject):
            await call("PlaceSubject", pb.PlaceSubjectRequest(subject="x", broker_groups=["g1"]))


async def test_a_subject_from_before_placement_lives_on_every_group(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2"), metaserver(store) as (call, _):
        await store.put(
            subject_key("old"),
            (
                b'{"name": "old", "retention_ms": null, "retention_bytes": null, '
                b'"body_bytes_max": 100}'
            ),
        )
        assert [(route[0], route[3]) for route in await routes(call, "old")] == [
            ("g1", True),
            ("g2", True),
        ]
        await call("PlaceSubject", pb.PlaceSubjectRequest(subject="old", broker_groups=["g2"]))
        assert [(route[0], route[3]) for route in await routes(call, "old")] == [
            ("g2", True),
            ("g1", False),
        ]


async def test_a_new_master_is_located_and_a_group_without_one_is_reported(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1"), metaserver(store) as (call, view):
        await create(call, "a")
        await store.put(
            group_key("g1", "master"),
            MasterRecord("g1-b", 2, "x", "data-g1-b:1", "127.0.0.1:1").encode(),
        )
        await eventually(lambda: (found := view.group("g1").master) and found.epoch == 2)
        assert await routes(call, "a") == [("g1", "data-g1-b:1", 2, True)]
        await store.delete(group_key("g1", "master"))
        await eventually(lambda: view.group("g1").master is None)
        with pytest.raises(NotConnected, match=r"has a master at the moment \(g1\)"):
            await routes(call, "a")


async def test_a_group_that_has_no_master_yet_is_named_beside_one_that_has(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2"), metaserver(store) as (call, view):
        await create(call, "a", "g2", "g1")
        await store.delete(group_key("g2", "master"))
        await eventually(lambda: view.group("g2").master is None)
        assert await routes(call, "a") == [("g1", "data-g1-a:1", 1, True), ("g2", "", 1, True)]


# --- what brokers know ----------------------------------------------------------------------------


async def test_questions_go_to_the_groups_that_may_hold_messages(store: CoordinationStore) -> None:
    async with (
        brokers(store, "g1", "g2", "g3") as (one, two, three),
        metaserver(store) as (call, _),
    ):
        await create(call, "s", "g1", "g2")
        two.messages.add("00")
        two.consumed.add("c")
        found = await call("FindMessage", control.FindMessageRequest(subject="s", message_id="00"))
        assert found.message.broker_group == "g2"
        with pytest.raises(MessageNotFound):
            await call("FindMessage", control.FindMessageRequest(subject="s", message_id="01"))
        times = await call("FindTime", control.FindTimeRequest(subject="s"))
        assert [each.broker_group for each in times.found] == ["g1", "g2"]
        groups = await call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="c"))
        assert [each.broker_group for each in groups.groups] == ["g2"]
        moved = await call(
            "ResetGroup", control.ResetGroupRequest(subject="s", group="c", sequence=5)
        )
        assert [(each.broker_group, each.to_sequence) for each in moved.moved] == [("g2", 5)]
        one.consumed.add("both")
        two.consumed.add("both")
        with pytest.raises(
            InvalidArgument, match="a sequence belongs to one broker group, not to g1, g2"
        ):
            await call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="both", sequence=5)
            )
        assert (
            len(
                (
                    await call(
                        "ResetGroup",
                        control.ResetGroupRequest(subject="s", group="both", latest=True),
                    )
                ).moved
            )
            == 2
        )
        with pytest.raises(UnknownGroup):
            await call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="none", sequence=5)
            )
        listed = await call("ListSubjects", pb.ListSubjectsRequest())
        assert [queue.broker_group for queue in listed.subjects[0].queues] == ["g1", "g2"]
        assert three.asked == []
        assert one.asked.count("ResetGroup") == 2


async def test_an_answer_that_would_be_wrong_without_a_group_names_the_group(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2") as (one, two), metaserver(store) as (call, _):
        await create(call, "s")
        one.messages.add("00")
        one.consumed.add("c")
        await two.server.stop(None)
        assert (
            await call("FindMessage", control.FindMessageRequest(subject="s", message_id="00"))
        ).message.broker_group == "g1"
        for method, request in (
            ("FindMessage", control.FindMessageRequest(subject="s", message_id="01")),
            ("FindTime", control.FindTimeRequest(subject="s")),
            ("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="elsewhere")),
            ("ResetGroup", control.ResetGroupRequest(subject="s", group="c", sequence=5)),
        ):
            with pytest.raises(NotConnected, match="broker group 'g2' does not answer"):
                await call(method, request)
        assert "ResetGroup" not in one.asked


async def test_a_replica_that_is_master_no_more_sends_us_to_the_new_one(
    store: CoordinationStore,
) -> None:
    newer = FakeBroker("g1", "g1-b")
    await newer.start()
    async with brokers(store, "g1") as (old,), metaserver(store) as (call, _):
        await create(call, "s")
        old.is_master = False
        with pytest.raises(NotConnected, match=r"g1-a .*not the master any more"):
            await call("Transfer", pb.GroupTransferRequest(broker_group="g1", to="g1-b"))
        master = MasterRecord("g1-b", 2, "x", "d:1", newer.address)
        await store.put(group_key("g1", "master"), master.encode())
        done = await call("Transfer", pb.GroupTransferRequest(broker_group="g1", to="g1-c"))
        assert (done.master, done.refused_ms) == ("g1-c", 7)
        assert len((await call("FindTime", control.FindTimeRequest(subject="s"))).found) == 1
        assert newer.asked == ["Transfer", "FindTime"]
        change = pb.GroupChangeReplicasRequest(
            broker_group="g1", change=control.ChangeReplicasRequest(add="g1-c")
        )
        assert (await call("ChangeReplicas", change)).learners == ["g1-c"]
        change = pb.GroupChangeReplicasRequest(
            broker_group="g1", change=control.ChangeReplicasRequest(remove="g1-b")
        )
        with pytest.raises(InvalidArgument, match="the last voter"):
            await call("ChangeReplicas", change)
    await newer.server.stop(None)


async def test_a_description_of_the_cluster_leaves_out_silent_replicas(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1", "g2") as (_, two), metaserver(store) as (call, _):
        await store.put(
            group_key("g2", "members"),
            b'{"version": 2, "voters": ["g2-a", "g2-b"], "learners": ["g2-c"]}',
        )
        await store.put(group_key("g3", "epoch"), EpochClaim(4, "g3-a", "x").encode())
        await two.server.stop(None)
        async with asyncio.timeout(20):
            while len((await call("DescribeCluster", pb.DescribeClusterRequest())).groups) < 3:
                await asyncio.sleep(0.01)
        first, second, third = (await call("DescribeCluster", pb.DescribeClusterRequest())).groups
        assert (first.health, first.master, first.epoch, list(first.voters)) == (
            "read-write",
            "g1-a",
            1,
            ["g1-a"],
        )
        assert (first.replicas[0].is_present, first.replicas[0].status.commit_index) == (True, 10)
        assert [
            (each.replica, each.is_present, each.HasField("status")) for each in second.replicas
        ] == [("g2-a", True, False), ("g2-b", False, False), ("g2-c", False, False)]
        assert (third.health, third.master, third.epoch) == ("offline", "", 4)


# --- watching -------------------------------------------------------------------------------------


async def test_a_watch_reports_the_names_to_locate_again(store: CoordinationStore) -> None:
    async with brokers(store, "g1"), metaserver(store) as (call, _):
        watch = call.stub.Watch(pb.WatchRequest())
        answers = aiter(watch)
        first = await anext(answers)
        assert (list(first.subjects), list(first.broker_groups)) == ([], [])
        await create(call, "a")
        await change(call, "a")
        assert list((await anext(answers)).subjects) == ["a"]
        await store.put(
            group_key("g1", "master"), MasterRecord("g1-b", 2, "x", "d:1", "c:1").encode()
        )
        assert list((await anext(answers)).broker_groups) == ["g1"]
        watch.cancel()


async def test_a_watch_does_not_report_a_new_subject_until_it_changes(
    store: CoordinationStore,
) -> None:
    """Nobody can have located it before."""
    async with brokers(store, "g1"), metaserver(store) as (call, _):
        watch = call.stub.Watch(pb.WatchRequest())
        answers = aiter(watch)
        await anext(answers)
        for name in ("a", "b", "c"):
            await create(call, name)
        await change(call, "b")
        assert list((await anext(answers)).subjects) == ["b"]
        await store.delete(subject_key("a"))
        await create(call, "a")
        assert list((await anext(answers)).subjects) == ["a"], (
            "who knows the deleted one must locate it again"
        )
        watch.cancel()


async def test_a_watcher_that_does_not_read_costs_a_bounded_number_of_names(
    store: CoordinationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "NAMES_MAX", 5)
    async with brokers(store, "g1"), metaserver(store) as (call, view):
        watchers = watching.Watchers(view)
        slow = watchers.watch()
        quick = watchers.watch(quiet_s=0.01)
        await anext(slow)
        await anext(quick)
        assert await anext(quick) == pb.WatchResponse()
        for number in range(8):
            await create(call, f"s{number}")
        for number in range(8):
            await change(call, f"s{number}")
            assert list((await anext(quick)).subjects) == [f"s{number}"]
        with pytest.raises(Overloaded, match="locate everything again"):
            await anext(slow)
        await quick.aclose()
        watchers.close()
        monkeypatch.setattr(watching, "WATCHERS_MAX", 0)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(aiter(call.stub.Watch(pb.WatchRequest())))
        assert isinstance(typed_error(failure.value, "here"), Overloaded)


# --- several metaservers, and the store away ------------------------------------------------------


async def test_two_metaservers_agree_on_what_both_create_at_once(shared_etcd: EtcdProcess) -> None:
    namespace = f"/{secrets.token_hex(8)}"
    stores = [EtcdStore([shared_etcd.endpoint], namespace=namespace) for _ in range(2)]
    async with (
        brokers(stores[0], "g1", "g2", "g3"),
        metaserver(stores[0]) as (one, _),
        metaserver(stores[1]) as (other, _),
    ):
        for number in range(20):
            request = pb.LocateRequest(subject=f"s{number}", create_if_missing=True)
            found = await asyncio.gather(*[call("Locate", request) for call in (one, other) * 3])
            assert len({tuple(each.settings.broker_groups) for each in found}) == 1
        await one("PlaceSubject", pb.PlaceSubjectRequest(subject="s0", broker_groups=["g1"]))
        async with asyncio.timeout(20):
            while (await routes(other, "s0"))[0][0] != "g1" or (await routes(other, "s0"))[1][3]:
                await asyncio.sleep(0.01)
        assert await create(other, "new", "g2") == ["g2"]
        assert await routes(one, "new") == [("g2", "data-g2-a:1", 1, True)]
    for each in stores:
        await each.close()


async def test_without_the_store_what_is_known_is_answered_and_changes_are_refused(
    own_etcd: EtcdProcess,
) -> None:
    store = EtcdStore([own_etcd.endpoint], call_s=0.3, total_s=0.6)
    async with brokers(store, "g1"), metaserver(store) as (call, view):
        await create(call, "known")
        own_etcd.kill()
        assert await routes(call, "known") == [("g1", "data-g1-a:1", 1, True)]
        for method, request in (
            ("Locate", pb.LocateRequest(subject="unknown", create_if_missing=True)),
            ("CreateSubject", pb.CreateSubjectRequest(settings=SETTINGS)),
            ("PlaceSubject", pb.PlaceSubjectRequest(subject="known", broker_groups=["g1"])),
            ("SetGroupMode", pb.SetGroupModeRequest(broker_group="g1", mode="read-only")),
        ):
            with pytest.raises(CoordinationUnavailable, match="nothing was changed"):
                await call(method, request)
        assert len((await call("FindTime", control.FindTimeRequest(subject="known"))).found) == 1
        await eventually(lambda: view.silent_ms > 500)
        described = await call("DescribeCluster", pb.DescribeClusterRequest())
        assert (described.groups[0].master, described.store_silent_ms > 500) == ("g1-a", True)
        own_etcd.start()
        await eventually(lambda: view.silent_ms < 500)
        assert await create(call, "s") == ["g1"]
    await store.close()


async def test_the_address_of_a_replica_that_left_goes_with_its_process(
    store: CoordinationStore,
) -> None:
    """A member's address stays while it is away, and that of a replica that is not added yet while
    its process is alive.
    """

    async def known() -> list[str]:
        return [item.key.rpartition("/")[2] for item in (await store.list(REPLICAS)).items]

    async with (
        brokers(store, "a"),
        metaserver(store, timing=replace(TIMING, sweep_s=0.02)) as (_, view),
    ):
        away = ReplicaRecord("away", "a", "d:1", "c:1")
        await store.put(group_key("a", "members"), ReplicaMembership(2, ("a-a", "away")).encode())
        for name in ("away", "left", "new"):
            await store.put(replica_key("a", name), replace(away, replica=name).encode())
        new = Registration(store, replace(away, replica="new"))
        await new.start()
        await eventually(lambda: "new" in view.present("a") and "away" in view.group("a").voters)
        async with asyncio.timeout(30):
            while "left" in await known():
                await asyncio.sleep(0.01)
        assert await known() == ["a-a", "away", "new"]
        await new.stop()
        async with asyncio.timeout(30):
            while "new" in await known():
                await asyncio.sleep(0.01)
        assert await known() == ["a-a", "away"]
