"""The output of `qmq route` for people: bars, tables and sentences made from `route_facts`. Pure: returns what rich prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from qmq.cli.output import time_text
from qmq.cli.route_drawing import DrawnRange, draw, kinds_of
from qmq.cli.table import LineTable
from qmq.cli.times import age
from qmq.operations.moments import Duration

_STATES = {"open": "green", "sealed": "dim", "fenced": "red", "unknown": "red"}
_PHASES = ("prepared", "sealed", "published", "done")
_RIGHT = {"partition", "width", "messages", "bytes", "messages/s", "left", "lag ms", "parked keys", "version", "sealed ms", "published ms"}
_RIGHT |= {"done ms", "refused ms"}


def route_cells(partitions: Iterable[dict[str, Any]]) -> list[DrawnRange]:
    """A route's partitions as cells of a drawing."""
    return [DrawnRange(each["first"], each["end"], str(each["partition"]), each["broker_group"]) for each in partitions]


def subject_view(found: dict[str, Any], columns: int) -> list[RenderableType]:
    """A subject: its route, partitions, groups, and the change in progress."""
    cells = route_cells(found["partitions"])
    latest = found["latest_version"]
    which = f"version {found['version']}" + ("" if found["version"] == latest else f" (the latest is {latest})")
    head = f"subject {found['subject']}: {found['order']} order, {found['logical_partitions']:,} logical partitions, route {which}"
    view: list[RenderableType] = [Text(head, "bold"), draw(cells, columns, kinds_of(cells)), partition_table(found["partitions"])]
    if found["older_partitions"]:
        view += [Text("partitions of older versions that are still read or waited for"), partition_table(found["older_partitions"])]
    for group in found["groups"]:
        view += group_view(group, latest, columns)
    if not found["groups"]:
        view.append(Text("no consumer group"))
    return view + notes(found)


def partition_table(partitions: Sequence[dict[str, Any]]) -> LineTable:
    """A table with one line per partition."""
    shown = LineTable(("partition", "range", "width", "broker group", "state", "messages", "bytes", "messages/s"), right=_RIGHT)
    for each in partitions:
        state = f"sealed at {each['sealed_at']:,}" if each["state"] == "sealed" else each["state"]
        width = "" if each["width_percent"] is None else f"{each['width_percent']:g} %"
        shown.add_row(
            str(each["partition"]),
            range_text(each),
            width,
            each["broker_group"] or "",
            Text(state, _STATES[each["state"]]),
            _number(each["messages"]),
            _number(each["bytes"]),
            _number(each["messages_per_s"]),
        )
    return shown


def group_view(group: dict[str, Any], latest: int, columns: int) -> list[RenderableType]:
    """A consumer group: its route version, its frontier if keys differ, and what it reads."""
    head = f"group {group['group']}: version {group['version']} of {latest}, gate {group['gate']}"
    if not group["is_ready"]:
        head += ", being placed"
    if group["is_paused"]:
        head += ", paused"
    counts = (
        f"consumers {len(group['consumers'])}, lanes {len(group['lanes'])}, left {group['left']:,}, oldest {age(group['lag_ms'])}, "
        f"parked keys {group['parked_keys']:,}"
    )
    view: list[RenderableType] = [Text(head, "bold"), Text(counts)]
    if len(group["frontier"]) > 1:
        cells = [DrawnRange(each["first"], each["end"], f"v{each['version']}", f"version {each['version']}") for each in group["frontier"]]
        view.append(draw(cells, columns, kinds_of(cells)))
    if group["partitions"]:
        view.append(reading_table(group["partitions"]))
    return view


def reading_table(partitions: Iterable[dict[str, Any]]) -> LineTable:
    """A group's unread messages by partition, and the consumers that read them."""
    shown = LineTable(("partition", "range", "broker group", "left", "lag ms", "parked keys", "consumers"), right=_RIGHT)
    for each in partitions:
        holders = ", ".join(
            f"{holder['consumer']} {range_text(holder)}{' (paused)' if holder['is_paused'] else ''}" for holder in each["holders"]
        )
        left = "finished" if each["is_finished"] else f"{each['left']:,}"
        shown.add_row(
            str(each["partition"]),
            range_text(each),
            each["broker_group"],
            left,
            Duration(each["lag_ms"]),
            f"{each['parked_keys']:,}",
            holders,
        )
    return shown


