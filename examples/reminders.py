"""Flight reminders: for every flight of a month of 2013 a message that is due an hour before its
scheduled departure.

    python examples/reminders.py                             on its own node; January plays in three
                                                             minutes
    python examples/reminders.py --server localhost:20880    on a cluster that is there
    python examples/reminders.py --month 7 --minutes 10 --json

The month is scaled so that it plays in minutes; then what came is compared with the plan: every
reminder once, none early, and how late. Exit status 1 if anything is missing, came twice or came
early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import flights
from own_node import own_node
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import qmq

SUBJECT = "flight.reminder"
BEFORE = timedelta(hours=1)
NEW_YORK = ZoneInfo("America/New_York")
LEAD_S = 3.0
"""The time between sending and the month's begin, since sending takes a moment."""
CHUNK = 5_000
QUIET_S = 3.0
"""How long to wait for surplus reminders after the last one was due."""


@dataclass(frozen=True, slots=True)
class Reminder:
    """One planned reminder: `number` is the flight's row; `due_s` counts from the month's begin, in
    real seconds.
    """

    number: int
    aircraft: str
    due_s: float
    departure: datetime


@dataclass(slots=True)
class Result:
    """The plan and the received reminders, compared."""

    planned: int = 0
    came: int = 0
    missing: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    by_day: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each day, the numbers of planned and of received reminders."""

    @property
    def is_right(self) -> bool:
        """Whether exactly the planned reminders came."""
        return not (self.missing or self.twice or self.early)

    def late(self, share: float) -> int:
        """A percentile of the lateness, in milliseconds."""
        values = sorted(self.lateness_ms)
        return values[min(int(len(values) * share), len(values) - 1)] if values else 0


def plan(month: int, minutes: float, rows: int = 0) -> list[Reminder]:
    """The month's reminders, scaled to play within `minutes`.
    `rows` limits the number of flights.
    """
    table = {column[0]: column[1:] for column in flights.columns()}
    begin = datetime(2013, month, 1, tzinfo=NEW_YORK)
    days = (
        begin.replace(year=2014, month=1) if month == 12 else begin.replace(month=month + 1)
    ) - begin
    scale = days.total_seconds() / (minutes * 60)
    found: list[Reminder] = []
    fields = zip(
        table["month"], table["day"], table["hour"], table["minute"], table["tailnum"], strict=True
    )
    for number, (of_month, day, hour, minute, aircraft) in enumerate(fields):
        if int(of_month) == month and (not rows or len(found) < rows):
            departure = datetime(2013, month, int(day), int(hour), int(minute), tzinfo=NEW_YORK)
            due_s = max((departure - BEFORE - begin).total_seconds(), 0.0) / scale
            found.append(Reminder(number, aircraft, due_s, departure))
    return found


async def send(mq: qmq.Client, reminders: Sequence[Reminder], begin_ms: int) -> None:
    """Send all reminders now, each due at its time."""
    for at in range(0, len(reminders), CHUNK):
        some = reminders[at : at + CHUNK]
        await mq.send_many(
            SUBJECT,
            [str(each.number).encode() for each in some],
            keys=[each.aircraft for each in some],
            ats=[
                datetime.fromtimestamp((begin_ms + each.due_s * 1000) / 1000, UTC) for each in some
            ],
        )


async def receive(mq: qmq.Client, count: int, until: float, bar: Progress) -> list[tuple[int, int]]:
    """(row, when the broker stored it) of each received reminder."""
    came: list[tuple[int, int]] = []
    task = bar.add_task("reminders", total=count)
    async with mq.consumer(SUBJECT, "passengers") as consumer:
        while len(came) < count or time.time() < until:
            if time.time() > until + 30:
                break
            found = await consumer.pull(10_000, timedelta(seconds=0.5))
            came += [(int(message.body), message.append_time_ms) for message in found]
            found.ack_later()
            bar.update(task, completed=len(came))
    return came


def compare(
    reminders: Sequence[Reminder], begin_ms: int, came: Sequence[tuple[int, int]]
) -> Result:
    """Compare the received reminders with the plan. Pure."""
    counts = Counter(number for number, _ in came)
    stored = dict(came)
    result = Result(len(reminders), len(came))
    planned_by_day, came_by_day = Counter[int](), Counter[int]()
    for each in reminders:
        planned_by_day[each.departure.day] += 1
        if each.number not in stored:
            result.missing.append(each.number)
            continue
        came_by_day[each.departure.day] += 1
        late_ms = stored[each.number] - int(begin_ms + each.due_s * 1000)
        if late_ms < 0:
            result.early.append(each.number)
        result.lateness_ms.append(late_ms)
    result.twice = [number for number, count in counts.items() if count > 1]
    result.by_day = {
        day: (count, came_by_day[day]) for day, count in sorted(planned_by_day.items())
    }
    return result


async def play(
    server: str, reminders: Sequence[Reminder], minutes: float, *, quiet: bool = False
) -> Result:
    async with qmq.connect(server) as mq:
        begin_ms = int((time.time() + LEAD_S + len(reminders) / 50_000) * 1000)
        await send(mq, reminders, begin_ms)
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
            came = await receive(mq, len(reminders), begin_ms / 1000 + minutes * 60 + QUIET_S, bar)
    return compare(reminders, begin_ms, came)


def show(result: Result, minutes: float) -> None:
    """Print a table, and a bar for each day."""
    console = Console()
    table = Table(
        title=f"flight reminders: a month in {minutes:g} minutes",
        title_justify="left",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("planned", result.planned),
        ("came", result.came),
        ("missing", len(result.missing)),
        ("twice", len(result.twice)),
        ("early", len(result.early)),
        ("late, p50, ms", result.late(0.5)),
        ("late, p99, ms", result.late(0.99)),
    ):
        table.add_row(name, f"{value:,}")
    console.print(table)
    most = max((planned for planned, _ in result.by_day.values()), default=1)
    for day, (planned, came) in result.by_day.items():
        console.print(
            (
                f"{day:>3} "
                f"{'█' * round(came / most * 50)}{'░' * round((planned - came) / most * 50)} "
                f"{came:,}"
            ),
            highlight=False,
        )


async def run(chosen: argparse.Namespace) -> int:
    """Run the whole example. Returns the exit status."""
    reminders = plan(chosen.month, chosen.minutes, chosen.rows)
    async with AsyncExitStack() as stack:
        server = chosen.server or await own_node(stack)
        result = await play(server, reminders, chosen.minutes, quiet=chosen.json)
    if chosen.json:
        found = {
            "planned": result.planned,
            "came": result.came,
            "missing": len(result.missing),
            "twice": len(result.twice),
        }
        found |= {
            "early": len(result.early),
            "late p50 ms": result.late(0.5),
            "late p99 ms": result.late(0.99),
        }
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        show(result, chosen.minutes)
    return 0 if result.is_right else 1


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--server", default="", help="a metaserver's address; without it, its own node"
    )
    options.add_argument("--month", type=int, default=1, choices=range(1, 13))
    options.add_argument("--minutes", type=float, default=3.0, help="in which the month plays")
    options.add_argument("--rows", type=int, default=0, help="only so many flights")
    options.add_argument("--json", action="store_true")
    return asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
