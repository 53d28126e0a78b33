"""A dead letter as a value: read from a message of a dead-letter queue, and copied into messages that are sent again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from qmq import headers
from qmq.batch_columns import Columns
from qmq.copies import CREATED_SPAN_MS, columns_of_copies
from qmq.errors import InvalidArgument
from qmq.model import MessageId
from qmq.text_numbers import whole_number

if TYPE_CHECKING:
    from qmq.client.message import Message


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that failed its last attempt or was rejected. Times are milliseconds since 1970."""

    group: str
    """The consumer group; for a broadcast group with the consumer, as GROUP%CONSUMER."""
    subject: str
    """The subject to which the message was sent."""
    broker_group: str
    sequence: int
    """The message's sequence in that subject."""
    id: MessageId
    attempts: int
    error: str
    """The error of the last attempt."""
    dead_ms: int
    create_time_ms: int
    key: bytes | None
    tags: tuple[str, ...]
    headers: Mapping[str, bytes]
    """The message's own headers."""
    body: bytes
    letter_sequence: int
    """The letter's own sequence in the dead-letter queue, on `broker_group`."""

    @property
    def place(self) -> bytes:
        """Where the letter is and when it died: the value of `headers.REPLAY_OF` on its copies."""
        return f"{self.broker_group}/{self.letter_sequence}/{self.dead_ms}".encode()

    @property
    def name(self) -> bytes:
        """A unique name: message id and place. A message that dies again is another letter."""
        return self.id.to_bytes() + self.place


_M = TypeVar("_M")
Choose = Callable[[DeadLetter], bool]
Edit = Callable[[DeadLetter], DeadLetter]


def _whole(text: bytes) -> int:
    found = whole_number(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return found


def letter_of(message: Message) -> DeadLetter:
    """Parse a message of a dead-letter queue. Raises InvalidArgument if it is not a dead letter."""
    found = message.headers
    try:
        return DeadLetter(
            found[headers.GROUP].decode(),
            found[headers.SUBJECT].decode(),
            message.broker_group,
            _whole(found[headers.SEQUENCE]),
            message.id,
            _whole(found[headers.ATTEMPT]),
            found[headers.ERROR].decode(errors="replace"),
            _whole(found[headers.DEAD_MS]),
            message.create_time_ms,
            message.key_bytes,
            message.tags,
            {name: value for name, value in found.items() if not name.startswith(headers.PREFIX)},
            message.body,
            message.sequence,
        )
    except (KeyError, ValueError) as cause:
        raise InvalidArgument(f"message {message.sequence} of {message.subject} is not a dead letter: {cause!r}") from None


def parts_of(chosen: Sequence[tuple[_M, DeadLetter]], letters_max: int = 0) -> list[list[tuple[_M, DeadLetter]]]:
    """Letters that can be sent in one batch: to one subject and group, with create times that fit together, and at most `letters_max`
    unless that is 0. Pure.
    """
    found: dict[tuple[str, str, int], list[tuple[_M, DeadLetter]]] = {}
    for each in chosen:
        letter = each[1]
        found.setdefault((letter.subject, letter.group, letter.create_time_ms // CREATED_SPAN_MS), []).append(each)
    return [part[at : at + (letters_max or len(part))] for part in found.values() for at in range(0, len(part), letters_max or len(part))]


def columns_of(letters: Sequence[DeadLetter], group: str) -> tuple[Columns, int]:
    """(columns, first create time) of the letters, directed to the group; each says which letter it is of. Pure."""
    return columns_of_copies(
        [each.body for each in letters],
        [each.key or b"" for each in letters],
        [each.tags for each in letters],
        [{**each.headers, headers.GROUP: group.encode(), headers.REPLAY_OF: each.place} for each in letters],
        [each.create_time_ms for each in letters],
        [each.id.to_bytes() for each in letters],
    )
