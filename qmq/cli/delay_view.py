"""The output of `qmq delay`: JSON values for programs, tables and a histogram for people. Pure: returns what rich prints."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from qmq.cli.delay_histogram import Bar, DelayHistogram, Due, histogram, shown
from qmq.cli.table import LineTable
from qmq.operations.key_texts import key_text
from qmq.operations.message_view import text_of
from qmq.operations.moments import Time

if TYPE_CHECKING:
    from qmq.client.delayed_message import DelayedMessage, DelayGroup, DelayStats

BAR_COLUMNS_MAX: Final = 60

_EIGHTHS: Final = "▏▎▍▌▋▊▉█"
_SECTIONS: Final = (("hours", "by hour", "%Y-%m-%d %H:%M"), ("days", "by day", "%Y-%m-%d"), ("months", "by month", "%Y-%m"))
_GROUP_COLUMNS: Final = ("delay group", "master", "pending", "waiting", "planned", "delivered", "p50 ms", "p99 ms")
_MEMORY_COLUMNS: Final = ("delay group", "in the wheel", "wheel MiB", "horizon", "clock step ms")
"""Two tables, because one would not fit 80 columns and a number must not be wrapped."""
_LEFT: Final = {"delay group", "master", "horizon", "subject", "reason", "key", "tags", "recurs", "id"}


def moment(time: datetime) -> str:
    """A time in UTC, in a form that the commands accept as input."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


# --- one message --------------------------------------------------------------------------------------------------------


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


# --- lists --------------------------------------------------------------------------------------------------------------


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
    table = LineTable(("due", "subject", "key", "tags", "bytes", "recurs", "id"), right=("bytes",), now_ms=now_ms)
    for row in rows:
        recurs = f"{row['cron']} {row['zone']}".strip()
        cells = (row["subject"], row["key"] or "", " ".join(row["tags"]), f"{row['bytes']:,}", recurs, row["id"])
        table.add_row(Time(round(datetime.fromisoformat(row["due"]).timestamp() * 1000)), *cells)
    return table


# --- delivery statistics --------------------------------------------------------------------------------------------


def stats_facts(found: DelayStats, now: datetime) -> dict[str, Any]:
    """The statistics of all delay groups, with a histogram of due times counted from `now`."""
    pending = [Due(each.start, each.start + each.length, each.pending) for group in found.groups for each in group.buckets]
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
        "lateness_p50_ms": _ms(group.lateness_p50),
        "lateness_p99_ms": _ms(group.lateness_p99),
        "wheel_messages": group.wheel_messages,
        "wheel_bytes": group.wheel_bytes,
        "horizon": moment(group.horizon),
        "time": moment(group.time),
        "clock_step_ms": _ms(group.clock_step),
        "troubles": [{"subject": each.subject, "waiting": each.waiting, "reason": each.reason} for each in group.troubles],
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


def _ms(time: timedelta) -> int:
    return round(time.total_seconds() * 1000)


def _histogram_facts(found: DelayHistogram) -> dict[str, Any]:
    bars = {"hours": found.hours, "days": found.days, "months": found.months}
    return {"late": found.late} | {
        name: [{"from": moment(bar.start), "to": moment(bar.end), "pending": bar.pending} for bar in each] for name, each in bars.items()
    }


def stats_view(facts: dict[str, Any], columns: int) -> list[RenderableType]:
    """The statistics for people: groups, failures, the histogram, and groups that did not answer."""
    view: list[RenderableType] = [Text(f"delayed messages at {facts['time']}: {facts['pending']:,} pending", "bold")]
    if facts["groups"]:
        view += [_group_table(facts["groups"]), _memory_table(facts["groups"])]
    troubles = [(group["delay_group"], each) for group in facts["groups"] for each in group["troubles"]]
    if troubles:
        view += [Text("due, but cannot be delivered", "bold red"), _trouble_table(troubles)]
    view += histogram_view(facts["histogram"], columns)
    view += [Text(f"partial: delay group {group} did not answer ({reason})", "red") for group, reason in facts["silent_groups"].items()]
    return view


def _table(*columns: str) -> LineTable:
    return LineTable(columns, right=[column for column in columns if column not in _LEFT])


def _group_table(groups: list[dict[str, Any]]) -> LineTable:
    table = _table(*_GROUP_COLUMNS)
    for each in groups:
        numbers = [each[name] for name in ("pending", "waiting", "planned", "delivered", "lateness_p50_ms", "lateness_p99_ms")]
        table.add_row(each["delay_group"], each["master"], *[f"{number:,}" for number in numbers])
    return table


def _memory_table(groups: list[dict[str, Any]]) -> LineTable:
    table = _table(*_MEMORY_COLUMNS)
    for each in groups:
        mib, horizon = f"{each['wheel_bytes'] / (1 << 20):,.1f}", each["horizon"][:19]
        table.add_row(each["delay_group"], f"{each['wheel_messages']:,}", mib, horizon, f"{each['clock_step_ms']:,}")
    return table


def _trouble_table(troubles: list[tuple[str, dict[str, Any]]]) -> LineTable:
    table = _table("delay group", "subject", "waiting", "reason")
    for group, each in troubles:
        table.add_row(group, each["subject"], f"{each['waiting']:,}", Text(each["reason"]))
    return table


# --- the histogram ------------------------------------------------------------------------------------------------------


def histogram_view(facts: dict[str, Any], columns: int) -> list[RenderableType]:
    """The histogram's sections that are not empty, each drawn to its own scale."""
    view: list[RenderableType] = []
    if facts["late"]:
        view.append(Text(f"overdue, delivered at once: {facts['late']:,}", "yellow"))
    for name, title, label in _SECTIONS:
        bars = [Bar(datetime.fromisoformat(each["from"]), datetime.fromisoformat(each["to"]), each["pending"]) for each in facts[name]]
        if any(bar.pending for bar in bars):
            view += [Text(f"due {title} (UTC)", "bold"), draw(bars, label, columns)]
    return view


def draw(bars: list[Bar], label: str, columns: int) -> Text:
    """One line per bar: its time (a strftime format), its count, and its length relative to the largest; `…` for a gap."""
    lines = [None if bar is None else (f"{bar.start:{label}}", f"{bar.pending:,}", bar.pending) for bar in shown(bars)]
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
        drawn.append(f"{name} {count.rjust(count_width)}").append(f" {length(pending, largest, width)}".rstrip(), "cyan")
    return drawn


def length(count: int, largest: int, width: int) -> str:
    """A bar; `largest` fills `width` columns. Lengths are in eighths of a column, rounded up, so that every count above 0 is visible."""
    eighths = -(-count * width * 8 // largest) if largest else 0
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")
