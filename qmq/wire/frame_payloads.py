"""Packs and unpacks the payload of each kind of frame. Pure.

Frequent payloads are fixed structs (little endian); the rare ones that open a session (HELLO,
WELCOME, ATTACH, ATTACHED) or have many fields (FETCH, FIND) are JSON objects, so that they can grow
and any language can read them. A payload that does not parse is a ProtocolViolation.

    PRODUCE    batches, one after another, as the producer made them
               -> PRODUCED  a Produced for each
    PULL       a consumer's request for messages
               -> MESSAGES  a Delivery: ranges, then the batches that hold them
    SETTLE     a Settlement for each range of pull sequences, then its number and an error's text
               for each range that has one
               -> SETTLED   the numbers of settled and of stale messages
    BEGUN      a session, and a range of pull sequences; not answered
    FETCH      a queue from a sequence on, and a selection
               -> FETCHED   a Fetched, then whole committed batches
    FIND       a producer, and which of its batches
               -> FOUND     the stored batches' numbers and places
    HEARTBEAT, DETACH
               -> OK
    anything
               -> ERROR     code, outcome, retry_after_ms, text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from struct import Struct, error
from typing import Any, Final, NamedTuple, TypeVar

from qmq import limits
from qmq.errors import InvalidArgument, Outcome, ProtocolViolation, QmqError, from_wire

PROTOCOL_VERSION: Final = 1

_PRODUCED: Final = Struct("<qq")
_PULL: Final = Struct("<IIII")
_PULL_KEEPING: Final = Struct("<IIIIq")
_DELIVERY: Final = Struct("<IIqI")
_RANGE: Final = Struct("<qIII")
_FETCHED: Final = Struct("<qqqqqII")
_SESSION: Final = Struct("<I")
_DETACH: Final = Struct("<Iq")
EVERYTHING_RECEIVED: Final = (1 << 63) - 1
"""The value in a DETACH of a consumer that does not know the last pull sequence it received."""
_ERROR: Final = Struct("<HBBI")
_LANE_PULL: Final = Struct("<IQqIII")
_LANE_DELIVERY: Final = Struct("<IIqII")
_LANE_SETTLE: Final = Struct("<IIQ")
_LANE_SETTLEMENT: Final = Struct("<qqII")
_SETTLE: Final = Struct("<II")
_SETTLEMENT: Final = Struct("<qqII")
_ERROR_TEXT: Final = Struct("<IH")
_SETTLED: Final = Struct("<QQ")
_BEGUN: Final = Struct("<Iqq")

RESUME: Final = "resume"
"""The value of `start` in an ATTACH that resumes a session."""

_J = TypeVar("_J", bound="_JsonMessage")


class _JsonMessage:
    """A payload that is one JSON object;
    unknown fields are ignored, so that a newer peer may add some.
    """

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()  # type: ignore[call-overload]

    @classmethod
    def unpack(cls: type[_J], payload: memoryview | bytes) -> _J:
        try:
            found: Any = json.loads(bytes(payload))
            known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
            message = cls(**{name: value for name, value in found.items() if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError) as cause:
            raise ProtocolViolation(
                f"not a valid {cls.__name__}: {str(cause)[: limits.ERROR_VALUE_CHARS_MAX]}"
            ) from None
        message._check()
        return message

    def _check(self) -> None:
        for known in fields(self):  # type: ignore[arg-type]
            value = getattr(self, known.name)
            kind = {"int": int, "str": str}.get(str(known.type), list)
            if (
                not isinstance(value, kind)
                or isinstance(value, bool)
                or not _holds(str(known.type), value)
            ):
                given = repr(value)[: limits.ERROR_VALUE_CHARS_MAX]
                raise ProtocolViolation(
                    f"{type(self).__name__}.{known.name} must be {known.type}, not {given}"
                )
            if not all(is_text(each) for each in (value if isinstance(value, list) else (value,))):
                raise InvalidArgument(
                    f"{type(self).__name__}.{known.name} holds half of a surrogate pair, "
                    "which is no character"
                )


def is_text(value: Any) -> bool:
    """True if a string can be encoded as UTF-8. JSON can escape code points that cannot."""
    return (
        not isinstance(value, str)
        or value.isascii()
        or not any("\ud800" <= each <= "\udfff" for each in value)
    )


def _holds(kind: str, value: Any) -> bool:
    """True if the items of a list have the right type."""
    if kind == "list[str]":
        return all(isinstance(each, str) for each in value)
    if kind == "list[list[int]]":
        return all(
            isinstance(each, list) and all(type(number) is int for number in each) for each in value
        )
    return True


@dataclass(frozen=True, slots=True)
class Hello(_JsonMessage):
    """The first frame on a connection. `token` identifies the client if its certificate does not.
    `server` is the name of the server that the client means (`ServerName.pack`); another server
    refuses (WrongServer). Releases up to 0.2.0 ignore it.
    """

    version: int
    client: str
    token: str = field(default="", repr=False)
    server: str = ""

    def pack(self) -> bytes:
        """Pack the payload. Empty fields are left out:
        the payload is then that of releases before them.
        """
        found = {
            name: value
            for name, value in asdict(self).items()
            if value or name not in ("token", "server")
        }
        return json.dumps(found, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Reauth(_JsonMessage):
    """A newer token of the same principal on an open connection. Answered by OK."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Welcome(_JsonMessage):
    """The broker's limits. `inflight_bytes_max` is the credit: the unanswered bytes that a client
    may have here.
    """

    version: int
    broker: str
    epoch: int
    frame_bytes_max: int
    inflight_bytes_max: int


