"""Prints a segment file for people: every entry, with its validity and its content. Only the file
is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qmq.errors import CorruptBatch
from qmq.log.actions import decode_actions
from qmq.model import MessageId
from qmq.process.event_loop import time_of
from qmq.wire.batch import ENVELOPE_BYTES, MAGIC, BatchView, Envelope, Kind, parse_envelope, unwrap
from qmq.wire.batch_columns import ALIGN, Column, check_region

_BODY_CHARS = 60


@dataclass(frozen=True, slots=True)
class Line:
    """One entry. `verdict` is "ok", or the damage."""

    position: int
    kind: str
    total_bytes: int
    subject: str
    base_sequence: int
    count: int
    epoch: int
    index: int
    append_time_ms: int
    columns: tuple[str, ...]
    verdict: str
    messages: tuple[tuple[object, ...], ...] = ()


def dump_segment(path: Path, *, with_messages: bool) -> Iterator[Line]:
    """The entries of a segment file, damaged entries included. After damage, reading continues at
    the next valid entry.
    """
    base = int(path.stem) if path.stem.isdigit() else 0
    data = path.read_bytes()
    at = 0
    while at < len(data):
        try:
            envelope = parse_envelope(data, at)
            line = _line(
                base + at,
                envelope,
                data[at + ENVELOPE_BYTES : at + envelope.total_bytes],
                with_messages,
            )
            yield line
            at += envelope.total_bytes
        except CorruptBatch as cause:
            following = _next_whole(data, at + ALIGN)
            yield Line(base + at, "?", following - at, "", 0, 0, 0, 0, 0, (), cause.message)
            at = following


def _next_whole(data: bytes, at: int) -> int:
    magic = MAGIC.to_bytes(4, "little")
    while (at := data.find(magic, at)) >= 0:
        try:
            parse_envelope(data, at)
        except CorruptBatch:
            at += 1
        else:
            return at
    return len(data)


def _line(position: int, envelope: Envelope, region: bytes, with_messages: bool) -> Line:
    verdict = "ok"
    try:
        check_region(region, envelope.region_crc)
        if len(region) != envelope.total_bytes - ENVELOPE_BYTES:
            verdict = "cut short"
    except CorruptBatch as cause:
        verdict = cause.message
    kind = Kind(envelope.kind)
    if kind is not Kind.DATA or verdict != "ok":
        return _other(position, kind, envelope, region, verdict)
    view = BatchView(envelope, region)
    columns = tuple(str(column.name).lower() for column in Column if view.header.columns & column)
    messages = tuple(_messages(view)) if with_messages else ()
    return Line(
        position,
        "data",
        envelope.total_bytes,
        f"{view.subject}/{view.header.partition}",
        envelope.base_sequence,
        view.count,
        envelope.epoch,
        envelope.index,
        envelope.append_time_ms,
        (*columns, "body"),
        verdict,
        messages,
    )


def _other(position: int, kind: Kind, envelope: Envelope, region: bytes, verdict: str) -> Line:
    words: tuple[str, ...] = ()
    if kind is Kind.ACTIONS and verdict == "ok":
        words = tuple(
            type(action).__name__.removesuffix("Action").lower()
            for action in decode_actions(unwrap(region))
        )
    return Line(
        position,
        kind.name.lower(),
        envelope.total_bytes,
        "",
        0,
        envelope.base_sequence,
        envelope.epoch,
        envelope.index,
        envelope.append_time_ms,
        words,
        verdict,
    )


def _messages(view: BatchView) -> Iterator[tuple[object, ...]]:
    keys, tags, times = view.keys(), view.tags(), view.create_times_ms()
    header = view.header
    for index, body in enumerate(view.bodies()):
        yield (
            view.base_sequence + index,
            str(MessageId(header.producer_id, header.batch_sequence, index)),
            time_of(times[index]).isoformat(timespec="milliseconds"),
            keys[index].decode(errors="replace") if keys else "",
            " ".join(tags[index]) if tags else "",
            len(body),
            repr(body[:_BODY_CHARS])[2:-1],
        )
