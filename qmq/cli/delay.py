"""`qmq delay` lists, shows, cancels and moves delayed messages, and shows delivery statistics: JSON
values for programs, tables and a histogram for people. Without a verb it runs one replica of a
delay group.

The histogram counts pending messages by hour for the next day, by day for the next month, by month
after that:

* Hours, days and months are in UTC, as the buckets are. The first hour is the current one.
* Every pending message is counted once: the bars plus `late` add up to the number of pending
  messages.
* A bucket counts in the bar where the bucket begins, or in the current hour if the bucket has
  begun. Messages of a bucket that has ended count as *late*.
"""

from __future__ import annotations

import base64
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import qmq
from qmq.cli.arguments import (
    COUNT_MAX,
    HOUR_MS,
    HOURS_MAX,
    parse_duration,
    parse_when,
    port_option,
    shifted,
)
from qmq.cli.broker import confirm_clock, hand_over
from qmq.cli.names import require_subject
from qmq.cli.output import SERVER, DryRun, Json, Server, ask_client, run, show, tell_silent
from qmq.cli.roles import ReplicaOptions, Variable, serve_replica, taking
from qmq.cli.route import emit
from qmq.cli.tables import LineTable, console, errors
from qmq.client.metadata.cache import Partial
from qmq.client.producing.delayed import due_at_ms as due_ms
from qmq.errors import InvalidArgument, TooLate
from qmq.operations.messages import text_of
from qmq.operations.text import Time, key_text

if TYPE_CHECKING:
    from qmq.client.producing.delayed import DelayedMessage, DelayGroup, DelayStats
    from qmq.node.delay import DelayReplicaConfig

HOURS: Final = 24
DAYS: Final = 30

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


class Bar(NamedTuple):
    """The messages due from `start` (included) to `end` (excluded)."""

    start: datetime
    end: datetime
    pending: int


class Due(NamedTuple):
    """One bucket: its time range and its pending messages."""

    start: datetime
    end: datetime
    pending: int


class DelayHistogram(NamedTuple):
    """Adjoining bars: `hours`, then `days`, then `months` up to the last one with a message. `late`
    counts messages due before now.
    """

    late: int
    hours: list[Bar]
    days: list[Bar]
    months: list[Bar]


