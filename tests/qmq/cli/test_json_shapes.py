"""`--json` of every command has the fields that docs/reference/json.md lists: each command is run
against a node.

With `QMQ_WRITE_JSON_FIELDS=1` the test writes the rows of the commands that it runs.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_support import commands
from support import NodeProcess
from typer.main import get_command
from typer.testing import CliRunner

import qmq.blocking
from qmq.cli.app import app
from qmq.columns.model import QueueKey, ReaderReport
from qmq.columns.servers.log import ServerAddress

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "json.md"
HEAD = """# JSON of the commands

<!-- Made by tests/qmq/cli/test_json_shapes.py, run with QMQ_WRITE_JSON_FIELDS=1. -->

What `--json` prints ([CLI](../CLI.md#json)). `rows` is an array of objects, `object` is one object, and `lines` is an object per line.

| command | prints | fields |
|---|---|---|
"""  # noqa: E501
ROWS, OBJECT, LINES = "rows", "object", "lines"
NOT_RUN = {
    "qmq backup create": (
        "needs etcd and replicas that write to a store: tests/qmq/backup/test_interrupted_backup.py"
    ),
    "qmq backup list": (
        "needs etcd and replicas that write to a store: tests/qmq/backup/test_interrupted_backup.py"
    ),
    "qmq backup prune": "needs a place with backups: tests/qmq/backup/test_pruning.py",
    "qmq backup rebuild": (
        "needs etcd and replicas that write to a store: tests/qmq/backup/test_interrupted_backup.py"
    ),
    "qmq backup restore": (
        "needs etcd and replicas that write to a store: tests/qmq/backup/test_interrupted_backup.py"
    ),
    "qmq backup verify": (
        "needs etcd and replicas that write to a store: tests/qmq/backup/test_interrupted_backup.py"
    ),
    "qmq broker confirm-clock": "needs a replica with a control port: tests/qmq/cli/test_confirm_clock.py",  # noqa: E501
    "qmq delay confirm-clock": "needs a replica with a control port: tests/qmq/cli/test_confirm_clock.py",  # noqa: E501
    "qmq broker hand-over": "needs a replica with a control port: tests/qmq/node/test_replica_node.py",  # noqa: E501
    "qmq delay hand-over": "needs a replica with a control port: tests/qmq/node/test_replica_node.py",  # noqa: E501
    "qmq lake compact": "needs a catalog of Iceberg tables: tests/spark/test_lake_command.py",
    "qmq lake expire": "needs a catalog of Iceberg tables: tests/spark/test_lake_command.py",
    "qmq lake migrate": "needs an archive of an older version: tests/spark/test_archive_migration.py",  # noqa: E501
    "qmq lake positions": "needs a catalog of Iceberg tables: tests/spark/test_lake_command.py",
    "qmq lake show": "needs a catalog of Iceberg tables: tests/spark/test_lake_command.py",
    "qmq mirror status": "needs two clusters: tests/qmq/backup/test_mirror.py",
    "qmq outbox drop": "needs a database with an outbox: tests/qmq/sql/test_outbox_commands.py",
    "qmq outbox list": "needs a database with an outbox: tests/qmq/sql/test_outbox_commands.py",
    "qmq outbox retry": "needs a database with an outbox: tests/qmq/sql/test_outbox_commands.py",
    "qmq replica add": "needs a second replica: tests/system/test_membership.py",
    "qmq replica remove": "needs a second replica: tests/system/test_membership.py",
    "qmq route move": (
        "needs a second broker group: tests/system/test_ordered_faults.py; prints what `qmq "
        "route split` prints"
    ),
    "qmq tail": "runs until Ctrl-C; prints what `qmq browse` prints",
    "qmq transfer": "needs a second replica: tests/system/test_membership.py",
}
"""Listed in the page, and not run here."""

ROW = re.compile(r"^\| ((?:`qmq [^`]+`(?:, )?)+) \| (rows|object|lines) \| (.+) \|$", re.MULTILINE)
"""Of the page: commands, kind, fields."""


@dataclass
class Shape:
    """The shape of a command's output: its kind, and the fields in the order in which they were
    seen.
    """

    kind: str
    fields: dict[str, None] = field(default_factory=dict)


def documented() -> dict[str, Shape]:
    """The table of the page. A line may name several commands that print the same."""
    found: dict[str, Shape] = {}
    for names, kind, cells in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} is listed twice"
            found[name] = Shape(kind, dict.fromkeys(re.findall(r"`([^`]+)`", cells)))
    return found


def page_of(shapes: Mapping[str, Shape]) -> str:
    """The page, in which commands that print the same share a line."""
    names: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, shape in sorted(shapes.items()):
        names[shape.kind, tuple(shape.fields)].append(name)
    return HEAD + "".join(
        f"| {in_code(same)} | {kind} | {in_code(fields)} |\n"
        for (kind, fields), same in names.items()
    )


def in_code(words: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in words)


def test_the_fields_of_every_command_with_json_are_documented() -> None:
    with_json = {
        name
        for name, each in commands(get_command(app))
        if "as_json" in [parameter.name for parameter in each.params]
    }
    found = documented()
    assert found.keys() == with_json
    assert [name for name, shape in found.items() if not shape.fields] == []
    assert NOT_RUN.keys() <= with_json
    assert page_of(found) == PAGE.read_text()


class Walk:
    """Runs commands with `--json` against a node, and keeps the shapes of what they print."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.shapes: dict[str, Shape] = {}
        home = {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_STATE_HOME": str(folder),
            "COLUMNS": "80",
        }
        self._environment = {**home, "QMQ_SERVER": address}

    def __call__(
        self, name: str, *words: str, data: bytes = b"", codes: tuple[int, ...] = (0,)
    ) -> Any:
        """Run `qmq NAME WORDS --json` and return its output."""
        done = CliRunner().invoke(
            app, [*name.split(), *words, "--json"], input=data, env=self._environment
        )
        assert done.exit_code in codes, (name, words, done.output, done.exception)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        lines = name in ("browse", "consume", "top")
        value = answers if lines else answers[0]
        assert lines or len(answers) == 1, (name, answers)
        kind = LINES if lines else ROWS if isinstance(value, list) else OBJECT
        shape = self.shapes.setdefault(f"qmq {name}", Shape(kind))
        assert shape.kind == kind, name
        for each in value if isinstance(value, list) else [value]:
            shape.fields |= dict.fromkeys(each)
        return value


def walk(say: Walk, data: Path, metrics: str) -> None:
    """Every command that one node can answer."""
    subjects_and_messages(say, data)
    delays(say)
    dead_letters(say)
    ordered(say)
    access(say)
    operation(say, metrics)


def report_reader(address: str, reader: str) -> None:
    """A stream of Spark asks for the end of its queue."""
    with closing(ServerAddress(address).open()) as log:
        log.topology(["orders"], ReaderReport(reader, {QueueKey("orders", 0, "broker-0"): 1}, {}))


def subjects_and_messages(say: Walk, data: Path) -> None:
    say("subject create", "orders")
    say("produce", "orders", "--key", "k", "--tag", "new", data=b"one\ntwo\n")
    (message, *_) = say("browse", "orders")
    say("consume", "orders", "-g", "billing", "-n", "1")
    for name in ("subject list", "group list"):
        say(name)
    for name in ("subject show", "subject describe"):
        say(name, "orders")
    for name in ("group show", "group lag", "group settings"):
        say(name, "orders", "billing")
    report_reader(say.address, "copy")
    for name in ("group show", "group lag"):
        say(name, "orders", "copy")
    say("group set", "orders", "billing", "--attempts-max", "3")
    say("group reset", "orders", "billing", "--to", "earliest")
    say("message find", "orders", message["id"])
    for name in ("message show", "message trace", "why"):
        say(name, "orders", message["id"])
    say("subject alter", "orders", "--retention-hours", "24")
    say("subject flush", "orders", "--flush", "default")
    (say.folder / "schema.json").write_text(
        '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    )
    say("subject schema set", "orders", "--json-schema", str(say.folder / "schema.json"))
    for name in ("subject schema list", "subject schema show", "subject schema delete"):
        say(name, "orders")
    say("subject place", "orders", "--groups", "broker-0", "--dry-run")
    say("export", "orders", "--file", str(say.folder / "orders.jsonl"))
    say("subject create", "copied")
    say("import", "copied", "--file", str(say.folder / "orders.jsonl"))
    say("copy", "orders", "copied")
    say("subject purge", "copied", "--yes")
    say("subject delete", "copied", "--yes")
    say("log dump", str(next((data / "broker" / "message").glob("*.log"))))
    say("pause group", "orders", "billing")
    say("pause list")
    say("resume group", "orders", "billing")
    for verb in ("pause", "resume"):
        say(f"{verb} consumer", "orders", "billing", "billing-1")
        say(f"{verb} client", "billing-1")
    say("group delete", "orders", "billing", "--yes")


def delays(say: Walk) -> None:
    (made, *_) = say("produce", "reminders", "--delay", "2d", data=b"later\n")
    say("delay list", "reminders")
    say("delay stats")
    for name, *words in (("delay show",), ("delay move", "--by", "1d"), ("delay cancel",)):
        say(name, made["delayed_id"], *words)


def dead_letters(say: Walk) -> None:
    say("produce", "payments", data=b"1\n2\n3\n")
    with (
        qmq.blocking.connect(say.address) as mq,
        mq.consumer("payments", "ledger", ack="explicit") as consumer,
    ):
        for message in consumer.pull(3):
            message.reject("broken")
    while sum(each["waiting"] for each in say("dlq list")) < 3:
        pass
    say("dlq show", "ledger")
    for verb in ("replay", "skip", "purge"):
        say(f"dlq {verb}", "ledger", "--limit", "1")
    say("dlq delete", "ledger", "--yes")


def ordered(say: Walk) -> None:
    say(
        "subject create",
        "accounts",
        "--order",
        "strict",
        "--logical-partitions",
        "64",
        "--partitions",
        "1",
    )
    say("produce", "accounts", "--key", "k", data=b"1\n")
    say("consume", "accounts", "-g", "audit", "-n", "1")
    say("route split", "accounts", "1", "--at", "32", "--no-wait")
    say("route merge", "accounts", "2", "3", "--no-wait")
    for name in ("route show", "route history", "route explain", "route policy"):
        say(name, "accounts")


def access(say: Walk) -> None:
    (rule, *_) = say("acl allow", "app:orders", "produce", "subject", "orders")
    say("acl deny", "app:other", "produce", "subject", "orders")
    say("acl list")
    say("acl test", "app:orders", "produce", "subject", "orders", codes=(0, 1))
    say("acl remove", rule["rule"])
    say("acl mode", "watch")
    say("acl mode", "off")
    say("role add", "billing", "app:orders")
    say("role list")
    say("role remove", "billing", "app:orders")
    (quota, *_) = say("quota set", "app:orders", "produce_bytes_per_s=1000")
    say("quota list")
    say("quota remove", quota["quota"])
    say("user token", "app:orders")
    say("user list")
    say("user revoke", "app:orders")
    say("whoami")


def operation(say: Walk, metrics: str) -> None:
    say("cluster status")
    say("doctor", "--interval", "0", codes=(0, 4, 5))
    say("top", "--once", "--interval", "0.1")
    say("broker drain", "broker-0", "--no-move")
    say("broker resume", "broker-0")
    for name in ("health meta", "health broker"):
        say(name, metrics)
    for name in ("bench pub", "bench sub"):
        say(name, "measured", "--messages", "100")
    say("bench latency", "measured", "--rate", "100", "--seconds", "0.1")
    say("completion", "bash")
    say("config")
    say("context add", "here", "--server", say.address)
    for name in ("context use", "context remove"):
        say("context list")
        say(name, "here")
    say("cert ca", "--folder", str(say.folder / "pki"))
    for name, *words in (
        ("cert server", "b0", "--host", "localhost"),
        ("cert client", "me"),
        ("cert cluster", "--meta", "m0=localhost"),
    ):
        say(name, *words, "--folder", str(say.folder / "pki"))


@pytest.mark.sampled
def test_every_command_prints_the_fields_of_the_page(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "node", "--metrics-port", "0")
    node.start()
    try:
        say = Walk(tmp_path, node.address)
        walk(say, node.data, node.metrics_address)
    finally:
        node.kill()
    found = documented()
    new = {
        name: seen
        for name, seen in say.shapes.items()
        if name not in found or (found[name].kind, found[name].fields) != (seen.kind, seen.fields)
    }
    if os.environ.get("QMQ_WRITE_JSON_FIELDS"):
        PAGE.write_text(page_of(found | new))
        return
    assert not new, (
        "run this test with QMQ_WRITE_JSON_FIELDS=1, and look at what changed in "
        "docs/reference/json.md"
    )
    assert found.keys() - say.shapes.keys() == NOT_RUN.keys()
