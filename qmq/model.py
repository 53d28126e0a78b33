"""The basic types: ids that cannot be mixed up, names with one grammar, settings of subjects and
groups, names of QMQ's own headers.

A *subject* is what is published to. Its messages on one broker group form a *queue*, and a
message's number in its queue is its *sequence*. Names follow one grammar,
`[A-Za-z0-9_-][A-Za-z0-9._-]*` up to 127 characters, and never become paths.

Applications see the headers that QMQ itself adds to messages or reads; their own headers must not
begin with `qmq-`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, NewType, TypeVar

from qmq import limits
from qmq.errors import InvalidArgument, InvalidName
from qmq.text import parse_json

_E = TypeVar("_E", bound=Enum)

Partition = NewType("Partition", int)
"""A queue's number within its subject."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\Z", re.ASCII)


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is a valid name of its kind ("subject", "group", ...).

    Raises:
        InvalidArgument: the name is not a string.
        InvalidName: the name is empty, over 127 characters, or breaks the grammar.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"{kind} must be a str, not {type(name).__name__}")
    if not name:
        raise InvalidName(f"{kind} is empty: give it 1 to {limits.NAME_CHARS_MAX} characters")
    if len(name) > limits.NAME_CHARS_MAX + (
        len(DEAD_LETTERS) if kind == "subject" and is_dead_letters(name) else 0
    ):
        raise InvalidName(
            f"{kind} has {len(name)} characters; the limit is {limits.NAME_CHARS_MAX}"
        )
    if _NAME.match(name) is None and not (
        kind == "subject" and is_dead_letters(name) and _NAME.match(name, len(DEAD_LETTERS))
    ):
        raise InvalidName(
            f"{kind} {name!r} may hold only letters, digits, '.', '_' and '-', and not start "
            "with '.'"
        )
    return name


def check_client(name: str) -> str:
    """Check and return a client's name from a HELLO. People and other programs see the name, so it
    may contain no control characters.

    QMQ's clients follow `check_name`. Other clients may use any printable text. Raises InvalidName.
    """
    if len(name) > limits.NAME_CHARS_MAX or not name.isprintable():
        raise InvalidName(
            f"a client's name is up to {limits.NAME_CHARS_MAX} printable characters, not "
            f"{name[: limits.NAME_CHARS_MAX]!r}"
        )
    return name


def utf8(what: str, text: str) -> bytes:
    """The text as UTF-8. Raises InvalidArgument."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{what} holds half of a surrogate pair, which is no character: {text!r}"
        ) from None


def texts(name: str, values: object) -> tuple[str, ...]:
    """The values of an argument that takes several texts; None means none. One text instead of a
    list would be taken for the list of its letters. Raises InvalidArgument.
    """
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        hint = f": write [{values!r}]" if isinstance(values, str) else ""
        raise InvalidArgument(f"{name} are a list of str, not {type(values).__name__}{hint}")
    found = tuple(values)
    for each in found:
        if not isinstance(each, str):
            raise InvalidArgument(f"{name} are a list of str, and {each!r} is none")
        utf8(name, each)
    return found


BROADCAST: Final = "%"
"""Separates group and consumer in the name that brokers use for a consumer of a broadcast group."""


def check_group(name: object) -> str:
    """Check and return a consumer group's name, or GROUP%CONSUMER of a broadcast group's consumer.
    Raises as `check_name`.
    """
    if not isinstance(name, str) or BROADCAST not in name:
        return check_name("group", name)
    group, _, consumer = name.partition(BROADCAST)
    return check_name("group", group) + BROADCAST + check_name("consumer", consumer)


def base_group(name: str) -> str:
    """The group's own name: GROUP of GROUP%CONSUMER, or else the name itself."""
    return name.partition(BROADCAST)[0]


DEAD_LETTERS: Final = "%dlq%"
"""The prefix of a dead-letter queue's subject; the group's name follows."""


