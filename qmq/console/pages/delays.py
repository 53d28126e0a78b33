"""*Delays*: a calendar of two years with the due messages, and a day's messages; a person can
cancel or move a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from qmq.console.bodies import text_or_hex
from qmq.console.page import ConsolePage, RefusedRequest, Show
from qmq.console.pages.message import moment_ms
from qmq.console.wording import command, exact_time
from qmq.delay.recurrence import next_run
from qmq.errors import InvalidArgument, QmqError
from qmq.process.event_loop import time_of

if TYPE_CHECKING:
    from qmq.client.producing.delayed import DelayBucket, DelayedMessage

DAYS: Final = 731
LEVELS: Final = 4
"""The shades of days with due messages, by powers of ten."""
SHOWN_MAX: Final = 100
RUNS: Final = 5


@dataclass(frozen=True, slots=True)
class CalendarDay:
    """A day (UTC) of the calendar: its place in weeks, and how many messages are due. `level` is 0
    for none.
    """

    day: date
    week: int
    weekday: int
    pending: int

    @property
    def level(self) -> int:
        return min(len(str(self.pending)), LEVELS) if self.pending else 0

    @property
    def next_day(self) -> date:
        return self.day + timedelta(days=1)


def calendar(buckets: Iterable[DelayBucket], today: date) -> tuple[list[CalendarDay], int]:
    """Two years from this week's Monday on, and how many are due before today. Pure.

    A bucket counts on the day on which it begins.
    """
    counts: dict[date, int] = {}
    for each in buckets:
        day = each.start.astimezone(UTC).date()
        counts[day] = counts.get(day, 0) + each.pending
    first = today - timedelta(days=today.weekday())
    days = [first + timedelta(days=number) for number in range(DAYS + today.weekday())]
    late = sum(count for day, count in counts.items() if day < today)
    return [
        CalendarDay(day, number // 7, number % 7, counts.get(day, 0) if day >= today else 0)
        for number, day in enumerate(days)
    ], late


def next_runs(message: DelayedMessage) -> list[int]:
    """The later runs of a recurring message, in milliseconds since 1970;
    empty for other messages. Pure.
    """
    if not message.cron:
        return []
    runs = [int(message.due.timestamp() * 1000)]
    try:
        while len(runs) <= RUNS:
            runs.append(next_run(message.cron, message.zone, runs[-1]))
    except InvalidArgument:
        pass  # it has no more runs
    return runs[1:]


def months(days: Iterable[CalendarDay]) -> list[tuple[str, int]]:
    """The number of due messages of each month that has any: the calendar as text. Pure."""
    found: dict[str, int] = {}
    for each in days:
        if each.pending:
            found[f"{each.day:%Y-%m}"] = found.get(f"{each.day:%Y-%m}", 0) + each.pending
    return list(found.items())


async def show_delays(page: ConsolePage) -> Response:
    """Show the calendar, and the messages of the chosen time."""
    stats = await page.mq.delayed.stats()
    today = datetime.fromtimestamp(page.wall_s(), UTC).date()
    days, late = calendar([bucket for group in stats.groups for bucket in group.buckets], today)
    subject, start_ms, end_ms = (
        page.text("subject"),
        moment_ms(page.text("start")),
        moment_ms(page.text("end")),
    )
    messages: list[DelayedMessage] = []
    failure, silent = "", dict[str, str]()
    try:
        found = page.mq.delayed.list(
            subject, _time(start_ms), _time(end_ms), SHOWN_MAX + 1, silent=silent
        )
        messages = [each async for each in found]
    except QmqError as cause:
        failure = str(cause)
    asked = {"from": exact_time(start_ms), "to": exact_time(end_ms)}
    return await page.render(
        "delays.html",
        stats=stats,
        silent={**stats.silent, **silent},
        days=days,
        months=months(days),
        late=late,
        weeks=days[-1].week + 1,
        messages=[
            (
                each,
                int(each.due.timestamp() * 1000),
                text_or_hex(each.key_bytes or b""),
                next_runs(each),
            )
            for each in messages[:SHOWN_MAX]
        ],
        is_more=len(messages) > SHOWN_MAX,
        subject=subject,
        start=asked["from"],
        end=asked["to"],
        failure=failure,
        command=command("delay", "list", *([subject] if subject else []), **asked),
        make_command=command,
    )


def _time(time_ms: int) -> datetime | None:
    return time_of(time_ms) if time_ms else None


async def act_on_delayed(page: ConsolePage) -> Response:
    """Cancel or move one message. A cancel requires the subject's name as confirmation."""
    form = await page.form()
    delayed_id, verb = form.get("id", "").strip(), form.get("verb", "")
    if verb == "move":
        to_ms = moment_ms(form.get("to", "").strip())
        if not to_ms:
            raise InvalidArgument("give the message's new due time: 2027-01-01T09:00Z")
        moved = await page.mq.delayed.move(delayed_id, time_of(to_ms))
        return page.back(
            "/delays",
            page.words(
                "delays.moved",
                subject=moved.subject,
                time=exact_time(int(moved.due.timestamp() * 1000)),
            ),
        )
    if verb != "cancel":
        raise InvalidArgument(f"a delayed message is cancelled or moved, not {verb!r}")
    found = await page.mq.delayed.show(delayed_id)
    if form.get("confirm", "").strip() != found.subject:
        raise RefusedRequest(
            HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=found.subject)
        )
    await page.mq.delayed.cancel(delayed_id)
    return page.back("/delays", page.words("delays.cancelled", subject=found.subject))


PAGES: Final[tuple[tuple[str, Show], ...]] = (("/delays", show_delays),)
ACTS: Final[tuple[tuple[str, Show], ...]] = (("/delays", act_on_delayed),)
