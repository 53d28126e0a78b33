"""Every decoder of what stands in a message, a request, a file or an object: any input gives a
value or the decoder's own typed reason.

`DECODERS` is the list. The first test feeds each of them what `tests/qmq/hostile_values.py` has:
its `always` in every run, then what Hypothesis chooses. The last test keeps the list complete by a
mechanical rule: in the packages of SURFACES, each function that calls a conversion which raises for
bytes or text that it does not like (CONVERSIONS) is run by a decoder of the list, which names it in
`runs`, or stands in OTHERS with the reason why nobody else writes what it reads. Conversions of
numbers are not looked at in modules that calculate with numpy: there they take a number out of an
array. What is on the wire between QMQ's own programs, and in the log's files, is fed to its readers
by `tests/fuzz`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from decoders_of_programs import CLIENT, COMMANDS, IDENTITY, SPARK, STORED
from decoders_of_services import CONSOLE, GATEWAY, HTTP, TASKS
from hostile_values import Decoder
from hypothesis import given

DECODERS: Final = (
    *GATEWAY,
    *HTTP,
    *TASKS,
    *CONSOLE,
    *COMMANDS,
    *STORED,
    *CLIENT,
    *SPARK,
    *IDENTITY,
)

ALSO_FUZZED: Final = "tests/fuzz feeds it, behind the checksum of the log's entry"
NUMBER_ALREADY: Final = "a number already"
BY_ETCD: Final = "a value that QMQ itself keeps in etcd"
BY_SERVERS: Final = "what a server of QMQ answered"
OWN: Final = "what this program wrote itself a moment ago"

OTHERS: Final[dict[str, str]] = {
    "pyspark_qmq.datasets.deliveries.Replay._snapshot": ALSO_FUZZED,
    "qmq.columns.files.index.pasts": ALSO_FUZZED,
    "qmq.columns.files.log.FileLog._names": "names of subjects, which brokers check before they store a batch",  # noqa: E501
    "qmq.columns.files.log.FileLog.subjects": "names of subjects, which brokers check before they store a batch",  # noqa: E501
    "pyspark_qmq.java.parse_settings": "what the installed Java says of itself",
    **{
        f"pyspark_qmq.jobs.{each}": NUMBER_ALREADY
        for each in (
            *(
                "archive._plots",
                "job.utc",
                "dead_letters.report",
                "delay_accuracy.binned",
                "duplicates._plots",
            ),
            "order_audit._plots",
        )
    },
    "pyspark_qmq.jobs.order_audit.producer": "a column that this job wrote as hexadecimal digits",
    "pyspark_qmq.stream.sources_of": "the progress that Spark itself writes as JSON",
    "qmq.backup.manifest.awaits_data": BY_ETCD,
    "qmq.backup.manifest.delay_settings": BY_ETCD,
    "qmq.backup.restore.RestoreMark.decode": BY_ETCD,
    "qmq.backup.restore.known_mark": BY_ETCD,
    "qmq.backup.rebuild._group_keys": BY_ETCD,
    "qmq.backup.restore.Restore._secret": BY_ETCD,
    "qmq.cli.backup._create": BY_ETCD,
    "qmq.backup.rebuild.look_into": "the data folder of a stopped replica; tests/damage cuts and changes its files",  # noqa: E501
    "qmq.backup.restore.ReplicaTarget.made_by": "the data folder of a restore; any damage reads as no restore",  # noqa: E501
    "qmq.backup.create.ScheduleReader.read": BY_SERVERS,
    "qmq.backup.verify.BackupVerifier._verify_schedule": "tests/qmq/backup changes such states; any becomes BackupDamaged",  # noqa: E501
    "qmq.cli.acl.set_quota": NUMBER_ALREADY,
    "qmq.cli.broker.confirm_clock": BY_SERVERS,
    "qmq.cli.delay.histogram_view": OWN,
    "qmq.cli.delay.list_table": OWN,
    "qmq.cli.message._body_text": OWN,
    "qmq.client.consuming.ack_spool.pack_owner": OWN,
    "qmq.client.dead_letters.DeadLetters._done": NUMBER_ALREADY,
    "qmq.client.producing.delayed.DelayedMessage.key": "says that it raises UnicodeDecodeError; nothing of QMQ calls it",  # noqa: E501
    "qmq.client.producing.delayed.checked": NUMBER_ALREADY,
    "qmq.client.consuming.ordered.lane.unpack_keys": BY_SERVERS,
    "qmq.client.consuming.ordered.message.MessageOfLane.logical_partition": NUMBER_ALREADY,
    "qmq.console.app.ConsoleSite._failure": NUMBER_ALREADY,
    "qmq.console.pages.delays.show_delays": NUMBER_ALREADY,
    "qmq.console.pages.subject.TailPace.take": NUMBER_ALREADY,
    "qmq.console.oidc.OidcFlow.came_back": "a cookie behind the console's own seal",
    "qmq.console.oidc._error_of": "the text of a refusal; any other answer reads as no text",
    "qmq.console.oidc._packed": OWN,
    "qmq.console.app.OidcLogin.begin": NUMBER_ALREADY,
    "qmq.console.pages.routes.lane_ranges": NUMBER_ALREADY,
    "qmq.console.pages.routes.partition_ranges": NUMBER_ALREADY,
    "qmq.console.pages.routes.ring": NUMBER_ALREADY,
    "qmq.console.wording.patterns": "a file of the package",
    "qmq.console.wording.catalog": "a file of the package",
    "qmq.gateway.sending.TopicSending._send_half": OWN,
    "qmq.integrations.kombu.envelope.due_of": "the sender's own task, before it is stored",
    "qmq.integrations.taskiq.QmqBroker.kick": "the sender's own task, before it is stored",
    "qmq.operations.text.size_in_words": NUMBER_ALREADY,
    "qmq.operations.messages._delay_stored_ms": "a delayed id, which the client parsed before",
    "qmq.schemas.body_decoder._fingerprint": OWN,
    "qmq.security.quotas.RateMeter.__init__": NUMBER_ALREADY,
    "qmq.sql.debezium_outbox.time_ordered_id": OWN,
    "qmq.sql.dedup_records.is_there": NUMBER_ALREADY,
    "qmq.sql.connection.number": NUMBER_ALREADY,
}
"""Functions that convert what nobody else writes, or that another test feeds: the reason."""


ROOT: Final = Path(__file__).parents[2]
SURFACES: Final = (
    *(
        "gateway",
        "integrations",
        "console",
        "cli",
        "operations",
        "schemas",
        "backup",
        "tiering",
        "sql",
        "client",
        "security",
    ),
    "columns",
)
CONVERSIONS: Final = frozenset(
    (
        *("loads", "parse_json", "b64decode", "urlsafe_b64decode", "fromhex", "unpackb", "UUID"),
        *("fromisoformat", "fromtimestamp", "strptime", "decode", "int", "float"),
    )
)


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda each: each.name)
def test_any_input_is_a_value_or_a_typed_reason(decoder: Decoder) -> None:
    seen: set[str] = set()

    def called(frame: Any, event: str, _: object) -> None:
        if event == "call":
            seen.add(name_of(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))

    def decode(value: Any) -> None:
        is_shown, text = True, ""
        sys.setprofile(None if set(decoder.runs) <= seen else called)
        try:
            decoder.decode(value)
        except decoder.raises as reason:
            text = str(reason)
            is_shown = text.encode(errors="ignore").decode() == text
        finally:
            sys.setprofile(None)
        assert is_shown, f"no page and no answer can hold the reason {text!a}"

    for value in decoder.always:
        decode(value)
    given(decoder.inputs)(decode)()
    assert set(decoder.runs) <= seen, "the decoder does not run what it names"


def test_each_function_that_converts_is_run_by_a_decoder_or_has_a_reason() -> None:
    found = {
        name
        for path, module in modules()
        for name in converting(ast.parse(path.read_text(encoding="utf-8")), module)
    }
    run = {name for each in DECODERS for name in each.runs}
    assert found - run - set(OTHERS) == set(), (
        "add these to a decoder of tests/qmq/decoders_of_*.py, or say here why not"
    )
    assert (run | set(OTHERS)) - found == set(), (
        "these convert nothing any more: take them off the list"
    )
    assert run & set(OTHERS) == set()


def test_a_function_that_converts_is_found() -> None:
    text = """
