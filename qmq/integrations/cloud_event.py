"""CloudEvents 1.0 as messages, and as HTTP in binary, structured and batch mode. Pure.

    message headers   ce-id, ce-source, ce-type, ce-specversion and every other attribute as
                      `ce-NAME`; content-type
    message body      the event's data
    message key       the extension `partitionkey`, if there is one

Binary mode of HTTP has the same headers, so an event passes through QMQ unchanged. Events in
structured and batch mode are JSON; they are stored in the form of binary mode, so that consumers
see only one form.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from qmq.errors import InvalidArgument
from qmq.text import parse_json

PREFIX: Final = "ce-"
CONTENT_TYPE: Final = "content-type"
STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
REQUIRED: Final = ("id", "source", "type", "specversion")
VERSION: Final = "1.0"
_NAME: Final = re.compile(r"[a-z0-9]{1,64}")
_UNQUOTED: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


@dataclass(frozen=True, slots=True)
class Event:
    """A CloudEvent: its data, and `attributes` by name,
    with `datacontenttype` and extensions among them.
    """

    attributes: Mapping[str, str]
    data: bytes

    def __post_init__(self) -> None:
        for name in REQUIRED:
            if not self.attributes.get(name):
                raise InvalidArgument(f"a CloudEvent needs a non-empty attribute {name!r}")
        if self.attributes["specversion"] != VERSION:
            raise InvalidArgument(
                f"specversion is {VERSION!r}, not {self.attributes['specversion']!r}"
            )
        for name, value in self.attributes.items():
            if _NAME.fullmatch(name) is None:
                raise InvalidArgument(
                    f"an attribute's name has lower-case letters and digits: {name!r} has others"
                )
            if any(
                ord(each) < 0x20 or 0x7F <= ord(each) < 0xA0 or 0xD800 <= ord(each) < 0xE000
                for each in value
            ):
                raise InvalidArgument(f"the attribute {name!r} has control characters")

    @property
    def key(self) -> str | None:
        """The key of the message."""
        return self.attributes.get("partitionkey")

    def headers(self) -> dict[str, str]:
        """The headers of the message, and of HTTP in binary mode; values are percent-encoded as the
        specification has it.
        """
        found = {
            PREFIX + name: quote(value, safe=_UNQUOTED)
            for name, value in self.attributes.items()
            if name != "datacontenttype"
        }
        if "datacontenttype" in self.attributes:
            found[CONTENT_TYPE] = self.attributes["datacontenttype"]
        return found

    def structured(self) -> dict[str, Any]:
        """The event in the JSON format: data as JSON if its content type says so and it parses,
        otherwise as base64.
        """
        found: dict[str, Any] = dict(self.attributes)
        if is_json(self.attributes.get("datacontenttype", "application/json")):
            try:
                return {**found, "data": parse_json(self.data)} if self.data else found
            except ValueError:
                pass
        return {**found, "data_base64": base64.b64encode(self.data).decode()}


def is_json(content_type: str) -> bool:
    """Whether data of this content type is JSON."""
    media = content_type.partition(";")[0].strip().lower()
    return media.endswith(("/json", "+json"))


def is_event(headers: Mapping[str, str]) -> bool:
    """Whether headers, with names in lower case, are those of an event in binary mode."""
    return PREFIX + "specversion" in headers


def of_headers(headers: Mapping[str, str], data: bytes) -> Event:
    """The event of a message, or of a request in binary mode; header names are in lower case.
    Raises InvalidArgument.
    """
    attributes = {
        name.removeprefix(PREFIX): unquote(value)
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    if headers.get(CONTENT_TYPE):
        attributes["datacontenttype"] = headers[CONTENT_TYPE]
    return Event(attributes, data)


def of_structured(found: object) -> Event:
    """The event that a JSON object describes. Raises InvalidArgument."""
    if not isinstance(found, dict):
        raise InvalidArgument("a CloudEvent in structured mode is a JSON object")
    attributes = {
        name: _text(name, value)
        for name, value in found.items()
        if name not in ("data", "data_base64") and value is not None
    }
    if "data_base64" in found:
        if "data" in found:
            raise InvalidArgument("a CloudEvent has data or data_base64, not both")
        try:
            return Event(attributes, base64.b64decode(found["data_base64"], validate=True))
        except (binascii.Error, TypeError, ValueError) as cause:
            raise InvalidArgument(f"data_base64 is not base64: {cause}") from None
    if "data" not in found:
        return Event(attributes, b"")
    data = found["data"]
    if isinstance(data, str) and not is_json(attributes.get("datacontenttype", "application/json")):
        return Event(attributes, data.encode("utf-8", "replace"))
    attributes.setdefault("datacontenttype", "application/json")
    try:
        return Event(attributes, json.dumps(data, allow_nan=False).encode())
    except (ValueError, RecursionError) as cause:
        raise InvalidArgument(f"the data is not JSON: {cause}") from None


def of_batch(found: object) -> list[Event]:
    """The events of a batch. Raises InvalidArgument."""
    if not isinstance(found, list):
        raise InvalidArgument("CloudEvents in batch mode are a JSON array")
    return [of_structured(each) for each in found]


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int) and value != "":
        return str(value)
    raise InvalidArgument(
        f"the attribute {name!r} must be a non-empty text, an integer or a boolean, not {value!r}"
    )