def dead_letter_subject(group: str) -> str:
    """The subject of a group's dead-letter queue.
    All consumers of a broadcast group share the group's.
    """
    return DEAD_LETTERS + base_group(group)


STEPS: Final = "%steps"
"""The subject of a broker group's steps (docs/adr/0025), which nobody consumes."""

OPERATORS: Final = "qmq-dlq"
"""The group that consumes dead-letter queues for operators: the dead letters that it settled were
replayed or purged.
"""


def is_dead_letters(subject: str) -> bool:
    """Whether a subject is a dead-letter queue."""
    return subject.startswith(DEAD_LETTERS)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How brokers retry a group's messages (docs/DELIVERY.md)."""

    attempts_max: int = 5
    """After so many failed attempts a message goes to the dead-letter queue; 0 means never."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 10_000, 30_000, 60_000)
    """Delays between attempts, in milliseconds; the last one holds for all further attempts."""

    def delay_ms(self, attempt: int) -> int:
        """How long a message waits after its attempt number `attempt` failed."""
        return self.retry_delays_ms[min(attempt, len(self.retry_delays_ms)) - 1]

    def check(self) -> GroupSettings:
        """These settings, if they are valid. Raises InvalidArgument."""
        if not 0 <= self.attempts_max <= limits.ATTEMPTS_MAX:
            raise InvalidArgument(
                f"attempts_max is 0 (no limit) to {limits.ATTEMPTS_MAX}, not {self.attempts_max}"
            )
        delays = self.retry_delays_ms
        if not 0 < len(delays) <= limits.RETRY_DELAYS_MAX or not all(
            0 <= each <= limits.REQUEUE_MS_MAX for each in delays
        ):
            raise InvalidArgument(
                f"retry_delays_ms is 1 to {limits.RETRY_DELAYS_MAX} delays of up to an hour, "
                f"not {list(delays)}"
            )
        return self


@dataclass(frozen=True, slots=True, order=True)
class QueueId:
    """One subject's partition on one broker group."""

    subject: str
    partition: Partition = Partition(0)

    def __str__(self) -> str:
        return f"{self.subject}/{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """Identifies a message: its producer, its batch, and its place in the batch. The id takes no
    byte in the log.
    """

    producer_id: int
    batch_sequence: int
    index: int

    def __str__(self) -> str:
        return f"{self.producer_id:016x}{self.batch_sequence:012x}{self.index:04x}"

    def to_bytes(self) -> bytes:
        """The 16 bytes of the message-id column, big endian, so that bytes sort as ids do."""
        return bytes.fromhex(str(self))

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Read the 32 hexadecimal digits that `str()` writes. Raises InvalidArgument."""
        if not re.fullmatch(r"[0-9a-f]{32}", text):
            raise InvalidArgument(f"{text!r} is not a message id: write its 32 hexadecimal digits")
        return cls(int(text[:16], 16), int(text[16:28], 16), int(text[28:], 16))


@dataclass(frozen=True, slots=True)
class DelayedId:
    """Names a delayed message and the delay group that keeps it (docs/DELAY.md). Applications keep
    `str()` of it.
    """

    message_id: MessageId
    due_ms: int
    """The due time with which the message was sent."""
    append_ms: int
    """When the delay group stored the message."""
    group: str
    """The delay group."""

    def __str__(self) -> str:
        return f"{self.message_id}-{self.due_ms:x}-{self.append_ms:x}-{self.group}"

    @classmethod
    def parse(cls, text: str) -> DelayedId:
        """Parse what `str()` wrote. Raises InvalidArgument."""
        match = (
            re.fullmatch(r"([0-9a-f]{32})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-(.+)", text)
            if isinstance(text, str)
            else None
        )
        if match is None:
            raise InvalidArgument(
                f"{text!r} is not the id of a delayed message: use the receipt's `delayed_id`"
            )
        return cls(
            MessageId.parse(match[1]),
            int(match[2], 16),
            int(match[3], 16),
            check_name("delay group", match[4]),
        )


