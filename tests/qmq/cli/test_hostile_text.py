"""Text written by others cannot control the terminal on which it is printed."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import Command, FakeMeta, settings
from rich.console import Console
from rich.text import Text

from qmq.cli import output
from qmq.cli.consume import Form
from qmq.errors import InvalidArgument
from qmq.printable import visible
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[31mred"
HARMLESS = "\\x1b]52;c;cm0gLXJmIH4=\\x07\\x1b[31mred"


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        (CLIPBOARD, HARMLESS),
        ("a\u202eb", "a\\u202eb"),
        ("a\ud800b", "a\\ud800b"),
        ("\x9b31m", "\\x9b31m"),
        ("\U000e0041", "\\U000e0041"),
        ("Grüße, 世界\n\tπ", "Grüße, 世界\n\tπ"),
        ("a\r\x00", "a\\x0d\\x00"),
        ("\u2028", "\\u2028"),
    ],
)
def test_control_and_format_characters_become_escapes(hostile: str, shown: str) -> None:
    assert visible(hostile) == shown


def test_a_pause_s_reason_and_a_client_s_name_are_printed_harmlessly(meta: FakeMeta, qmq: Command) -> None:
    pause = pb.Pause(kind="group", subject="*", group="g", reason=CLIPBOARD)
    meta.answers["ListPauses"] = pb.ListPausesResponse(pauses=[pause])
    meta.answers["ListSubjects"] = pb.ListSubjectsResponse(subjects=[pb.SubjectDescription(settings=settings("s", ""))])
    consumer = control.Consumer(name="c", client=CLIPBOARD)
    meta.answers["DescribeGroups"] = control.DescribeGroupsResponse(groups=[control.Group(subject="s", group="g", consumers=[consumer])])
    for words in (("pause", "list"), ("group", "show", "s", "g")):
        assert not {"\x1b", "\x07"} & set(qmq.text(*words))
    assert qmq.json("group", "show", "s", "g")[0]["consumers"][0]["client"] == CLIPBOARD


def test_whatever_is_printed_is_harmless_and_rich_s_own_colours_stay() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200)
    output.escape_controls(console)
    console.print(Text("a\x1b[32mb\u202e", "red"))
    assert shown.getvalue() == "\x1b[31ma\\x1b[32mb\\u202e\x1b[0m\n"


def test_an_error_s_text_is_printed_harmlessly(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ListSubjects"] = InvalidArgument("bad \u202e text")
    assert "\u202e" not in qmq.error("subject", "list")[1]


def test_a_body_is_raw_only_where_no_terminal_reads_it() -> None:
    message: Any = SimpleNamespace(body=CLIPBOARD.encode() + b"\xff")
    assert Form(is_raw=True).line(message, {}) == message.body
    assert Form(is_raw=False).line(message, {}) == HARMLESS.encode() + b"\\xff"
    more: Any = SimpleNamespace(
        body=message.body,
        sequence=0,
        id="x",
        key=None,
        tags=(),
        headers={},
        attempt=1,
        create_time_ms=0,
        append_time_ms=0,
        at=datetime.now(UTC),
    )
    line = Form(as_json=True).line(more, {})
    assert b"\x1b" not in line
    assert json.loads(line)["body"].startswith(CLIPBOARD)
