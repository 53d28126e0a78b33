"""`qmq acl`, `role`, `user`, `quota` and `whoami`, as an administrator uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import NodeProcess
from typer.testing import CliRunner

from qmq.cli.app import app

pytestmark = pytest.mark.sampled

Say = Callable[..., Any]


@pytest.fixture
def say(node_process: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs a command against a node, and gives what it printed: parsed, if that is JSON."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    runner, address = CliRunner(), node_process.start()

    def run(line: str, *, token: str = "", status: int = 0) -> Any:
        done = runner.invoke(
            app,
            line.split(),
            env={"QMQ_SERVER": address, "QMQ_TOKEN": token or None, "QMQ_TOKEN_FILE": None},
        )
        assert done.exit_code == status, f"{line}: {done.output}"
        text = done.output.strip()
        return json.loads(text) if text.startswith(("[", "{")) else text

    return run


def test_an_administrator_closes_a_cluster_and_opens_it_for_one_application(say: Say) -> None:
    admin, orders = (say(f"user token {name}") for name in ("op:alice", "app:orders"))
    for kind in ("cluster", "subject", "group"):
        say(f"acl allow op:alice * {kind}")
    say("acl mode watch", token=admin)
    assert say("acl mode enforce", token=admin) == "mode: watch -> enforce"

    assert "QMQ_TOKEN" in say("subject create orders", status=2)
    assert "create on subject orders" in say("subject create orders", token=orders, status=2)
    assert "administer on cluster" in say("acl list", token=orders, status=2)
    made = say("acl allow role:shops produce,create subject orders* --json", token=admin)
    assert say("role add shops app:orders", token=admin) == "shops: app:orders"
    say("subject create orders", token=orders)
    (told,) = say("whoami --json", token=orders)
    assert (told["principal"], told["known_by"], told["roles"], told["administers"]) == (
        "app:orders",
        "token",
        "shops",
        "no",
    )

    (decision,) = say("acl test app:orders produce subject orders.new --json", token=admin)
    assert (decision["answer"], decision["decided_by"], decision["roles"]) == (
        "allowed",
        made[0]["rule"],
        "shops",
    )
    (decision,) = say("acl test node:b0 produce subject orders.new --json", token=admin)
    assert (decision["answer"], decision["decided_by"]) == ("allowed", "a server")
    assert "no rule" in say("acl test app:orders consume subject orders.new", token=admin, status=1)
    say("acl deny app:orders * subject orders.old --id no-old", token=admin)
    (decision,) = say(
        "acl test app:orders produce subject orders.old --json", token=admin, status=1
    )
    assert decision["decided_by"] == "no-old"
    assert {each["rule"] for each in say("acl list --json", token=admin)} >= {
        "no-old",
        made[0]["rule"],
    }
    say("acl remove no-old", token=admin)
    assert say("role remove shops app:orders", token=admin) == "shops: no members"
    assert say("role list --json", token=admin) == []

    assert {each["principal"] for each in say("user list --json", token=admin)} == {
        "op:alice",
        "app:orders",
    }
    assert say("user revoke app:orders", token=admin).startswith("revoked: ")
    assert "revoked" in say("whoami", token=orders, status=2)


def test_an_administrator_sets_and_takes_away_limits(say: Say) -> None:
    (made, *_) = say("quota set app:* produce_bytes_per_s=1000000 connections=5 --json")
    rows = say("quota list --json")
    assert {(each["limit"], each["value"]) for each in rows} == {
        ("produce_bytes_per_s", 1_000_000),
        ("connections", 5),
    }
    say(f"quota remove {made['quota']}")
    say("quota set subject:team-a.* subjects=50 groups=3 delayed_messages=1000")
    rows = say("quota list --json")
    assert {(each["limit"], each["value"]) for each in rows} == {
        ("subjects", 50),
        ("groups", 3),
        ("delayed_messages", 1000),
    }
    say(f"quota remove {rows[0]['quota']}")
    assert say("quota list --json") == []
    (row,) = say("quota set app:* delayed_messages=1 --json")
    assert (row["limit"], row["set_by"]) == ("delayed_messages", "cluster")


def test_a_token_may_end_and_is_shown_once(say: Say) -> None:
    (made,) = say("user token app:orders --for 90d --json")
    assert made["token"].startswith("qmq_")
    (listed,) = say("user list --json")
    assert listed["ends"] != "never"
    assert made["token"] not in json.dumps(listed)


REFUSED = {
    "acl allow orders produce subject a": "app, op",
    "acl allow app:orders fly subject a": "produce, consume",
    "acl allow app:orders produce planet a": "a subject, a group, a namespace or the cluster",
    "acl remove nothing": "no rule",
    "acl mode sometimes": "off, watch or enforce",
    "user token node:b0": "certificate",
    "user revoke app:nobody": "no such token",
}


def test_what_makes_no_sense_is_refused_and_says_what_does(say: Say) -> None:
    for line, said in REFUSED.items():
        assert said in " ".join(say(line, status=2).split()), line
