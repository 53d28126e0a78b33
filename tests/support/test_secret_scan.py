"""The search for secrets finds those that a test printed, and fails the test."""

from __future__ import annotations

import pytest

from qmq.security.principal import Principal
from qmq.security.tokens import new_token
from support import secret_scan

pytest_plugins = ("pytester",)

TOKEN = new_token(Principal("app", "orders"), by="", now_ms=1).token


@pytest.mark.parametrize(
    "text",
    [
        f"login failed with {TOKEN}",
        "bearer "
        + ".".join(
            ["eyJhbGciOiJFUzI1NiJ9", "eyJzdWIiOiJvcmRlcnMifQ", "c2lnbmF0dXJlLXNpZ25hdHVyZQ"]
        ),
        "-----BEGIN " + "PRIVATE KEY-----",
    ],
    ids=["token", "jwt", "key"],
)
def test_secrets_of_each_form_are_found_and_not_shown(text: str) -> None:
    found = secret_scan.found_in(text)
    assert found
    assert len(found) < 20


def test_what_looks_like_one_is_not_one() -> None:
    assert (
        secret_scan.found_in(
            "qmq_group_lag{group='g'} eyJ PRIVATE KEY of app:orders qmq_0123456789ab"
        )
        == ""
    )


def test_a_planted_value_is_found() -> None:
    secret = secret_scan.plant("correct horse " + "battery staple")
    assert secret_scan.found_in(f"ETCD_PASSWORD={secret}")


@pytest.mark.prints_secrets
@pytest.mark.parametrize(("body", "failed"), [("print({token!r})", 1), ("pass", 0)])
def test_a_test_that_prints_a_secret_fails(
    pytester: pytest.Pytester, body: str, failed: int
) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest("from support.secret_scan import pytest_runtest_makereport")
    pytester.makepyfile("def test_it():\n    " + body.format(token=TOKEN))
    outcomes = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:qmq"
    ).parseoutcomes()
    assert outcomes.get("errors", 0) + outcomes.get("failed", 0) == failed
