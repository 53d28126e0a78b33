"""Hostile text from programs and strangers. Where it is shown it must have no effect: no markup in
a page, no control in a terminal.

The console and the command line share this list. Add any text here that breaks one of them.

Batches that no QMQ producer makes: their checksum holds, but their content is inconsistent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import msgspec
from google_crc32c import value as crc32c

from qmq.wire.batch import encode, sent_envelope
from qmq.wire.batch_columns import REGION, REGION_BYTES, Columns

CLIPBOARD: Final = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[31mred"
"""Sets a terminal's clipboard and colour."""
MARKUP: Final = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "' onmouseover='window.hacked=1",
    "</pre></details><svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "{{ 7 * 7 }}${7*7}<%= 7 %>",
    "<a href='javascript:window.hacked=1' autofocus onfocus=window.hacked=1>x</a>",
    "</title></textarea></script><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "<base href=//example.invalid/><meta http-equiv=refresh content='0;url=//example.invalid'>",
    "-->]]><style>*{display:none}</style><form action=//example.invalid><button>",
    "&lt;b&gt; &#x3c;i&#x3e; %3Cscript%3Ewindow.hacked=1%3C/script%3E",
)
CONTROLS: Final = (
    CLIPBOARD,
    "\u202egnp.exe\x1b[31m\x00",
    "\x9b31m\r\n\x85\u2028data: {}\n\nevent: failure",
    "\u2066a\U000e0041\ufeff\u200b",
    "[bold red]rich[/] \\x1b[0m",
)
TEXTS: Final = (*MARKUP, *CONTROLS)
NAMES: Final = (*TEXTS, "../../etc/passwd", "a/b?c=d#e", "a b", "")
"""Not one is a valid name of a subject, a group or a client."""
BODIES: Final = (
    *(text.encode() for text in TEXTS),
    json.dumps({text: text for text in TEXTS}).encode(),
    json.dumps({text: text for text in TEXTS}, ensure_ascii=False).encode(),
    msgspec.msgpack.encode([{text: text} for text in TEXTS]),
    b"\xff\xfe" + MARKUP[0].encode(),
    b'{"' + MARKUP[0].encode(),
)


@dataclass(frozen=True, slots=True)
class Lie:
    """A field of a region's header, by its place in `REGION`, and the value that overwrites the
    field.
    """

    field: int
    value: int


LIES: Final = {
    "unknown compression": Lie(9, 9),
    "garbage that claims zstd": Lie(9, 1),
    "a number beyond a message id": Lie(1, 1 << 48),
    "a create time before 1970": Lie(4, -1),
    "a create time at the end of time": Lie(4, (1 << 63) - 1),
}
HARMLESS_AT_INTAKE: Final = {"garbage that claims zstd"}
"""A flaw that only decompression reveals."""


def region_of(
    name: str, body: bytes = b"poison", subject: bytes = b"s", *, due_ms: int | None = None
) -> bytes:
    """A batch of one message with a false header. Create times have deltas, and a delayed message
    has a due time.
    """
    columns = Columns([body], create_deltas=[1], due_times_ms=None if due_ms is None else [due_ms])
    _, region = encode(subject, columns, producer_id=7, batch_sequence=3, create_time_ms=1)
    fields = list(REGION.unpack_from(region))
    fields[LIES[name].field] = LIES[name].value
    return REGION.pack(*fields) + region[REGION_BYTES:]


def sent(region: bytes) -> bytes:
    """The batch as a producer sends it, with a valid checksum."""
    return sent_envelope(region) + region


def crc(region: bytes) -> int:
    """Its checksum."""
    return int(crc32c(region))
