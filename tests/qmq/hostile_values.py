"""What strangers put into messages, requests and files, as Hypothesis strategies; and the entries
of the list of decoders, which read it. Every property test of a decoder draws from here.

Add any value here that broke a decoder once: all others then see it, too.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
from google_crc32c import value as crc32c
from hypothesis import strategies as st
from support import hostile

from qmq import errors
from qmq.client.browsing import BrowsedMessage, BrowsedQueue
from qmq.client.consuming.message import BatchSlice, DecodedBatch, Message
from qmq.client.producing.delayed import DelayedMessage
from qmq.log.segment_index import with_checksum
from qmq.model import DelayedId, MessageId
from qmq.process.event_loop import time_of
from qmq.wire.batch import BatchView, Envelope, encode
from qmq.wire.batch_columns import Columns

NUMBER_TEXTS: Final = (
    *(
        "²",
        "٣",
        "1_000",
        " 1",
        "+1",
        "-0",
        "-1",
        "1.",
        "1.5",
        "infinity",
        "NaN",
        "1e999",
        "1e400",
        "",
        "0" * 30,
        "0x10",
        "9" * 5_000,
    ),
    *[str(each) for each in (2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**40)],
)
NUMBERS: Final = st.sampled_from(NUMBER_TEXTS) | st.integers().map(str)
DIGITS: Final = (
    st.sampled_from(
        ["0", "5", "²", "٣", str(2**63 - 1), str(2**63), "9" * 19, "9" * 5_000, "0" * 30]
    )
    | NUMBERS
)
"""Numbers where a decoder wants digits only."""
TIME_EXAMPLES_MS: Final = (0, 253_402_300_799_999, 253_402_300_800_000, 2**62, 2**63 - 1)
TIMES_MS: Final = (
    st.integers(0, 2**63 - 1) | st.sampled_from(TIME_EXAMPLES_MS) | st.integers(0, 2**42)
)
"""Create times as a batch holds them: also those of the year 10000 and later."""
ANY_TIMES_MS: Final = TIMES_MS | TIMES_MS.map(lambda time: -time) | st.integers()
_TIMES: Final = (
    *(
        "9999-12-31T23:59:59-01:00",
        "0001-01-01T00:00+14:00",
        "10000-01-01",
        "2027-02-30",
        "2027-01-01T24:00",
        "2027-W01",
        "20270101T00Z",
    ),
    *("0001-01-01T00:00", "9999-12-31T23:59:59.999999Z"),
)
TIME_TEXTS: Final = (
    st.sampled_from(_TIMES) | st.datetimes().map(lambda time: time.isoformat()) | NUMBERS
)
TEXT_EXAMPLES: Final = (
    *(
        *hostile.TEXTS,
        *hostile.NAMES,
        "\x00",
        "a\x00b",
        "\ud800",
        "\udfff\ud800",
        "\r\n",
        "é",
        "x" * 5_000,
    ),
    *(*NUMBER_TEXTS, *_TIMES),
)
"""Each of them broke a decoder of text once: a decoder of text sees all of them in every run."""
WIRE_EXAMPLES: Final = tuple(each.encode("utf-8", "replace").decode() for each in TEXT_EXAMPLES)
TEXTS: Final = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Nd", "No", "L"]), max_size=20),
    st.sampled_from(TEXT_EXAMPLES),
    NUMBERS,
    TIME_TEXTS,
)
"""Text that Python can hold: half a surrogate pair, too."""
WIRE_TEXTS: Final = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())
"""Text as UTF-8 can carry it."""
JSON_VALUES: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([2**63, -(2**63) - 1, 10**40])
    | TEXTS,
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
BYTE_EXAMPLES: Final = (
    *(
        *DEEP,
        b"",
        b"1e999",
        b"NaN",
        b"-Infinity",
        b'"\\ud800"',
        b"1" * 5_000,
        b"\xef\xbb\xbf{}",
        b"{}",
        b"[]",
        b"null",
        b"[null]",
        b"\xff",
    ),
    *hostile.BODIES,
    *[each.encode("utf-8", "surrogatepass") for each in TEXT_EXAMPLES],
)
BYTES: Final[st.SearchStrategy[bytes]] = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(BYTE_EXAMPLES),
    JSON_BYTES,
    TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")),
    TEXTS.map(lambda text: text.encode("utf-16", "surrogatepass")),
)
"""Bytes where text, JSON or MessagePack is meant."""
BASE64: Final = st.one_of(
    WIRE_TEXTS, BYTES.map(lambda data: base64.urlsafe_b64encode(data).decode()), st.just("====")
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries with some of these fields, each with a value of its kind or any JSON value."""
    return st.fixed_dictionaries(
        {}, optional={name: value | JSON_VALUES for name, value in fields.items()}
    )


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """A good value of JSON in which up to three parts, at any depth, are gone or have another
    value.
    """
    value = deepcopy(good)
    for _ in range(draw(st.integers(0, 3))):
        place = value
        while isinstance(place, dict | list) and place:
            key = draw(
                st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
            )
            if place[key] and isinstance(place[key], dict | list) and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.integers(0, 4)):
                place[key] = draw(JSON_VALUES)
            else:
                del place[key]
            break
    return value