class Order(Enum):
    """A subject's promise about the messages of one key."""

    NONE = ""
    """No order: any broker group takes any message."""
    STRICT = "strict"
    """Every group sees the messages in the order in which they were sent, always."""
    BEST_EFFORT = "best-effort"
    """In order as long as all broker groups work. When one cannot take messages, another takes them
    immediately, out of order.
    """


class Fencing(Enum):
    """How an ordered subject's partitions are closed on a broker group that cannot be reached."""

    LEASE = "lease"
    """A master takes messages only while it holds a lease in the coordination store. Partitions of
    a group that lost its lease can be closed.
    """
    MAJORITY = "majority"
    """Masters take messages without the coordination store. Partitions of a group that cannot be
    reached at all stay there.
    """


class SubjectFlush(Enum):
    """When producers of a subject get their acknowledgement."""

    DEFAULT = "default"
    """When the message is committed: as safe as the brokers' `--flush` makes it."""
    SYNC = "sync"
    """When a majority has also flushed the message, independent of the brokers' flush policy for
    other subjects.
    """


@dataclass(frozen=True, slots=True)
class SubjectConfig:
    """A subject's configuration. `None` means that the broker's default holds.

    `order`, `logical_partitions` and `fencing` never change after the subject was created
    (docs/ORDERING.md).
    """

    name: str
    retention_ms: int | None = None
    """Messages older than this may be deleted, whether they were consumed or not."""
    retention_bytes: int | None = None
    """Stored bytes of one queue, beyond which its oldest messages may be deleted."""
    body_bytes_max: int = limits.BODY_BYTES_MAX
    groups: tuple[str, ...] = ()
    """The broker groups that take its messages. Empty for a subject of an old version, which uses
    all broker groups.
    """
    former_groups: tuple[str, ...] = ()
    """Broker groups that took its messages before. Consumers still read from them, since only an
    operator knows when all is consumed.
    """
    order: Order = Order.NONE
    logical_partitions: int = 0
    """How many logical partitions an ordered subject has; this never changes.
    0 for an unordered subject.
    """
    fencing: Fencing = Fencing.LEASE
    """For an ordered subject."""
    flush: SubjectFlush = SubjectFlush.DEFAULT
    created_by: str = ""
    """The principal that created it; empty if unknown to the metaserver. It counts for the
    principal's quota, and is not a setting.
    """

    def __post_init__(self) -> None:
        check_name("subject", self.name)
        for group in (*self.groups, *self.former_groups):
            check_name("broker group", group)
        if len({*self.groups, *self.former_groups}) < len(self.groups) + len(self.former_groups):
            raise InvalidArgument(
                f"a broker group of subject {self.name!r} is named twice: {self.groups}, "
                f"{self.former_groups}"
            )
        if (self.order is Order.NONE) != (self.logical_partitions == 0):
            raise InvalidArgument(
                f"subject {self.name!r}: an ordered subject has logical partitions, an "
                "unordered one has none"
            )
        if not 0 <= self.logical_partitions <= limits.LOGICAL_PARTITIONS_MAX:
            most = limits.LOGICAL_PARTITIONS_MAX
            raise InvalidArgument(
                f"subject {self.name!r}: 1 to {most} logical partitions, not "
                f"{self.logical_partitions}"
            )
        for field in ("retention_ms", "retention_bytes"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value <= 0):
                raise InvalidArgument(
                    f"{field} of subject {self.name!r} must be a positive int, not {value!r}"
                )
        if not 0 < self.body_bytes_max <= limits.LONG_BODY_BYTES_MAX:
            raise InvalidArgument(
                f"body_bytes_max of subject {self.name!r} must be 1 byte to 15 MiB"
            )


