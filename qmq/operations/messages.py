"""Gathers all facts about one message: its places, its state in delay groups, its deliveries to
consumer groups, and the pauses of these groups; and says them, as `qmq message` and `qmq why` do:
facts for programs, lines and sentences for people.

The id is a message id (32 hexadecimal digits), or the id of a delayed message (a receipt's
`delayed_id`), which also contains its place.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from qmq.errors import InvalidArgument, MessageNotFound, QmqError
from qmq.model import GROUP, OPERATORS, DelayedId, MessageId, is_dead_letters
from qmq.operations.text import Time, key_text
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import failures

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.client.consuming.message import StoredMessage
    from qmq.client.producing.delayed import DelayedMessage

EARLY_MS: Final = 60_000
"""The most by which a delivery may be before the due time, by the clock of the broker that stores
the message.
"""


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


async def places_of(
    mq: Client, text: str, subject: str
) -> tuple[str, list[control.StoredMessage], list[DelayedMessage], bool]:
    """(message id, places, what delay groups have, whether there may be more). Raises
    MessageNotFound, InvalidArgument.
    """
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
            # if the bucket is deleted, the message was delivered or cancelled
            with suppress(MessageNotFound):
                shown = await mq.delayed.show(_delayed_id(place))
                waiting[shown.id] = shown
    return message_id, places, list(waiting.values()), found is not None and found.is_incomplete


def _delayed_id(place: control.StoredMessage) -> DelayedId:
    return DelayedId(
        MessageId.parse(place.message_id), place.due_ms, place.append_time_ms, place.broker_group
    )


async def _find(
    mq: Client, message_id: str, subject: str, delayed_id: DelayedId | None
) -> control.FindMessageResponse:
    since_ms = delayed_id.due_ms - EARLY_MS if delayed_id is not None else 0
    found = await mq.metadata.find_every(message_id, subject, since_ms=max(since_ms, 0))
    due_ms = max([place.due_ms for place in (found.message, *found.others)])
    if found.is_incomplete and due_ms and not since_ms:
        return await mq.metadata.find_every(message_id, subject, since_ms=due_ms - EARLY_MS)
    return found


async def inquire(mq: Client, text: str, subject: str = "", group: str = "") -> Inquiry:
    """Gather all facts about a message.
    Raises MessageNotFound, UnknownSubject, InvalidArgument, Unavailable.
    """
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
    except InvalidArgument:
        # retention was faster than the cursor: the known events begin later now
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
    return next(
        (header.value.decode(errors="replace") for header in place.headers if header.name == GROUP),
        "",
    )


async def _unopened(mq: Client, found: Followed, group: str) -> list[tuple[str, int]]:
    """The groups of an ordered subject that have not reached the message's partition."""
    begun = {state.group for state in found.states}
    try:
        route = await mq.metadata.describe_route(found.place.subject)
    except QmqError:
        return []
    return [
        (each.group, each.version)
        for each in route.groups
        if each.group not in begun and group in ("", each.group)
    ]


TIMELINE: Final = ("time", "group", "what", "consumer", "attempt", "note")
_UNITS: Final = ((86_400_000, "day"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))
WHAT: Final = {
    "pull": "handed out",
    "ack": "acknowledged",
    "nack": "failed",
    "release": "given back unseen",
    "dead": "failed for good",
    "return": "never arrived, went back",
    "left": "its consumer left",
    "lost": "its consumer was lost",
    "again": "its consumer attached again",
    "reset": "the group was moved",
    "expired": "taken by retention before it went out again",
    "passed": "passed over",
    "skip": "the group began behind it",
    "forget": "the group was forgotten",
    "grant": "its lane was given to",
    "done": "done",
    "park": "set aside with its key",
    "replay": "given back",
    "drop": "dropped",
}
"""The effect of each kind of event on the message."""


def span_text(ms: int) -> str:
    """A duration in its two largest units: "12 s", "1 min 30 s", "2 days 23 h"."""
    for at, (size, name) in enumerate(_UNITS):
        if ms >= size:
            count, rest = divmod(ms, size)
            text = f"{count} {name}{'s' if name == 'day' and count != 1 else ''}"
            small, small_name = _UNITS[min(at + 1, len(_UNITS) - 1)]
            return f"{text} {rest // small} {small_name}" if rest >= small else text
    return "less than 1 s"


def place_text(place: control.StoredMessage) -> str:
    """The place where a message is stored."""
    partition = f", partition {place.partition}" if place.partition else ""
    return f"{place.broker_group} as {place.sequence} of {place.subject}{partition}"


# --- show -----------------------------------------------------------------------------------------


