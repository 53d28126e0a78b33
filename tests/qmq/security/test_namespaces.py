"""A team administers its own namespace: rules, roles and tokens below its prefix, and nothing
else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from access_support import Cluster, guarded
from support import eventually

import qmq
from qmq.errors import AccessDenied, InvalidArgument, InvalidName, QuotaExceeded
from qmq.meta import access
from qmq.security.access_rules import (
    AccessRule,
    Operation,
    ResourceKind,
    decide,
    on_cluster,
    on_namespace,
)

BOB = "op:bob"
ADMINISTER = frozenset({Operation.ADMINISTER})


@asynccontextmanager
async def team(tmp_path: Path) -> AsyncIterator[tuple[Cluster, qmq.Client]]:
    """A cluster, and the client of Bob, who administers `pay.`"""
    async with guarded(tmp_path) as cluster:
        await cluster.allow(BOB, "administer", "namespace", "pay.")
        async with cluster.client(BOB) as bob:
            yield cluster, bob


async def test_a_team_lets_its_own_applications_in_without_the_cluster_s_administrator(
    tmp_path: Path,
) -> None:
    async with team(tmp_path) as (cluster, bob):
        for kind in ("subject", "group"):
            await bob.access.put_rule("role:pay.services", [], kind, "pay.*")
        await bob.access.change_role("pay.services", add=["app:pay.checkout"])
        made = await bob.access.create_token("app:pay.checkout")
        view = cluster.node.view.access
        await eventually(
            lambda: (
                made.info.id in view.tokens
                and "pay.services" in view.roles
                and len(view.rules) == 6
            )
        )
        async with qmq.connect(cluster.node.address, token=made.token) as checkout:
            await checkout.send("pay.new", b"1")
            assert (await anext(checkout.consumer("pay.new", group="pay.g"))).body == b"1"
            with pytest.raises(AccessDenied):
                await checkout.send("orders", b"1")
        assert (
            await bob.access.test("app:pay.checkout", "produce", "subject", "pay.new")
        ).is_allowed
        assert await bob.access.delete_tokens(token_id=made.info.id) == [made.info.id]


async def test_a_team_sets_quotas_of_its_own_within_the_cluster_s(tmp_path: Path) -> None:
    async with team(tmp_path) as (cluster, bob):
        given = await cluster.admin.access.put_quota("subject:pay.*", {"subjects": 1, "groups": 2})
        own = await bob.access.put_quota("subject:pay.*", {"subjects": 9, "groups": 1})
        for principal in ("app:pay.checkout", "namespace:pay.", "subject:pay.in"):
            assert (await bob.access.put_quota(principal, {"produce_messages_per_s": 1000})).is_team
        view = cluster.node.view.access
        await eventually(lambda: len(view.quotas) == 5)
        assert own.is_team
        assert not given.is_team
        assert {each.id for each in await bob.access.quotas("pay.")} >= {given.id, own.id}
        limits = cluster.node.access.subject_quota("pay.x")
        assert (limits.subjects, limits.groups) == (1, 1), (
            "its own quota lets no team out of the cluster's"
        )
        await bob.access.delete_quota(own.id)
        await eventually(lambda: own.id not in view.quotas)


Act = Callable[[qmq.Client], Any]
BEYOND: dict[str, Act] = {
    "a subject of others": lambda mq: mq.access.put_rule(BOB, [], "subject", "orders"),
    "a wider pattern": lambda mq: mq.access.put_rule(BOB, [], "subject", "pay*"),
    "every subject": lambda mq: mq.access.put_rule(BOB, [], "subject"),
    "a group of others": lambda mq: mq.access.put_rule(BOB, [], "group", "billing"),
    "the cluster": lambda mq: mq.access.put_rule(BOB, ["administer"], "cluster"),
    "the cluster under a namespace's pattern": lambda mq: mq.access.put_rule(
        BOB, ["administer"], "cluster", "pay.x"
    ),
    "another namespace": lambda mq: mq.access.put_rule(BOB, ["administer"], "namespace", "orders."),
    "a rule of others, by its id": lambda mq: mq.access.put_rule(
        BOB, [], "subject", "pay.x", rule_id="others"
    ),
    "the end of a rule of others": lambda mq: mq.access.delete_rule("others"),
    "the end of a rule that is not there": lambda mq: mq.access.delete_rule("nothing"),
    "a role of others": lambda mq: mq.access.change_role("admins", add=[BOB]),
    "an application of others": lambda mq: mq.access.create_token("app:orders"),
    "a person": lambda mq: mq.access.create_token("op:pay.alice"),
    "tokens of others": lambda mq: mq.access.delete_tokens(principal="op:admin"),
    "a quota of everybody": lambda mq: mq.access.put_quota("*", {"connections": 9}),
    "a quota of a role, which may have members of others": lambda mq: mq.access.put_quota(
        "role:pay.services", {"connections": 9}
    ),
    "a quota of a person": lambda mq: mq.access.put_quota("op:pay.alice", {"connections": 9}),
    "a quota of subjects of others": lambda mq: mq.access.put_quota(
        "subject:pay*", {"subjects": 9}
    ),
    "a quota of another namespace": lambda mq: mq.access.put_quota(
        "namespace:orders.", {"produce_bytes_per_s": 9}
    ),
    "the cluster's quota for itself, by its id": lambda mq: mq.access.put_quota(
        "subject:pay.*", {"subjects": 9}, quota_id="given"
    ),
    "the end of the cluster's quota for itself": lambda mq: mq.access.delete_quota("given"),
    "the mode": lambda mq: mq.access.set_mode("off"),
    "all rules": lambda mq: mq.access.rules(),
    "all tokens": lambda mq: mq.access.tokens(),
    "all quotas": lambda mq: mq.access.quotas(),
    "what others may": lambda mq: mq.access.test("app:orders", "produce", "subject", "orders"),
}


async def test_a_team_changes_and_sees_nothing_beyond_its_namespace(tmp_path: Path) -> None:
    async with team(tmp_path) as (cluster, bob):
        await cluster.admin.access.put_rule("app:x", [], "subject", "orders", rule_id="others")
        await cluster.admin.access.put_quota("subject:pay.*", {"subjects": 1}, quota_id="given")
        await eventually(lambda: "others" in cluster.node.view.access.rules)
        before = dict(cluster.node.view.access.rules)
        for what, act in BEYOND.items():
            with pytest.raises(AccessDenied):
                await act(bob)
                pytest.fail(f"Bob may change or see {what}")
        assert cluster.node.view.access.rules == before
        assert cluster.node.view.access.mode.value == "enforce"


async def test_a_team_refused_the_clusters_list_hears_how_to_list_its_own(tmp_path: Path) -> None:
    async with team(tmp_path) as (cluster, bob):
        for listed in (bob.access.rules, bob.access.tokens, bob.access.quotas):
            with pytest.raises(AccessDenied, match=r"`--namespace pay\.` lists what is below it"):
                await listed()
        with pytest.raises(AccessDenied) as said:
            await bob.access.set_mode("off")
        assert "--namespace" not in said.value.message
        async with cluster.client("app:nobody") as nobody:
            with pytest.raises(AccessDenied) as said:
                await nobody.access.rules()
        assert "--namespace" not in said.value.message


async def test_a_team_sees_its_own_rules_roles_tokens_and_quotas(tmp_path: Path) -> None:
    async with team(tmp_path) as (cluster, bob):
        await cluster.admin.access.put_quota("namespace:pay.", {"produce_bytes_per_s": 9})
        await cluster.admin.access.put_quota("app:orders", {"connections": 9})
        await bob.access.put_rule("app:pay.x", ["produce"], "subject", "pay.*")
        await bob.access.change_role("pay.r", add=["app:pay.x"])
        await bob.access.create_token("app:pay.x")
        view = cluster.node.view.access
        await eventually(
            lambda: (
                len(view.quotas) == 2
                and "pay.r" in view.roles
                and len(view.rules) == 5
                and len(view.tokens) == 3
            )
        )
        found = await bob.access.rules("pay.")
        assert {(each.kind, each.pattern) for each in found.rules} == {
            ("namespace", "pay."),
            ("subject", "pay.*"),
        }
        assert [each.name for each in found.roles] == ["pay.r"]
        assert [each.principal for each in await bob.access.tokens("pay.")] == ["app:pay.x"]
        assert [each.principal for each in await bob.access.quotas("pay.")] == ["namespace:pay."]


async def test_a_team_hands_a_part_of_its_namespace_on_and_does_not_lock_itself_out(
    tmp_path: Path,
) -> None:
    async with team(tmp_path) as (cluster, bob):
        await bob.access.put_rule("op:carol", ["administer"], "namespace", "pay.in.")
        own = next(
            each.id for each in (await bob.access.rules("pay.")).rules if each.principal == BOB
        )
        with pytest.raises(InvalidArgument, match=r"namespace pay\."):
            await bob.access.delete_rule(own)
        async with cluster.client("op:carol") as carol:
            await carol.access.put_rule("app:pay.in.x", ["produce"], "subject", "pay.in.*")
            with pytest.raises(AccessDenied):
                await carol.access.put_rule("app:pay.in.x", ["produce"], "subject", "pay.*")


async def test_a_namespace_has_so_many_records_and_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "NAMESPACE_RECORDS_MAX", 3)
    async with team(tmp_path) as (cluster, bob):
        await bob.access.put_rule("op:carol", ["administer"], "namespace", "pay.in.")
        await eventually(lambda: len(cluster.node.view.access.rules) == 5)
        async with cluster.client("op:carol") as carol:
            await cluster.allow("app:pay.1", "produce", "subject", "pay.1")
            with pytest.raises(QuotaExceeded, match=r"namespace pay\."):
                await carol.access.put_rule("app:pay.2", ["produce"], "subject", "pay.in.2")
        await cluster.allow("app:orders", "produce", "subject", "orders")


async def test_a_namespace_is_a_prefix_and_is_administered_only(tmp_path: Path) -> None:
    wrong: list[tuple[list[str], str]] = [
        (["produce"], "pay."),
        ([], "pay."),
        (["administer"], "*"),
        (["administer"], "pay.*"),
    ]
    async with guarded(tmp_path) as cluster:
        for operations, pattern in wrong:
            with pytest.raises((InvalidArgument, InvalidName)):
                await cluster.admin.access.put_rule(BOB, operations, "namespace", pattern)


def rule(
    kind: ResourceKind,
    pattern: str,
    *,
    is_deny: bool = False,
    operations: frozenset[Operation] = ADMINISTER,
) -> AccessRule:
    return AccessRule("r", is_deny, BOB, operations, kind, pattern)


PAY = rule(ResourceKind.NAMESPACE, "pay.")
ALL = rule(ResourceKind.CLUSTER, "*")
NOT_ALL = rule(ResourceKind.CLUSTER, "*", is_deny=True)
NOT_KEYS = rule(ResourceKind.NAMESPACE, "pay.keys.", is_deny=True)
OPERATE = rule(ResourceKind.CLUSTER, "*", operations=frozenset({Operation.OPERATE}))
EVERYTHING_ON_SUBJECTS = rule(ResourceKind.SUBJECT, "*", operations=frozenset())


@pytest.mark.parametrize(
    ("rules", "prefix", "is_allowed"),
    [
        ([PAY], "pay.x", True),
        ([PAY], "pay", False),
        ([PAY], "", False),
        ([ALL], "pay.", True),
        ([OPERATE], "pay.", False),
        ([EVERYTHING_ON_SUBJECTS], "pay.", False),
        ([ALL, NOT_KEYS], "pay.keys.x", False),
        ([ALL, NOT_KEYS], "pay.", False),
        ([ALL, NOT_KEYS], "pay.other", True),
        ([PAY, NOT_ALL], "pay.", False),
    ],
)
def test_a_namespace_is_administered_by_rules_on_it_around_it_or_on_the_cluster(
    rules: list[AccessRule], prefix: str, is_allowed: bool
) -> None:
    assert decide(rules, on_namespace(prefix)).is_allowed is is_allowed
    assert not decide([PAY], on_cluster(Operation.ADMINISTER)).is_allowed