def reads(data): return json.loads(data)
class A:
    async def parse(self, text): return [int(each) for each in text.split(",")]
    def inner(self, text):
        def within(): return base64.b64decode(text)
def lenient(data): return data.decode(errors="replace")
def calculates(a): return int(a * 1000)
def shows(data): return base64.b64encode(data).decode()
"""
    assert set(converting(ast.parse(text), "m")) == {"m.reads", "m.A.parse", "m.A.inner.within"}


def modules() -> Iterator[tuple[Path, str]]:
    for package in (*[ROOT / "qmq" / each for each in SURFACES], ROOT / "spark" / "pyspark_qmq"):
        for path in sorted(package.rglob("*.py")):
            base = ROOT if package.name != "pyspark_qmq" else ROOT / "spark"
            yield (
                path,
                ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"),
            )


def name_of(module: str, qualified: str) -> str:
    """A function's name without the parts that Python adds to inner ones."""
    return f"{module}.{qualified}".replace(".<locals>", "").split(".<")[0]


def converting(tree: ast.Module, module: str) -> Iterator[str]:
    """The functions that call a conversion."""
    imports = {
        each.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for each in node.names
    }
    wanted = CONVERSIONS - ({"int", "float"} if imports & {"numpy", "pyarrow"} else set())
    yield from _within(tree, module, wanted)


def _within(node: ast.AST, name: str, wanted: frozenset[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(child, f"{name}.{child.name}", wanted)
        elif isinstance(child, ast.Call) and _converts(child, wanted):
            yield name
            yield from _within(child, name, wanted)
        else:
            yield from _within(child, name, wanted)


def _converts(call: ast.Call, wanted: frozenset[str]) -> bool:
    name = _called(call)
    if name not in wanted:
        return False
    if name in ("int", "float"):
        return bool(call.args) and (
            isinstance(call.args[0], ast.Name | ast.Subscript) or _called(call.args[0]) == "get"
        )
    if name != "decode":
        return True
    is_lenient = len(call.args) > 1 or any(each.arg == "errors" for each in call.keywords)
    data = call.func.value if isinstance(call.func, ast.Attribute) else None
    return (
        data is not None
        and not is_lenient
        and _called(data) not in ("b64encode", "urlsafe_b64encode", "encode")
    )


def _called(node: ast.AST) -> str:
    """The name of what a call calls, without what stands before it."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id
        if isinstance(function, ast.Name)
        else function.attr
        if isinstance(function, ast.Attribute)
        else ""
    )