def message_facts(place: control.StoredMessage) -> dict[str, Any]:
    """A stored message as JSON values; `body` is None if the body is not text."""
    return {
        "id": place.message_id,
        "subject": place.subject,
        "partition": place.partition,
        "broker_group": place.broker_group,
        "sequence": place.sequence,
        "key": key_text(place.key) if place.key else None,
        "tags": list(place.tags),
        "headers": {header.name: key_text(header.value) for header in place.headers},
        "created": Time(place.create_time_ms),
        "stored": Time(place.append_time_ms),
        "due": Time(place.due_ms),
        "for_group": directed_to(place),
        "body_bytes": len(place.body),
        "body": text_of(place.body),
        "body_base64": base64.b64encode(place.body).decode(),
    }


def stored_facts(message: StoredMessage) -> dict[str, Any]:
    """A message that was read, as JSON values: `body` is None if the body is not UTF-8;
    `body_base64` is always there.
    """
    return {
        "sequence": message.sequence,
        "id": str(message.id),
        "key": None if message.key_bytes is None else key_text(message.key_bytes),
        "tags": list(message.tags),
        "headers": {name: key_text(value) for name, value in message.headers.items()},
        "create_time_ms": message.create_time_ms,
        "append_time_ms": message.append_time_ms,
        "body": text_of(message.body),
        "body_base64": base64.b64encode(message.body).decode(),
    }


def text_of(body: bytes) -> str | None:
    """The body as text; None if it is not text."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


# --- trace ----------------------------------------------------------------------------------------


def timeline(inquiry: Inquiry) -> list[tuple[Any, ...]]:
    """One row for each event, in order."""
    rows: list[tuple[int, tuple[Any, ...]]] = []
    created = {each.place.create_time_ms for each in inquiry.followed} | {
        _ms(each.create_time) for each in inquiry.delayed
    }
    if created:
        rows.append(
            (min(created), ("", "created", "", "", f"by producer {inquiry.message_id[:16]}"))
        )
    for each in inquiry.delayed:
        note = f"delay group {each.delay_group}, due {Time(_ms(each.due))}, {each.state}"
        group = each.headers.get(GROUP, b"").decode(errors="replace")
        rows.append((_delay_stored_ms(each), (group, "stored to be delivered later", "", "", note)))
    for found in inquiry.followed:
        rows.append(
            (
                found.place.append_time_ms,
                (directed_to(found.place), _stored(found.place), "", "", place_text(found.place)),
            )
        )
        rows += [(event.time_ms, _row(event, found.place)) for event in found.events]
    rows.sort(
        key=lambda row: row[0]
    )  # a stable sort keeps the order of events of the same millisecond
    return [(Time(time_ms), *row) for time_ms, row in rows]


def event_line(time: Time, group: str, what: str, consumer: str, attempt: object, note: str) -> str:
    """A row of the timeline as one line of text."""
    count = f"attempt {attempt}" if attempt not in ("", 0, "0") else ""
    rest = ", ".join(each for each in (consumer, count, note) if each)
    return f"{time}  {f'group {group}: ' if group else ''}{what}{f': {rest}' if rest else ''}"


def _delay_stored_ms(message: DelayedMessage) -> int:
    return int(message.id.split("-")[2], 16)


def _stored(place: control.StoredMessage) -> str:
    if is_dead_letters(place.subject):
        return "moved to the dead-letter queue"
    return "stored again, for one group" if place.is_directed else "stored"


def _row(event: control.MessageEvent, place: control.StoredMessage) -> tuple[Any, ...]:
    notes = [event.error] if event.error else []
    if event.kind == "nack" and event.delay_ms:
        notes.append(f"again after {span_text(event.delay_ms)}")
    attempt = event.attempt + _earlier(place) if event.attempt else ""
    return event.group, WHAT.get(event.kind, event.kind), event.consumer, attempt, "; ".join(notes)


def _earlier(place: control.StoredMessage) -> int:
    """The number of a directed message's failures before it was sent again."""
    return (
        failures({header.name: header.value for header in place.headers})
        if place.is_directed
        else 0
    )


# --- why ------------------------------------------------------------------------------------------


def why(inquiry: Inquiry, now_ms: int) -> list[dict[str, str]]:
    """A paragraph for the message, and one for each group: `group`, `state` and `text`. `now_ms` is
    this machine's time.
    """
    told = [{"group": "", "state": "stored", "text": _where(inquiry)}]
    told += [
        {"group": "", "state": each.state, "text": _delayed_text(each, now_ms)}
        for each in inquiry.delayed
    ]
    for found in inquiry.followed:
        told += [_told(inquiry, found, state) for state in found.states]
        told += [
            {"group": group, "state": "unopened", "text": _unopened_text(group, version)}
            for group, version in found.unopened
        ]
        if not found.states and not found.unopened and not is_dead_letters(found.place.subject):
            text = f"No group has consumed {found.place.subject} on {found.place.broker_group}."
            told.append({"group": "", "state": "unread", "text": text})
    if inquiry.is_incomplete:
        text = (
            "It may be elsewhere too: not everything could be looked through. Name its subject, "
            "or see `qmq cluster status`."
        )
        told.append({"group": "", "state": "incomplete", "text": text})
    return told


