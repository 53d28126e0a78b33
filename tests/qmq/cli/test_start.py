"""What a command loads before it works: third-party packages by name, because how long they take
depends on the machine. The table of commands says what the commands say themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import serving
from typer.main import get_command

import qmq
from qmq.cli.app import COMMANDS, app, loaded
from qmq.cli.output import SENTENCE_CHARS_MAX, CommandGroup
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

OF_TYPER = {"annotated_doc", "click", "rich", "shellingham", "typer", "typing_extensions"}
OF_GRPC = {"google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_tools"}
OF_CLIENTS = {"google_crc32c", "tenacity", "uvloop"}
OF_NODES = {"cronsim", "msgspec", "numpy"}
LATE = {"qmq.client.client", "qmq.console.app", "qmq.gateway.server", "rich.progress"}
"""Modules that few commands need, or a node at the first request for them."""

PROGRAM = """
import gc, json, os, signal, sys, threading
before = set(sys.modules)
def tell():
    new = set(sys.modules) - before
    print(json.dumps({"modules": sorted(new), "collects": gc.isenabled()}), flush=True)
def tell_and_end():
    sys.stdin.readline()
    tell()
    os.kill(os.getpid(), signal.SIGTERM)
is_server = sys.argv[1] == "dev"
if is_server:
    threading.Thread(target=tell_and_end, daemon=True).start()
from qmq.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
if not is_server:
    tell()
"""
"""Runs the command line, and prints the modules that it has loaded, and whether the collector of
garbage works; a server prints that as soon as a line comes on its standard input.
"""


def packages(told: dict[str, Any]) -> set[str]:
    """The third-party packages among the modules."""
    names = {each.partition(".")[0] for each in told["modules"]}
    return {
        each
        for each in names - sys.stdlib_module_names - {"cython_runtime"}
        if not each.startswith(("_", "qmq"))
    }


def run(*words: str, **variables: str) -> tuple[list[str], dict[str, Any]]:
    """The lines of standard output, and what the program says of itself."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    *lines, told = done.stdout.splitlines()
    return lines, json.loads(told)


def test_the_version_is_told_without_any_library() -> None:
    lines, told = run("--version")
    assert lines == [qmq.__version__]
    assert packages(told) == set()
    assert "qmq.cli.app" not in told["modules"]


def test_the_list_of_commands_loads_no_command() -> None:
    _, told = run("--help")
    assert packages(told) <= OF_TYPER
    places = {each.place.partition(":")[0] for each in COMMANDS.values()}
    assert places & set(told["modules"]) == {"qmq.cli.added_options"}


def test_a_question_to_the_metaservers_loads_no_client_and_no_checks_of_values() -> None:
    with serving() as (meta, address):
        settings = pb.SubjectSettings(name="orders")
        meta.answers["ListSubjects"] = pb.ListSubjectsResponse(
            subjects=[pb.SubjectDescription(settings=settings)]
        )
        meta.answers["DescribeGroups"] = control.DescribeGroupsResponse(
            groups=[control.Group(subject="orders", group="billing")]
        )
        lines, told = run("group", "lag", "orders", "billing", QMQ_SERVER=address)
    assert lines
    assert packages(told) <= OF_TYPER | OF_GRPC | OF_CLIENTS
    assert LATE & set(told["modules"]) == set()
    assert told["collects"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`qmq dev` on free ports."""
    words = ["dev", "--data", str(tmp_path / "data"), "--console-port", "0"]
    for each in ("--port", "--data-port", "--control-port"):
        words += [each, "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_an_idle_node_has_loaded_no_console_and_no_gateway(node: subprocess.Popen[str]) -> None:
    assert node.stdin is not None
    assert node.stdout is not None
    assert node.stdout.readline().startswith("qmq is ready at ")
    assert node.stdout.readline().startswith("the console is at ")
    node.stdin.write("\n")
    node.stdin.flush()
    told = json.loads(node.stdout.readline())
    assert packages(told) <= OF_TYPER - {"rich"} | OF_GRPC | OF_CLIENTS | OF_NODES
    assert LATE & set(told["modules"]) == set()
    assert told["collects"]
    assert node.wait(60) == 0


def test_the_table_says_the_first_sentence_of_each_command() -> None:
    found = {name: loaded(name).get_short_help_str(SENTENCE_CHARS_MAX) for name in COMMANDS}
    assert found == {name: each.about for name, each in COMMANDS.items()}


def test_a_command_is_looked_up_by_its_name_only() -> None:
    root = get_command(app)
    assert isinstance(root, CommandGroup)
    assert list(root.commands) == list(COMMANDS)
    assert root.commands["group"] is loaded("group")
    assert root.commands.get("groups") is None