UNSAID: Final = "\0"
"""The condition of a consumer that does not know the field: releases up to 0.2.0."""


@dataclass(frozen=True, slots=True)
class Attach(_JsonMessage):
    """A consumer joins its group on one queue.

    `incarnation` is a random id that the consumer chooses when it starts. If the same incarnation
    attaches again, it reconnects and keeps its messages up to `received` (the last pull sequence
    that it got, -1 for none). Another incarnation gets all unsettled messages again. `start` says
    where a new group begins: "earliest" or "latest". With `RESUME` the consumer attaches only if
    the broker still knows this incarnation. Otherwise nothing changes, and the answer has `resumed`
    0 and no session. `condition` is what the application selects by itself; brokers only compare
    it.
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
    condition: str = UNSAID


@dataclass(frozen=True, slots=True)
class Attached(_JsonMessage):
    """`session` names the consumer in the frames that follow on this connection.

    `resumed` is 1 if the consumer still holds the messages that it had received, 0 if they went
    back to the group.
    """

    session: int
    lease_ms: int
    next_pull_sequence: int
    resumed: int
    attempts_max: int = 0
    """A message that fails this many times goes to the dead-letter queue; 0: never."""
    knows_kept: int = 0
    """1 if a PULL may name the batch that the consumer keeps."""


ONLY_DIRECTED: Final = 2


@dataclass(frozen=True, slots=True)
class Fetch(_JsonMessage):
    """Read committed batches of a queue, without a group: those that hold any of `sequence` to
    `until` - 1, about `bytes_max` of them.

    The answer has at least one batch if there is one and `bytes_max` is more than 0. With 0 it has
    only the queue's numbers. `since_ms`: begin at the first batch appended at or after that time,
    if that batch comes later than `sequence` (0: no limit). The broker may leave out batches that
    hold no message with any of `tags_any`, or none with one of `tags_all`, or none of the logical
    partitions `lps` (ranges, end exclusive, as "0-512"; empty: all). `directed`: 1 to include
    batches for one consumer group, 2 (`ONLY_DIRECTED`) for only these batches.

    `reader`: a reader without a group reports itself by this name: it has read and committed
    everything before `done`, and `lost` messages were deleted before it read them. Brokers before
    release 0.3 ignore that.
    """

    subject: str
    partition: int
    sequence: int
    until: int
    since_ms: int
    bytes_max: int
    tags_any: list[str]
    tags_all: list[str]
    lps: list[str]
    directed: int
    reader: str = ""
    done: int = 0
    lost: int = 0

    def pack(self) -> bytes:
        """Pack the payload. Without a reader, it is that of releases before readers."""
        found = asdict(self)
        if not self.reader:
            for name in ("reader", "done", "lost"):
                del found[name]
        return json.dumps(found, separators=(",", ":")).encode()


class Fetched(NamedTuple):
    """A queue's numbers, and the end of the batches that follow in the answer. All are 0 for a
    queue that never had a message.

    `next_sequence`: the answer has every wanted batch from the requested sequence (or
    `start_sequence`, if that is higher) up to this sequence; the next request begins here.
    `end_sequence` is the sequence after the newest message that applications may see; of a sealed
    partition, the sequence of its command message. `stored_bytes`, the bytes of the kept messages,
    is set only in the answer to a request for no messages.
    """

    start_sequence: int
    next_sequence: int
    end_sequence: int
    stored_bytes: int
    last_append_ms: int
    is_sealed: bool
    batches: int


@dataclass(frozen=True, slots=True)
class Find(_JsonMessage):
    """Asks for the batches of a producer (16 hexadecimal digits) in a queue: at most `most`, with
    the highest numbers below `before`.
    """

    subject: str
    partition: int
    producer_id: str
    before: int
    most: int


@dataclass(frozen=True, slots=True)
class FoundBatches(_JsonMessage):
    """`[batch_sequence, base_sequence, count]` of each batch, the highest number first; all are
    committed. A count of 0: retention removed it.
    """

    found: list[list[int]]


@dataclass(frozen=True, slots=True)
class LaneAttach(_JsonMessage):
    """A consumer takes a lane of an ordered subject: logical partitions `first` to `end` - 1 of a
    partition, for a group.

    `version` is the frontier's version under which the lane is open for the group. `token` is the
    consumer's earlier token for this lane if it reconnects after a broken connection, and 0
    otherwise. The consumer gives up all its other lanes that overlap this one.
    """

    subject: str
    partition: int
    group: str
    consumer: str
    incarnation: str
    first: int
    end: int
    version: int
    token: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class LaneAttached(_JsonMessage):
    """The consumer owns the lane. Sent when this is committed. `token` goes into every LANE_PULL
    and LANE_SETTLE.

    `position` is the first sequence that may have an unfinished message of the lane: pull from
    there. `is_resumed` is 1 if the consumer had this token before, and still owns the messages that
    it pulled. `parked` are the parked keys of the lane, hexadecimal: the consumer must park their
    messages, too.
    """

    session: int
    token: int
    lease_ms: int
    position: int
    is_resumed: int
    parked: list[str]


class Produced(NamedTuple):
    """The place of a batch in the log. An earlier try may have stored it."""

    base_sequence: int
    append_time_ms: int


class Pull(NamedTuple):
    """Asks for the group's next messages. The answer comes when there are messages, or is empty
    after `wait_ms`.

    `kept` is the base sequence of the batch in which this session's last delivery ended: the
    consumer keeps it, and the answer leaves it out. -1: none.
    """

    session: int
    messages_max: int
    bytes_max: int
    wait_ms: int
    kept: int = -1


class Range(NamedTuple):
    """Consecutive messages of one batch. `batch` is the batch's place in the delivery, from 0; the
    kept batch comes behind them.
    """

    first_sequence: int
    count: int  # type: ignore[assignment]
    attempt: int
    batch: int


class Verdict(IntEnum):
    """A consumer's verdict on messages that it received."""

    ACK = 0
    NACK = 1
    """Processing failed: deliver the message again after `delay_ms`, with one attempt more."""
    RELEASE = 2
    """Not processed: deliver the message again, with the same attempt count."""
    DEAD = 3
    """Failed for good: move the message to the group's dead-letter queue. A NACK of the last
    attempt does the same.
    """


