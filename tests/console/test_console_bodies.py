"""Bodies as people read them, and command lines that may be copied."""

from __future__ import annotations

import shlex

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from qmq.console.bodies import MASK, READ_BYTES_MAX, body_view, masked_fields
from qmq.console.command_lines import command
from qmq.console.console_config import MaskRule


def test_the_form_of_a_body_is_found_by_itself() -> None:
    forms = {
        b'{"a": 1}': "json",
        b" [1, 2]": "json",
        b"{no json": "text",
        msgspec.msgpack.encode({"a": [1, b"\xff"]}): "msgpack",
        "火车".encode(): "text",
        b"\x00\x01\xff": "hex",
        b"": "empty",
        b"[" * 100_000: "text",
        b"x" * (READ_BYTES_MAX + 1): "text",
    }
    assert {body: body_view(body).form for body in forms} == forms


@given(st.binary(max_size=200))
def test_any_body_can_be_shown(body: bytes) -> None:
    assert body_view(body).body_bytes == len(body)
    assert body_view(body, ("a",)).line is not None


def test_a_masked_value_is_hidden_at_any_depth_and_in_any_case() -> None:
    masked = masked_fields((MaskRule("card"), MaskRule.parse("pay*:pin")), "payments")
    assert masked == {"card", "pin"}
    shown = body_view(b'{"a": [{"CARD": "4111", "b": 1}], "pin": {"x": "4111"}}', masked)
    assert "4111" not in shown.text
    assert MASK in shown.text
    assert shown.is_masked
    packed = body_view(msgspec.msgpack.encode({"card": "4111"}), masked)
    assert "4111" not in packed.text


def test_a_body_without_fields_that_names_a_masked_one_is_hidden() -> None:
    assert body_view(b"Card: 4111", {"card"}).form == "masked"
    assert body_view(b"nothing here", {"card"}).form == "text"
    assert masked_fields((MaskRule.parse("pay*:card"),), "orders") == frozenset()


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), min_size=1))
def test_a_shell_reads_a_command_line_as_it_was_meant(words: list[str]) -> None:
    assert shlex.split(command(*words)) == ["qmq", *words]
    assert shlex.split(command("dlq", "replay", id=words, dry_run=True, error=None)) == [
        "qmq",
        "dlq",
        "replay",
        *[part for each in words for part in ("--id", each)],
        "--dry-run",
    ]
