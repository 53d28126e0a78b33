"""While a broker group is lost, queries for people are answered by the other groups, and name the
missing one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from meta_support import Caller, FakeBroker, brokers, metaserver
from qmq_coordination.embedded import EmbeddedStore

from qmq.client.metadata.service import MetadataClient
from qmq.errors import NotConnected
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


@asynccontextmanager
async def two_groups() -> AsyncIterator[tuple[Caller, list[FakeBroker]]]:
    store = EmbeddedStore()
    async with brokers(store, "g1", "g2") as found, metaserver(store) as (call, _):
        await call(
            "CreateSubject",
            pb.CreateSubjectRequest(
                settings=pb.SubjectSettings(name="s", broker_groups=["g1", "g2"])
            ),
        )
        found[0].consumed = {"g"}
        yield call, found
    await store.close()


async def test_without_a_broker_group_others_are_reported_and_nothing_is_denied_or_moved() -> None:
    async with two_groups() as (call, found):
        found[1].is_master = False
        subjects = await call("ListSubjects", pb.ListSubjectsRequest())
        assert [queue.broker_group for queue in subjects.subjects[0].queues] == ["g1"]
        groups = await call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="g"))
        assert [each.broker_group for each in groups.groups] == ["g1"]
        for answer in (subjects, groups):
            assert list(answer.silent) == ["g2"]
            assert "not the master any more" in answer.silent["g2"]
        with pytest.raises(NotConnected, match=r"not on g1; .*g2"):
            await call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="other"))
        reset = control.ResetGroupRequest(subject="s", group="g", earliest=True)
        with pytest.raises(NotConnected, match="g2"):
            await call("ResetGroup", reset)
        assert "ResetGroup" not in found[0].asked
        found[0].is_master = False
        subjects = await call("ListSubjects", pb.ListSubjectsRequest())
        assert [each.settings.name for each in subjects.subjects] == ["s"]
        assert sorted(subjects.silent) == ["g1", "g2"]
        with pytest.raises(NotConnected, match=r"g1.*g2"):
            await call("DescribeGroups", control.DescribeGroupsRequest(subject="s"))


async def test_the_client_says_which_broker_groups_are_missing() -> None:
    async with two_groups() as (call, found):
        client = MetadataClient([call.address])
        try:
            assert (await client.list_subjects()).silent == {}
            found[1].is_master = False
            for answer in (
                await client.list_subjects(),
                await client.describe_groups("s", "g"),
                await client.dead_letter_queues(),
            ):
                assert list(answer.silent) == ["g2"]
        finally:
            await client.close()


async def test_a_subject_is_found_by_its_whole_name_and_says_which_groups_are_silent() -> None:
    async with two_groups() as (call, found):
        for name, group in (("orders", "g1"), ("orders2", "g2")):
            settings = pb.SubjectSettings(name=name, broker_groups=[group])
            await call("CreateSubject", pb.CreateSubjectRequest(settings=settings))
        found[1].is_master = False
        client = MetadataClient([call.address])
        try:
            subject = await client.find_subject("s")
            assert subject is not None
            assert subject.settings.name == "s"
            assert [queue.broker_group for queue in subject.description.queues] == ["g1"]
            assert list(subject.silent) == ["g2"]
            assert await client.find_subject("order") is None, "orders is another one"
            orders = await client.find_subject("orders")
            assert orders is not None
            assert orders.silent == {}, "g2 is only silent of orders2"
        finally:
            await client.close()


async def test_all_metaservers_that_do_not_answer_are_named() -> None:
    client = MetadataClient(["127.0.0.1:1", "127.0.0.1:2"])
    try:
        with pytest.raises(NotConnected, match=r"127\.0\.0\.1:1:.*127\.0\.0\.1:2:"):
            await client.describe_route("s")
    finally:
        await client.close()
