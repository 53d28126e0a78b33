"""One message in an outbox: converted from the application's values to a row, and from a row to a
message that is sent. Pure. The id is fixed here, before the row is inserted: the message has this
id however often, and by whichever process, it is sent, so that consumers recognise duplicates.

    producer id (64 bits, new for each client) | number of the message (48 bits) | 0

`key_hash` stands for subject and key in the index by which earlier messages of a key are found. Two
keys with the same hash are only kept in order without need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from qmq import limits
from qmq.client.producing import batch
from qmq.errors import InvalidArgument, QmqError
from qmq.model import MessageId, check_name
from qmq.sql.outbox_tables import ERROR_CHARS_MAX, HOLDER_CHARS_MAX
from qmq.text import parse_json

OTHERS_BYTES: Final = 256
"""The most bytes that a message takes in a batch besides key, tags, headers and body: its id, due
time and offsets.
"""
_PER_ITEM_BYTES: Final = 32


class MessageIds:
    """Unique ids for messages of outboxes; thread-safe."""

    def __init__(self, producer_id: int) -> None:
        self._producer_id = producer_id
        self._numbers = count()

    def __call__(self) -> MessageId:
        return MessageId(self._producer_id, next(self._numbers), 0)


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """One message. `due_ms` (of a delayed message) and `create_time_ms` are
    milliseconds since 1970.
    """

    message_id: bytes
    subject: str
    key: bytes
    tags: tuple[str, ...]
    headers: Mapping[str, bytes]
    body: bytes
    due_ms: int | None
    create_time_ms: int

    @property
    def key_hash(self) -> int | None:
        """The hash of subject and key, 64 bits with a sign; None without a key."""
        return key_hash(self.subject, self.key) if self.key else None

    @property
    def size(self) -> int:
        """The most bytes that the message takes in a batch."""
        size = len(self.body) + len(self.key) + OTHERS_BYTES
        size += sum([_PER_ITEM_BYTES + len(tag.encode()) for tag in self.tags])
        return size + sum(
            [
                _PER_ITEM_BYTES + len(name.encode()) + len(value)
                for name, value in self.headers.items()
            ]
        )

    def row(self) -> dict[str, Any]:
        """The row to insert."""
        tags = json.dumps(self.tags) if self.tags else None
        headers = (
            json.dumps({name: value.decode("latin-1") for name, value in self.headers.items()})
            if self.headers
            else None
        )
        return {
            "message_id": self.message_id,
            "subject": self.subject,
            "message_key": self.key or None,
            "key_hash": self.key_hash,
            "tags": tags,
            "headers": headers,
            "body": self.body,
            "due_ms": self.due_ms,
            "create_time_ms": self.create_time_ms,
            "content_bytes": _content_bytes(self.key, tags, headers, self.body),
        }


class RowName(NamedTuple):
    """A row, by its place and its message. The place alone is not enough: a database that is put
    back gives the same ids to other rows.
    """

    id: int
    message_id: bytes


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row that was read: its message, or the reason why it has none."""

    name: RowName
    message: OutboxMessage | None
    fault: QmqError | None = None


def key_hash(subject: str, key: bytes) -> int:
    """A 64-bit hash of subject and key, as a signed SQL integer."""
    return int.from_bytes(
        hashlib.blake2b(subject.encode() + b"\0" + key, digest_size=8).digest(),
        "little",
        signed=True,
    )


def new_message(
    message_id: MessageId,
    now_ns: int,
    subject: str,
    body: object,
    *,
    key: object = None,
    tags: object = None,
    headers: object = None,
    due_ms: int | None = None,
) -> OutboxMessage:
    """Check the application's values and make a message. Raises InvalidName, InvalidArgument,
    MessageTooLarge.
    """
    return OutboxMessage(
        message_id.to_bytes(),
        check_name("subject", subject),
        batch.key_bytes(key),
        batch.tag_tuple(tags),
        batch.header_map(headers),
        batch.body_bytes(body, limits.BODY_BYTES_MAX),
        due_ms,
        now_ns // 1_000_000,
    )


def from_row(row: Sequence[Any]) -> OutboxRow:
    """Read a row of `OutboxStatements.contents`. Never raises: a damaged row has an error."""
    number, message_id, subject, key, _, tags, headers, body, due_ms, create_time_ms, size = row
    name, key_data, data = RowName(number, bytes(message_id)), bytes(key or b""), bytes(body)
    found = _content_bytes(key_data, tags, headers, data)
    if found != size:
        fault = InvalidArgument(
            f"the row has {found} bytes of content where {size} were written: a column of "
            "the table is too narrow"
        )
        return OutboxRow(name, None, fault)
    try:
        message = OutboxMessage(
            name.message_id,
            check_name("subject", subject),
            key_data,
            tuple(parse_json(tags)) if tags else (),
            {name: value.encode("latin-1") for name, value in parse_json(headers).items()}
            if headers
            else {},
            data,
            due_ms,
            create_time_ms,
        )
    except (ValueError, TypeError, AttributeError, QmqError) as cause:
        return OutboxRow(name, None, InvalidArgument(f"the row cannot be read: {cause}"))
    return OutboxRow(name, message)


def error_text(error: BaseException) -> str:
    """An error as a row keeps it: ASCII, without control characters, cut to a length; for
    SQLAlchemy's errors the driver's text, without the values.
    """
    text = str(getattr(error, "orig", None) or error)
    return _ascii(text or type(error).__name__)[:ERROR_CHARS_MAX]


def holder_text(name: str) -> str:
    """The name of the holder of a claim or lease, as stored."""
    return _ascii(name)[:HOLDER_CHARS_MAX]


def _ascii(text: str) -> str:
    return "".join(
        each if " " <= each <= "~" else each.encode("unicode_escape").decode() for each in text
    )


def _content_bytes(key: bytes, tags: str | None, headers: str | None, body: bytes) -> int:
    return len(key) + len(tags or "") + len(headers or "") + len(body)
