"""Text written by others cannot control the terminal on which it is printed."""

from __future__ import annotations

import base64
import io
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import Command, FakeMeta, settings
from rich.console import Console
from rich.text import Text
from support import hostile
from support.hostile import CLIPBOARD

from qmq.cli import tables
from qmq.cli.consume import Form
from qmq.errors import InvalidArgument, InvalidName
from qmq.model import check_name
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.text import visible

CONTROLS = {chr(each) for each in range(0x20) if chr(each) not in "\n\t"} | set(
    "\x85\x9b\u2028\u202e\u2066\u200b\ufeff\U000e0041"
)
HARMLESS = "\\x1b]52;c;cm0gLXJmIH4=\\x07\\x1b[31mred"


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_control_and_format_characters_become_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.sampled
@pytest.mark.parametrize("text", hostile.TEXTS, ids=range(len(hostile.TEXTS)))
def test_reasons_clients_and_keys_of_others_are_printed_harmlessly(
    meta: FakeMeta, qmq: Command, text: str
) -> None:
    pause = pb.Pause(kind="group", subject="*", group="g", reason=text)
    meta.answers["ListPauses"] = pb.ListPausesResponse(pauses=[pause])
    meta.answers["ListSubjects"] = pb.ListSubjectsResponse(
        subjects=[pb.SubjectDescription(settings=settings("s", ""))]
    )
    consumer = control.Consumer(name="c", client=text)
    meta.answers["DescribeGroups"] = control.DescribeGroupsResponse(
        groups=[control.Group(subject="s", group="g", consumers=[consumer])]
    )
    meta.answers["DescribeParked"] = control.DescribeParkedResponse(
        keys=[control.ParkedKey(partition=1, key=text.encode(), messages=1)]
    )
    for words in (("pause", "list"), ("group", "show", "s", "g"), ("dlq", "list", "s", "g")):
        assert not CONTROLS & set(qmq.text(*words)), words
    assert qmq.json("group", "show", "s", "g")[0]["consumers"][0]["client"] == text
    assert qmq.json("pause", "list")[0]["reason"] == text


@pytest.mark.sampled
@pytest.mark.parametrize("text", hostile.TEXTS, ids=range(len(hostile.TEXTS)))
def test_an_error_s_text_is_printed_harmlessly(meta: FakeMeta, qmq: Command, text: str) -> None:
    # gRPC's trailers carry no NUL
    meta.answers["ListSubjects"] = InvalidArgument(text.replace("\0", ""))
    assert not CONTROLS & set(qmq.error("subject", "list")[1])


@pytest.mark.parametrize("body", hostile.BODIES, ids=range(len(hostile.BODIES)))
def test_a_body_is_raw_only_where_no_terminal_reads_it(body: bytes) -> None:
    message: Any = SimpleNamespace(body=body)
    assert Form(is_raw=True).line(message, {}) == body
    assert not CONTROLS & set(Form(is_raw=False).line(message, {}).decode())
    more: Any = SimpleNamespace(
        body=body,
        sequence=0,
        id="x",
        key_bytes=body,
        tags=(),
        headers={body.decode(errors="replace"): body},
        attempt=1,
        create_time_ms=0,
        append_time_ms=0,
        at=datetime.now(UTC),
    )
    line = Form(as_json=True).line(more, {})
    assert not CONTROLS & set(line.decode())
    assert base64.b64decode(json.loads(line)["body_base64"]) == body
    assert json.loads(line)["body"] in (None, body.decode(errors="replace"))


@pytest.mark.parametrize("name", hostile.NAMES, ids=range(len(hostile.NAMES)))
def test_a_hostile_name_of_a_subject_or_a_group_is_refused(name: str) -> None:
    for kind in ("subject", "group"):
        with pytest.raises(InvalidName):
            check_name(kind, name)


def test_a_line_break_in_a_cell_makes_no_row_of_its_own(meta: FakeMeta, qmq: Command) -> None:
    pause = pb.Pause(kind="group", subject="*", group="g", reason="maintenance\ngroup\t*  forged")
    meta.answers["ListPauses"] = pb.ListPausesResponse(pauses=[pause])
    assert len(qmq.text("pause", "list").splitlines()) == 2  # the header, and one pause


def test_whatever_is_printed_is_harmless_and_rich_s_own_colours_stay() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200)
    tables.escape_controls(console)
    console.print(Text("a\x1b[32mb\u202e", "red"))
    assert shown.getvalue() == "\x1b[31ma\\x1b[32mb\\u202e\x1b[0m\n"
