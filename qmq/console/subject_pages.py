"""*Subject*: depth, groups with their lag, the last messages, a search, and a live tail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from qmq.console.bodies import masked_fields
from qmq.console.cluster_look import SubjectFigures
from qmq.console.command_lines import command
from qmq.console.live_tail import event, tail_events
from qmq.console.message_finding import SHOWN_MAX, FoundMessages, MessageQuery, ReadPlace, find_messages, moment_ms, newest
from qmq.console.overview_page import history
from qmq.console.page import ConsolePage, Show
from qmq.console.wording import exact_time
from qmq.errors import QmqError, UnknownSubject
from qmq.model import check_name

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
    found = sorted((each for each in look.subjects if part in each.name), key=SORTS.get(sort, SORTS["name"]))  # type: ignore[arg-type]
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
            return await page.render("subject.html", 503, **_values(page, subject, query, FoundMessages(), look.missing["subjects"]))
        raise UnknownSubject(f"there is no subject {subject!r}: `qmq subject list` shows all")
    found, failure = FoundMessages(), ""
    masked = masked_fields(page.config.masks, subject)
    try:
        found = await (newest(page.mq, subject, NEWEST, masked) if query.is_empty else find_messages(page.mq, subject, query, masked))
    except QmqError as cause:
        failure = str(cause)
    return await page.render("subject.html", **_values(page, subject, query, found, failure))


def _values(page: ConsolePage, subject: str, query: MessageQuery, found: FoundMessages, failure: str) -> dict[str, Any]:
    watch = page.caller.subject_watch(subject)
    look = watch.last
    asked = {"at": exact_time(query.start_ms), "until": exact_time(query.end_ms), "key": query.key, "tag": query.tag, "grep": query.content}
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

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/subjects", show_subjects),
    ("/subjects/{subject}", show_subject),
    ("/subjects/{subject}/history.json", show_subject_history),
    ("/subjects/{subject}/tail", show_tail),
)
