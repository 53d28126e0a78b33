"""Quotas slow down the principal that exceeds them, and no other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from access_support import guarded
from support import eventually, node_config, running

import qmq
from qmq.broker.connection.access import Throttle
from qmq.errors import AccessDenied, InvalidArgument, Overloaded, QuotaExceeded
from qmq.security.access import OpenAccess
from qmq.security.principal import Principal
from qmq.security.quotas import (
    Quota,
    nearest,
    nearest_namespaces,
    nearest_of_subject,
    require_room_for,
)

ORDERS = Principal("app", "orders")


class Limited(OpenAccess):
    """One quota for everybody."""

    def __init__(self, **limits: int) -> None:
        self._quota = Quota("q", "*", **limits)

    def quota(self, principal: Principal) -> Quota | None:
        return self._quota


class Quotas(OpenAccess):
    """Some quotas as in the metadata, without roles."""

    def __init__(self, *quotas: Quota) -> None:
        self._quotas = quotas

    def quota(self, principal: Principal) -> Quota | None:
        return nearest(self._quotas, principal, [])

    def subject_quota(self, subject: str) -> Quota | None:
        return nearest_of_subject(self._quotas, subject)

    def namespace_quotas(self, subject: str) -> tuple[Quota, ...]:
        return nearest_namespaces(self._quotas, subject)


class Batch(NamedTuple):
    """The fields of a batch that quotas count."""

    region: bytes
    header: SimpleNamespace
    queue: SimpleNamespace


def sent(size: int, messages: int, subject: str = "s") -> list[Any]:
    return [
        Batch(
            bytes(size),
            SimpleNamespace(count=messages),
            SimpleNamespace(id=SimpleNamespace(subject=subject)),
        )
    ]


def test_bytes_and_messages_are_counted_over_all_connections_of_a_principal() -> None:
    now = [0.0]
    throttle = Throttle(
        Limited(produce_bytes_per_s=1000, produce_messages_per_s=10), lambda: now[0]
    )
    assert throttle.produced(ORDERS, sent(1000, 1)) == 0.0
    assert throttle.produced(ORDERS, sent(500, 1)) == pytest.approx(0.5)
    now[0] = 0.5
    assert throttle.produced(ORDERS, sent(0, 13)) == pytest.approx(0.3)
    assert throttle.produced(Principal("app", "other"), sent(1000, 10)) == 0.0
    assert throttle.fetched(ORDERS, "s", 1 << 20, 1 << 30) == 0.0


def test_bytes_and_messages_out_are_counted_of_a_principal_and_of_a_subject() -> None:
    quotas = Quotas(
        Quota("q", "app:orders", fetch_bytes_per_s=1000, fetch_messages_per_s=10),
        Quota("r", "subject:pay*", fetch_bytes_per_s=100, fetch_messages_per_s=1),
    )
    throttle = Throttle(quotas, lambda: 0.0)
    assert throttle.fetched(ORDERS, "s", 10, 500) == 0.0
    assert throttle.fetched(ORDERS, "s", 5, 500) == pytest.approx(0.5)
    assert throttle.fetched(Principal("app", "other"), "s", 1000, 1000) == 0.0
    assert throttle.fetched(Principal("app", "other"), "pay", 1, 200) == pytest.approx(1.0)
    assert throttle.fetched(Principal("app", "third"), "pay", 2, 0) == pytest.approx(2.0)


def test_subjects_of_a_namespace_have_a_quota_together() -> None:
    quotas = Quotas(
        Quota("q", "namespace:pay.", produce_bytes_per_s=1000),
        Quota("r", "namespace:pay.in.", produce_messages_per_s=1),
        Quota("s", "subject:ord*", produce_bytes_per_s=1000),
    )
    throttle = Throttle(quotas, lambda: 0.0)
    assert throttle.produced(ORDERS, sent(1000, 1, "ord")) == 0.0, "a subject has a quota by itself"
    assert throttle.produced(Principal("app", "other"), sent(500, 1, "ord")) == pytest.approx(0.5)
    assert throttle.produced(ORDERS, sent(1000, 1, "orders")) == 0.0
    assert throttle.produced(ORDERS, sent(600, 1, "pay.a")) == 0.0
    assert throttle.produced(Principal("app", "other"), sent(900, 1, "pay.b")) == pytest.approx(0.5)
    assert throttle.produced(ORDERS, sent(100_000, 1, "payments")) == 0.0
    assert throttle.produced(ORDERS, sent(100_000, 2, "pay.in.a")) == pytest.approx(1.0), (
        "the smallest namespace counts"
    )


async def test_teams_share_a_cluster_and_neither_sees_or_slows_the_other(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        for team in ("a", "b"):
            for kind in ("subject", "group"):
                await cluster.allow(f"role:team-{team}", "*", kind, f"{team}.*")
            await cluster.admin.access.change_role(f"team-{team}", add=[f"app:{team}"])
        await cluster.admin.access.put_quota("namespace:a.", {"produce_bytes_per_s": 200_000})
        await eventually(
            lambda: (
                bool(cluster.node.view.access.quotas) and len(cluster.node.view.access.roles) == 2
            )
        )
        throttle = cluster.node.running.data.throttle
        async with cluster.client("app:a") as a, cluster.client("app:b") as b:
            for number in range(2):
                await b.send(f"b.{number}", bytes(150_000))
            assert throttle.paused_s == 0
            for number in range(2):
                await a.send(f"a.{number}", bytes(150_000))
            assert throttle.paused_s > 0
            assert [each.settings.name for each in await a.metadata.list_subjects()] == [
                "a.0",
                "a.1",
            ]
            assert len((await anext(a.consumer("a.0", group="a.g"))).body) == 150_000
            with pytest.raises(AccessDenied):
                await anext(a.consumer("b.0", group="a.g"))
            with pytest.raises(AccessDenied):
                await anext(a.consumer("a.0", group="b.g"))


@pytest.mark.parametrize("limits", [{"connections": 1}, {"subjects": 1}, {"fetch_bytes_per_s": 1}])
def test_a_namespace_has_rates_only(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        Quota.of("q", "namespace:a.", limits)


def test_connections_are_counted_and_given_back() -> None:
    throttle = Throttle(Limited(connections=2), lambda: 0.0)
    throttle.admit(ORDERS)
    throttle.admit(ORDERS)
    with pytest.raises(Overloaded, match="2 connections"):
        throttle.admit(ORDERS)
    throttle.ended(ORDERS)
    throttle.admit(ORDERS)


async def test_a_producer_over_its_quota_is_slowed_down_and_loses_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.allow("app:orders", "produce,create", "subject")
        await cluster.admin.access.put_quota("app:orders", {"produce_bytes_per_s": 200_000})
        await eventually(lambda: bool(cluster.node.view.access.quotas))
        throttle = cluster.node.running.data.throttle
        async with cluster.client("app:orders") as orders:
            for number in range(4):
                await orders.send("orders", bytes([number]) * 100_000)
            assert throttle.paused_s > 0
            before = throttle.paused_s
            await cluster.admin.send("orders", b"admin" * 100_000)
            assert throttle.paused_s == before, "the administrator has no quota"
        consumer = cluster.admin.consumer("orders", group="g")
        assert sum([len((await anext(consumer)).body) for _ in range(5)]) == 900_000


@pytest.mark.parametrize(
    ("way", "limited"),
    [
        ("consume", "app:*"),
        ("browse", "subject:ord*"),
        ("lanes", "app:*"),
        ("lanes", "subject:ord*"),
    ],
)
async def test_messages_a_second_out_of_a_principal_or_a_subject_are_bounded(
    tmp_path: Path, way: str, limited: str
) -> None:
    async with guarded(tmp_path) as cluster:
        if way == "lanes":
            await cluster.admin.metadata.create_subject(
                qmq.SubjectConfig("orders", order=qmq.Order.STRICT, logical_partitions=8)
            )
        await cluster.admin.send_many(
            "orders", [b"%d" % number for number in range(500)], keys=[b"k"] * 500
        )
        for kind in ("subject", "group"):
            await cluster.allow(
                "app:orders", "browse,consume" if kind == "subject" else "consume", kind
            )
        await cluster.admin.access.put_quota(limited, {"fetch_messages_per_s": 400})
        await eventually(lambda: bool(cluster.node.view.access.quotas))
        async with cluster.client("app:orders") as orders:
            assert [each async for each in read_all(orders, way, 500)] == [
                b"%d" % number for number in range(500)
            ]
        assert cluster.node.running.data.throttle.paused_s > 0


async def read_all(mq: qmq.Client, way: str, count: int) -> AsyncIterator[bytes]:
    """The bodies of all messages of `orders`, read in this way."""
    if way == "browse":
        found = mq.browse("orders")
    else:
        found = (
            mq.ordered_consumer("orders", group="g")
            if way == "lanes"
            else mq.consumer("orders", group="g")
        )
    async for each in found:
        yield each.body
        count -= 1
        if not count:
            return


async def test_a_connection_over_the_quota_is_refused_and_says_why(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as first:
        await first.access.put_quota("*", {"connections": 1})
        await eventually(lambda: bool(node.view.access.quotas))
        await first.send("orders", b"1")
        async with qmq.connect(node.address) as second:
            sending = asyncio.ensure_future(second.send("orders", b"2"))
            await eventually(lambda: node.broker.counters.accepted >= 2)
            assert not sending.done(), "it is tried again"
            await first.access.delete_quota((await first.access.quotas())[0].id)
            await sending


async def test_bytes_in_flight_of_all_connections_of_a_principal_are_bounded(
    tmp_path: Path,
) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as admin:
        await admin.access.put_quota("*", {"inflight_bytes": 100_000})
        await eventually(lambda: bool(node.view.access.quotas))
        throttle = node.running.data.throttle
        most = []
        took = throttle.took

        def watched(principal: Principal, size: int, reader: Any) -> bool:
            found = took(principal, size, reader)
            most.append((throttle.inflight_bytes, found))
            return found

        throttle.took = watched
        async with qmq.connect(node.address) as one, qmq.connect(node.address) as other:
            await asyncio.gather(
                *[mq.send("orders", bytes(60_000)) for mq in (one, other) for _ in range(20)]
            )
        assert any(is_over for _, is_over in most)
        assert max(size for size, _ in most) < 800_000, (
            "a connection that is over is not read from: what had come in its buffer counts"
        )
        assert not throttle.inflight_bytes


async def test_a_namespace_has_so_many_subjects_and_no_more(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        await mq.access.put_quota("subject:team-a.*", {"subjects": 2})
        await eventually(lambda: bool(node.view.access.quotas))
        for name in (
            "team-a.one",
            "team-a.two",
            "team-b.one",
            "team-b.two",
            "team-b.three",
            "team-a.two",
        ):
            await mq.send(name, b"x")
        with pytest.raises(QuotaExceeded, match="2 subjects fit 'team-a"):
            await mq.send("team-a.three", b"x")
        await mq.metadata.delete_subject("team-a.one")
        await eventually(lambda: node.view.subject("team-a.one") is None)
        await mq.send("team-a.three", b"x")


async def test_a_principal_creates_so_many_subjects_and_no_more(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        for name in ("app:one", "app:other"):
            await cluster.allow(name, "produce,create,delete", "subject", "*")
        await cluster.admin.access.put_quota("app:*", {"subjects": 2})
        view = cluster.node.view
        await eventually(lambda: bool(view.access.quotas))
        async with cluster.client("app:one") as one, cluster.client("app:other") as other:
            for name in ("a", "b", "a"):
                await one.send(name, b"x")
            with pytest.raises(QuotaExceeded, match="app:one has created 2 subjects"):
                await one.send("c", b"x")
            with pytest.raises(QuotaExceeded, match="app:one has created 2 subjects"):
                await one.metadata.create_subject(qmq.SubjectConfig("c", created_by="app:other"))
            await other.send("c", b"x")
            # it exists, with the same settings: nothing is created
            await other.metadata.create_subject(qmq.SubjectConfig("a"))
            await one.metadata.delete_subject("a")
            await eventually(lambda: view.subject("a") is None)
            await one.send("d", b"x")
        assert {each.name: each.created_by for each in view.subjects() if each.name in "bcd"} == {
            "b": "app:one",
            "c": "app:other",
            "d": "app:one",
        }


async def test_a_subject_has_so_many_groups_and_no_more(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        await mq.access.put_quota("subject:*", {"groups": 2})
        await eventually(lambda: bool(node.view.access.quotas))
        await mq.send("orders", b"x")
        for group in ("g", "h", "g"):
            async with mq.consumer("orders", group, ack="explicit") as consumer:
                assert (await anext(consumer)).body == b"x"
        async with mq.consumer("orders", "i") as consumer:
            with pytest.raises(QuotaExceeded, match="2 groups"):
                await anext(consumer)


async def test_subjects_that_a_principal_created_have_so_many_groups_together_and_no_more(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path) as cluster:
        for name in ("app:one", "app:other"):
            for kind in ("subject", "group"):
                await cluster.allow(name, "produce,create,consume", kind, "*")
        await cluster.admin.access.put_quota("app:one", {"groups": 2})
        await eventually(lambda: bool(cluster.node.view.access.quotas))
        async with cluster.client("app:one") as one, cluster.client("app:other") as other:
            for mq, name in ((one, "a"), (one, "b"), (other, "c")):
                await mq.send(name, b"x")
            for mq, name, group in (
                (one, "a", "g"),
                (other, "b", "g"),
                (other, "b", "g"),
                (one, "c", "g"),
                (one, "c", "h"),
            ):
                async with mq.consumer(name, group, ack="explicit") as consumer:
                    assert (await anext(consumer)).body == b"x"
            for mq in (one, other):
                async with mq.consumer("a", "h") as consumer:
                    with pytest.raises(QuotaExceeded, match="that app:one created have 2 groups"):
                        await anext(consumer)


def test_of_the_cluster_s_quota_and_a_team_s_the_smaller_limit_holds() -> None:
    quotas = [
        Quota("c", "subject:pay.*", produce_bytes_per_s=100, subjects=2),
        Quota("t", "subject:pay.in.*", produce_bytes_per_s=500, groups=3, subjects=9, is_team=True),
        Quota("n", "namespace:pay.", 1),
        Quota("m", "namespace:pay.in.", 9, is_team=True),
        Quota("p", "app:pay.x", connections=5, is_team=True),
    ]
    found = nearest_of_subject(quotas, "pay.in.a")
    assert found is not None
    assert (found.produce_bytes_per_s, found.groups, found.id) == (100, 3, "c and t")
    assert [each.id for each in nearest_namespaces(quotas, "pay.in.a")] == ["n", "m"]
    assert nearest(quotas, Principal("app", "pay.x"), []) == quotas[-1]
    with pytest.raises(QuotaExceeded, match="quota 'c'"):
        require_room_for(quotas, "pay.in.a", ["pay.x", "pay.y"])


def test_limits_of_a_namespace_hold_at_each_width_by_themselves() -> None:
    quotas = Quotas(
        Quota("n", "namespace:pay.", 1000), Quota("t", "namespace:pay.", 500, is_team=True)
    )
    throttle = Throttle(quotas, lambda: 0.0)
    assert throttle.produced(ORDERS, sent(750, 1, "pay.in")) == pytest.approx(0.5)
    assert throttle.produced(ORDERS, sent(1250, 1, "pay.in")) == pytest.approx(3.0)


async def test_questions_over_the_quota_wait_and_then_are_refused(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        await mq.access.put_quota("*", {"requests_per_s": 5})
        await eventually(lambda: bool(node.view.access.quotas))
        found = await asyncio.gather(
            *[mq.metadata.call("ListPauses", _no_pauses(), retry_s=0) for _ in range(40)],
            return_exceptions=True,
        )
        refused = [each for each in found if isinstance(each, Overloaded)]
        assert refused
        assert refused[0].retry_after_ms
        assert len(refused) < 40


def _no_pauses() -> object:
    from qmq.proto.v1 import meta_pb2

    return meta_pb2.ListPausesRequest()


@pytest.mark.parametrize("limits", [{"connections": -1}, {"produce_bytes_per_s": 1 << 60}])
def test_an_invalid_limit_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="from 0"):
        Quota.of("q", "app:orders", limits)
