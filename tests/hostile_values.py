"""What strangers put into messages, requests and files, as Hypothesis strategies. Every property test of a decoder draws from here.

Add any value here that broke a decoder once: all others then see it, too.
"""

from __future__ import annotations

import base64
import json
from copy import deepcopy
from typing import Any, Final

import hostile
from google_crc32c import value as crc32c
from hypothesis import strategies as st

from qmq.batch import BatchView, Envelope, encode
from qmq.batch_columns import Columns
from qmq.client.browse_selection import BrowsedMessage, BrowsedQueue
from qmq.client.message import Decoded, Message, Slice

NUMBERS: Final = st.one_of(
    st.sampled_from(["²", "٣", "1_000", " 1", "+1", "-0", "-1", "1.", "1.5", "infinity", "NaN", "1e999", "1e400", "", "0" * 30, "0x10"]),
    st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**40]).map(str),
    st.just("9" * 5_000),
    st.integers().map(str),
)
DIGITS: Final = st.sampled_from(["0", "5", "²", "٣", str(2**63 - 1), str(2**63), "9" * 19, "9" * 5_000, "0" * 30]) | NUMBERS
"""Numbers where a decoder wants digits only."""
TIMES_MS: Final = st.one_of(
    st.integers(0, 2**63 - 1), st.sampled_from([0, 253_402_300_799_999, 253_402_300_800_000, 2**62, 2**63 - 1]), st.integers(0, 2**42)
)
"""Create times as a batch holds them: also those of the year 10000 and later."""
ANY_TIMES_MS: Final = TIMES_MS | TIMES_MS.map(lambda time: -time) | st.integers()
TIME_TEXTS: Final = st.one_of(
    st.sampled_from(
        ["9999-12-31T23:59:59-01:00", "0001-01-01T00:00+14:00", "10000-01-01", "2027-02-30", "2027-01-01T24:00", "2027-W01", "20270101T00Z"]
    ),
    st.datetimes().map(lambda time: time.isoformat()),
    NUMBERS,
)
TEXTS: Final = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Nd", "No", "L"]), max_size=20),
    st.sampled_from([*hostile.TEXTS, *hostile.NAMES, "\x00", "a\x00b", "\ud800", "\udfff\ud800", "\r\n", "é", "x" * 5_000]),
    NUMBERS,
    TIME_TEXTS,
)
"""Text that Python can hold: half a surrogate pair, too."""
WIRE_TEXTS: Final = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())
"""Text as UTF-8 can carry it."""
JSON_VALUES: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([2**63, -(2**63) - 1, 10**40]) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""What Python's parser makes of JSON: with NaN and Infinity."""
DEEP: Final = (
    b"[" * 20_000,
    b"[" * 5_000 + b"]" * 5_000,
    b"[" * 700 + b"]" * 700,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b"\x91" * 5_000 + b"\x01",
)
JSON_BYTES: Final = JSON_VALUES.map(lambda value: json.dumps(value).encode()) | JSON_VALUES.map(
    lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
)
BYTES: Final[st.SearchStrategy[bytes]] = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([*DEEP, b"", b"1e999", b"NaN", b"-Infinity", b'"\\ud800"', b"1" * 5_000, b"\xef\xbb\xbf{}", b"{}", b"[]", b"null"]),
    st.sampled_from(hostile.BODIES),
    JSON_BYTES,
    TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")),
    TEXTS.map(lambda text: text.encode("utf-16", "surrogatepass")),
)
"""Bytes where text, JSON or MessagePack is meant."""
BASE64: Final = st.one_of(WIRE_TEXTS, BYTES.map(lambda data: base64.urlsafe_b64encode(data).decode()), st.just("===="))


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries with some of these fields, each with a value of its kind or any JSON value."""
    return st.fixed_dictionaries({}, optional={name: value | JSON_VALUES for name, value in fields.items()})


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """A good value of JSON in which up to three parts, at any depth, are gone or have another value."""
    value = deepcopy(good)
    for _ in range(draw(st.integers(0, 3))):
        place = value
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
            if place[key] and isinstance(place[key], dict | list) and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.integers(0, 4)):
                place[key] = draw(JSON_VALUES)
            else:
                del place[key]
            break
    return value


def json_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """The values as JSON, and any bytes."""
    return values.map(lambda value: json.dumps(value).encode()) | BYTES


def headers(*names: str, text: st.SearchStrategy[str] = WIRE_TEXTS) -> st.SearchStrategy[dict[str, bytes]]:
    """Headers of a message: some of these and any others."""
    values = BYTES | text.map(str.encode) | NUMBERS.map(str.encode)
    return st.dictionaries(st.sampled_from(names) | WIRE_TEXTS if names else WIRE_TEXTS, values, max_size=6)


@st.composite
def _decoded(draw: st.DrawFn, found: st.SearchStrategy[dict[str, bytes]], bodies: st.SearchStrategy[bytes]) -> Decoded:
    columns = Columns(
        [draw(bodies)],
        keys=[draw(BYTES)],
        tags=[tuple(draw(st.lists(WIRE_TEXTS, max_size=2)))],
        headers=[draw(found)],
        message_ids=draw(st.none() | st.binary(min_size=16, max_size=16).map(lambda each: [each])),
    )
    _, region = encode(b"s", columns, producer_id=draw(st.integers(0, 2**64 - 1)), batch_sequence=3, create_time_ms=draw(TIMES_MS))
    return Decoded(BatchView(Envelope(0, len(region), crc32c(region), 7, draw(TIMES_MS), 1, 1, 1), region))


def browsed(
    found: st.SearchStrategy[dict[str, bytes]] | None = None, bodies: st.SearchStrategy[bytes] = BYTES
) -> st.SearchStrategy[BrowsedMessage]:
    """Stored messages as a browser reads them, whose key, tags, headers, times and body a stranger chose."""
    queue = BrowsedQueue("s", "g1", 0, 8)
    return _decoded(headers() if found is None else found, bodies).map(lambda batch: BrowsedMessage(batch, 0, queue))


class Untouched:
    """A receiver of verdicts for messages that nobody settles."""

    subject, broker_group = "s", "g1"


def received(
    found: st.SearchStrategy[dict[str, bytes]] | None = None, bodies: st.SearchStrategy[bytes] = BYTES
) -> st.SearchStrategy[Message]:
    """The same as a consumer gets them."""

    def message(batch: Decoded) -> Message:
        return Slice(batch, 0, 1, 1, 0, Untouched()).message(0)  # type: ignore[arg-type]

    return _decoded(headers() if found is None else found, bodies).map(message)