def histogram(buckets: Iterable[Due], now: datetime) -> DelayHistogram:
    """The histogram of the buckets as of `now`, which has a time zone."""
    known = list(buckets)
    this_hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    edges, hours, days = _edges(this_hour, max([each.start for each in known], default=this_hour))
    counts = [0] * (len(edges) - 1)
    late = 0
    for each in known:
        if each.end <= now:
            late += each.pending
        else:
            counts[bisect_right(edges, max(each.start, this_hour)) - 1] += each.pending
    bars = [
        Bar(start, end, count) for start, end, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return DelayHistogram(late, bars[:hours], bars[hours : hours + days], bars[hours + days :])


def _edges(first: datetime, last: datetime) -> tuple[list[datetime], int, int]:
    """The start of each bar and the end of the last one; the number of hours;
    the number of days.
    """
    edges = [first + number * _HOUR for number in range(HOURS + 1)]
    midnight = edges[-1].replace(hour=0) + _DAY
    edges += [midnight + number * _DAY for number in range(DAYS)]
    while edges[-1] <= last:
        edges.append(_next_month(edges[-1]))
    return edges, HOURS, DAYS


def _next_month(time: datetime) -> datetime:
    """The start of the next month."""
    return datetime(time.year + time.month // 12, time.month % 12 + 1, 1, tzinfo=UTC)


def shown(bars: list[Bar]) -> list[Bar | None]:
    """The bars to draw, up to the last one that is not empty. None stands for a gap of three or
    more empty bars.
    """
    kept: list[Bar | None] = []
    gap: list[Bar] = []
    for bar in bars:
        if not bar.pending:
            gap.append(bar)
            continue
        kept += gap if len(gap) < 3 else [None]
        kept.append(bar)
        gap = []
    return kept


BAR_COLUMNS_MAX: Final = 60

_EIGHTHS: Final = "▏▎▍▌▋▊▉█"
_SECTIONS: Final = (
    ("hours", "by hour", "%Y-%m-%d %H:%M"),
    ("days", "by day", "%Y-%m-%d"),
    ("months", "by month", "%Y-%m"),
)
_GROUP_COLUMNS: Final = (
    "delay group",
    "master",
    "pending",
    "waiting",
    "planned",
    "delivered",
    "p50 ms",
    "p99 ms",
)
_MEMORY_COLUMNS: Final = ("delay group", "in the wheel", "wheel MiB", "horizon", "clock step ms")
"""Two tables, because one would not fit 80 columns and a number must not be wrapped."""
_LEFT: Final = {
    "delay group",
    "master",
    "horizon",
    "subject",
    "reason",
    "key",
    "tags",
    "recurs",
    "id",
}


def moment(time: datetime) -> str:
    """A time in UTC, in a form that the commands accept as input."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


# --- one message ----------------------------------------------------------------------------------


def message_facts(found: DelayedMessage) -> dict[str, Any]:
    """A delayed message as JSON values; `body` is None if the body is not text."""
    body = found.body or b""
    return {
        "id": found.id,
        "subject": found.subject,
        "state": found.state,
        "due": moment(found.due),
        "cron": found.cron,
        "zone": found.zone,
        "message_id": str(found.message_id),
        "created": moment(found.create_time),
        "delay_group": found.delay_group,
        "key": None if found.key_bytes is None else key_text(found.key_bytes),
        "tags": list(found.tags),
        "headers": {name: key_text(value) for name, value in found.headers.items()},
        "body_bytes": found.body_bytes,
        "body": text_of(body),
        "body_base64": base64.b64encode(body).decode(),
    }


def message_view(facts: dict[str, Any]) -> list[RenderableType]:
    """The message for people: one line per known field."""
    lines = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if name not in ("body", "body_base64") and value not in (None, "", [], {}):
            lines.add_row(Text(name.replace("_", " "), "bold"), Text(_cell(value)))
    body = facts["body"] if facts["body"] is not None else f"base64:{facts['body_base64']}"
    return [lines, Text(body)]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- lists ----------------------------------------------------------------------------------------


def row_facts(found: DelayedMessage) -> dict[str, Any]:
    """One message of a list, as JSON values."""
    return {
        "due": moment(found.due),
        "subject": found.subject,
        "key": None if found.key_bytes is None else key_text(found.key_bytes),
        "tags": list(found.tags),
        "bytes": found.body_bytes,
        "cron": found.cron,
        "zone": found.zone,
        "id": found.id,
    }


def list_table(rows: list[dict[str, Any]], now_ms: int) -> LineTable:
    """A table with one line per message."""
    table = LineTable(
        ("due", "subject", "key", "tags", "bytes", "recurs", "id"), right=("bytes",), now_ms=now_ms
    )
    for row in rows:
        recurs = f"{row['cron']} {row['zone']}".strip()
        cells = (
            row["subject"],
            row["key"] or "",
            " ".join(row["tags"]),
            f"{row['bytes']:,}",
            recurs,
            row["id"],
        )
        table.add_row(Time(round(datetime.fromisoformat(row["due"]).timestamp() * 1000)), *cells)
    return table


# --- delivery statistics --------------------------------------------------------------------------


def stats_facts(found: DelayStats, now: datetime) -> dict[str, Any]:
    """The statistics of all delay groups, with a histogram of due times counted from `now`."""
    pending = [
        Due(each.start, each.start + each.length, each.pending)
        for group in found.groups
        for each in group.buckets
    ]
    return {
        "time": moment(now),
        "pending": found.pending,
        "groups": [_group_facts(each) for each in found.groups],
        "silent_groups": dict(found.silent),
        "histogram": _histogram_facts(histogram(pending, now)),
    }


def _group_facts(group: DelayGroup) -> dict[str, Any]:
    return {
        "delay_group": group.name,
        "master": group.replica,
        "pending": group.pending,
        "waiting": group.waiting,
        "planned": group.planned,
        "delivered": group.delivered,
        "lateness_p50_ms": _in_ms(group.lateness_p50),
        "lateness_p99_ms": _in_ms(group.lateness_p99),
        "wheel_messages": group.wheel_messages,
        "wheel_bytes": group.wheel_bytes,
        "horizon": moment(group.horizon),
        "time": moment(group.time),
        "clock_step_ms": _in_ms(group.clock_step),
        "troubles": [
            {"subject": each.subject, "waiting": each.waiting, "reason": each.reason}
            for each in group.troubles
        ],
        "buckets": [
            {
                "from": moment(each.start),
                "to": moment(each.start + each.length),
                "messages": each.messages,
                "pending": each.pending,
                "bytes": each.stored_bytes,
            }
            for each in group.buckets
        ],
    }


def _in_ms(time: timedelta) -> int:
    return round(time.total_seconds() * 1000)


def _histogram_facts(found: DelayHistogram) -> dict[str, Any]:
    bars = {"hours": found.hours, "days": found.days, "months": found.months}
    return {"late": found.late} | {
        name: [
            {"from": moment(bar.start), "to": moment(bar.end), "pending": bar.pending}
            for bar in each
        ]
        for name, each in bars.items()
    }


def stats_view(facts: dict[str, Any], columns: int) -> list[RenderableType]:
    """The statistics for people: groups, failures, the histogram,
    and groups that did not answer.
    """
    view: list[RenderableType] = [
        Text(f"delayed messages at {facts['time']}: {facts['pending']:,} pending", "bold")
    ]
    if facts["groups"]:
        view += [_group_table(facts["groups"]), _memory_table(facts["groups"])]
    troubles = [
        (group["delay_group"], each) for group in facts["groups"] for each in group["troubles"]
    ]
    if troubles:
        view += [Text("due, but cannot be delivered", "bold red"), _trouble_table(troubles)]
    view += histogram_view(facts["histogram"], columns)
    view += [
        Text(f"partial: delay group {group} did not answer ({reason})", "red")
        for group, reason in facts["silent_groups"].items()
    ]
    return view


def _table(*columns: str) -> LineTable:
    return LineTable(columns, right=[column for column in columns if column not in _LEFT])


def _group_table(groups: list[dict[str, Any]]) -> LineTable:
    table = _table(*_GROUP_COLUMNS)
    for each in groups:
        numbers = [
            each[name]
            for name in (
                "pending",
                "waiting",
                "planned",
                "delivered",
                "lateness_p50_ms",
                "lateness_p99_ms",
            )
        ]
        table.add_row(each["delay_group"], each["master"], *[f"{number:,}" for number in numbers])
    return table


def _memory_table(groups: list[dict[str, Any]]) -> LineTable:
    table = _table(*_MEMORY_COLUMNS)
    for each in groups:
        mib, horizon = f"{each['wheel_bytes'] / (1 << 20):,.1f}", each["horizon"][:19]
        table.add_row(
            each["delay_group"],
            f"{each['wheel_messages']:,}",
            mib,
            horizon,
            f"{each['clock_step_ms']:,}",
        )
    return table


def _trouble_table(troubles: list[tuple[str, dict[str, Any]]]) -> LineTable:
    table = _table("delay group", "subject", "waiting", "reason")
    for group, each in troubles:
        table.add_row(group, each["subject"], f"{each['waiting']:,}", Text(each["reason"]))
    return table


# --- the histogram --------------------------------------------------------------------------------


def histogram_view(facts: dict[str, Any], columns: int) -> list[RenderableType]:
    """The histogram's sections that are not empty, each drawn to its own scale."""
    view: list[RenderableType] = []
    if facts["late"]:
        view.append(Text(f"overdue, delivered at once: {facts['late']:,}", "yellow"))
    for name, title, label in _SECTIONS:
        bars = [
            Bar(
                datetime.fromisoformat(each["from"]),
                datetime.fromisoformat(each["to"]),
                each["pending"],
            )
            for each in facts[name]
        ]
        if any(bar.pending for bar in bars):
            view += [Text(f"due {title} (UTC)", "bold"), draw(bars, label, columns)]
    return view


def draw(bars: list[Bar], label: str, columns: int) -> Text:
    """One line per bar: its time (a strftime format), its count, and its length relative to the
    largest; `…` for a gap.
    """
    lines = [
        None if bar is None else (f"{bar.start:{label}}", f"{bar.pending:,}", bar.pending)
        for bar in shown(bars)
    ]
    largest = max(bar.pending for bar in bars)
    name_width, count_width = len(f"{bars[0].start:{label}}"), len(f"{largest:,}")
    width = max(1, min(BAR_COLUMNS_MAX, columns - name_width - count_width - 2))
    drawn = Text()
    for line in lines:
        if drawn:
            drawn.append("\n")
        if line is None:
            drawn.append("…".rjust(name_width), "dim")
            continue
        name, count, pending = line
        drawn.append(f"{name} {count.rjust(count_width)}").append(
            f" {length(pending, largest, width)}".rstrip(), "cyan"
        )
    return drawn


def length(count: int, largest: int, width: int) -> str:
    """A bar; `largest` fills `width` columns. Lengths are in eighths of a column, rounded up, so
    that every count above 0 is visible.
    """
    eighths = -(-count * width * 8 // largest) if largest else 0
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")


@dataclass(frozen=True)
class DelayOptions(ReplicaOptions):
    """Options of `qmq delay`."""

    group: Annotated[
        str, typer.Option(envvar="QMQ_GROUP", help="The delay group of this replica.")
    ] = ""
    data_port: Annotated[int, port_option("The data port", "QMQ_DATA_PORT")] = 20883
    control_port: Annotated[int, port_option("The control port", "QMQ_CONTROL_PORT")] = 20884
    bucket: Annotated[
        str,
        Variable(
            "QMQ_BUCKET",
            "The time span of one schedule file, 5m to 24h; fixed when the group is created.",
        ),
    ] = "1h"
    longest: Annotated[
        str,
        Variable(
            "QMQ_DELAY_MAX", "The longest delay that is accepted; fixed when the group is created."
        ),
    ] = "732d"
    tick_ms: Annotated[
        int,
        Variable(
            "QMQ_TICK_MS",
            "Due messages are delivered at multiples of this interval.",
            at_least=1,
            at_most=HOUR_MS,
        ),
    ] = 500
    retention_hours: Annotated[
        float,
        typer.Option(
            min=0,
            max=HOURS_MAX,
            envvar="QMQ_RETENTION_HOURS",
            help="How long the message log is kept; the schedule is kept longer.",
        ),
    ] = 24.0

    def config(self) -> DelayReplicaConfig:
        """The delay server's configuration.
        Raises InvalidArgument, InvalidName, typer.BadParameter.
        """
        from qmq_coordination.broker_groups import DelaySettings

        from qmq.broker.config import BrokerConfig
        from qmq.delay.config import DelayConfig
        from qmq.node.delay import DelayReplicaConfig

        return DelayReplicaConfig(
            **self.shared_config("delay group"),
            broker=BrokerConfig(name=self.group),
            settings=DelaySettings(_ms(self.bucket), _ms(self.longest)),
            delay=DelayConfig(tick_ms=self.tick_ms),
        )


def attach(app: typer.Typer) -> None:
    """Make `app` run a delay server when it is called without a verb, and hand the mastership of
    one over.
    """
    app.callback(invoke_without_command=True)(delay)
    app.command("hand-over")(hand_over)
    app.command("confirm-clock")(confirm_clock)


@taking(DelayOptions)
def delay(context: typer.Context, options: DelayOptions) -> None:
    """Run one replica of a delay group, which stores messages until they are due; or, with a verb,
    manage delayed messages.

    Prints one line, `qmq delay is ready at HOST:PORT`, when its control port is open. Ctrl-C or
    SIGTERM stops it cleanly.
    """
    context.obj = options
    if context.invoked_subcommand is None:
        from qmq.node.delay import delay_node

        serve_replica(
            options,
            options.config,
            lambda config, environment: delay_node(config, environment=environment),
            "delay",
        )


def _ms(text: str) -> int:
    return parse_duration(text) // timedelta(milliseconds=1)


app = typer.Typer(help="Run a delay server; list, show, cancel or move delayed messages.")
attach(app)

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The delayed message's id: a receipt's `delayed_id`, or an id shown by `list`.",
    ),
]

_CANCEL_COLUMNS: Final = ("id", "due", "state", "cron", "subject")
_MOVE_COLUMNS: Final = ("id", "to", "from", "subject")


@app.command("list")
def list_delayed(
    subject: Annotated[str, typer.Argument(help="Only messages of this subject.")] = "",
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Only messages due at or after this time: 2026-11-21T09:30:00+01:00, or +2h.",
        ),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Only messages due before this time.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=COUNT_MAX, help="Show at most this many.")] = 100,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List pending messages in the order of their due times."""
    found = run(_list(server, subject, start, end, limit))
    tell_silent(found.silent)
    rows = [row_facts(each) for each in found[:limit]]
    emit(rows, [list_table(rows, time.time_ns() // 1_000_000)], as_json=as_json)
    if len(found) > limit:
        rest = f"--limit, or --from {rows[-1]['due']}"
        more = f"only the first {limit:,} are shown: for more, use {rest}"
        errors.print(more, highlight=False, soft_wrap=True)


async def _list(
    server: str, subject: str, start: str | None, end: str | None, limit: int
) -> Partial[DelayedMessage]:
    """Up to `limit` + 1 messages: the extra one tells that there are more."""
    now = datetime.now(UTC)
    first, last = (None if text is None else parse_moment(text, now) for text in (start, end))
    async with qmq.connect(server) as mq:
        silent: dict[str, str] = {}
        found = [
            each async for each in mq.delayed.list(subject, first, last, limit + 1, silent=silent)
        ]
        if not found:
            await require_subject(mq, subject)
        return Partial(found, silent)


@app.command("show")
def show_delayed(delayed_id: Id, as_json: Json = False, server: Server = SERVER) -> None:
    """Show a delayed message and its state."""
    facts = message_facts(ask_client(server, lambda mq: mq.delayed.show(delayed_id)))
    emit(facts, message_view(facts), as_json=as_json)


@app.command("cancel")
def cancel(
    delayed_id: Id, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER
) -> None:
    """Cancel a delayed message. A recurring message has no further runs."""

    async def _cancel() -> DelayedMessage:
        async with qmq.connect(server) as mq:
            if not dry_run:
                return await mq.delayed.cancel(delayed_id)
            found = await mq.delayed.show(delayed_id)
            if found.state != "cancelled":
                _require_pending(found)
            return found

    found = run(_cancel())
    row = (found.id, moment(found.due), found.state, found.cron, found.subject)
    show("would be cancelled" if dry_run else "cancelled", _CANCEL_COLUMNS, [row], as_json=as_json)


@app.command("move")
def move(
    delayed_id: Id,
    to: Annotated[
        str | None,
        typer.Option("--to", help="The new due time: 2026-11-21T09:30:00+01:00, or +2h from now."),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Shift the due time: 30m or 1d later; -30m earlier.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Change the due time of a message; a time in the past means now. For a recurring message, only
    the next run moves.
    """
    row = run(_move(server, delayed_id, to, by, dry_run))
    show("would be moved" if dry_run else "moved", _MOVE_COLUMNS, [row], as_json=as_json)


