"""Recognises the format of a message's body (JSON, MessagePack, text or bytes as hex) and makes it
readable. Pure.

A masked field's value is never shown. A body that cannot be read as fields is masked whole, and so
is a text that contains a masked field's name, such as JSON within JSON, and what stands beside the
bare name, as in lists of names and values: a rule must not fail because a producer changed its
format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from qmq.console.config import MaskRule
from qmq.text import DEPTH_MAX, parse_json

MASK: Final = "•••"
READ_BYTES_MAX: Final = 1 << 20
"""The console shows a larger body as hex or text, and does not read its fields."""
SHOWN_CHARS_MAX: Final = 64 * 1024
_PACKED: Final = frozenset((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
"""The first bytes of a MessagePack map or array."""


@dataclass(frozen=True, slots=True)
class BodyView:
    """`form` is json, msgpack, text, hex, empty or masked."""

    form: str
    text: str
    body_bytes: int
    is_cut: bool = False
    is_masked: bool = False

    @property
    def line(self) -> str:
        """The beginning of the body, in one line."""
        return " ".join(self.text[:400].split())[:200]


def masked_fields(rules: Sequence[MaskRule], subject: str) -> frozenset[str]:
    """The names of the fields that are masked in a subject's bodies, in lower case."""
    return frozenset(
        rule.field.lower() for rule in rules if subject.startswith(rule.subject_prefix)
    )


def body_view(body: bytes, masked: Collection[str] = ()) -> BodyView:
    """Decode a body for display, without the values of masked fields."""
    if not body:
        return BodyView("empty", "", 0)
    read = _fields_of(body, masked)
    if read is None:
        if masked:
            return BodyView("masked", MASK, len(body), is_masked=True)
        return _flat(body)
    form, value = read
    shown = _masked(value, masked) if masked else value
    text = json.dumps(shown, indent=2, ensure_ascii=False)
    return BodyView(
        form, text[:SHOWN_CHARS_MAX], len(body), len(text) > SHOWN_CHARS_MAX, shown != value
    )


def _fields_of(body: bytes, masked: Collection[str]) -> tuple[str, Any] | None:
    if len(body) > READ_BYTES_MAX:
        return None
    try:
        if body.lstrip()[:1] in (b"{", b"["):
            return "json", parse_json(body)
        if body[0] in _PACKED:
            return "msgpack", _plain(msgspec.msgpack.decode(body, strict=False), DEPTH_MAX, masked)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError):
        pass
    return None


def _plain(value: Any, depth_left: int, masked: Collection[str]) -> Any:
    """A MessagePack value as JSON can hold it. Bytes are searched for masked names here: as hex
    they would hide them. Raises ValueError if it is nested too deep.
    """
    if not depth_left:
        raise ValueError("too deep")
    if isinstance(value, dict):
        return {
            _leaf(key) if not isinstance(key, str) else key: _plain(each, depth_left - 1, masked)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each, depth_left - 1, masked) for each in value]
    if isinstance(value, bytes) and any(name.encode() in value.lower() for name in masked):
        return MASK
    return value if isinstance(value, str | int | float | None) else _leaf(value)


def _flat(body: bytes) -> BodyView:
    try:
        text = body[: 4 * SHOWN_CHARS_MAX].decode()
    except UnicodeDecodeError as failure:
        # The cut may split a character.
        is_cut_there = len(body) > 4 * SHOWN_CHARS_MAX and failure.start > 4 * SHOWN_CHARS_MAX - 4
        text = body[: failure.start].decode() if is_cut_there else ""
    strange = sum(not (each.isprintable() or each in "\n\r\t") for each in text[:1000])
    if text and strange * 10 <= min(len(text), 1000):
        return BodyView(
            "text",
            text[:SHOWN_CHARS_MAX],
            len(body),
            len(text) > SHOWN_CHARS_MAX or len(body) > 4 * SHOWN_CHARS_MAX,
        )
    part = body[: SHOWN_CHARS_MAX // 4]
    lines = [part[at : at + 16] for at in range(0, len(part), 16)]
    text = "\n".join(
        f"{at * 16:08x}  {line.hex(' '):<47}  {_ascii(line)}" for at, line in enumerate(lines)
    )
    return BodyView("hex", text, len(body), len(part) < len(body))


def _ascii(line: bytes) -> str:
    return "".join(chr(each) if 32 <= each < 127 else "." for each in line)


def _masked(value: Any, masked: Collection[str]) -> Any:
    if isinstance(value, str):
        return masked_text(value, masked)
    if not isinstance(value, dict | list):
        return value
    beside = value.values() if isinstance(value, dict) else value
    if any(isinstance(each, str) and is_masked(each, masked) for each in beside):
        return MASK
    if isinstance(value, dict):
        return {
            key: MASK if is_masked(str(key), masked) else _masked(each, masked)
            for key, each in value.items()
        }
    return [_masked(each, masked) for each in value]


def is_masked(name: str, masked: Collection[str]) -> bool:
    return name.strip().lower() in masked


def masked_text(text: str, masked: Collection[str]) -> str:
    """A text, hidden whole if it contains a masked field's name."""
    return MASK if any(name in text.lower() for name in masked) else text


def masked_headers(headers: Mapping[str, str], masked: Collection[str]) -> dict[str, str]:
    """Headers as text, without the values of masked fields."""
    return {
        name: MASK if is_masked(name, masked) else masked_text(value, masked)
        for name, value in headers.items()
    }


def _leaf(value: Any) -> str:
    """The text of a MessagePack value or key that JSON cannot hold:
    bytes, times, arrays and extensions.
    """
    return text_or_hex(value) if isinstance(value, bytes) else str(value)


def text_or_hex(data: bytes) -> str:
    """A key or a header's value: as text, or as hex:00ff if it is not text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "hex:" + data.hex()
