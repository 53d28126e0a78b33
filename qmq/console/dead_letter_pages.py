"""*Dead letters*: what groups gave up, by error and age; what a filter chooses; replay and purge of just that, at a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import RedirectResponse, Response

from qmq.console.bodies import BodyView, body_view, masked_fields, text_or_hex
from qmq.console.command_lines import command
from qmq.console.message_finding import moment_ms
from qmq.console.page import ConsolePage, RefusedRequest, number_of
from qmq.console.replay_jobs import ReplayJob
from qmq.console.wording import exact_time
from qmq.errors import InvalidArgument, UnknownGroup
from qmq.model import check_name
from qmq.operations.letter_choice import chosen_by

if TYPE_CHECKING:
    from qmq.client.dead_letter import Choose, DeadLetter

SHOWN_MAX: Final = 100
READ_MAX: Final = 10_000
"""So many are read to be counted by error and age."""
RATE_MAX: Final = 100_000
AGES: Final = (("hour", 3_600_000), ("day", 86_400_000), ("week", 7 * 86_400_000))
FILTER: Final = ("subject", "error", "since", "id")


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which letters are meant: all that is said must hold."""

    subject: str = ""
    error: str = ""
    since_ms: int = 0
    id: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> LetterFilter:
        """From an address or a form. Raises InvalidArgument."""
        subject, error, since, letter_id = (given.get(name, "").strip() for name in FILTER)
        return cls(subject, error, moment_ms(since), letter_id)

    def choose(self) -> Choose:
        """Raises InvalidArgument for what is no message id."""
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC) if self.since_ms else None
        return chosen_by(self.subject, [self.id] if self.id else [], self.error, since)

    def state(self) -> dict[str, str]:
        """The same for an address."""
        told = {"subject": self.subject, "error": self.error, "since": exact_time(self.since_ms), "id": self.id}
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class ShownLetter:
    """A dead letter as the page shows it."""

    letter: DeadLetter
    key: str
    headers: dict[str, str]
    body: BodyView


async def show_dead_letters(page: ConsolePage) -> Response:
    """All groups that gave something up."""
    look = await page.caller.watch.latest()
    found = sorted(look.snapshot.dead_letters, key=lambda each: (-each.waiting, each.group))
    return await page.render("dead_letters.html", look=look, queues=found, command=command("dlq", "list"))


def group_of(page: ConsolePage) -> str:
    """The group that the address names. Raises InvalidName."""
    return check_name("group", page.request.path_params["group"])


async def show_group_letters(page: ConsolePage) -> Response:
    """One group's, as far as a filter chooses them."""
    group, chosen = group_of(page), LetterFilter.of(page.request.query_params)
    if not any(each.group == group for each in await page.mq.metadata.dead_letter_queues(group)):
        raise UnknownGroup(f"group {group!r} has no dead letters: `qmq dlq list` shows which groups have")
    letters = await page.mq.dead_letters(group).show(READ_MAX, chosen.choose())
    return await page.render(
        "group_letters.html",
        group=group,
        asked=chosen,
        count=len(letters),
        is_more=len(letters) == READ_MAX,
        by_error=Counter(each.error[:200] for each in letters).most_common(10),
        by_age=ages(letters, page.now_ms),
        by_subject=Counter(each.subject for each in letters).most_common(10),
        letters=[_shown(page, each) for each in letters[:SHOWN_MAX]],
        jobs=[each for each in page.caller.jobs if each.group == group],
        replay_command=command("dlq", "replay", group, **_options(chosen)),
        purge_command=command("dlq", "purge", group, **_options(chosen)),
    )


def _options(chosen: LetterFilter) -> dict[str, str]:
    return {name: value.removesuffix("Z") if name == "since" else value for name, value in chosen.state().items()}


def ages(letters: Iterable[DeadLetter], now_ms: int) -> list[tuple[str, int]]:
    """How many died within the last hour, day, week, and before. Pure."""
    counts = Counter(next((name for name, ms in AGES if now_ms - each.dead_ms < ms), "older") for each in letters)
    return [(name, counts[name]) for name in (*[name for name, _ in AGES], "older") if counts[name]]


def _shown(page: ConsolePage, letter: DeadLetter) -> ShownLetter:
    masked = masked_fields(page.config.masks, letter.subject)
    headers = {name: text_or_hex(value) for name, value in letter.headers.items()}
    return ShownLetter(letter, text_or_hex(letter.key or b""), headers, body_view(letter.body, masked))


async def act_on_letters(page: ConsolePage) -> Response:
    """Replay or purge what the filter chooses, in the background."""
    form, group = await page.form(), group_of(page)
    chosen, verb = LetterFilter.of(form), form.get("verb", "")
    if verb not in ("replay", "purge"):
        raise InvalidArgument(f"letters are replayed or purged, not {verb!r}")
    if verb == "purge" and form.get("confirm", "").strip() != group:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=group))
    rate, most = number_of("rate", form.get("rate", ""), 0, RATE_MAX), number_of("max", form.get("max", ""), 0, 1_000_000_000)
    choose = chosen.choose()
    line = command("dlq", verb, group, **_options(chosen), max=most or None, **({"rate": rate} if rate and verb == "replay" else {}))
    job = page.caller.start_job(ReplayJob(group, verb, line, page.now_ms))
    letters = page.mq.dead_letters(group)
    if verb == "replay":
        job.start(letters.replay(choose, messages_max=most, progress=job.tell, per_second=rate))
    else:
        job.start(letters.purge(choose, messages_max=most, progress=job.tell))
    return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)


def job_of(page: ConsolePage) -> ReplayJob:
    """The job that the address names, of this caller."""
    for each in page.caller.jobs:
        if each.id == page.request.path_params["job"]:
            return each
    raise RefusedRequest(HTTPStatus.NOT_FOUND, page.words("refused.no_job"))


async def show_job(page: ConsolePage) -> Response:
    """How far a job is."""
    return await page.render("job.html", job=job_of(page))


async def stop_job(page: ConsolePage) -> Response:
    """Stop it; what is done stays done."""
    await page.form()
    job = job_of(page)
    await job.stop()
    return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)


Show = Callable[[ConsolePage], Awaitable[Response]]
PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/dead-letters", show_dead_letters),
    ("/dead-letters/{group}", show_group_letters),
    ("/jobs/{job}", show_job),
)
ACTS: Final[tuple[tuple[str, Show], ...]] = (("/dead-letters/{group}", act_on_letters), ("/jobs/{job}/stop", stop_job))
