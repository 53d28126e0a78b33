"""One entry of the list of decoders, and what several entries use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import hostile_values as values
import msgspec
from hypothesis import strategies as st

from qmq import errors
from qmq.client.dead_letters import DeadLetter, letter_of
from qmq.client.producing.delayed import DelayedMessage
from qmq.log.segment_index import with_checksum
from qmq.model import DelayedId, MessageId
from qmq.process.event_loop import time_of

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
LETTERS: Final = values.headers(
    "qmq-group", "qmq-subject", "qmq-sequence", "qmq-attempt", "qmq-error", "qmq-dead-ms"
)
LETTER_HEADERS: Final = {
    **dict.fromkeys(("qmq-group", "qmq-subject"), b"g"),
    **dict.fromkeys(("qmq-sequence", "qmq-attempt", "qmq-dead-ms"), b"1"),
    "qmq-error": b"\xff",
}
PACKED: Final = values.JSON_VALUES.map(packed) | values.BYTES
NUMBER: Final = st.integers(-(2**63), 2**64 - 1)


CRONS: Final = ("", "* * * * *", "0 0 30 2 *", "UTC", "Europe/Berlin")


def checked(magic: bytes, payloads: Strategy) -> Strategy:
    """Payloads behind their checksum, and any bytes."""
    return payloads.map(lambda payload: with_checksum(magic, payload)) | values.BYTES


def checked_examples(magic: bytes) -> tuple[bytes, ...]:
    """Hostile bytes, alone and behind their checksum."""
    checked = [with_checksum(magic, each) for each in values.BYTE_EXAMPLES]
    return (*values.BYTE_EXAMPLES, *checked)


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
    cron, zone = (draw(st.sampled_from(CRONS) | values.WIRE_TEXTS) for _ in range(2))
    return delayed_message(
        draw(values.headers(*OURS, "qmq-cron")),
        body=draw(st.none() | values.BYTES),
        key=draw(st.none() | values.BYTES),
        times_ms=(draw(values.ANY_TIMES_MS), draw(values.ANY_TIMES_MS)),
        numbers=(draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**63 - 1))),
        cron=(cron, zone),
        state=draw(
            st.sampled_from(["half", "pending", "planned", "delivered", "cancelled", "moved"])
        ),
    )


def each_delayed() -> tuple[DelayedMessage, ...]:
    good = dict.fromkeys((*OURS, "qmq-cron"), b"1")
    return (
        *[delayed_message({**good, name: each}) for name in good for each in values.BYTE_EXAMPLES],
        *[
            delayed_message({other: good[other] for other in good if other != name})
            for name in good
        ],
        *[delayed_message(good, body=each, key=each) for each in (None, *values.BYTE_EXAMPLES)],
        *[
            delayed_message(good, times_ms=(each, -each), numbers=(each, each))
            for each in values.TIME_EXAMPLES_MS
        ],
        *[
            delayed_message(good, cron=each)
            for each in product((*CRONS, *values.WIRE_EXAMPLES), CRONS)
        ],
        *[delayed_message(good, cron=("0 9 * * *", each)) for each in values.WIRE_EXAMPLES],
    )


def letter(message: Any) -> DeadLetter:
    return letter_of(message)
