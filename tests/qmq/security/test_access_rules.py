"""Several rules together. Pure."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidArgument, InvalidName, NotAuthenticated
from qmq.security.access_rules import (
    AccessRule,
    Need,
    Operation,
    ResourceKind,
    RuleBook,
    on_cluster,
    on_group,
    on_subject,
)
from qmq.security.principal import CertificateNames, Principal, PrincipalField, PrincipalRule
from qmq.security.quotas import Quota, RateMeter, nearest
from qmq.security.tokens import check_token, digest_of, id_of, new_token

ORDERS = Principal("app", "orders")
ALICE = Principal("op", "alice")


def rule(text: str, number: int = 0) -> AccessRule:
    """ "allow app:orders produce,consume subject billing.*" as a rule."""
    effect, principal, operations, kind, *pattern = text.split()
    named = frozenset(Operation(each) for each in operations.split(",") if each != "*")
    return AccessRule(
        f"r{number}", effect == "deny", principal, named, ResourceKind(kind), *(pattern or ["*"])
    ).check()


def book(*rules: str, **roles: set[str]) -> RuleBook:
    found = [rule(text, number) for number, text in enumerate(rules)]
    return RuleBook(
        {each.id: each for each in found},
        {name: frozenset(members) for name, members in roles.items()},
    )


def allows(found: RuleBook, principal: Principal, need: Need) -> bool:
    return found.decide(principal, need).is_allowed


def test_what_no_rule_allows_is_denied() -> None:
    assert not allows(book(), ORDERS, on_subject(Operation.PRODUCE, "a"))
    assert not allows(
        book("allow app:orders consume subject *"), ORDERS, on_subject(Operation.PRODUCE, "a")
    )
    assert not allows(
        book("allow app:orders produce subject a"), ALICE, on_subject(Operation.PRODUCE, "a")
    )
    assert not allows(
        book("allow app:orders produce group a"), ORDERS, on_subject(Operation.PRODUCE, "a")
    )


def test_a_rule_covers_a_name_a_prefix_or_everything() -> None:
    found = book(
        "allow app:orders produce subject billing.*", "allow app:orders consume subject one"
    )
    assert allows(found, ORDERS, on_subject(Operation.PRODUCE, "billing.new"))
    assert not allows(found, ORDERS, on_subject(Operation.PRODUCE, "billing"))
    assert allows(found, ORDERS, on_subject(Operation.CONSUME, "one"))
    assert not allows(found, ORDERS, on_subject(Operation.CONSUME, "one.more"))
    assert allows(book("allow app:* * subject *"), ORDERS, on_subject(Operation.DELETE, "x"))


@given(
    st.permutations(
        [
            "allow app:orders * subject *",
            "deny app:orders produce subject pay.*",
            "allow * produce subject pay.in",
        ]
    )
)
def test_a_rule_that_denies_wins_whatever_the_order(rules: list[str]) -> None:
    found = book(*rules)
    decision = found.decide(ORDERS, on_subject(Operation.PRODUCE, "pay.in"))
    assert not decision.is_allowed
    assert decision.rule is not None
    assert decision.rule.is_deny
    assert allows(found, ORDERS, on_subject(Operation.PRODUCE, "other"))


def test_members_of_a_role_may_what_the_role_may() -> None:
    found = book("allow role:ops operate cluster", ops={"op:alice"})
    assert allows(found, ALICE, on_cluster(Operation.OPERATE))
    assert not allows(found, ORDERS, on_cluster(Operation.OPERATE))
    assert found.roles_of(ALICE) == ["ops"]


def test_who_may_do_something_may_describe_it_unless_that_is_denied() -> None:
    assert allows(
        book("allow app:orders produce subject a"), ORDERS, on_subject(Operation.DESCRIBE, "a")
    )
    denied = book("allow app:orders produce subject a", "deny app:orders describe subject a")
    assert not allows(denied, ORDERS, on_subject(Operation.DESCRIBE, "a"))


def test_servers_may_do_everything_and_no_rule_makes_a_server() -> None:
    assert allows(book(), Principal("node", "b0"), on_cluster(Operation.REPLICATE))
    assert not allows(book("allow app:orders * cluster"), ORDERS, on_cluster(Operation.REPLICATE))
    with pytest.raises(InvalidArgument, match="certificate"):
        rule("allow app:orders replicate cluster")


def test_dead_letters_belong_to_their_group() -> None:
    found = book("allow app:orders browse group billing")
    assert allows(found, ORDERS, on_subject(Operation.BROWSE, "%dlq%billing"))
    assert not allows(found, ORDERS, on_subject(Operation.BROWSE, "%dlq%other"))
    assert on_group(Operation.CONSUME, "billing%host-1").name == "billing"


@pytest.mark.parametrize(
    "text",
    [
        "allow orders produce subject a",
        "allow app:a*b produce subject a",
        "allow app:a produce subject a*b",
        "allow role: produce subject a",
    ],
)
def test_a_rule_without_a_meaning_is_refused(text: str) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        rule(text)


# --- who ------------------------------------------------------------------------------------------


def test_a_certificate_names_its_principal() -> None:
    names = CertificateNames.of_peer(
        {
            "subject": ((("commonName", "billing"),),),
            "subjectAltName": (("URI", "spiffe://qmq/app/orders"), ("DNS", "orders.example")),
        }
    )
    assert PrincipalRule().principal(names) == ORDERS
    assert PrincipalRule(PrincipalField.DNS).principal(names) == Principal("app", "orders.example")
    assert PrincipalRule(PrincipalField.COMMON_NAME).principal(names) == Principal("app", "billing")
    assert PrincipalRule(PrincipalField.EMAIL).principal(names) is None


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://qmq/boss/x",
        "spiffe://qmq/app/",
        "https://qmq/app/x",
        "spiffe://qmq/app/a/b",
        "spiffe://q/app/a b",
    ],
)
def test_a_certificate_without_a_name_is_anonymous(uri: str) -> None:
    assert PrincipalRule().principal(CertificateNames(uris=(uri,))) is None


def test_a_token_is_known_by_its_digest_only() -> None:
    made = new_token(ORDERS, by="op:alice", now_ms=5)
    assert made.token not in repr(made)
    assert made.token not in repr(made.record)
    assert id_of(made.token) == made.record.id
    assert check_token(made.token, made.record, 10) == ORDERS
    for wrong in (
        made.token[:-1] + ("A" if made.token[-1] != "A" else "B"),
        made.token.upper(),
        "",
        digest_of(made.token),
    ):
        with pytest.raises(NotAuthenticated):
            check_token(wrong, made.record, 10)
    with pytest.raises(NotAuthenticated):
        check_token(made.token, None, 10)


def test_a_token_that_is_not_known_costs_the_work_of_one_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, sha256, compare = new_token(ORDERS, by="", now_ms=5), hashlib.sha256, hmac.compare_digest
    work = list[str]()
    monkeypatch.setattr(
        hashlib, "sha256", lambda data: work.append(f"hash {len(data)}") or sha256(data)
    )
    monkeypatch.setattr(
        hmac,
        "compare_digest",
        lambda one, other: work.append(f"compare {len(one)} {len(other)}") or compare(one, other),
    )
    wrong = made.token[:-1] + ("A" if made.token[-1] != "A" else "B")
    said = list[tuple[str, list[str]]]()
    for record in (made.record, None):
        with pytest.raises(NotAuthenticated) as refused:
            check_token(wrong, record, 10)
        said.append((str(refused.value), work[:]))
        work.clear()
    assert said[0] == said[1]
    assert said[0][1] == [f"hash {len(wrong)}", "compare 64 64"]


def test_a_token_ends_when_it_says_so() -> None:
    made = new_token(ORDERS, by="", now_ms=5, ends_ms=100)
    assert check_token(made.token, made.record, 99) == ORDERS
    with pytest.raises(NotAuthenticated, match="expired"):
        check_token(made.token, made.record, 100)


def test_servers_get_no_tokens() -> None:
    with pytest.raises(InvalidArgument, match="certificate"):
        new_token(Principal("node", "b0"), by="", now_ms=0)


# --- how much -------------------------------------------------------------------------------------


def test_the_nearest_quota_holds() -> None:
    quotas = [
        Quota(name, name, 1) for name in ("*", "app:*", "app:ord*", "role:team", "app:orders")
    ]
    assert [nearest(quotas[:count], ORDERS, ["team"]) for count in range(1, 6)] == quotas
    assert nearest(quotas[1:], ALICE, []) is None


@given(st.lists(st.tuples(st.integers(1, 5_000_000), st.floats(0, 3)), max_size=50))
def test_a_meter_lets_through_no_more_than_the_rate_and_one_second_of_it(
    takes: list[tuple[int, float]],
) -> None:
    rate, now_s, taken = 1_000_000, 0.0, 0
    meter = RateMeter(rate, now_s)
    for amount, waits_s in takes:
        now_s += waits_s
        now_s += meter.take(0, now_s)  # nothing is taken before what is owed has passed
        taken += amount
        meter.take(amount, now_s)
    assert taken <= rate * (now_s + 1) + max([amount for amount, _ in takes], default=0) + 1
