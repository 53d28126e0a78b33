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


async def test_subjects_and_groups_are_reported_without_a_lost_broker_group() -> None:
    async with two_groups() as (call, found):
        found[1].is_master = False
        subjects = await call("ListSubjects", pb.ListSubjectsRequest())
        assert [queue.broker_group for queue in subjects.subjects[0].queues] == ["g1"]
        groups = await call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="g"))
        assert [each.broker_group for each in groups.groups] == ["g1"]
        for answer in (subjects, groups):
            assert list(answer.silent) == ["g2"]
            assert "not the master any more" in answer.silent["g2"]


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
        await call(
            "CreateSubject",
            pb.CreateSubjectRequest(
                settings=pb.SubjectSettings(name="orders", broker_groups=["g1"])
            ),
        )
        found[1].is_master = False
        client = MetadataClient([call.address])
        try:
            subject = await client.find_subject("s")
            assert subject is not None
            assert subject.settings.name == "s"
            assert [queue.broker_group for queue in subject.description.queues] == ["g1"]
            assert list(subject.silent) == ["g2"]
            assert await client.find_subject("order") is None, "orders is another one"
        finally:
            await client.close()


async def test_the_silent_groups_of_a_longer_name_are_not_those_of_a_subject() -> None:
    async with two_groups() as (call, found):
        for name, group in (("orders", "g1"), ("orders2", "g2")):
            await call(
                "CreateSubject",
                pb.CreateSubjectRequest(
                    settings=pb.SubjectSettings(name=name, broker_groups=[group])
                ),
            )
        found[1].is_master = False
        client = MetadataClient([call.address])
        try:
            subject = await client.find_subject("orders")
            assert subject is not None
            assert subject.silent == {}
        finally:
            await client.close()


async def test_subjects_are_known_though_no_broker_answers() -> None:
    async with two_groups() as (call, found):
        for each in found:
            each.is_master = False
        subjects = await call("ListSubjects", pb.ListSubjectsRequest())
        assert [each.settings.name for each in subjects.subjects] == ["s"]
        assert sorted(subjects.silent) == ["g1", "g2"]
        with pytest.raises(NotConnected, match=r"g1.*g2"):
            await call("DescribeGroups", control.DescribeGroupsRequest(subject="s"))


async def test_a_group_that_only_a_lost_broker_group_may_know_is_not_denied() -> None:
    async with two_groups() as (call, found):
        found[1].is_master = False
        with pytest.raises(NotConnected, match=r"not on g1; .*g2"):
            await call("DescribeGroups", control.DescribeGroupsRequest(subject="s", group="other"))


async def test_a_group_is_moved_everywhere_or_nowhere() -> None:
    async with two_groups() as (call, found):
        found[1].is_master = False
        with pytest.raises(NotConnected, match="g2"):
            await call(
                "ResetGroup", control.ResetGroupRequest(subject="s", group="g", earliest=True)
            )
        assert "ResetGroup" not in found[0].asked


async def test_all_metaservers_that_do_not_answer_are_named() -> None:
    client = MetadataClient(["127.0.0.1:1", "127.0.0.1:2"])
    try:
        with pytest.raises(NotConnected, match=r"127\.0\.0\.1:1:.*127\.0\.0\.1:2:"):
            await client.describe_route("s")
    finally:
        await client.close()
