"""*Subject*: depth, groups with their lag, the last messages, a search, and a live tail.

The tail shows messages as they are stored, by server-sent events; a sample of them if they are too
many to read.

    event: message    one message as JSON
    event: pace       {"shown": N, "skipped": M} of the last second in which any messages arrived

At most SHOWN_PER_S messages a second are sent; `pace` counts the others. The stream ends when the
browser leaves, and when the console stops; an id with each message lets a browser that was cut off
continue from there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response, StreamingResponse

from qmq.console.bodies import masked_fields
from qmq.console.cluster_look import SubjectFigures
from qmq.console.page import ConsolePage, Show
from qmq.console.pages.message import (
    SHOWN_MAX,
    FoundMessages,
    MessageQuery,
    ReadPlace,
    ShownMessage,
    find_messages,
    moment_ms,
    newest,
    shown_message,
)
from qmq.console.pages.overview import history
from qmq.console.wording import command, exact_time
from qmq.errors import QmqError, UnknownSubject
from qmq.model import check_name
from qmq.process.event_loop import time_of
from qmq.text import visible

if TYPE_CHECKING:
    from qmq.client.client import Client

SHOWN_PER_S: Final = 20
FIRST: Final = 10
KEEP_ALIVE_S: Final = 15.0


class TailPace:
    """Counts the messages of this second. Pure: the time is handed in."""

    def __init__(self, shown_per_s: int = SHOWN_PER_S) -> None:
        self._per_s = shown_per_s
        self._second = -1
        self.shown = self.skipped = 0

    def take(self, now_s: float) -> tuple[bool, tuple[int, int] | None]:
        """Returns (whether the message is shown, (shown, skipped) of the last second if it has
        ended and messages were skipped).
        """
        ended = None
        if int(now_s) != self._second:
            ended = (self.shown, self.skipped) if self.skipped else None
            self._second, self.shown, self.skipped = int(now_s), 0, 0
        if self.shown < self._per_s:
            self.shown += 1
            return True, ended
        self.skipped += 1
        return False, ended


def event(kind: str, value: Any, event_id: str = "") -> bytes:
    """One server-sent event. The JSON contains no line breaks."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def message_fields(message: ShownMessage) -> dict[str, Any]:
    """The fields of a message for the browser, as text without hidden characters."""
    return {
        "id": message.id,
        "time": exact_time(message.append_time_ms),
        "place": visible(f"{message.place}@{message.sequence}"),
        "key": visible(message.key),
        "form": message.body.form,
        "body": visible(message.body.line),
    }


async def tail_events(
    mq: Client, subject: str, masked: Collection[str], place: ReadPlace, time_s: Callable[[], float]
) -> AsyncIterator[bytes]:
    """The stream. `place` is the id of the last message that the browser has; an empty one: begin
    with the newest. Raises as `Client.browse`.
    """
    options: dict[str, Any] = {"last": FIRST}
    if place.time_ms:
        options = {"start": time_of(place.time_ms), "positions": dict(place.positions)}
    pace = TailPace()
    messages: Any = mq.browse(subject, follow=True, partial=True, **options)
    async with aclosing(messages):
        coming = asyncio.ensure_future(anext(messages))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=KEEP_ALIVE_S)
                if not done:
                    yield b": nothing came\n\n"
                    continue
                message = await coming
                place.passed(message)
                is_shown, ended = pace.take(time_s())
                if ended is not None:
                    yield event("pace", {"shown": ended[0], "skipped": ended[1]})
                if is_shown:
                    yield event(
                        "message", message_fields(shown_message(message, masked)), str(place)
                    )
                coming = asyncio.ensure_future(anext(messages))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


ROWS: Final = 100
NEWEST: Final = 20
SORTS: Final[dict[str, Callable[[SubjectFigures], object]]] = {
    "name": lambda each: each.name,
    "messages": lambda each: (-each.messages, each.name),
    "bytes": lambda each: (-each.stored_bytes, each.name),
    "newest": lambda each: (-each.last_append_ms, each.name),
}