def _where(inquiry: Inquiry) -> str:
    stored = [
        f"stored on {place_text(found.place)} at {Time(found.place.append_time_ms)}"
        for found in inquiry.followed
    ]
    return f"Message {inquiry.message_id}: {'; '.join(stored) or 'not stored for delivery'}."


def _delayed_text(message: DelayedMessage, now_ms: int) -> str:
    due_ms, group = _ms(message.due), message.headers.get(GROUP)
    what = (
        (
            f"A copy for group {group.decode(errors='replace')}, which asked for a later retry, "
            "is delayed"
        )
        if group
        else "Delayed"
    )
    if message.state == "pending" and due_ms > now_ms:
        return (
            f"{what}: due in {span_text(due_ms - now_ms)}, at {Time(due_ms)}, in delay group "
            f"{message.delay_group}."
        )
    if message.state in ("pending", "planned"):
        return (
            f"{what}: was due at {Time(due_ms)}; delay group {message.delay_group} is delivering "
            "it: see `qmq delay stats`."
        )
    return (
        f"{what}: was due at {Time(due_ms)}; delay group {message.delay_group} says: "
        f"{message.state}."
    )


def _unopened_text(group: str, version: int) -> str:
    return (
        f"Group {group}: still reads version {version} of the route; the message's partition "
        "comes after that is finished."
    )


def _told(inquiry: Inquiry, found: Followed, state: control.MessageState) -> dict[str, str]:
    copy = " (the copy for it alone)" if found.place.is_directed else ""
    queue = (
        f" of the dead-letter queue {found.place.subject}"
        if is_dead_letters(found.place.subject)
        else ""
    )
    is_handed_over = (
        state.state == "done"
        and state.last.kind == "ack"
        and not found.place.is_directed
        and _has_copy(inquiry, state.group)
    )
    parts = [
        _handed_over(state) if is_handed_over else _TEXTS[state.state](found, state),
        *_pauses(inquiry, found, state),
    ]
    return {
        "group": state.group,
        "state": state.state,
        "text": f"Group {state.group}{queue}{copy}: {'; '.join(filter(None, parts))}.",
    }


def _has_copy(inquiry: Inquiry, group: str) -> bool:
    """True if the message was copied for this group, for a retry after more than an hour."""
    return any(each.headers.get(GROUP) == group.encode() for each in inquiry.delayed) or any(
        directed_to(each.place) == group and not is_dead_letters(each.place.subject)
        for each in inquiry.followed
    )


def _handed_over(state: control.MessageState) -> str:
    return (
        f"failed at {Time(state.last.time_ms)} and asked for a later retry, for which a copy for "
        "it alone was made"
    )


def _pauses(inquiry: Inquiry, found: Followed, state: control.MessageState) -> list[str]:
    if state.state not in ("new", "waiting", "held"):
        return []
    told = []
    if state.is_paused:
        pause = next(
            (
                each
                for each in inquiry.pauses
                if each.kind == "group" and _is_about(each, found, state)
            ),
            None,
        )
        told.append(f"the group is paused{_since(pause)}")
    elif state.is_consumer_paused:
        pause = next(
            (
                each
                for each in inquiry.pauses
                if each.kind == "consumer" and each.name == state.consumer
            ),
            None,
        )
        told.append(f"consumer {state.consumer} is paused{_since(pause)}")
    return told


def _is_about(pause: Any, found: Followed, state: control.MessageState) -> bool:
    return pause.group == state.group.partition("%")[0] and pause.subject in (
        "*",
        found.place.subject,
    )


def _since(pause: Any) -> str:
    if pause is None:
        return ""
    return f" since {Time(pause.since_ms)}{f' ({pause.reason})' if pause.reason else ''}"


def _attempt(found: Followed, state: control.MessageState) -> str:
    number = state.attempt + _earlier(found.place)
    return (
        f"attempt {number} of {state.attempts_max}" if state.attempts_max else f"attempt {number}"
    )


