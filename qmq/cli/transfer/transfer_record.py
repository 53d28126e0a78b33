"""A message in an export, an import or a copy: a value and its validity checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qmq import limits
from qmq.client.producing import batch
from qmq.errors import InvalidArgument, MessageTooLarge
from qmq.model import MessageId
from qmq.wire.batch import size_of_copy

if TYPE_CHECKING:
    from qmq.client.browsing import BrowsedMessage


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A message with its id, key, tags, headers and create time. Times are milliseconds since 1970."""

    body: bytes
    key: bytes | None = None
    tags: tuple[str, ...] = ()
    headers: Mapping[str, bytes] = field(default_factory=dict)
    create_time_ms: int | None = None
    """None: an id is made when the message is sent."""
    id: MessageId | None = None
    """None: the time of sending."""

    @property
    def size(self) -> int:
        """The approximate size in a batch, in bytes."""
        return size_of_copy(self.body, self.key or b"", self.tags, self.headers)

    def check(self, number: int) -> TransferRecord:
        """Return the record. Raises InvalidArgument or MessageTooLarge with the record's number if a broker would refuse it."""
        try:
            batch.body_bytes(self.body, limits.LONG_BODY_BYTES_MAX)
            batch.key_bytes(self.key)
            batch.tag_tuple(self.tags)
            batch.header_map(self.headers)
        except (InvalidArgument, MessageTooLarge) as failure:
            raise type(failure)(f"record {number:,}: {failure.message}") from None
        return self


def record_of(message: BrowsedMessage) -> TransferRecord:
    """A stored message as a record."""
    return TransferRecord(message.body, message.key_bytes, message.tags, message.headers, message.create_time_ms, message.id)


def place_of(message: BrowsedMessage) -> dict[str, Any]:
    """Where and when a message was stored. Exports contain it for readers; imports ignore it."""
    return {
        "subject": message.subject,
        "broker_group": message.broker_group,
        "partition": message.partition,
        "sequence": message.sequence,
        "append_time_ms": message.append_time_ms,
    }