async def show_subjects(page: ConsolePage) -> Response:
    """Show all subjects in pages; `q` is a part of the name."""
    look = await page.caller.watch.latest()
    part, sort = page.text("q"), page.text("sort", "name")
    found = sorted(
        (each for each in look.subjects if part in each.name),
        key=SORTS.get(sort, SORTS["name"]),  # type: ignore[arg-type]
    )
    first = page.number("from", 0, 10_000_000)
    lags = {each.name: 0 for each in found[first : first + ROWS]}
    for group in look.groups:
        if group.subject in lags:
            lags[group.subject] = max(lags[group.subject], group.lag_ms)
    return await page.render(
        "subjects.html",
        look=look,
        subjects=found[first : first + ROWS],
        count=len(found),
        first=first,
        rows=ROWS,
        sorts=tuple(SORTS),
        part=part,
        sort=sort,
        lags=lags,
        rates=page.caller.watch.rates,
        command=command("subject", "list", *([part] if part else [])),
    )


def subject_of(page: ConsolePage) -> str:
    """The subject that the address names. Raises InvalidName."""
    return check_name("subject", page.request.path_params["subject"])


def query_of(page: ConsolePage) -> MessageQuery:
    """The search in the address. Raises InvalidArgument."""
    after = page.text("after")
    return MessageQuery(
        moment_ms(page.text("start")),
        moment_ms(page.text("end")),
        page.text("key"),
        page.text("tag"),
        page.text("header"),
        page.text("content"),
        ReadPlace.parse(after) if after else None,
    )


async def show_subject(page: ConsolePage) -> Response:
    """One subject."""
    subject, query = subject_of(page), query_of(page)
    watch = page.caller.subject_watch(subject)
    look = await watch.latest()
    figures = next(iter(look.subjects), None)
    if figures is None:
        if "subjects" in look.missing:
            return await page.render(
                "subject.html",
                503,
                **_values(page, subject, query, FoundMessages(), look.missing["subjects"]),
            )
        raise UnknownSubject(f"there is no subject {subject!r}: `qmq subject list` shows all")
    found, failure = FoundMessages(), ""
    masked = masked_fields(page.config.masks, subject)
    try:
        found = await (
            newest(page.mq, subject, NEWEST, masked)
            if query.is_empty
            else find_messages(page.mq, subject, query, masked)
        )
    except QmqError as cause:
        failure = str(cause)
    return await page.render("subject.html", **_values(page, subject, query, found, failure))


def _values(
    page: ConsolePage, subject: str, query: MessageQuery, found: FoundMessages, failure: str
) -> dict[str, Any]:
    watch = page.caller.subject_watch(subject)
    look = watch.last
    asked = {
        "at": exact_time(query.start_ms),
        "until": exact_time(query.end_ms),
        "key": query.key,
        "tag": query.tag,
        "grep": query.content,
    }
    return {
        "subject": subject,
        "figures": next(iter(look.subjects), None) if look is not None else None,
        "look": look,
        "rates": watch.rates,
        "found": found,
        "failure": failure,
        "asked": query,
        "shown_max": SHOWN_MAX,
        "next_time": exact_time(found.next.time_ms) if found.next is not None else "",
        "command": command("browse", subject, **asked),
        "tail_command": command("tail", subject),
    }


async def show_subject_history(page: ConsolePage) -> Response:
    """Answer with the curves of one subject."""
    return await history(page.caller.subject_watch(subject_of(page)))


async def show_tail(page: ConsolePage) -> Response:
    """Stream the subject's new messages."""
    subject = subject_of(page)
    masked = masked_fields(page.config.masks, subject)
    after = page.request.headers.get("last-event-id", "")
    place = ReadPlace.parse(after) if after else ReadPlace()

    async def stream() -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        try:
            async for each in tail_events(page.mq, subject, masked, place, page.wall_s):
                yield each
        except QmqError as failure:
            yield event("failure", {"text": str(failure)})

    return StreamingResponse(
        stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/subjects", show_subjects),
    ("/subjects/{subject}", show_subject),
    ("/subjects/{subject}/history.json", show_subject_history),
    ("/subjects/{subject}/tail", show_tail),
)