async def _move(
    server: str, delayed_id: str, to: str | None, by: str | None, dry_run: bool
) -> tuple[str, str, str, str]:
    if (to is None) == (by is None):
        raise InvalidArgument(
            "give either --to 2026-11-21T09:30:00Z (the new due time) or --by 30m (how much later)"
        )
    wanted = parse_moment(to, datetime.now(UTC)) if to is not None else parse_shift(by or "")
    async with qmq.connect(server) as mq:
        before = await mq.delayed.show(delayed_id)
        target = shifted(before.due, wanted) if isinstance(wanted, timedelta) else wanted
        if dry_run:
            _require_pending(before)
            due_ms(target, time.time_ns())
        after = target if dry_run else (await mq.delayed.move(delayed_id, target)).due
        return (before.id, moment(after), moment(before.due), before.subject)


def _require_pending(found: DelayedMessage) -> None:
    """The check of the delay group, repeated here for --dry-run. Raises TooLate."""
    if found.state != "pending":
        raise TooLate(
            f"{found.id} is {found.state}: only a pending message can be cancelled or moved"
        )


@app.command("stats")
def stats(as_json: Json = False, server: Server = SERVER) -> None:
    """Show pending messages by due time, delivery lateness,
    and messages that cannot be delivered.
    """

    async def _stats() -> dict[str, Any]:
        async with qmq.connect(server) as mq:
            found = await mq.delayed.stats()
            return stats_facts(
                found, max([group.time for group in found.groups], default=datetime.now(UTC))
            )

    facts = run(_stats())
    emit(facts, stats_view(facts, console.width), as_json=as_json)


# --- times ----------------------------------------------------------------------------------------


def parse_moment(text: str, now: datetime) -> datetime:
    """Parse a time with a time zone, or one relative to now: +2h, -1d. Raises InvalidArgument."""
    if text.startswith(("+", "-")):
        return shifted(now, parse_shift(text))
    return parse_when(text)


def parse_shift(text: str) -> timedelta:
    """Parse a duration with an optional sign. Raises InvalidArgument."""
    found = parse_duration(text.removeprefix("-").removeprefix("+"))
    return -found if text.startswith("-") else found
