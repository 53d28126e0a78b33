"""The behaviour common to all commands (docs/CLI.md): `--json`, `--watch`, exit codes,
completion.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import commands
from support import NodeProcess, cli_process
from typer.main import get_command

import qmq.blocking
from qmq.cli.added_options import (
    SHELLS,
    broker_groups,
    completer_of,
    either,
    groups,
    is_view,
    subjects,
)
from qmq.cli.app import app

pytestmark = pytest.mark.sampled

QMQ = Path(sys.executable).with_name("qmq")
WITHOUT_JSON = {
    "qmq broker": "serves",
    "qmq console": "serves",
    "qmq delay": "serves",
    "qmq dev": "serves",
    "qmq gateway": "serves",
    "qmq lake follow": "serves",
    "qmq meta": "serves",
    "qmq mirror run": "serves",
    "qmq outbox watchdog": "serves",
    "qmq dedup migration": "prints SQL",
    "qmq outbox migration": "prints SQL",
    "qmq etcd protect": "runs etcd's commands",
    "qmq route export": "prints JSON",
    "qmq spark": "hands its words to a job",
}
"""Commands without a JSON answer; docs/CLI.md lists them too."""


def test_every_command_with_an_answer_has_json() -> None:
    found = dict(commands(get_command(app)))
    without = {
        name
        for name, each in found.items()
        if "as_json" not in [parameter.name for parameter in each.params]
    }
    assert without == set(WITHOUT_JSON)
    page = (Path(__file__).resolve().parents[3] / "docs" / "CLI.md").read_text()
    assert [name for name in WITHOUT_JSON if f"`{name}`" not in page] == []


def test_every_view_can_be_watched() -> None:
    views = {
        name: each
        for name, each in commands(get_command(app))
        if is_view(name) and name not in WITHOUT_JSON
    }
    assert {
        "qmq subject list",
        "qmq group lag",
        "qmq delay stats",
        "qmq route show",
        "qmq doctor",
    } <= set(views)
    for name, each in views.items():
        assert {"--watch", "--interval"} <= {
            option for parameter in each.params for option in parameter.opts
        }, name


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with two subjects and a group."""
    node = NodeProcess(tmp_path_factory.mktemp("shop"))
    node.start()
    try:
        with qmq.blocking.connect(node.address) as mq:
            mq.send("orders", b"")
            mq.send("orders-late", b"")
            mq.send("bills", b"")
        consume = ("consume", "orders", "-g", "billing", "-n", "1")
        assert cli_process.run(consume, {**os.environ, "QMQ_SERVER": node.address}).returncode == 0
        yield node
    finally:
        node.kill()


def test_a_view_is_shown_again_and_again_until_ctrl_c(shop: NodeProcess) -> None:
    words = f"subject list watched --watch --interval 0.1 --json --server {shop.address}".split()
    # Who runs the tests may ignore the signal.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "qmq.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline()) == []
        with qmq.blocking.connect(shop.address) as mq:
            mq.send("watched", b"")
        while not json.loads(watching.stdout.readline()):
            pass
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)
        assert watching.returncode == 130


def test_a_view_of_a_missing_prefix_ends_at_once(shop: NodeProcess) -> None:
    done = cli_process.run(
        ("group", "lag", "nothing", "g", "--watch"), {**os.environ, "QMQ_SERVER": shop.address}
    )
    assert (done.returncode, b"there is no subject" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("subject", "list"), 0),
        (("acl", "test", "app:x", "produce", "subject", "orders"), 1),
        (("subject", "list", "--nothing"), 2),
        (("browse", "nowhere-near"), 2),
        (("subject", "list", "--server", "127.0.0.1:1"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_exit_codes_are_those_of_the_page(
    shop: NodeProcess, words: tuple[str, ...], code: int
) -> None:
    assert cli_process.run(words, {**os.environ, "QMQ_SERVER": shop.address}).returncode == code


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    done = cli_process.run(("completion", shell), dict(os.environ))
    assert (done.returncode, b"_QMQ_COMPLETE" in done.stdout) == (0, True)
    (row,) = json.loads(cli_process.run(("completion", shell, "--json"), dict(os.environ)).stdout)
    assert row["script"].strip() == done.stdout.decode().strip()


def test_another_shell_is_refused() -> None:
    done = cli_process.run(("completion", "csh"), dict(os.environ))
    assert (done.returncode, b"bash, zsh, fish" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("qmq brow", {"browse"}),
        ("qmq browse ord", {"orders", "orders-late"}),
        ("qmq group lag orders b", {"billing"}),
        ("qmq subject purge bi", {"bills"}),
        ("qmq broker drain br", {"broker-0"}),
    ],
)
def test_bash_completes_commands_subjects_and_groups(
    shop: NodeProcess, typed: str, found: set[str]
) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    words = typed.split()
    script = cli_process.run(("completion", "bash"), dict(os.environ)).stdout.decode()
    ask = (
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _qmq_completion qmq; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {
        **os.environ,
        "QMQ_SERVER": shop.address,
        "PATH": f"{QMQ.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [bash, "-c", f"{script}\n{ask}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == found, done.stderr


def test_a_cluster_that_does_not_answer_completes_nothing() -> None:
    environment = {
        **os.environ,
        "QMQ_SERVER": "127.0.0.1:1",
        "_QMQ_COMPLETE": "complete_bash",
        "COMP_WORDS": "qmq browse o",
        "COMP_CWORD": "2",
    }
    done = subprocess.run([QMQ], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_parameter_completes_what_it_names() -> None:
    assert (
        completer_of("qmq browse", "subject")
        is completer_of("qmq subject purge", "name")
        is subjects
    )
    assert completer_of("qmq consume", "group") is groups
    assert completer_of("qmq replica add", "group") is broker_groups
    assert completer_of("qmq dlq show", "words") is either
    assert completer_of("qmq context use", "name") is None
