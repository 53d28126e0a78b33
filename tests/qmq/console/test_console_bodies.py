"""Bodies as people read them, and command lines that may be copied."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.console.bodies import MASK, READ_BYTES_MAX, body_view, masked_fields, masked_headers
from qmq.console.config import MaskRule
from qmq.console.wording import command

KEYS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary()
)


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


FORMS_OF_A_FIELD = [
    b"Card: 4111",
    json.dumps({"inner": json.dumps({"card": "4111"})}).encode(),
    json.dumps({"card": "4111"}).encode("utf-16"),
    json.dumps({"card": "4111"}).encode("utf-32"),
    b"[" * 700 + b'{"card": "4111"}' + b"]" * 700,
    b"\x00\x084111",  # Avro writes no names
    msgspec.msgpack.encode({b"card": "4111"}),
    msgspec.msgpack.encode({"a": b'{"card": "4111"}'}),
    msgspec.msgpack.encode([{"CARD": ["4111"]}]),
    b'{"card": "4111", "n": NaN}',
    b'["card", "4111"]',
    b'{"name": "Card", "value": "4111"}',
    b'[{"k": "card ", "v": ["4111"]}]',
    b'{"card ": "4111"}',
    msgspec.msgpack.encode({"a": b"\xff" + msgspec.msgpack.encode({"card": "4111"})}),
]


@pytest.mark.parametrize("body", FORMS_OF_A_FIELD)
def test_a_masked_field_is_hidden_in_every_form(body: bytes) -> None:
    assert "4111" not in body_view(body, {"card"}).text


def test_a_masked_header_is_hidden_and_so_is_a_text_that_names_the_field() -> None:
    headers = {"Card": "4111", "detail": "card=4111", "colour": "blue"}
    assert masked_headers(headers, {"card"}) == {"Card": MASK, "detail": MASK, "colour": "blue"}
    assert masked_headers(headers, ()) == headers


@given(
    st.recursive(
        KEYS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=20,
    )
)
def test_any_messagepack_can_be_shown(value: object) -> None:
    shown = body_view(msgspec.msgpack.encode([value]), {"card"})
    assert shown.form == "msgpack"
    json.loads(shown.text)


def test_masks_are_of_their_subjects() -> None:
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