def _new(found: Followed, state: control.MessageState) -> str:
    if found.place.partition:
        return _in_lane(found, state)
    if state.behind:
        text = f"waits behind {state.behind:,} older message{'s' if state.behind != 1 else ''}"
    else:
        text = "is the next one to be handed out"
    if not state.consumers:
        return f"{text}; none of its consumers is here"
    return (
        text
        if state.behind
        else f"{text}: its {_consumers(state)} asked for none, or for other tags"
    )


def _consumers(state: control.MessageState) -> str:
    return "consumer has" if state.consumers == 1 else f"{state.consumers} consumers have"


def _in_lane(found: Followed, state: control.MessageState) -> str:
    parts = [
        f"failed {state.attempt} time{'s' if state.attempt != 1 else ''} so far"
        if state.attempt
        else ""
    ]
    parts.append(
        f"waits behind {state.behind:,} others of its partition"
        if state.behind
        else "is the next one of its lane"
    )
    if state.consumer:
        parts.append(
            f"its lane is held by {state.consumer}, whose lease ends in "
            f"{span_text(state.lease_left_ms)} unless it sends a heartbeat"
        )
    else:
        parts.append("no consumer holds its lane")
    return "; ".join(filter(None, parts))


def _held(found: Followed, state: control.MessageState) -> str:
    since = (
        f" since {span_text(found.now_ms - state.last.time_ms)}"
        if state.last.kind == "pull"
        else ""
    )
    lease = f"its lease ends in {span_text(state.lease_left_ms)} unless it sends a heartbeat"
    return f"held by consumer {state.consumer}{since} ({_attempt(found, state)}); {lease}"


def _waiting(found: Followed, state: control.MessageState) -> str:
    failed = state.attempt - 1 + _earlier(found.place)
    if state.last.kind in ("lost", "left", "again"):
        text = f"{WHAT[state.last.kind]} ({state.last.consumer}) at {Time(state.last.time_ms)}"
    else:
        text = f"failed {failed} time{'s' if failed != 1 else ''}" if failed else "was given back"
    if state.due_ms > found.now_ms:
        return (
            f"{text}, comes again in {span_text(state.due_ms - found.now_ms)} "
            f"({_attempt(found, state)})"
        )
    return (
        f"{text}, goes out again to the next consumer that asks "
        f"({_attempt(found, state)}){'' if state.consumers else '; none is here'}"
    )


def _dying(found: Followed, state: control.MessageState) -> str:
    return (
        f"failed for good at {Time(state.last.time_ms)}{_because(state.last.error)}; on its way "
        "to the dead-letter queue"
    )


def _dead(found: Followed, state: control.MessageState) -> str:
    letter, because = state.dead_letter, _because(state.last.error)
    if not letter.subject:
        return (
            f"failed for good at {Time(state.last.time_ms)}{because}; its dead letter is not "
            "kept any more"
        )
    return (
        f"in the dead-letter queue since {Time(letter.append_time_ms)}{because}; there it is "
        f"{place_text(letter)}"
    )


def _because(error: str) -> str:
    return f" because of: {error}" if error else ""


def _done(found: Followed, state: control.MessageState) -> str:
    last = state.last
    if not last.kind:
        since = f" before {Time(found.known_since_ms)}" if found.known_since_ms else ""
        return f"done{since}; how, the logs do not tell any more"
    if state.group == OPERATORS:
        return f"replayed or purged at {Time(last.time_ms)}"
    by = f" by {last.consumer}" if last.consumer else ""
    attempt = f" ({_attempt(found, state)})" if state.attempts_max and last.kind == "ack" else ""
    text = _DONE.get(last.kind, f"done ({WHAT.get(last.kind, last.kind)})")
    return f"{text} at {Time(last.time_ms)}{by}{attempt}"


_DONE: Final = {
    "ack": "done: acknowledged",
    "done": "done: acknowledged",
    "passed": "passed over, since its consumers asked for other tags, or it is for another group,",
    "expired": "retention took it before it went out again,",
    "reset": "an operator moved the group past it",
    "skip": "the group began behind it",
    "drop": "an operator counted it as done",
}


def _parked(found: Followed, state: control.MessageState) -> str:
    since = f" since {Time(state.last.time_ms)}" if state.last.kind == "park" else ""
    key = key_text(found.place.key) if found.place.key else ""
    behind = (
        f", behind {state.parked_first} of the same key"
        if state.parked_first != found.place.sequence
        else ""
    )
    return (
        f"set aside with its key {key}{since}{behind}: `qmq dlq replay {found.place.subject} "
        f"{state.group} {key}` gives it back"
    )


_TEXTS: Final = {
    "new": _new,
    "held": _held,
    "waiting": _waiting,
    "dying": _dying,
    "dead": _dead,
    "done": _done,
    "parked": _parked,
}


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)