BY_GROUP_MS: Final = 0xFFFF_FFFF
"""The delay of a NACK that means: use the delay of the group's settings for this attempt."""
ERROR_CHARS_MAX: Final = 1_000
"""The longest error text of a verdict; a longer text is cut."""


class Settlement(NamedTuple):
    """A verdict on a range of pull sequences, both ends included."""

    first: int
    last: int
    verdict: int
    delay_ms: int
    error: str = ""
    """The error of a NACK or DEAD."""


class LanePull(NamedTuple):
    """Asks for a lane's messages from `sequence` on. The answer comes when there are messages, or
    is empty after `wait_ms`.

    The request has the position, so after a broken answer the consumer repeats the request.
    """

    session: int
    token: int
    sequence: int
    messages_max: int
    bytes_max: int
    wait_ms: int


class LaneDelivery(NamedTuple):
    """A lane's messages. `ranges` has all unfinished messages of the lane from the pull's sequence
    up to before `next_sequence`.

    `is_end`: the partition is sealed, and `next_sequence` is after its command message. No message
    will ever follow.
    """

    session: int
    next_sequence: int
    is_end: bool
    ranges: list[Range]
    batches: int


class LaneVerdict(IntEnum):
    """A consumer's verdict on its lane's messages in a range of sequences, both ends included."""

    DONE = 0
    """Processed. Covers all messages of the lane in the range; messages of other lanes may lie
    between them.
    """
    FAILED = 1
    """The handler failed on the message at `first`, for the `argument`-th time. The message is not
    done; the broker keeps the count.
    """
    PARKED = 2
    """The message at `first` is parked with its key. It is done for the lane."""


