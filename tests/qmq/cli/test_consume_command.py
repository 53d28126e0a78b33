"""`qmq consume` and `qmq produce`: keys of any bytes, and nodes that do not answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Command
from support import NodeProcess

import qmq.blocking
from qmq.client.consuming.ack_spool import user_state_folder
from qmq.errors import InvalidArgument
from qmq.security.contexts import ClusterContext, ContextFile

NO_NODE = "127.0.0.1:1"


@pytest.mark.parametrize("words", ["--timeout 0.1 --count 1", ""])
def test_consuming_fails_when_no_node_answers(words: str) -> None:
    done = Command(NO_NODE)("consume", "orders", "--group", "g", *words.split())
    assert (done.exit_code, done.stdout, bool(done.stderr)) == (3, "", True)


def test_producing_fails_after_the_time_that_is_given(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\n")
    done = Command(NO_NODE)("produce", "orders", "--file", str(lines), "--timeout", "0.1")
    assert (done.exit_code, done.stdout, bool(done.stderr)) == (3, "", True)


def test_a_key_of_any_bytes_is_printed_as_other_commands_print_it(
    node_process: NodeProcess,
) -> None:
    command = Command(node_process.start())
    with qmq.blocking.connect(node_process.address, state_dir=False) as mq:
        for key in (b"\xff\x00\x80", b"plain", None):
            mq.send("orders", b"0", key=key)
    consumed = [
        json.loads(each)["key"]
        for each in command.text("consume", "orders", "-g", "g", "-n", "3", "--json").splitlines()
    ]
    browsed = [
        json.loads(each)["key"] for each in command.text("browse", "orders", "--json").splitlines()
    ]
    assert (consumed, consumed[1:]) == (browsed, ["plain", None])


def test_a_user_without_a_home_folder_has_no_contexts_and_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    contexts = ContextFile.of_user({})
    assert contexts.load() == ("", {})
    with pytest.raises(InvalidArgument, match="set HOME or XDG_CONFIG_HOME"):
        contexts.add(ClusterContext("prod", "m:1"))
    with pytest.raises(InvalidArgument, match="set HOME or XDG_STATE_HOME"):
        user_state_folder({})
    assert user_state_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/qmq")