def notes(found: dict[str, Any]) -> list[RenderableType]:
    """Notes for the operator: silent groups, order violations."""
    said: list[RenderableType] = []
    if found["change"] is not None:
        said.append(Text(f"under way: {change_text(found['change'])}", "yellow"))
    if found["silent_groups"]:
        said.append(Text(f"partial: no answer from {', '.join(found['silent_groups'])}", "red"))
    bent = sum(each["bent_messages"] or 0 for each in (*found["partitions"], *found["older_partitions"]))
    if bent:
        said.append(Text(f"{bent:,} messages were taken out of order, as best-effort order allows", "yellow"))
    return said


# --- changes -----------------------------------------------------------------------------------------------------------


def change_text(change: dict[str, Any]) -> str:
    """A change on one line."""
    targets = ", ".join(f"{each['partition']} {range_text(each)} on {each['broker_group']}" for each in change["targets"])
    sources = ", ".join(map(str, change["sources"]))
    why = f" ({change['reason']})" if change["reason"] else ""
    return f"{change['kind']} {sources} -> {targets}, to version {change['to_version']}: {change['phase']}{why}"


def history_table(changes: Iterable[dict[str, Any]], now_ms: int = 0) -> LineTable:
    """A table with one line per change: when it was prepared, and how much later each phase began."""
    shown = LineTable(
        ("version", "change", "prepared", "sealed ms", "published ms", "done ms", "refused ms", "reason"), right=_RIGHT, now_ms=now_ms
    )
    for change in changes:
        times = change["times_ms"]
        later = [f"+{times[phase] - times['prepared']:,}" if {phase, "prepared"} <= times.keys() else "" for phase in _PHASES[1:]]
        targets = ", ".join(f"{each['partition']} {each['broker_group']}" for each in change["targets"])
        shown.add_row(
            str(change["to_version"]),
            f"{change['kind']} {', '.join(map(str, change['sources']))} -> {targets}",
            time_text(times.get("prepared", 0)),
            *later,
            _refused(change),
            change["reason"],
        )
    return shown


def _refused(change: dict[str, Any]) -> str:
    least, most = change["refused_ms"], change["refused_ms_max"]
    if least is None or most is None:
        return ""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def plan_view(plan: dict[str, Any], columns: int) -> list[RenderableType]:
    """The plan of a dry run: the route before and after, what each group waits for, and how to undo the change."""
    before, after = route_cells(plan["before"]), route_cells(plan["after"])
    kinds = kinds_of(before, after)
    view: list[RenderableType] = [
        Text(f"would be: {change_text(plan['change'])}", "bold"),
        Text(f"now, version {plan['from_version']}"),
        draw(before, columns, kinds),
        Text(f"then, version {plan['change']['to_version']}"),
        draw(after, columns, kinds),
    ]
    last = plan["last_refused_ms_max"]
    so_long = "no change of this subject has been made yet" if last is None else f"in the subject's last change {last:,} ms at most"
    sources = ", ".join(map(str, plan["change"]["sources"]))
    word = "partition" if len(plan["change"]["sources"]) == 1 else "partitions"
    view.append(
        Text(f"Writers of {word} {sources} ({plan['refused_percent']:g} % of the keys) are refused until it is published: {so_long}.")
    )
    for group in plan["groups"]:
        said = f"Group {group['group']} (version {group['version']}) finishes {group['left']:,} messages in {sources} before it continues."
        view.append(Text(said))
    return [*view, Text(f"To undo it: {plan['undo']}")]


def range_text(found: dict[str, Any]) -> str:
    """A range of logical partitions; empty if unknown."""
    return "" if found["first"] is None else f"[{found['first']}, {found['end']})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"