class LaneSettlement(NamedTuple):
    """A verdict on sequences `first` to `last`."""

    first: int
    last: int
    verdict: int
    argument: int


def pack_lane_pull(pull: LanePull) -> bytes:
    """The payload of LANE_PULL."""
    return _LANE_PULL.pack(*pull)


def unpack_lane_pull(payload: memoryview | bytes) -> LanePull:
    """Raises ProtocolViolation."""
    return LanePull(*_unpack(_LANE_PULL, payload, "LANE_PULL"))


def pack_lane_delivery(delivery: LaneDelivery) -> bytes:
    """The bytes before the batches in LANE_MESSAGES."""
    session, following, is_end, ranges, batches = delivery
    return _LANE_DELIVERY.pack(session, len(ranges), following, batches, is_end) + b"".join(
        [_RANGE.pack(*each) for each in ranges]
    )


def unpack_lane_delivery(payload: memoryview | bytes) -> tuple[LaneDelivery, int]:
    """The delivery, and where its batches begin. Raises ProtocolViolation."""
    try:
        session, count, following, batches, is_end = _LANE_DELIVERY.unpack_from(payload)
        start = _LANE_DELIVERY.size + count * _RANGE.size
        ranges = [Range(*each) for each in _RANGE.iter_unpack(payload[_LANE_DELIVERY.size : start])]
    except error:
        raise ProtocolViolation("LANE_MESSAGES is incomplete") from None
    if len(ranges) != count:
        raise ProtocolViolation(f"LANE_MESSAGES holds {len(ranges)} of {count} ranges")
    return LaneDelivery(session, following, bool(is_end), ranges, batches), start


def pack_lane_settle(session: int, token: int, settlements: list[LaneSettlement]) -> bytes:
    """The payload of LANE_SETTLE."""
    return _LANE_SETTLE.pack(session, len(settlements), token) + b"".join(
        [_LANE_SETTLEMENT.pack(*each) for each in settlements]
    )


