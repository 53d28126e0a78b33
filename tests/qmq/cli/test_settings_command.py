"""`qmq config`: the settings in force, and the origin of each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import cli_process
from typer.main import get_command

from qmq.cli.app import app
from qmq.cli.contexts import HIDDEN, other_variables, settings_of, variables_of
from qmq.cli.output import SERVER


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user without settings."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
    return {**plain, "XDG_CONFIG_HOME": str(tmp_path)}


def settings(environment: dict[str, str], *words: str) -> dict[str, tuple[str, str]]:
    done = cli_process.run(("config", "--json", *words), environment)
    assert done.returncode == 0, done.stderr
    return {each["setting"]: (each["value"], each["from"]) for each in json.loads(done.stdout)}


@pytest.mark.sampled
def test_an_argument_goes_before_a_variable_before_the_context(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert settings(environment)["server"] == (SERVER, "default")
    for name in ("prod", "test"):
        added = cli_process.run(
            (
                "context",
                "add",
                name,
                "--server",
                f"{name}:1",
                "--token-file",
                str(tmp_path / "token"),
            ),
            environment,
        )
        assert added.returncode == 0, added.stderr
    found = settings(environment)
    assert found["server"] == ("prod:1", "context prod")
    assert found["context"] == ("prod", "current context")
    assert found["token file"] == (str(tmp_path / "token"), "context prod")
    found = settings({**environment, "QMQ_CONTEXT": "test"})
    assert found["server"] == ("test:1", "context test")
    assert found["context"] == ("test", "environment")
    assert settings({**environment, "QMQ_SERVER": "other:1"})["server"] == (
        "other:1",
        "environment",
    )
    assert settings({**environment, "QMQ_SERVER": "other:1"}, "--server", "third:1")["server"] == (
        "third:1",
        "argument",
    )


def test_secrets_are_not_shown(environment: dict[str, str]) -> None:
    found = settings(
        {
            **environment,
            "QMQ_TOKEN": "t",
            "QMQ_ETCD_PASSWORD": "p",
            "QMQ_OUTBOX_DB": "postgresql://me:p@db/shop",
        }
    )
    assert {found[name][0] for name in ("token", "etcd password", "outbox db")} == {HIDDEN}


def test_a_variable_that_no_command_reads_is_pointed_out() -> None:
    read_by = variables_of(get_command(app))
    assert {"qmq browse", "qmq subject list"} <= read_by["QMQ_SERVER"]
    (found,) = other_variables({"QMQ_SERVRE": "x", "HOME": "/"}, read_by)
    assert (found.variable, found.origin) == ("QMQ_SERVRE", "environment, but no command reads it")
    assert [each.origin for each in settings_of(None, {}, "", {})] == ["default", *[""] * 7]


def test_a_context_file_that_cannot_be_used_is_an_error_that_names_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "qmq").mkdir()
    file = tmp_path / "qmq" / "contexts.json"
    file.touch(0o600)
    done = cli_process.run(("config",), environment)
    assert (done.returncode, str(file) in done.stderr.decode()) == (2, True)
