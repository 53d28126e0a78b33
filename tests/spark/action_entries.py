"""Hand-made entries of an action log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from qmq.log.actions import AnyAction, encode_actions
from qmq.log.envelopes import wrap
from qmq.wire.batch import Envelope, Kind, parse_envelope

Entry = tuple[Envelope, bytes]
START_MS = 1_700_000_000_000


def entry(time_ms: int, *actions: AnyAction, index: int = 1) -> Entry:
    """The entry of one turn of a broker."""
    return _entry(Kind.ACTIONS, encode_actions(actions), time_ms, index)


def snapshot(time_ms: int, states: Iterable[Any], index: int = 1) -> Entry:
    """The snapshot with which a segment begins."""
    return _entry(Kind.SNAPSHOT, msgspec.msgpack.encode(list(states)), time_ms, index)


def _entry(kind: Kind, payload: bytes, time_ms: int, index: int) -> Entry:
    envelope, region = wrap(kind, payload, count=1, epoch=1, index=index, time_ms=time_ms, flushed=0)
    return parse_envelope(envelope), region


def timed(actions: Iterable[AnyAction], start_ms: int = START_MS, step_ms: int = 10) -> Iterator[Entry]:
    """One entry for each action, `step_ms` apart, from `start_ms` on."""
    for number, action in enumerate(actions):
        yield entry(start_ms + number * step_ms, action, index=number + 1)
