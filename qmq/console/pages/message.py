"""*Message*: where a message is, what it waits for, and the events of its life; and the search of a
subject's messages by time, key, header and content. A search has bounds, and the next one continues
where it ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from qmq.client.browsing import BrowseProgress
from qmq.console.bodies import BodyView, body_view, masked_fields, masked_headers, text_or_hex
from qmq.console.page import ConsolePage, Show
from qmq.console.wording import command
from qmq.errors import InvalidArgument, QmqError
from qmq.operations.messages import Inquiry, inquire, timeline, why
from qmq.process.event_loop import TIME_MS_MAX, time_of
from qmq.text import whole_number

if TYPE_CHECKING:
    from collections.abc import Collection

    from qmq.client.browsing import BrowsedMessage
    from qmq.client.client import Client


async def ask_for_message(page: ConsolePage) -> Response:
    """Show a form for a message id, or redirect to the page of the id that the form gives."""
    message_id = page.text("id")
    if message_id:
        return RedirectResponse(f"/messages/{quote(message_id, safe='')}", HTTPStatus.SEE_OTHER)
    return await page.render(
        "message.html",
        message_id="",
        inquiry=None,
        failure="",
        command=command("why", "MESSAGE_ID"),
    )


async def show_message(page: ConsolePage) -> Response:
    """Show all information in the cluster about one message."""
    message_id, subject = page.request.path_params["id"], page.text("subject")
    inquiry: Inquiry | None = None
    failure = ""
    try:
        inquiry = await inquire(page.mq, message_id, subject)
    except QmqError as cause:
        failure = str(cause)
    return await page.render(
        "message.html",
        404 if inquiry is None else 200,
        message_id=message_id,
        inquiry=inquiry,
        failure=failure,
        told=why(inquiry, page.now_ms) if inquiry is not None else [],
        events=[
            dict(zip(("time", "group", "what", "consumer", "attempt", "note"), row, strict=True))
            for row in timeline(inquiry)
        ]
        if inquiry is not None
        else [],
        places=_places(page, inquiry) if inquiry is not None else [],
        command=command("why", *([subject] if subject else []), message_id),
    )


def _places(page: ConsolePage, inquiry: Inquiry) -> list[dict[str, Any]]:
    found = []
    for each in inquiry.followed:
        place = each.place
        masked = masked_fields(page.config.masks, place.subject)
        found.append(
            {
                "place": place,
                "key": text_or_hex(place.key),
                "headers": masked_headers(
                    {header.name: text_or_hex(header.value) for header in place.headers}, masked
                ),
                "body": body_view(place.body, masked),
            }
        )
    return found


PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/messages", ask_for_message),
    ("/messages/{id}", show_message),
)


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


_PLACE: Final = re.compile(r"[0-9]{1,15}(?:,[0-9]{1,10}:[0-9]{1,19}:[^,:]{1,255})*")


_PARTITION_MAX: Final = (1 << 31) - 1


@dataclass(slots=True)
class ReadPlace:
    """How far messages were read in the order in which they were stored: all that were stored
    before `time_ms`, and in some queues those before a sequence. Many messages share a time,
    because all of a batch do: a time alone would name them twice or not at all.

    As text: 1767225600000,0:42:group-1 is that time, and all before 42 in partition 0 of group-1.
    """

    time_ms: int = 0
    positions: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ReadPlace:
        """Raises InvalidArgument."""
        time, *queues = text.split(",")
        time_ms = whole_number(time, TIME_MS_MAX)
        if time_ms is None or _PLACE.fullmatch(text) is None:
            raise _no_place(text)
        place = cls(time_ms)
        for each in queues:
            partition, sequence, group = each.split(":", 2)
            number, at = whole_number(partition, _PARTITION_MAX), whole_number(sequence)
            if number is None or at is None:
                raise _no_place(text)
            place.positions[group, number] = at
        return place

    def __str__(self) -> str:
        return ",".join(
            [
                str(self.time_ms),
                *(
                    f"{part}:{sequence}:{group}"
                    for (group, part), sequence in self.positions.items()
                ),
            ]
        )

    def reach(self, time_ms: int) -> None:
        """Everything that was stored before this time was read."""
        if time_ms > self.time_ms:
            self.time_ms = time_ms
            self.positions.clear()

    def passed(self, message: BrowsedMessage) -> None:
        """The message was read."""
        self.reach(message.append_time_ms)
        self.positions[message.broker_group, message.partition] = message.sequence + 1


def _no_place(text: str) -> InvalidArgument:
    return InvalidArgument(f"{text[:100]!r} is not a place in a subject: search from the beginning")


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """A search. An empty field matches every message. `content` is searched in the body, `header`
    is NAME or NAME=VALUE; both are plain text. `after` is the place of a search that continues.
    """

    start_ms: int = 0
    end_ms: int = 0
    key: str = ""
    tag: str = ""
    header: str = ""
    content: str = ""
    after: ReadPlace | None = None

    @property
    def is_empty(self) -> bool:
        """True if no field is set: the page then shows the newest messages."""
        return self == MessageQuery()

    def wants(self, message: BrowsedMessage, masked: Collection[str]) -> bool:
        """Whether a message has the key, the header and the content; browsing chooses by the rest.
        Pure.

        Where fields are masked, the content is searched in the shown text: a search must not reveal
        masked values.
        """
        if self.key and (message.key_bytes is None or text_or_hex(message.key_bytes) != self.key):
            return False
        if self.header:
            name, equals, value = self.header.partition("=")
            found = message.headers.get(name)
            if found is None or (
                equals and masked_headers({name: text_or_hex(found)}, masked)[name] != value
            ):
                return False
        if not self.content:
            return True
        if masked:
            return self.content in body_view(message.body, masked).text
        return self.content.encode() in message.body


@dataclass(slots=True)
class FoundMessages:
    """The messages that a search found. `next`: the search reached its bounds, and continues from
    there; None: it read everything.
    """

    messages: list[ShownMessage] = field(default_factory=list)
    looked: int = 0
    next: ReadPlace | None = None


def moment_ms(text: str) -> int:
    """A time in ISO 8601, in UTC if it names no zone; 0 for an empty text.
    Raises InvalidArgument.
    """
    if not text:
        return 0
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{text!r} is not a time: write 2027-01-01T09:00, or ...+01:00 for a zone"
        ) from None


def shown_message(message: BrowsedMessage, masked: Collection[str]) -> ShownMessage:
    """All fields of a message that a page may show."""
    place = (
        f"{message.broker_group}/{message.partition}" if message.partition else message.broker_group
    )
    return ShownMessage(
        str(message.id),
        message.subject,
        place,
        message.sequence,
        "" if message.key_bytes is None else text_or_hex(message.key_bytes),
        message.tags,
        masked_headers(
            {name: text_or_hex(value) for name, value in message.headers.items()}, masked
        ),
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
    found.messages = sorted(found.messages, key=lambda each: each.append_time_ms, reverse=True)[
        :count
    ]
    return found


async def find_messages(
    mq: Client,
    subject: str,
    query: MessageQuery,
    masked: Collection[str],
    loop_s: Callable[[], float] | None = None,
) -> FoundMessages:
    """The first SHOWN_MAX messages that match. The search takes at most LOOK_S seconds and examines
    at most LOOKED_MAX messages one by one. Batches that cannot contain the content are skipped as a
    whole. Raises as `Client.browse`.
    """
    clock_s = loop_s or asyncio.get_running_loop().time
    found, until_s, seen = FoundMessages(), clock_s() + LOOK_S, BrowseProgress()
    place = (
        ReadPlace(query.after.time_ms, dict(query.after.positions))
        if query.after is not None
        else ReadPlace()
    )
    place.reach(query.start_ms)
    options: dict[str, Any] = {
        "start": _time(place.time_ms),
        "positions": dict(place.positions),
        "end": _time(query.end_ms),
        "tags_any": (query.tag,) if query.tag else (),
        "content": b""
        if masked
        else query.content.encode(),  # what is masked is not searched in the stored body
        "partial": True,
        "progress": seen,
    }
    read = 0
    try:
        async with (
            asyncio.timeout(LOOK_S),
            aclosing(_generator(mq.browse(subject, **options))) as messages,
        ):
            async for message in messages:
                place.reach(message.append_time_ms)
                is_enough = len(found.messages) == SHOWN_MAX or read == LOOKED_MAX
                if is_enough or (read % 256 == 0 and clock_s() > until_s):
                    break
                read += 1
                place.passed(message)
                if query.wants(message, masked):
                    found.messages.append(shown_message(message, masked))
            else:
                found.looked = seen.looked
                return found
    except TimeoutError:
        place.reach(seen.time_ms)
    found.looked = seen.looked if options["content"] else read
    place.reach(1)  # the time was over before the first message came
    found.next = place
    return found


def _generator(messages: Any) -> Any:
    """A cast: the type of `browse` does not show that it returns an asynchronous generator."""
    return messages


def _time(time_ms: int) -> datetime | None:
    return time_of(time_ms) if time_ms else None
