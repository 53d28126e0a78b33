"""What each kind of frame carries, packed and unpacked. Pure.

Frequent payloads are fixed structs (little endian); the rare ones that open a conversation (HELLO, WELCOME, ATTACH, ATTACHED, FETCH)
are JSON objects, so that they can grow and any language can read them. A payload that does not parse is a ProtocolViolation.

    PRODUCE    batches, one after another, as the producer made them   ->  PRODUCED  a Produced for each
    PULL       what a consumer wants next                              ->  MESSAGES  a Delivery: ranges, then the batches they lie in
    SETTLE     a Settlement for each range of pull sequences           ->  SETTLED   how many messages were settled, how many were stale
    HEARTBEAT, DETACH                                                  ->  OK
    anything                                                           ->  ERROR     code, outcome, retry_after_ms, text
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from struct import Struct, error
from typing import Any, Final, NamedTuple, TypeVar

from qmq.errors import Outcome, ProtocolViolation, QmqError, from_wire

PROTOCOL_VERSION: Final = 1

_PRODUCED: Final = Struct("<qq")
_PULL: Final = Struct("<IIII")
_DELIVERY: Final = Struct("<IIqI")
_RANGE: Final = Struct("<qIII")
_SETTLE: Final = Struct("<II")
_SETTLEMENT: Final = Struct("<qqII")
_SETTLED: Final = Struct("<QQ")
_SESSION: Final = Struct("<I")
_ERROR: Final = Struct("<HBBI")

_J = TypeVar("_J", bound="_JsonMessage")


class _JsonMessage:
    """A payload that is one JSON object; unknown fields are passed over, so that a newer peer may add some."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()  # type: ignore[call-overload]

    @classmethod
    def unpack(cls: type[_J], payload: memoryview | bytes) -> _J:
        try:
            found: Any = json.loads(bytes(payload))
            known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
            message = cls(**{name: value for name, value in found.items() if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError) as cause:
            raise ProtocolViolation(f"no {cls.__name__}: {cause}") from None
        message._check()
        return message

    def _check(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            kind = {"int": int, "str": str, "list[str]": list}[str(field.type)]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ProtocolViolation(f"{type(self).__name__}.{field.name} must be {field.type}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Hello(_JsonMessage):
    """First frame on a connection."""

    version: int
    client: str


@dataclass(frozen=True, slots=True)
class Welcome(_JsonMessage):
    """The broker's answer: its limits. `inflight_bytes_max` is the credit: unanswered bytes a client may have here."""

    version: int
    broker: str
    epoch: int
    frame_bytes_max: int
    inflight_bytes_max: int


@dataclass(frozen=True, slots=True)
class Attach(_JsonMessage):
    """A consumer takes part in its group on one queue.

    `incarnation` is drawn when the consumer starts: the same one attaching again is a reconnect and keeps what it holds up to
    `received` (the last pull sequence it got, -1 for none); another one gets everything that was not settled again.
    `start` says where a group that is new begins: "earliest" or "latest".
    """

    subject: str
    partition: int
    group: str
    consumer: str
    incarnation: str
    received: int
    start: str
    lease_ms: int
    tags_any: list[str]
    tags_all: list[str]


@dataclass(frozen=True, slots=True)
class Attached(_JsonMessage):
    """`session` names the consumer in the frames that follow on this connection.

    `resumed` is 1 if the consumer still holds what it had received, 0 if that went back to the group.
    """

    session: int
    lease_ms: int
    next_pull_sequence: int
    resumed: int


@dataclass(frozen=True, slots=True)
class Fetch(_JsonMessage):
    """Read committed batches of a queue from `sequence` on, without a group. The answer is whole batches."""

    subject: str
    partition: int
    sequence: int
    bytes_max: int


class Produced(NamedTuple):
    """Where a batch went. It may have gone there at an earlier try."""

    base_sequence: int
    append_time_ms: int


class Pull(NamedTuple):
    """Ask for the group's next messages; answered when there are some, or after `wait_ms` with none."""

    session: int
    messages_max: int
    bytes_max: int
    wait_ms: int


class Range(NamedTuple):
    """Consecutive messages of one batch. `batch` is the batch's place in the delivery, from 0."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    attempt: int
    batch: int


class Verdict(IntEnum):
    """What a consumer says about messages it was handed."""

    ACK = 0
    NACK = 1
    """Failed: hand it out again, one attempt older, after `delay_ms`."""
    RELEASE = 2
    """Never worked on: hand it out again as if it had not been pulled."""


class Settlement(NamedTuple):
    """A verdict on a range of pull sequences, both ends included."""

    first: int
    last: int
    verdict: int
    delay_ms: int


def pack_produced(results: list[Produced]) -> bytes:
    """The payload of PRODUCED."""
    return b"".join([_PRODUCED.pack(*each) for each in results])


def unpack_produced(payload: memoryview | bytes) -> list[Produced]:
    """Raises ProtocolViolation."""
    try:
        return [Produced(*each) for each in _PRODUCED.iter_unpack(payload)]
    except error:
        raise ProtocolViolation("PRODUCED is cut short") from None


def pack_pull(pull: Pull) -> bytes:
    """The payload of PULL."""
    return _PULL.pack(*pull)


def unpack_pull(payload: memoryview | bytes) -> Pull:
    """Raises ProtocolViolation."""
    return Pull(*_unpack(_PULL, payload, "PULL"))


def pack_delivery(session: int, first_pull_sequence: int, ranges: list[Range], batches: int) -> bytes:
    """What stands before the batches in MESSAGES."""
    head = _DELIVERY.pack(session, len(ranges), first_pull_sequence, batches)
    return head + b"".join([_RANGE.pack(*each) for each in ranges])


def unpack_delivery(payload: memoryview | bytes) -> tuple[int, int, list[Range], int, int]:
    """(session, first pull sequence, ranges, number of batches, where they begin). Raises ProtocolViolation."""
    try:
        session, count, first, batches = _DELIVERY.unpack_from(payload)
        start = _DELIVERY.size + count * _RANGE.size
        ranges = [Range(*each) for each in _RANGE.iter_unpack(payload[_DELIVERY.size : start])]
    except error:
        raise ProtocolViolation("MESSAGES is cut short") from None
    if len(ranges) != count:
        raise ProtocolViolation(f"MESSAGES holds {len(ranges)} of {count} ranges")
    return session, first, ranges, batches, start


def pack_settle(session: int, settlements: list[Settlement]) -> bytes:
    """The payload of SETTLE."""
    return _SETTLE.pack(session, len(settlements)) + b"".join([_SETTLEMENT.pack(*each) for each in settlements])


def unpack_settle(payload: memoryview | bytes) -> tuple[int, list[Settlement]]:
    """Raises ProtocolViolation."""
    try:
        session, count = _SETTLE.unpack_from(payload)
        settlements = [Settlement(*each) for each in _SETTLEMENT.iter_unpack(payload[_SETTLE.size :])]
    except error:
        raise ProtocolViolation("SETTLE is cut short") from None
    if len(settlements) != count or any(each.verdict > Verdict.RELEASE for each in settlements):
        raise ProtocolViolation("SETTLE has another number of ranges than it says, or an unknown verdict")
    return session, settlements


def pack_settled(settled: int, stale: int) -> bytes:
    """The payload of SETTLED."""
    return _SETTLED.pack(settled, stale)


def unpack_settled(payload: memoryview | bytes) -> tuple[int, int]:
    """(messages settled, messages that were no longer this consumer's). Raises ProtocolViolation."""
    settled, stale = _unpack(_SETTLED, payload, "SETTLED")
    return settled, stale


def pack_session(session: int) -> bytes:
    """The payload of HEARTBEAT and DETACH."""
    return _SESSION.pack(session)


def unpack_session(payload: memoryview | bytes) -> int:
    """Raises ProtocolViolation."""
    session: int = _unpack(_SESSION, payload, "HEARTBEAT or DETACH")[0]
    return session


def pack_error(failure: QmqError) -> bytes:
    """The payload of ERROR."""
    retry = failure.retry_after_ms or 0
    return _ERROR.pack(failure.code, failure.outcome.value, 0, retry) + failure.message.encode()


def unpack_error(payload: memoryview | bytes) -> QmqError:
    """The error that the peer answered with. Raises ProtocolViolation if it is none."""
    try:
        code, outcome, _, retry_after_ms = _ERROR.unpack_from(payload)
        return from_wire(code, bytes(payload[_ERROR.size :]).decode(), Outcome(outcome).value, retry_after_ms)
    except (error, ValueError):
        raise ProtocolViolation("ERROR cannot be read") from None


def _unpack(layout: Struct, payload: memoryview | bytes, name: str) -> tuple[Any, ...]:
    if len(payload) != layout.size:
        raise ProtocolViolation(f"{name} has {len(payload)} bytes instead of {layout.size}")
    return layout.unpack(payload)
