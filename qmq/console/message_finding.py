"""Searches a subject's messages by time, key, header and content. A search has bounds, and the next search continues where it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from qmq.client.browsing import BrowseProgress
from qmq.console.bodies import BodyView, body_view, text_or_hex
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Collection

    from qmq.client.browse_selection import BrowsedMessage
    from qmq.client.client import Client

SHOWN_MAX: Final = 50
LOOKED_MAX: Final = 200_000
LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message as pages show it."""

    id: str
    subject: str
    place: str
    sequence: int
    key: str
    tags: tuple[str, ...]
    headers: dict[str, str]
    create_time_ms: int
    append_time_ms: int
    body: BodyView


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """A search. An empty field matches every message. `content` is searched in the body, `header` is NAME or NAME=VALUE; both are plain
    text.
    """

    start_ms: int = 0
    end_ms: int = 0
    key: str = ""
    tag: str = ""
    header: str = ""
    content: str = ""

    @property
    def is_empty(self) -> bool:
        """True if no field is set: the page then shows the newest messages."""
        return self == MessageQuery()

    def wants(self, message: BrowsedMessage, masked: Collection[str]) -> bool:
        """Whether a message has the key, the header and the content; browsing chooses by the rest. Pure.

        Where fields are masked, the content is searched in the shown text: a search must not reveal masked values.
        """
        if self.key and (message.key_bytes is None or text_or_hex(message.key_bytes) != self.key):
            return False
        if self.header:
            name, equals, value = self.header.partition("=")
            found = message.headers.get(name)
            if found is None or (equals and text_or_hex(found) != value):
                return False
        if not self.content:
            return True
        if masked:
            return self.content in body_view(message.body, masked).text
        return self.content.encode() in message.body


@dataclass(slots=True)
class FoundMessages:
    """The messages that a search found. `next_ms`: the search reached its bounds, and continues from there; 0: it read everything."""

    messages: list[ShownMessage] = field(default_factory=list)
    looked: int = 0
    next_ms: int = 0


def moment_ms(text: str) -> int:
    """A time in ISO 8601, in UTC if it names no zone; 0 for an empty text. Raises InvalidArgument."""
    if not text:
        return 0
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{text!r} is not a time: write 2027-01-01T09:00, or ...+01:00 for a zone") from None


def shown_message(message: BrowsedMessage, masked: Collection[str]) -> ShownMessage:
    """All fields of a message that a page may show."""
    place = f"{message.broker_group}/{message.partition}" if message.partition else message.broker_group
    return ShownMessage(
        str(message.id),
        message.subject,
        place,
        message.sequence,
        "" if message.key_bytes is None else text_or_hex(message.key_bytes),
        message.tags,
        {name: text_or_hex(value) for name, value in message.headers.items()},
        message.create_time_ms,
        message.append_time_ms,
        body_view(message.body, masked),
    )


async def newest(mq: Client, subject: str, count: int, masked: Collection[str]) -> FoundMessages:
    """The newest messages of all queues, the newest first. Raises as `Client.browse`."""
    found = FoundMessages()
    async with aclosing(_generator(mq.browse(subject, last=count, partial=True))) as messages:
        async for message in messages:
            found.messages.append(shown_message(message, masked))
    found.looked = len(found.messages)
    found.messages = sorted(found.messages, key=lambda each: each.append_time_ms, reverse=True)[:count]
    return found


async def find_messages(
    mq: Client, subject: str, query: MessageQuery, masked: Collection[str], loop_s: Callable[[], float] | None = None
) -> FoundMessages:
    """The first SHOWN_MAX messages that match. The search takes at most LOOK_S seconds and examines at most LOOKED_MAX messages one by one.
    Batches that cannot contain the content are skipped as a whole. Raises as `Client.browse`.
    """
    clock_s = loop_s or asyncio.get_running_loop().time
    found, until_s, seen = FoundMessages(), clock_s() + LOOK_S, BrowseProgress()
    options: dict[str, Any] = {
        "start": _time(query.start_ms),
        "end": _time(query.end_ms),
        "tags_any": (query.tag,) if query.tag else (),
        "content": b"" if masked else query.content.encode(),  # what is masked is not searched in the stored body
        "partial": True,
        "progress": seen,
    }
    read, last_ms = 0, query.start_ms
    try:
        async with asyncio.timeout(LOOK_S), aclosing(_generator(mq.browse(subject, **options))) as messages:
            async for message in messages:
                last_ms = message.append_time_ms
                is_enough = len(found.messages) == SHOWN_MAX or read == LOOKED_MAX
                if is_enough or (read % 256 == 0 and clock_s() > until_s):
                    break
                read += 1
                if query.wants(message, masked):
                    found.messages.append(shown_message(message, masked))
            else:
                found.looked = seen.looked
                return found
    except TimeoutError:
        last_ms = max(last_ms, seen.time_ms)
    found.looked = seen.looked if options["content"] else read
    found.next_ms = last_ms or 1  # the time was over before the first message came: 0 would say that everything was read
    return found


def _generator(messages: Any) -> Any:
    """A cast: the type of `browse` does not show that it returns an asynchronous generator."""
    return messages


def _time(time_ms: int) -> datetime | None:
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms else None