JSON_EXAMPLES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        0,
        -1,
        2**63,
        10**40,
        1.5,
        math.nan,
        math.inf,
        "",
        "x",
        "\ud800",
        "²",
        "10000-01-01",
        [],
        {},
        [None],
        {"": None},
    ),
    *("a=1\r\nb", ["\ud800"], {"\ud800": 1}),
)
_IN_JSON: Final[tuple[Any, ...]] = (
    *JSON_EXAMPLES,
    *(
        "%1e999%",
        "%1" + "0" * 5_000 + "%",
        "%" + "[" * 150 + "]" * 150 + "%",
        "%" + "[" * 900 + "]" * 900 + "%",
    ),
)
"""What stands between two % is JSON that Python does not write."""


def each_change(good: Any) -> tuple[bytes, ...]:
    """A good value as JSON; the same with each part, at any depth, gone, and with each hostile
    value in its place; and hostile bytes.
    """
    found = [good]
    for path in _paths(good):
        for replacement in (_GONE, *_IN_JSON):
            value = deepcopy(good)
            place = value
            for step in path[:-1]:
                place = place[step]
            if replacement is _GONE:
                del place[path[-1]]
            else:
                place[path[-1]] = replacement
            found.append(value)
    return (
        *[json.dumps(each).replace('"%', "").replace('%"', "").encode() for each in found],
        *BYTE_EXAMPLES,
    )


def each_change_as_text(good: Any) -> tuple[str, ...]:
    """The same for a decoder of text."""
    return tuple(each.decode("latin-1") for each in each_change(good))


_GONE: Final = object()


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    steps = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else []
    )
    for step in steps:
        yield (step,)
        yield from ((step, *rest) for rest in _paths(value[step]))


def json_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """The values as JSON, and any bytes."""
    return values.map(lambda value: json.dumps(value).encode()) | BYTES


def headers(
    *names: str, text: st.SearchStrategy[str] = WIRE_TEXTS
) -> st.SearchStrategy[dict[str, bytes]]:
    """Headers of a message: some of these and any others."""
    values = BYTES | text.map(str.encode) | NUMBERS.map(str.encode)
    return st.dictionaries(
        st.sampled_from(names) | WIRE_TEXTS if names else WIRE_TEXTS, values, max_size=6
    )


def _batch(
    body: bytes = b"b",
    key: bytes = b"",
    tags: tuple[str, ...] = (),
    found: Mapping[str, bytes] | None = None,
    times_ms: tuple[int, int] = (5, 6),
    message_id: bytes | None = None,
    producer_id: int = 1,
) -> DecodedBatch:
    columns = Columns(
        [body],
        keys=[key],
        tags=[tags],
        headers=[found or {}],
        message_ids=None if message_id is None else [message_id],
    )
    _, region = encode(
        b"s", columns, producer_id=producer_id, batch_sequence=3, create_time_ms=times_ms[0]
    )
    return DecodedBatch(
        BatchView(Envelope(0, len(region), crc32c(region), 7, times_ms[1], 1, 1, 1), region)
    )