def unpack_lane_settle(payload: memoryview | bytes) -> tuple[int, int, list[LaneSettlement]]:
    """(session, token, settlements). Raises ProtocolViolation."""
    try:
        session, count, token = _LANE_SETTLE.unpack_from(payload)
        require_ranges("LANE_SETTLE", min(count, len(payload) // _LANE_SETTLEMENT.size))
        settlements = [
            LaneSettlement(*each)
            for each in _LANE_SETTLEMENT.iter_unpack(payload[_LANE_SETTLE.size :])
        ]
    except error:
        raise ProtocolViolation("LANE_SETTLE is incomplete") from None
    if len(settlements) != count or any(each.verdict > LaneVerdict.PARKED for each in settlements):
        raise ProtocolViolation("LANE_SETTLE has a wrong number of ranges, or an unknown verdict")
    return session, token, settlements


def pack_produced(results: list[Produced]) -> bytes:
    """The payload of PRODUCED."""
    if len(results) == 1:
        return _PRODUCED.pack(*results[0])
    return b"".join([_PRODUCED.pack(*each) for each in results])


def unpack_produced(payload: memoryview | bytes) -> list[Produced]:
    """Raises ProtocolViolation."""
    try:
        return [Produced(*each) for each in _PRODUCED.iter_unpack(payload)]
    except error:
        raise ProtocolViolation("PRODUCED is incomplete") from None


def unpack_one_produced(payload: memoryview | bytes) -> Produced:
    """The answer to a PRODUCE of one batch. Raises ProtocolViolation."""
    if len(payload) != _PRODUCED.size:
        raise ProtocolViolation(
            f"PRODUCED answers one batch with {len(payload)} bytes, not {_PRODUCED.size}"
        )
    return tuple.__new__(
        Produced, _PRODUCED.unpack(payload)
    )  # `_make` would be one more call for each message


def pack_pull(pull: Pull) -> bytes:
    """The payload of PULL."""
    return _PULL.pack(*pull[:-1]) if pull.kept < 0 else _PULL_KEEPING.pack(*pull)


def unpack_pull(payload: memoryview | bytes) -> Pull:
    """Raises ProtocolViolation."""
    layout = _PULL_KEEPING if len(payload) == _PULL_KEEPING.size else _PULL
    return Pull(*_unpack(layout, payload, "PULL"))


def pack_delivery(
    session: int, first_pull_sequence: int, ranges: list[Range], batches: int
) -> bytes:
    """The bytes before the batches in MESSAGES."""
    head = _DELIVERY.pack(session, len(ranges), first_pull_sequence, batches)
    return head + b"".join([_RANGE.pack(*each) for each in ranges])


def unpack_delivery(payload: memoryview | bytes) -> tuple[int, int, list[Range], int, int]:
    """(session, first pull sequence, ranges, number of batches, where they begin).
    Raises ProtocolViolation.
    """
    try:
        session, count, first, batches = _DELIVERY.unpack_from(payload)
        start = _DELIVERY.size + count * _RANGE.size
        ranges = [Range(*each) for each in _RANGE.iter_unpack(payload[_DELIVERY.size : start])]
    except error:
        raise ProtocolViolation("MESSAGES is incomplete") from None
    if len(ranges) != count:
        raise ProtocolViolation(f"MESSAGES holds {len(ranges)} of {count} ranges")
    return session, first, ranges, batches, start


def pack_fetched(fetched: Fetched) -> bytes:
    """The bytes before the batches in FETCHED."""
    return _FETCHED.pack(*fetched)


def unpack_fetched(payload: memoryview | bytes) -> tuple[Fetched, int]:
    """The numbers, and where the batches begin. Raises ProtocolViolation."""
    try:
        found = Fetched(*_FETCHED.unpack_from(payload))
    except error:
        raise ProtocolViolation("FETCHED is incomplete") from None
    return found._replace(is_sealed=bool(found.is_sealed)), _FETCHED.size


FETCHED_HEAD_BYTES: Final = _FETCHED.size
"""The bytes before the batches. A reader can send its next FETCH when it has these, while the
batches still arrive.
"""


pack_session: Final[Callable[[int], bytes]] = _SESSION.pack
"""(session) -> the payload of HEARTBEAT."""


def unpack_session(payload: memoryview | bytes) -> int:
    """Raises ProtocolViolation."""
    session: int = _unpack(_SESSION, payload, "HEARTBEAT")[0]
    return session


def pack_detach(session: int, received: int = EVERYTHING_RECEIVED) -> bytes:
    """The payload of DETACH. `received` is the last pull sequence that arrived; later messages
    return to the group without an attempt.
    """
    return _DETACH.pack(session, received)


def unpack_detach(payload: memoryview | bytes) -> tuple[int, int]:
    """The session, and the last pull sequence that has arrived. Raises ProtocolViolation."""
    session, received = _unpack(_DETACH, payload, "DETACH")
    return session, received


def pack_settle(session: int, settlements: list[Settlement]) -> bytes:
    """The payload of SETTLE."""
    errors = [
        (at, each.error[:ERROR_CHARS_MAX].encode())
        for at, each in enumerate(settlements)
        if each.error
    ]
    parts = [_SETTLE.pack(session, len(settlements))]
    parts += [_SETTLEMENT.pack(*each[:4]) for each in settlements]
    parts += [part for at, text in errors for part in (_ERROR_TEXT.pack(at, len(text)), text)]
    return b"".join(parts)


def unpack_settle(payload: memoryview | bytes) -> tuple[int, list[Settlement]]:
    """Raises ProtocolViolation, InvalidArgument."""
    if len(payload) > limits.SETTLE_BYTES_MAX:
        raise InvalidArgument(
            f"a SETTLE has at most {limits.SETTLE_BYTES_MAX} bytes, not {len(payload)}: send "
            "several"
        )
    try:
        session, count = _SETTLE.unpack_from(payload)
        require_ranges("SETTLE", min(count, len(payload) // _SETTLEMENT.size))
        end = _SETTLE.size + count * _SETTLEMENT.size
        settlements = [
            Settlement(*each) for each in _SETTLEMENT.iter_unpack(payload[_SETTLE.size : end])
        ]
        for at, text in _error_texts(payload, end):
            settlements[at] = settlements[at]._replace(error=text)
    except (error, IndexError, UnicodeDecodeError):
        raise ProtocolViolation(
            "SETTLE is incomplete, or has an error for a range that it does not have"
        ) from None
    if len(settlements) != count or any(each.verdict > Verdict.DEAD for each in settlements):
        raise ProtocolViolation("SETTLE has a wrong number of ranges, or an unknown verdict")
    return session, settlements


def require_ranges(what: str, count: int) -> None:
    """Raise InvalidArgument for too many ranges, before they are packed."""
    if count > limits.SETTLE_RANGES_MAX:
        raise InvalidArgument(
            f"a {what} has at most {limits.SETTLE_RANGES_MAX} ranges, not {count}: send several"
        )


def _error_texts(payload: memoryview | bytes, at: int) -> Iterator[tuple[int, str]]:
    """The error texts after the ranges: (number of the range, text)."""
    while at < len(payload):
        number, size = _ERROR_TEXT.unpack_from(payload, at)
        at += _ERROR_TEXT.size
        if at + size > len(payload):
            raise error("cut short")
        yield number, bytes(payload[at : at + size]).decode()
        at += size


pack_begun: Final[Callable[[int, int, int], bytes]] = _BEGUN.pack
"""(session, first, last) -> the payload of BEGUN: these pull sequences, both ends included, were
given to a handler.
"""


def unpack_begun(payload: memoryview | bytes) -> tuple[int, int, int]:
    """(session, first, last). Raises ProtocolViolation."""
    session, first, last = _unpack(_BEGUN, payload, "BEGUN")
    return session, first, last


pack_settled: Final[Callable[[int, int], bytes]] = _SETTLED.pack
"""(settled messages, stale ones) -> the payload of SETTLED."""


def unpack_settled(payload: memoryview | bytes) -> tuple[int, int]:
    """(messages settled, messages that were no longer this consumer's).
    Raises ProtocolViolation.
    """
    settled, stale = _unpack(_SETTLED, payload, "SETTLED")
    return settled, stale


def pack_error(failure: QmqError) -> bytes:
    """The payload of ERROR."""
    retry = failure.retry_after_ms or 0
    return _ERROR.pack(failure.code, failure.outcome.value, 0, retry) + failure.message.encode()


def unpack_error(payload: memoryview | bytes) -> QmqError:
    """The error in the peer's answer. Raises ProtocolViolation if the payload is not an error."""
    try:
        code, outcome, _, retry_after_ms = _ERROR.unpack_from(payload)
        return from_wire(
            code, bytes(payload[_ERROR.size :]).decode(), Outcome(outcome).value, retry_after_ms
        )
    except (error, ValueError):
        raise ProtocolViolation("ERROR cannot be read") from None


def _unpack(layout: Struct, payload: memoryview | bytes, name: str) -> tuple[Any, ...]:
    if len(payload) != layout.size:
        raise ProtocolViolation(f"{name} has {len(payload)} bytes instead of {layout.size}")
    return layout.unpack(payload)
