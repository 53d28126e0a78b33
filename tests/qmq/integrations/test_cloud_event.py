"""CloudEvents as messages: every mode of HTTP, and the official SDK on the other side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidArgument
from qmq.integrations import cloud_event
from qmq.integrations.cloud_event import Event

NAMES = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda name: name not in ("data", "datacontenttype")
)
TEXTS = st.text(
    st.characters(min_codepoint=0x20, blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20
)
REQUIRED = {"id": "1", "source": "/shop", "type": "order.new", "specversion": "1.0"}


@given(st.dictionaries(NAMES, TEXTS, max_size=4), st.binary(max_size=50))
def test_an_event_comes_back_from_the_headers_of_a_message(
    extensions: dict[str, str], data: bytes
) -> None:
    event = Event({**extensions, **REQUIRED}, data)
    headers = event.headers()
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert cloud_event.of_headers(headers, data) == event


@given(st.dictionaries(NAMES, TEXTS, max_size=4), st.binary(max_size=50))
def test_an_event_comes_back_from_structured_mode(extensions: dict[str, str], data: bytes) -> None:
    event = Event({**extensions, **REQUIRED, "datacontenttype": "image/png"}, data)
    assert cloud_event.of_structured(json.loads(json.dumps(event.structured()))) == event


@pytest.mark.parametrize(
    "found",
    [
        [],
        {},
        {**REQUIRED, "id": ""},
        {**REQUIRED, "specversion": "0.3"},
        {**REQUIRED, "Upper": "x"},
        {**REQUIRED, "x": [1]},
        {**REQUIRED, "x": "a\nb"},
        {**REQUIRED, "data": 1, "data_base64": "MQ=="},
        {**REQUIRED, "data_base64": "?"},
    ],
)
def test_an_invalid_event_is_refused(found: Any) -> None:
    with pytest.raises(InvalidArgument):
        cloud_event.of_structured(found)


@pytest.mark.parametrize(
    ("given", "data"),
    [
        ({"data": {"a": 1}}, b'{"a": 1}'),
        ({"data": "text", "datacontenttype": "text/plain"}, b"text"),
        ({"data_base64": "/w=="}, b"\xff"),
        ({}, b""),
    ],
)
def test_data_of_structured_mode_is_the_body(given: dict[str, Any], data: bytes) -> None:
    assert cloud_event.of_structured({**REQUIRED, **given}).data == data


def test_the_official_sdk_reads_what_we_write_and_the_other_way_round() -> None:
    pytest.importorskip("cloudevents", reason="needs the SDK: pip install cloudevents")
    from cloudevents.core.bindings.http import (
        HTTPMessage,
        from_http_event,
        to_binary_event,
        to_structured_event,
    )
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    theirs = CloudEvent(
        attributes={
            **REQUIRED,
            "source": "/käse",
            "datacontenttype": "application/json",
            "partitionkey": "k",
        },
        data={"n": 1},
    )
    binary = to_binary_event(theirs, JSONFormat())
    ours = cloud_event.of_headers(
        {name.lower(): value for name, value in binary.headers.items()}, bytes(binary.body)
    )
    assert (ours.attributes["source"], ours.key, json.loads(ours.data)) == ("/käse", "k", {"n": 1})
    structured = to_structured_event(theirs, JSONFormat())
    assert cloud_event.of_structured(json.loads(structured.body)).attributes == ours.attributes
    back = from_http_event(HTTPMessage(headers=ours.headers(), body=ours.data), JSONFormat())
    assert (back.get_id(), back.get_source(), back.get_data()) == ("1", "/käse", {"n": 1})