@st.composite
def _decoded(
    draw: st.DrawFn, found: st.SearchStrategy[dict[str, bytes]], bodies: st.SearchStrategy[bytes]
) -> DecodedBatch:
    return _batch(
        draw(bodies),
        draw(BYTES),
        tuple(draw(st.lists(WIRE_TEXTS, max_size=2))),
        draw(found),
        (draw(TIMES_MS), draw(TIMES_MS)),
        draw(st.none() | st.binary(min_size=16, max_size=16)),
        draw(st.integers(0, 2**64 - 1)),
    )


def _each_batch(good: Mapping[str, bytes]) -> Iterator[DecodedBatch]:
    """Messages with these headers: each hostile value in each header, as the key, as the body, as a
    tag and as a header's name.
    """
    for each in BYTE_EXAMPLES:
        yield _batch(each, found=good)
        yield _batch(key=each, found=good)
        yield from [_batch(found={**good, name: each}) for name in good]
    for text in WIRE_EXAMPLES:
        yield _batch(tags=(text,), found={**good, text: b"x"})
    yield from [
        _batch(found={other: value for other, value in good.items() if other != name})
        for name in good
    ]
    yield from [_batch(found=good, times_ms=(time, time)) for time in TIME_EXAMPLES_MS]


def browsed(
    found: st.SearchStrategy[dict[str, bytes]] | None = None,
    bodies: st.SearchStrategy[bytes] = BYTES,
) -> st.SearchStrategy[BrowsedMessage]:
    """Stored messages as a browser reads them, whose key, tags, headers, times and body a stranger
    chose.
    """
    return _decoded(headers() if found is None else found, bodies).map(_as_browsed)


def each_browsed() -> tuple[BrowsedMessage, ...]:
    return tuple(map(_as_browsed, _each_batch({"a": b"x"})))


class Untouched:
    """A receiver of verdicts for messages that nobody settles."""

    subject, broker_group = "s", "g1"


def received(
    found: st.SearchStrategy[dict[str, bytes]] | None = None,
    bodies: st.SearchStrategy[bytes] = BYTES,
) -> st.SearchStrategy[Message]:
    """The same as a consumer gets them."""
    return _decoded(headers() if found is None else found, bodies).map(_as_received)


def each_received(good: Mapping[str, bytes] = MappingProxyType({})) -> tuple[Message, ...]:
    return tuple(map(_as_received, _each_batch(good)))


def _as_browsed(batch: DecodedBatch) -> BrowsedMessage:
    return BrowsedMessage(batch, 0, BrowsedQueue("s", "g1", 0, 8))


def _as_received(batch: DecodedBatch) -> Message:
    return BatchSlice(batch, 0, 1, 1, 0, Untouched()).message(0)  # type: ignore[arg-type]


