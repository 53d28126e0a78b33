"""Gathers all facts about one message: its places, its state in delay groups, its deliveries to consumer groups, and the pauses of
these groups.

The id is a message id (32 hexadecimal digits), or the id of a delayed message (a receipt's `delayed_id`), which also contains its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from qmq.errors import InvalidArgument, MessageNotFound, QmqError
from qmq.headers import GROUP
from qmq.model import DelayedId, MessageId
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.client.delayed_message import DelayedMessage

EARLY_MS: Final = 60_000
"""The most by which a delivery may be before the due time, by the clock of the broker that stores the message."""


@dataclass(slots=True)
class Followed:
    """One place of the message, with the deliveries to consumer groups there."""

    place: control.StoredMessage
    events: list[control.MessageEvent] = field(default_factory=list)
    states: list[control.MessageState] = field(default_factory=list)
    known_since_ms: int = 0
    now_ms: int = 0
    unopened: list[tuple[str, int]] = field(default_factory=list)
    """Groups that have not begun on its partition, and the version of the route that they read."""


@dataclass(slots=True)
class Inquiry:
    message_id: str
    followed: list[Followed]
    delayed: list[DelayedMessage]
    pauses: Sequence[pb.Pause] = ()
    is_incomplete: bool = False


async def places_of(mq: Client, text: str, subject: str) -> tuple[str, list[control.StoredMessage], list[DelayedMessage], bool]:
    """(message id, places, what delay groups have, whether there may be more). Raises MessageNotFound, InvalidArgument."""
    delayed_id = DelayedId.parse(text) if "-" in text else None
    message_id = str(delayed_id.message_id if delayed_id is not None else MessageId.parse(text))
    waiting: dict[str, DelayedMessage] = {}
    if delayed_id is not None:
        shown = await mq.delayed.show(delayed_id)
        waiting[shown.id] = shown
    found: control.FindMessageResponse | None = None
    try:
        found = await _find(mq, message_id, subject, delayed_id)
    except MessageNotFound:
        if not waiting:
            raise
    places = [found.message, *found.others] if found is not None else []
    for place in places:
        if place.due_ms:
            with suppress(MessageNotFound):  # the bucket is deleted: the message was delivered or cancelled
                shown = await mq.delayed.show(_delayed_id(place))
                waiting[shown.id] = shown
    return message_id, places, list(waiting.values()), found is not None and found.is_incomplete


def _delayed_id(place: control.StoredMessage) -> DelayedId:
    return DelayedId(MessageId.parse(place.message_id), place.due_ms, place.append_time_ms, place.broker_group)


async def _find(mq: Client, message_id: str, subject: str, delayed_id: DelayedId | None) -> control.FindMessageResponse:
    since_ms = delayed_id.due_ms - EARLY_MS if delayed_id is not None else 0
    found = await mq.metadata.find_every(message_id, subject, since_ms=max(since_ms, 0))
    due_ms = max([place.due_ms for place in (found.message, *found.others)])
    if found.is_incomplete and due_ms and not since_ms:
        return await mq.metadata.find_every(message_id, subject, since_ms=due_ms - EARLY_MS)
    return found


async def inquire(mq: Client, text: str, subject: str = "", group: str = "") -> Inquiry:
    """Gather all facts about a message. Raises MessageNotFound, UnknownSubject, InvalidArgument, Unavailable."""
    message_id, places, delayed, is_incomplete = await places_of(mq, text, subject)
    followed = [await _follow(mq, place, group) for place in places if not place.due_ms]
    return Inquiry(message_id, followed, delayed, await mq.metadata.pauses(), is_incomplete)


async def _follow(mq: Client, place: control.StoredMessage, group: str) -> Followed:
    found = Followed(place)
    only = directed_to(place)
    if only and group not in ("", only):
        return found
    try:
        await _read(mq, found, group or only)
    except InvalidArgument:  # retention was faster than the cursor: the known events begin later now
        found = Followed(place)
        await _read(mq, found, group or only)
    if place.partition:
        found.unopened = await _unopened(mq, found, group)
    return found


async def _read(mq: Client, found: Followed, group: str) -> None:
    page = await mq.metadata.trace_message(found.place, group)
    found.known_since_ms, found.events = page.known_since_ms, list(page.events)
    while page.cursor:
        page = await mq.metadata.trace_message(found.place, group, page.cursor)
        found.events += page.events
    found.states, found.now_ms = list(page.states), page.time_ms


def directed_to(place: control.StoredMessage) -> str:
    """The one group that a place of the message is for; empty if it is for all."""
    if not place.is_directed:
        return ""
    return next((header.value.decode(errors="replace") for header in place.headers if header.name == GROUP), "")


async def _unopened(mq: Client, found: Followed, group: str) -> list[tuple[str, int]]:
    """The groups of an ordered subject that have not reached the message's partition."""
    begun = {state.group for state in found.states}
    try:
        route = await mq.metadata.describe_route(found.place.subject)
    except QmqError:
        return []
    return [(each.group, each.version) for each in route.groups if each.group not in begun and group in ("", each.group)]
