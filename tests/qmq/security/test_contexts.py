"""Contexts: a cluster by its name, for the command line and for programs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from support import NodeProcess
from typer.testing import CliRunner

import qmq
from qmq.cli.app import app
from qmq.errors import InvalidArgument
from qmq.security.contexts import ClusterContext, ContextFile, environment_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without contexts, and an environment that names nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in (
        "QMQ_CONTEXT",
        "QMQ_SERVER",
        "QMQ_TLS_CA",
        "QMQ_TLS_CERT",
        "QMQ_TLS_KEY",
        "QMQ_TOKEN",
        "QMQ_TOKEN_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config" / "qmq" / "contexts.json"


def test_the_file_is_its_owners_only_and_one_that_others_read_is_refused(home: Path) -> None:
    file = ContextFile.of_user()
    file.add(ClusterContext("here", "localhost:1"))
    assert stat.S_IMODE(home.stat().st_mode) == 0o600
    home.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        file.load()


def test_the_first_context_is_the_current_one_until_another_is_used(home: Path) -> None:
    file = ContextFile.of_user()
    for name in ("a", "b"):
        file.add(ClusterContext(name, f"{name}:1"))
    assert file.load()[0] == "a"
    file.use("b")
    file.remove("a")
    assert list(file.load()[1]) == ["b"]
    file.remove("b")
    assert file.load() == ("", {})
    with pytest.raises(InvalidArgument, match="no context 'b'"):
        file.use("b")


def test_a_variable_goes_before_the_context(home: Path) -> None:
    ContextFile.of_user().add(ClusterContext("a", "a:1", "ca.pem", "cert.pem", "key.pem", "token"))
    found = environment_of({"XDG_CONFIG_HOME": str(home.parents[1]), "QMQ_CONTEXT": "a"})
    assert (found["QMQ_SERVER"], found["QMQ_TLS_CA"], found["QMQ_TOKEN_FILE"]) == (
        "a:1",
        "ca.pem",
        "token",
    )
    given = {
        "XDG_CONFIG_HOME": str(home.parents[1]),
        "QMQ_CONTEXT": "a",
        "QMQ_SERVER": "b:1",
        "QMQ_TLS_CA": "x",
        "QMQ_TOKEN": "t",
    }
    assert environment_of(given) == given


def test_programs_use_no_context_that_they_did_not_name(home: Path) -> None:
    ContextFile.of_user().add(ClusterContext("a", "a:1"))
    assert "QMQ_SERVER" not in environment_of()
    assert environment_of(uses_current=True)["QMQ_SERVER"] == "a:1"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"current": "", "contexts": {"a": {"colour": "red"}}}']
)
def test_a_damaged_file_is_named(home: Path, content: str) -> None:
    home.parent.mkdir(parents=True)
    home.write_text(content)
    home.chmod(0o600)
    with pytest.raises(InvalidArgument, match=r"contexts\.json"):
        ContextFile.of_user().load()


def test_the_command_line_goes_where_the_current_context_says(
    home: Path, node_process: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    address = node_process.start()

    def say(*words: str) -> str:
        with monkeypatch.context():
            done = runner.invoke(
                app, list(words), env=dict.fromkeys(("QMQ_SERVER", "QMQ_TOKEN_FILE"))
            )
        assert done.exit_code == 0, done.output
        return done.output

    say("context", "add", "here", "--server", address)
    made = json.loads(say("user", "token", "op:alice", "--json"))[0]
    token = home.parent / "token"
    token.write_text(made["token"])
    say("context", "add", "here", "--server", address, "--token-file", str(token))
    assert json.loads(say("whoami", "--json"))[0]["principal"] == "op:alice"
    assert json.loads(say("context", "list", "--json"))[0]["current"] == "*"


async def test_a_program_that_names_a_context_goes_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ContextFile.of_user().add(ClusterContext("far", "192.0.2.1:1"))
    monkeypatch.setenv("QMQ_CONTEXT", "far")
    async with qmq.connect() as mq:
        assert mq.addresses == ["192.0.2.1:1"]
