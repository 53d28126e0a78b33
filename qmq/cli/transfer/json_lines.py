"""Records as lines of JSON, one object each. Pure. `qmq browse --json` writes the same format, with the body in both forms.

    {"subject": "orders", "broker_group": "g1", "partition": 0, "sequence": 7, "append_time_ms": 1795...,
     "id": "0123...", "key": "N14228", "tags": [], "headers": {}, "create_time_ms": 1795..., "body": "{}"}

A body that is not UTF-8 is in "body_base64" instead. Keys and header values are text, or "hex:00ff" where text could not be read back. A
line to import needs only a body.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from qmq.cli.transfer.transfer_record import TransferRecord
from qmq.errors import InvalidArgument
from qmq.json_values import parse_json
from qmq.model import MessageId
from qmq.operations.key_texts import key_text, parse_key
from qmq.text_numbers import INT64_MAX

SHOWN_CHARS: Final = 80


def json_line(record: TransferRecord, place: Mapping[str, Any], *, as_base64: bool = False) -> bytes:
    """A record as a line with its newline. `as_base64`: encode every body, also text."""
    found = {
        **place,
        "id": None if record.id is None else str(record.id),
        "key": None if record.key is None else key_text(record.key),
        "tags": list(record.tags),
        "headers": {name: key_text(value) for name, value in record.headers.items()},
        "create_time_ms": record.create_time_ms,
        **_body(record.body, as_base64),
    }
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _body(body: bytes, as_base64: bool) -> dict[str, str]:
    if not as_base64:
        try:
            return {"body": body.decode()}
        except UnicodeDecodeError:
            pass
    return {"body_base64": base64.b64encode(body).decode()}


def record_of_line(line: bytes, number: int) -> TransferRecord:
    """The inverse of `json_line`. A body that is not a string is kept as JSON text. Raises InvalidArgument with the line's number."""
    try:
        found = parse_json(line)
        if not isinstance(found, dict):
            raise TypeError(f"it is {type(found).__name__}")
        key, time_ms, headers = found.get("key"), found.get("create_time_ms"), found.get("headers") or {}
        is_time = time_ms is None or (type(time_ms) is int and 0 <= time_ms <= INT64_MAX)
        if not is_time or not isinstance(headers, dict):
            raise TypeError("create_time_ms must be a number of milliseconds since 1970, and headers an object")
        return TransferRecord(
            _bytes_of(found),
            None if key is None else parse_key(key),
            tuple(found.get("tags") or ()),
            {name: parse_key(value) for name, value in headers.items()},
            time_ms,
            None if found.get("id") is None else MessageId.parse(found["id"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        shown = line[:SHOWN_CHARS].decode(errors="replace").strip()
        raise InvalidArgument(f'line {number:,} is not an object with a "body" or a "body_base64" ({cause}): {shown}') from None


def _bytes_of(found: dict[str, Any]) -> bytes:
    if found.get("body_base64") is not None:
        try:
            return base64.b64decode(found["body_base64"], validate=True)
        except binascii.Error as cause:
            raise ValueError(f"body_base64: {cause}") from None
    body = found["body"]
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