Strategy = st.SearchStrategy[Any]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder. `always`: what it reads in every run, before the inputs that Hypothesis chooses.
    `raises`: its typed reasons. `runs`: the functions with conversions that it runs.
    """

    name: str
    inputs: Strategy
    decode: Callable[[Any], object]
    raises: tuple[type[Exception], ...] = ()
    runs: tuple[str, ...] = ()
    always: tuple[Any, ...] = field(kw_only=True)


def shown(value: object) -> None:
    """What a page, an answer or a file gets must be text that UTF-8 can carry."""
    json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()


def in_file(use: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """A decoder of a file's content."""

    def decode(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return use(path)

    return decode


def tolerant(decode: Callable[[Any], object]) -> Callable[[Any], object]:
    """The decoder, where others follow it."""

    def work(value: Any) -> object:
        try:
            return decode(value)
        except errors.InvalidArgument as reason:
            return reason

    return work


def packed(value: Any) -> bytes:
    """A value as MessagePack; the empty map for one that MessagePack cannot hold."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return b"\x80"


OURS: Final = (
    *("rocketmq-id", "rocketmq-keys", "rocketmq-type", "rocketmq-due-ms", "rocketmq-born-host"),
    *("rocketmq-check-after-ms", "traceparent", "qmq-group"),
)
LETTERS: Final = headers(
    "qmq-group", "qmq-subject", "qmq-sequence", "qmq-attempt", "qmq-error", "qmq-dead-ms"
)
LETTER_HEADERS: Final = {
    **dict.fromkeys(("qmq-group", "qmq-subject"), b"g"),
    **dict.fromkeys(("qmq-sequence", "qmq-attempt", "qmq-dead-ms"), b"1"),
    "qmq-error": b"\xff",
}
PACKED: Final = JSON_VALUES.map(packed) | BYTES
NUMBER: Final = st.integers(-(2**63), 2**64 - 1)


CRONS: Final = ("", "* * * * *", "0 0 30 2 *", "UTC", "Europe/Berlin")


def checked(magic: bytes, payloads: Strategy) -> Strategy:
    """Payloads behind their checksum, and any bytes."""
    return payloads.map(lambda payload: with_checksum(magic, payload)) | BYTES


def checked_examples(magic: bytes) -> tuple[bytes, ...]:
    """Hostile bytes, alone and behind their checksum."""
    checked = [with_checksum(magic, each) for each in BYTE_EXAMPLES]
    return (*BYTE_EXAMPLES, *checked)


def delayed_message(
    found: dict[str, bytes],
    *,
    body: bytes | None = b"b",
    key: bytes | None = None,
    times_ms: tuple[int, int] = (5, 5),
    numbers: tuple[int, int] = (1, 1),
    cron: tuple[str, str] = ("", ""),
    state: str = "half",
) -> DelayedMessage:
    """A delayed message as a delay group shows it."""
    due, created = map(time_of, times_ms)
    identifier = str(DelayedId(MessageId(1, 2, 3), *numbers, "d1"))
    return DelayedMessage(
        identifier,
        "s",
        MessageId(1, 2, 3),
        due,
        created,
        key,
        ("t",),
        found,
        body,
        5,
        state,
        *cron,
        "d1",
    )


@st.composite
def delayed(draw: st.DrawFn) -> DelayedMessage:
    """Delayed messages whose sender is a stranger."""
    cron, zone = (draw(st.sampled_from(CRONS) | WIRE_TEXTS) for _ in range(2))
    return delayed_message(
        draw(headers(*OURS, "qmq-cron")),
        body=draw(st.none() | BYTES),
        key=draw(st.none() | BYTES),
        times_ms=(draw(ANY_TIMES_MS), draw(ANY_TIMES_MS)),
        numbers=(draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**63 - 1))),
        cron=(cron, zone),
        state=draw(
            st.sampled_from(["half", "pending", "planned", "delivered", "cancelled", "moved"])
        ),
    )


def each_delayed() -> tuple[DelayedMessage, ...]:
    good = dict.fromkeys((*OURS, "qmq-cron"), b"1")
    return (
        *[delayed_message({**good, name: each}) for name in good for each in BYTE_EXAMPLES],
        *[
            delayed_message({other: good[other] for other in good if other != name})
            for name in good
        ],
        *[delayed_message(good, body=each, key=each) for each in (None, *BYTE_EXAMPLES)],
        *[
            delayed_message(good, times_ms=(each, -each), numbers=(each, each))
            for each in TIME_EXAMPLES_MS
        ],
        *[delayed_message(good, cron=each) for each in product((*CRONS, *WIRE_EXAMPLES), CRONS)],
        *[delayed_message(good, cron=("0 9 * * *", each)) for each in WIRE_EXAMPLES],
    )
