"""Messages in an export, an import or a copy: each is a record, a value with validity checks; a
subject is a source of records, by a range of messages and the position of the reader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import qmq
from qmq import limits
from qmq.client.browsing import BrowsedMessage
from qmq.client.producing import batch
from qmq.errors import InvalidArgument, MessageTooLarge
from qmq.model import MessageId
from qmq.wire.batch import size_of_copy


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A message with its id, key, tags, headers and create time.
    Times are milliseconds since 1970.
    """

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
        """Return the record. Raises InvalidArgument or MessageTooLarge with the record's number if
        a broker would refuse it.
        """
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
    return TransferRecord(
        message.body,
        message.key_bytes,
        message.tags,
        message.headers,
        message.create_time_ms,
        message.id,
    )


def place_of(message: BrowsedMessage) -> dict[str, Any]:
    """Where and when a message was stored. Exports contain it for readers; imports ignore it."""
    return {
        "subject": message.subject,
        "broker_group": message.broker_group,
        "partition": message.partition,
        "sequence": message.sequence,
        "append_time_ms": message.append_time_ms,
    }


@dataclass(frozen=True, slots=True)
class MessageRange:
    """A selection of a subject's messages. Times are store times; upper bounds are exclusive. None
    or empty: no restriction.
    """

    start: datetime | None = None
    end: datetime | None = None
    first_sequence: int | None = None
    end_sequence: int | None = None
    partition: int | None = None
    broker_group: str = ""
    key: bytes | None = None
    key_from: bytes | None = None
    key_before: bytes | None = None
    tags_any: tuple[str, ...] = ()

    @property
    def has_key_range(self) -> bool:
        """Whether the range has only messages with a key."""
        return self.key_from is not None or self.key_before is not None

    def has(self, message: BrowsedMessage) -> bool:
        """Whether the range has a message that `browse` returned. Conditions that `browse` applies
        itself are not checked again. Pure.
        """
        key = message.key_bytes
        return (
            (self.partition is None or message.partition == self.partition)
            and (not self.broker_group or message.broker_group == self.broker_group)
            and not (self.has_key_range and key is None)
            and (self.key_from is None or (key or b"") >= self.key_from)
            and (self.key_before is None or (key or b"") < self.key_before)
        )

    def to_json(self) -> dict[str, Any]:
        """The range for the state file; a different range is a different load."""
        texts = {
            "start": None if self.start is None else self.start.isoformat(),
            "end": None if self.end is None else self.end.isoformat(),
            "sequences": [self.first_sequence, self.end_sequence],
            "queue": [self.broker_group, self.partition],
            "keys": [
                None if each is None else each.hex()
                for each in (self.key, self.key_from, self.key_before)
            ],
            "tags": list(self.tags_any),
        }
        return {
            name: value
            for name, value in texts.items()
            if value not in (None, [], [None, None], ["", None], [None] * 3)
        }


class MessageSource:
    """Reads the messages of a range, each queue in order, starting at a mark if one is given. A
    mark is a list of `[group, partition, sequence]`, one for each queue read so far."""

    def __init__(
        self, mq: qmq.Client, subject: str, chosen: MessageRange, mark: Any = None
    ) -> None:
        self._mq, self._subject, self._chosen = mq, subject, chosen
        self._next = {(group, partition): sequence for group, partition, sequence in mark or ()}

    async def messages(self) -> AsyncIterator[BrowsedMessage]:
        """Yields the messages as stored. Raises what `Client.browse` raises."""
        chosen = self._chosen
        async for message in self._mq.browse(
            self._subject,
            start=chosen.start,
            end=chosen.end,
            key=chosen.key,
            tags_any=chosen.tags_any,
            positions=self._positions(),
            sequences=(chosen.first_sequence or 0, chosen.end_sequence),
        ):
            self._next[message.broker_group, message.partition] = message.sequence + 1
            if chosen.has(message):
                yield message

    def _positions(self) -> Mapping[tuple[str, int], int]:
        return dict(self._next)

    async def records(self) -> AsyncIterator[TransferRecord]:
        """Yields the messages as records."""
        async for message in self.messages():
            yield record_of(message)

    def mark(self) -> list[list[Any]]:
        """The position in each queue."""
        return [
            [group, partition, sequence]
            for (group, partition), sequence in sorted(self._next.items())
        ]
