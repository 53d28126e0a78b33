"""*Dead letters*: the dead letters of groups by error and age, filters, and replay and purge of the
filtered letters, with edits and a rate. A replay is planned first: the address has the filter, the
edits and the rate, and the page shows what would be sent. The console keeps no state. The cluster
records which letters are done (`qmq/client/dead_letters.py`), so the same address continues after a
restart.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from qmq.console.bodies import (
    BodyView,
    body_view,
    masked_fields,
    masked_headers,
    masked_text,
    text_or_hex,
)
from qmq.console.page import ConsolePage, RefusedRequest, Show, number_of
from qmq.console.pages.message import moment_ms
from qmq.console.sessions import ReplayJob
from qmq.console.wording import command, exact_time
from qmq.errors import InvalidArgument, QmqError, UnknownGroup
from qmq.model import check_name
from qmq.operations.letters import LetterEdit, chosen_by
from qmq.process.event_loop import time_of
from qmq.text import visible

if TYPE_CHECKING:
    from qmq.client.dead_letters import Choose, DeadLetter

SHOWN_MAX: Final = 100
READ_MAX: Final = 10_000
"""A page reads at most this many letters to count them by error and age."""
RATE_MAX: Final = 100_000
AGES: Final = (("hour", 3_600_000), ("day", 86_400_000), ("week", 7 * 86_400_000))
FILTER: Final = ("subject", "error", "since", "id")
RATE: Final = 100
EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Chooses letters. A letter must match every field that is set."""

    subject: str = ""
    error: str = ""
    since_ms: int = 0
    id: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> LetterFilter:
        """Parse an address or a form. Raises InvalidArgument."""
        subject, error, since, letter_id = (given.get(name, "").strip() for name in FILTER)
        return cls(subject, error, moment_ms(since), letter_id)

    def choose(self) -> Choose:
        """The choice for the client. Raises InvalidArgument for an invalid message id."""
        since = time_of(self.since_ms) if self.since_ms else None
        return chosen_by(self.subject, [self.id] if self.id else [], self.error, since)

    def state(self) -> dict[str, str]:
        """The filter as parameters of an address."""
        told = {
            "subject": self.subject,
            "error": self.error,
            "since": exact_time(self.since_ms),
            "id": self.id,
        }
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How letters are sent again. `sets` and `unsets` name the fields to change, one in a line;
    `body` replaces the whole body.
    """

    rate: int = RATE
    most: int = 0
    sets: str = ""
    unsets: str = ""
    body: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> ReplayPlan:
        """Parse an address or a form. Raises InvalidArgument."""
        body = given.get("body", "").replace("\r\n", "\n") if given.get("edit") == "body" else None
        return cls(
            number_of("rate", given.get("rate", "").strip(), RATE, RATE_MAX),
            number_of("max", given.get("max", "").strip(), 0, 1_000_000_000),
            given.get("set", "").replace("\r\n", "\n").strip(),
            given.get("unset", "").replace("\r\n", "\n").strip(),
            body,
        )

    def edit(self) -> LetterEdit:
        """The edit for the client. Raises InvalidArgument."""
        return LetterEdit.parse(_lines(self.sets), _lines(self.unsets), self.body)

    def state(self) -> dict[str, str]:
        """The plan as parameters of an address."""
        told = {
            "rate": str(self.rate),
            "max": str(self.most or ""),
            "set": self.sets,
            "unset": self.unsets,
        }
        body = {} if self.body is None else {"edit": "body", "body": self.body}
        return {name: value for name, value in told.items() if value} | body


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


@dataclass(frozen=True, slots=True)
class ShownLetter:
    """A dead letter as the page shows it. `letter` is without what the other fields show."""

    letter: DeadLetter
    key: str
    headers: dict[str, str]
    body: BodyView

    @property
    def is_editable(self) -> bool:
        """True if the page shows the whole body as text, so that a person may change it."""
        body = self.body
        return (
            body.form in ("json", "text", "empty")
            and not body.is_masked
            and not body.is_cut
            and visible(body.text) == body.text
        )


async def show_dead_letters(page: ConsolePage) -> Response:
    """Show all groups that have dead letters."""
    look = await page.caller.watch.latest()
    found = sorted(look.snapshot.dead_letters, key=lambda each: (-each.waiting, each.group))
    return await page.render(
        "dead_letters.html", look=look, queues=found, command=command("dlq", "list")
    )


def group_of(page: ConsolePage) -> str:
    """The group that the address names. Raises InvalidName."""
    return check_name("group", page.request.path_params["group"])


async def show_group_letters(page: ConsolePage) -> Response:
    """Show the letters of one group that the filter chooses; with `plan` in the address, also what
    a replay would send.
    """
    group, chosen = group_of(page), LetterFilter.of(page.request.query_params)
    if not any(each.group == group for each in await page.mq.metadata.dead_letter_queues(group)):
        raise UnknownGroup(
            f"group {group!r} has no dead letters: `qmq dlq list` shows which groups have"
        )
    survey, failure = LetterSurvey(page, chosen), ""
    is_planned = "plan" in page.request.query_params
    try:
        survey.plan(ReplayPlan.of(page.request.query_params), is_planned=is_planned)
    except QmqError as cause:
        failure = str(cause)
    async with aclosing(page.mq.dead_letters(group).each(chosen.choose())) as letters:
        async for letter in letters:
            survey.add(letter)
            if survey.count == READ_MAX:
                break
    failure, plan = failure or survey.failure, survey.planned
    replayed = min(survey.count, plan.most or survey.count)
    return await page.render(
        "group_letters.html",
        400 if failure else 200,
        group=group,
        asked=chosen,
        plan=plan,
        is_planned=is_planned and not failure,
        examples=survey.examples,
        failure=failure,
        replayed=replayed,
        takes_ms=1000 * replayed // plan.rate if plan.rate else 0,
        count=survey.count,
        is_more=survey.count == READ_MAX,
        by_error=survey.by_error.most_common(10),
        by_age=ages(survey.dead_ms, page.now_ms),
        by_subject=survey.by_subject.most_common(10),
        letters=survey.shown,
        jobs=[each for each in page.caller.jobs if each.group == group],
        replay_command="" if failure else _replay_line(group, chosen, plan),
        purge_command=command("dlq", "purge", group, **_options(chosen)),
    )


class LetterSurvey:
    """What the page tells of the letters, which it gets one after the other: it keeps counts, and
    what it shows of the first ones.
    """

    def __init__(self, page: ConsolePage, chosen: LetterFilter) -> None:
        self._page, self._chosen = page, chosen
        self.planned = ReplayPlan()
        self._edit: LetterEdit | None = None
        self.count, self.failure = 0, ""
        self.by_error, self.by_subject = Counter[str](), Counter[str]()
        self.dead_ms = array("q")
        self.shown = list[ShownLetter]()
        self.examples = list[tuple[ShownLetter, BodyView]]()
        """The first letters of a plan, and the bodies that they would be sent with."""

    def plan(self, plan: ReplayPlan, *, is_planned: bool) -> None:
        """Tell of a replay, too, if `is_planned`. Raises InvalidArgument."""
        self.planned = plan
        if is_planned:
            edit = plan.edit()
            _check_edit(edit, self._chosen)
            self._edit = edit

    def add(self, letter: DeadLetter) -> None:
        """Count one letter. It is edited as planned, whichever it is, to find those that cannot be:
        `failure` has the reason.
        """
        self.count += 1
        masked = masked_fields(self._page.config.masks, letter.subject)
        self.by_error[masked_text(letter.error, masked)[:200]] += 1
        self.by_subject[letter.subject] += 1
        self.dead_ms.append(letter.dead_ms)
        shown = _shown(letter, masked) if self.count <= SHOWN_MAX else None
        if shown is not None:
            self.shown.append(shown)
        if (
            self._edit is not None
            and not self.failure
            and self.count <= (self.planned.most or READ_MAX)
        ):
            try:
                self._plan_one(letter, shown, self._edit)
            except QmqError as cause:
                self.failure = str(cause)

    def _plan_one(self, letter: DeadLetter, shown: ShownLetter | None, edit: LetterEdit) -> None:
        new = edit.of(letter)
        if shown is not None and len(self.examples) < EXAMPLES:
            self.examples.append(
                (shown, body_view(new.body, masked_fields(self._page.config.masks, new.subject)))
            )


def _check_edit(edit: LetterEdit, chosen: LetterFilter) -> None:
    if edit.body is not None and not chosen.id:
        raise InvalidArgument("a whole body is for one letter: choose it by its id first")


def _replay_line(group: str, chosen: LetterFilter, plan: ReplayPlan) -> str:
    options: dict[str, Any] = {
        **_options(chosen),
        **plan.edit().options(),
        "limit": plan.most or None,
        "rate": plan.rate or None,
    }
    return command("dlq", "replay", group, **options)


def _options(chosen: LetterFilter) -> dict[str, str]:
    return {
        name: value.removesuffix("Z") if name == "since" else value
        for name, value in chosen.state().items()
    }


def ages(dead_ms: Iterable[int], now_ms: int) -> list[tuple[str, int]]:
    """How many letters were given up within the last hour, the last day,
    the last week, and before. Pure.
    """
    counts = Counter(
        next((name for name, ms in AGES if now_ms - each < ms), "older") for each in dead_ms
    )
    return [(name, counts[name]) for name in (*[name for name, _ in AGES], "older") if counts[name]]


def _shown(letter: DeadLetter, masked: frozenset[str]) -> ShownLetter:
    headers = masked_headers(
        {name: text_or_hex(value) for name, value in letter.headers.items()}, masked
    )
    told = replace(letter, error=masked_text(letter.error, masked), key=None, headers={}, body=b"")
    return ShownLetter(
        told, text_or_hex(letter.key or b""), headers, body_view(letter.body, masked)
    )


async def act_on_letters(page: ConsolePage) -> Response:
    """Start a job that replays or purges the letters that the filter chooses."""
    form, group = await page.form(), group_of(page)
    chosen, verb = LetterFilter.of(form), form.get("verb", "")
    if verb not in ("replay", "purge"):
        raise InvalidArgument(f"letters are replayed or purged, not {verb!r}")
    if verb == "purge" and form.get("confirm", "").strip() != group:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=group))
    choose, plan, letters = chosen.choose(), ReplayPlan.of(form), page.mq.dead_letters(group)
    if verb == "purge":
        line = command("dlq", "purge", group, **_options(chosen), limit=plan.most or None)
        job = page.caller.start_job(ReplayJob(group, verb, line, page.now_ms))
        job.start(letters.purge(choose, messages_max=plan.most, progress=job.set_count))
    else:
        edit = plan.edit()
        _check_edit(edit, chosen)
        job = page.caller.start_job(
            ReplayJob(group, verb, _replay_line(group, chosen, plan), page.now_ms)
        )
        job.start(
            letters.replay(
                choose,
                edit=edit.of,
                messages_max=plan.most,
                progress=job.set_count,
                per_second=plan.rate,
            )
        )
    state = {"group": group, **chosen.state(), **(plan.state() if verb == "replay" else {})}
    return RedirectResponse(f"/jobs/{job.id}?{urlencode(state)}", HTTPStatus.SEE_OTHER)


def job_of(page: ConsolePage) -> ReplayJob:
    """The caller's job that the address names."""
    for each in page.caller.jobs:
        if each.id == page.request.path_params["job"]:
            return each
    raise RefusedRequest(HTTPStatus.NOT_FOUND, page.words("refused.no_job"))


async def show_job(page: ConsolePage) -> Response:
    """Show the progress of a job. A person starts a job of an earlier console
    again from its address.
    """
    given = dict(page.request.query_params)
    group = given.pop("group", "")
    again = (
        f"/dead-letters/{check_name('group', group)}?{urlencode({**given, 'plan': 1})}#plan"
        if group
        else ""
    )
    try:
        job = job_of(page)
    except RefusedRequest:
        if not group:
            raise
        return await page.render("job_over.html", group=group, again=again)
    return await page.render("job.html", job=job, again=again)


async def stop_job(page: ConsolePage) -> Response:
    """Stop the job; letters that are done stay done."""
    await page.form()
    job = job_of(page)
    await job.stop()
    return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)


PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/dead-letters", show_dead_letters),
    ("/dead-letters/{group}", show_group_letters),
    ("/jobs/{job}", show_job),
)
ACTS: Final[tuple[tuple[str, Show], ...]] = (
    ("/dead-letters/{group}", act_on_letters),
    ("/jobs/{job}/stop", stop_job),
)