BATCH_NUMBERS: Final = 1 << 48
"""Batch numbers are below this, since a message id has 48 bits for them."""
SESSION_BITS: Final = 24
"""On an ordered subject, the upper 24 of a batch number's 48 bits are the session of the stream,
the lower ones count within the session.
"""


class SchemaFormat(Enum):
    """The language of a schema."""

    JSON_SCHEMA = "json-schema"
    AVRO = "avro"


class Compatibility(Enum):
    """What a new version must be able to do."""

    BACKWARD = "backward"
    """Its readers read bodies of the version before."""
    FORWARD = "forward"
    """Readers of the version before read its bodies."""
    FULL = "full"
    """Both."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class DeclaredSchema:
    """One version of a subject's schema, as the coordination store has it."""

    format: SchemaFormat
    text: str
    """As it was given."""
    compatibility: Compatibility = Compatibility.BACKWARD
    version: int = 0
    """1 for the first of a subject; 0: not stored yet."""
    created_ms: int = 0

    def encode(self) -> bytes:
        return json.dumps(
            {
                **asdict(self),
                "format": self.format.value,
                "compatibility": self.compatibility.value,
            },
            sort_keys=True,
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> DeclaredSchema:
        """The inverse. Raises ValueError, KeyError, TypeError."""
        found: dict[str, Any] = parse_json(data)
        return cls(
            SchemaFormat(found["format"]),
            str(found["text"]),
            Compatibility(found["compatibility"]),
            int(found["version"]),
            int(found["created_ms"]),
        )


def format_of(text: str) -> SchemaFormat:
    """Raises InvalidArgument."""
    return _chosen(SchemaFormat, "format of a schema", text)


def compatibility_of(text: str) -> Compatibility:
    """Raises InvalidArgument."""
    return _chosen(Compatibility, "compatibility", text)


def _chosen(kind: type[_E], what: str, text: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgument(
            f"the {what} is one of {', '.join(each.value for each in kind)}, not {text!r}"
        ) from None


def session_of(number: int) -> int:
    """The session of a batch number; -1 for -1 (no number yet)."""
    return number >> SESSION_BITS


def begins_session(number: int) -> bool:
    """Whether a batch number is the first one of its session."""
    return not number & ((1 << SESSION_BITS) - 1)


def next_session(number: int) -> int:
    """The first number of the session after that of a batch number."""
    return (session_of(number) + 1) << SESSION_BITS


PREFIX: Final = "qmq-"
CRON: Final = "qmq-cron"
"""The schedule of a recurring message: five fields as in cron."""
ZONE: Final = "qmq-zone"
"""The time zone of `qmq-cron`: an IANA name."""
SCHEDULE_ID: Final = "qmq-schedule-id"
"""On every run of a recurring message but the first:
the first run's message id, 32 hexadecimal digits.
"""
PLANNED: Final = "qmq-planned"
"""On a run of a recurring message that was moved: PLANNED/DUE, its time by the schedule and the
time to which it was moved, in milliseconds since 1970. It holds for that due time only: release 0.2
copies the header to the runs after it.
"""
GROUP: Final = "qmq-group"
"""On a directed message: the consumer group that it is for."""
ATTEMPT: Final = "qmq-attempt"
"""On a directed message: how often it was handed out and failed before, a decimal number."""
SUBJECT: Final = "qmq-subject"
"""On a dead letter: the subject to which the message was sent."""
SEQUENCE: Final = "qmq-sequence"
"""On a dead letter: the message's sequence in that subject,
on the broker group that holds the dead letter.
"""
ERROR: Final = "qmq-error"
"""On a dead letter: the last error's text."""
DEAD_MS: Final = "qmq-dead-ms"
"""On a dead letter: when the message died, milliseconds since 1970."""
REPLAY_OF: Final = "qmq-replay-of"
"""On a replayed dead letter: which letter it is a replay of, as BROKER-GROUP/SEQUENCE/TIME: its
place in the dead-letter queue, and when it died."""
