"""`qmq route` shows and changes how an ordered subject's keys are spread over partitions
(docs/ORDERING.md), and exports all routes for readers of log files without a metaserver
(docs/FORMAT.md).

A route is drawn as a line of text: the logical partitions from 0 to N in cells as wide as their
ranges.

    │1░░░░░░░░░░│3▒▒▒▒│4░░░░│2▒▒▒▒▒▒▒▒▒▒│
    0           256   384   512      1024
    ░ g1  ▒ g2

Rules:
* A cell begins with its wall and is at least that one column wide, even for a tiny range; its
  neighbours get narrower.
* If there are more cells than columns, the first cells get one column each, and the line ends in
  "and N more".
* The position of a kind (a broker group, a version) in `kinds` determines its pattern and colour:
  bars with the same kinds look the same.
* A label or a number that does not fit is left out, because a truncated number would be misread.

`qmq route split`, `merge` and `move` change a subject's route while messages flow:

* A change names the route version that it was planned for, so either exactly the plan is carried
  out or the change fails (RouteConflict).
* The change is done when the next route is published. Consumer groups follow by themselves; waiting
  for them is for the operator's information: Ctrl-C ends the waiting, never the change.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import RenderableType
from rich.text import Text

from qmq.cli.added_options import WatchPace
from qmq.cli.arguments import (
    CliTiming,
    Neighbours,
    Partition,
    RouteVersion,
    SplitAt,
    age,
    assignments,
    timing_of,
)
from qmq.cli.output import (
    SERVER,
    DryRun,
    Json,
    Server,
    administration,
    ask,
    fail,
    progress_of,
    run,
    show,
    time_text,
    warn,
)
from qmq.cli.roles import taking
from qmq.cli.tables import LineTable, console
from qmq.errors import CoordinationUnavailable, InvalidArgument, Unavailable, UnknownPartition
from qmq.limits import LOGICAL_PARTITIONS_MAX
from qmq.model import Order
from qmq.operations.routes import change_facts, described, left_in, plan_facts, undo_command
from qmq.operations.text import Duration
from qmq.wire.number_fields import check_numbers, request_of

if TYPE_CHECKING:
    from rich.progress import TaskID

    from qmq.proto.v1 import meta_pb2 as pb

PATTERNS: Final = "░▒▓─═"
COLORS: Final = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""The number of colours is coprime to the number of patterns, so a pair of pattern and colour
repeats only after 30 kinds.
"""

_WALL: Final = "│"


class DrawnRange(NamedTuple):
    """Logical partitions `first` to `end` - 1; `kind` chooses the pattern."""

    first: int
    end: int
    label: str
    kind: str


def draw(cells: Sequence[DrawnRange], columns: int, kinds: Sequence[str]) -> Text:
    """The bar, the ruler below it, and the legend, in `width` columns."""
    bar, ruler = draw_bar(cells, columns, kinds), draw_ruler(cells, columns)
    return Text("\n").join([bar, ruler, draw_legend(kinds, columns)])


def kinds_of(*bars: Sequence[DrawnRange]) -> list[str]:
    """All kinds of the bars, sorted."""
    return sorted({cell.kind for bar in bars for cell in bar})


def walls(cells: Sequence[DrawnRange], columns: int) -> list[int]:
    """The column of each cell's wall, followed by the column of the closing wall. Needs more
    columns than cells.
    """
    whole = cells[-1].end - cells[0].first
    inner = columns - 1
    found = [round((cell.first - cells[0].first) * inner / whole) for cell in cells] + [inner]
    for place in range(1, len(found)):
        found[place] = max(found[place], found[place - 1] + 1)
    found[-1] = inner
    for place in range(len(found) - 2, -1, -1):
        found[place] = min(found[place], found[place + 1] - 1)
    return found


def draw_bar(cells: Sequence[DrawnRange], columns: int, kinds: Sequence[str]) -> Text:
    """The line of cells."""
    shown = cells[: _room(cells, columns)]
    at = walls(shown, columns) if len(shown) == len(cells) else range(len(shown) + 1)
    line = Text()
    for cell, first, end in zip(shown, at, at[1:], strict=False):
        pattern, color = _look(cell.kind, kinds)
        room = end - first - 1
        label = cell.label if len(cell.label) <= room else ""
        line.append(_WALL, color).append(label, f"bold {color}").append(
            pattern * (room - len(label)), color
        )
    line.append(_WALL)
    if len(shown) < len(cells):
        line.append(f" and {len(cells) - len(shown)} more")
    return line


def _room(cells: Sequence[DrawnRange], columns: int) -> int:
    """How many cells can be shown."""
    return (
        len(cells) if len(cells) < columns else max(1, columns - 1 - len(f" and {len(cells)} more"))
    )


def draw_ruler(cells: Sequence[DrawnRange], columns: int) -> Text:
    """The first logical partition of each cell below its wall, if there is room, and the end below
    the closing wall.
    """
    room = _room(cells, columns)
    if room < len(cells):
        return Text(f"{cells[0].first} to {cells[room - 1].end} of {cells[-1].end}", "dim")
    last = str(cells[-1].end)
    line = ""
    for cell, at in zip(cells, walls(cells, columns), strict=False):
        number = str(cell.first)
        is_apart = not line or at > len(line)
        if is_apart and at + len(number) < columns - len(last):
            line = line.ljust(at) + number
    return Text(line + last.rjust(columns - len(line)), "dim")


def draw_legend(kinds: Sequence[str], columns: int) -> Text:
    """The pattern of each kind."""
    legend, used = Text(), 0
    for kind in kinds:
        pattern, color = _look(kind, kinds)
        item = f"{pattern} {kind}"
        if used and used + 2 + len(item) > columns:
            legend.append("\n")
            used = 0
        gap = "  " if used else ""
        legend.append(gap).append(item, color)
        used += len(gap) + len(item)
    return legend


def _look(kind: str, kinds: Sequence[str]) -> tuple[str, str]:
    place = list(kinds).index(kind)
    return PATTERNS[place % len(PATTERNS)], COLORS[place % len(COLORS)]


_STATES = {"open": "green", "sealed": "dim", "fenced": "red", "unknown": "red"}
_PHASES = ("prepared", "sealed", "published", "done")
_RIGHT = {
    "partition",
    "width",
    "messages",
    "bytes",
    "messages/s",
    "left",
    "lag ms",
    "parked keys",
    "version",
    "sealed ms",
    "published ms",
}
_RIGHT |= {"done ms", "refused ms"}


def route_cells(partitions: Iterable[dict[str, Any]]) -> list[DrawnRange]:
    """A route's partitions as cells of a drawing."""
    return [
        DrawnRange(each["first"], each["end"], str(each["partition"]), each["broker_group"])
        for each in partitions
    ]


def subject_view(found: dict[str, Any], columns: int) -> list[RenderableType]:
    """A subject: its route, partitions, groups, and the change in progress."""
    cells = route_cells(found["partitions"])
    latest = found["latest_version"]
    which = f"version {found['version']}" + (
        "" if found["version"] == latest else f" (the latest is {latest})"
    )
    head = (
        f"subject {found['subject']}: {found['order']} order, {found['logical_partitions']:,} "
        f"logical partitions, route {which}"
    )
    view: list[RenderableType] = [
        Text(head, "bold"),
        draw(cells, columns, kinds_of(cells)),
        partition_table(found["partitions"]),
    ]
    if found["older_partitions"]:
        view += [
            Text("partitions of older versions that are still read or waited for"),
            partition_table(found["older_partitions"]),
        ]
    for group in found["groups"]:
        view += group_view(group, latest, columns)
    if not found["groups"]:
        view.append(Text("no consumer group"))
    return view + notes(found)


def partition_table(partitions: Sequence[dict[str, Any]]) -> LineTable:
    """A table with one line per partition."""
    shown = LineTable(
        ("partition", "range", "width", "broker group", "state", "messages", "bytes", "messages/s"),
        right=_RIGHT,
    )
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
        f"consumers {len(group['consumers'])}, lanes {len(group['lanes'])}, left "
        f"{group['left']:,}, oldest {age(group['lag_ms'])}, parked keys {group['parked_keys']:,}"
    )
    view: list[RenderableType] = [Text(head, "bold"), Text(counts)]
    if len(group["frontier"]) > 1:
        cells = [
            DrawnRange(
                each["first"], each["end"], f"v{each['version']}", f"version {each['version']}"
            )
            for each in group["frontier"]
        ]
        view.append(draw(cells, columns, kinds_of(cells)))
    if group["partitions"]:
        view.append(reading_table(group["partitions"]))
    return view


def reading_table(partitions: Iterable[dict[str, Any]]) -> LineTable:
    """A group's unread messages by partition, and the consumers that read them."""
    shown = LineTable(
        ("partition", "range", "broker group", "left", "lag ms", "parked keys", "consumers"),
        right=_RIGHT,
    )
    for each in partitions:
        holders = ", ".join(
            f"{holder['consumer']} {range_text(holder)}{' (paused)' if holder['is_paused'] else ''}"
            for holder in each["holders"]
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
    bent = sum(
        each["bent_messages"] or 0 for each in (*found["partitions"], *found["older_partitions"])
    )
    if bent:
        said.append(
            Text(
                f"{bent:,} messages were taken out of order, as best-effort order allows", "yellow"
            )
        )
    return said


# --- changes --------------------------------------------------------------------------------------


def change_text(change: dict[str, Any]) -> str:
    """A change on one line."""
    targets = ", ".join(
        f"{each['partition']} {range_text(each)} on {each['broker_group']}"
        for each in change["targets"]
    )
    sources = ", ".join(map(str, change["sources"]))
    why = f" ({change['reason']})" if change["reason"] else ""
    return (
        f"{change['kind']} {sources} -> {targets}, to version {change['to_version']}: "
        f"{change['phase']}{why}"
    )


def history_table(changes: Iterable[dict[str, Any]], now_ms: int = 0) -> LineTable:
    """A table with one line per change:
    when it was prepared, and how much later each phase began.
    """
    shown = LineTable(
        (
            "version",
            "change",
            "prepared",
            "sealed ms",
            "published ms",
            "done ms",
            "refused ms",
            "reason",
        ),
        right=_RIGHT,
        now_ms=now_ms,
    )
    for change in changes:
        times = change["times_ms"]
        later = [
            f"+{times[phase] - times['prepared']:,}" if {phase, "prepared"} <= times.keys() else ""
            for phase in _PHASES[1:]
        ]
        targets = ", ".join(
            f"{each['partition']} {each['broker_group']}" for each in change["targets"]
        )
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
    """The plan of a dry run: the route before and after, what each group waits for, and how to undo
    the change.
    """
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
    so_long = (
        "no change of this subject has been made yet"
        if last is None
        else f"in the subject's last change {last:,} ms at most"
    )
    sources = ", ".join(map(str, plan["change"]["sources"]))
    word = "partition" if len(plan["change"]["sources"]) == 1 else "partitions"
    view.append(
        Text(
            f"Writers of {word} {sources} ({plan['refused_percent']:g} % of the keys) are "
            f"refused until it is published: {so_long}."
        )
    )
    for group in plan["groups"]:
        said = (
            f"Group {group['group']} (version {group['version']}) finishes {group['left']:,} "
            f"messages in {sources} before it continues."
        )
        view.append(Text(said))
    return [*view, Text(f"To undo it: {plan['undo']}")]


def range_text(found: dict[str, Any]) -> str:
    """A range of logical partitions; empty if unknown."""
    return "" if found["first"] is None else f"[{found['first']}, {found['end']})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


Subject = Annotated[str, typer.Argument(help="An ordered subject.")]
Planned = Callable[["pb.DescribeRouteResponse"], dict[str, Any]]
"""Makes the operation for `MetadataClient.change_route` from the subject's current state. Raises
InvalidArgument, UnknownPartition.
"""


@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """The options of every change. `subject` and the operation belong to the
    classes of the commands.
    """

    reason: Annotated[
        str, typer.Option("--reason", help="The reason, shown by `qmq route history`.")
    ] = ""
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait until every consumer group reads the new partitions."
        ),
    ] = True
    dry_run: DryRun = False
    as_json: Json = False
    server: Server = SERVER


@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    subject: Subject
    partition: Partition
    at: SplitAt = None
    parts: Annotated[
        int,
        typer.Option(
            "--partitions",
            min=0,
            max=LOGICAL_PARTITIONS_MAX,
            help="Without --at: the number of parts, cut by load; default: 2.",
        ),
    ] = 0
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="The parts' broker groups: one for all, or one for each part."),
    ] = None

    def planned(self, now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        require(now, [self.partition])
        at, parts = self.at, self.parts
        if at and parts and parts != len(at) + 1:
            raise InvalidArgument(
                f"--at makes {len(at) + 1} parts, but --partitions is {parts}: give only one "
                "of them"
            )
        count = len(at) + 1 if at else parts or 2
        groups = names(self.to)
        if len(groups) not in (0, 1, count):
            raise InvalidArgument(
                f"--to names {len(groups)} broker groups for {count} parts: give one for "
                "all, or one for each"
            )
        groups = groups * count if len(groups) == 1 else groups
        return {
            "split": request_of(
                pb.SplitOperation,
                partition=self.partition,
                at=sorted(at or ()),
                parts=0 if at else count,
                broker_groups=groups,
            )
        }


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    subject: Subject
    partitions: Neighbours
    to: Annotated[
        str,
        typer.Option(
            "--to", help="The new partition's broker group; default: the first partition's."
        ),
    ] = ""

    def planned(self, now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        require(now, self.partitions)
        if len(set(self.partitions)) < 2:
            raise InvalidArgument("give two or more partitions to merge")
        return {"merge": pb.MergeOperation(partitions=self.partitions, broker_group=self.to)}


@dataclass(frozen=True, kw_only=True)
class MoveFlags:
    subject: Subject
    partition: Partition
    to: Annotated[str, typer.Option("--to", help="The new broker group.")]

    def planned(self, now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        (place,) = require(now, [self.partition])
        if place.broker_group == self.to:
            raise InvalidArgument(f"partition {self.partition} is already on {self.to}")
        return {"move": pb.MoveOperation(partition=self.partition, broker_group=self.to)}


@dataclass(frozen=True, kw_only=True)
class SplitOptions(ChangeFlags, SplitFlags):
    pass


@dataclass(frozen=True, kw_only=True)
class MergeOptions(ChangeFlags, MergeFlags):
    pass


@dataclass(frozen=True, kw_only=True)
class MoveOptions(ChangeFlags, MoveFlags):
    pass


@taking(SplitOptions)
def split(context: typer.Context, options: SplitOptions) -> None:
    """Split a partition. Stored messages stay where they are; new messages go to the parts."""
    change(options.subject, options.planned, options, timing_of(context))


@taking(MergeOptions)
def merge(context: typer.Context, options: MergeOptions) -> None:
    """Merge neighbouring partitions into one."""
    change(options.subject, options.planned, options, timing_of(context))


@taking(MoveOptions)
def move(context: typer.Context, options: MoveOptions) -> None:
    """Move a partition to another broker group. Stored messages stay on the old group and are
    consumed from there.
    """
    change(options.subject, options.planned, options, timing_of(context))


def names(words: list[str] | None) -> list[str]:
    """The values of an option that may be repeated, or hold several values separated by commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def require(now: pb.DescribeRouteResponse, numbers: list[int]) -> list[pb.OrderedPartition]:
    """The named partitions of the latest route. Raises UnknownPartition."""
    known = {each.number: each for each in now.route.partitions}
    strangers = [number for number in numbers if number not in known]
    if strangers:
        which, there = ", ".join(map(str, strangers)), ", ".join(map(str, known))
        raise UnknownPartition(
            f"partition {which} is not in route version {now.route.version} of "
            f"{now.settings.name!r}: it has {there}"
        )
    return [known[number] for number in numbers]


def change(subject: str, planned: Planned, flags: ChangeFlags, timing: CliTiming) -> None:
    """Read the subject, then print the plan (a dry run),
    or make the change and print the result.
    """
    done = run(
        _plan(subject, planned, flags) if flags.dry_run else _do(subject, planned, flags, timing)
    )
    if flags.as_json:
        sys.stdout.write(json.dumps(done) + "\n")
    elif flags.dry_run:
        for each in plan_view(done, console.width):
            console.print(each)
    else:
        console.print(change_text(done["change"]), highlight=False, markup=False)


async def _plan(subject: str, planned: Planned, flags: ChangeFlags) -> dict[str, Any]:
    async with administration(flags.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        found = await mq.metadata.change_route(
            subject, **operation, from_version=now.route.version, reason=flags.reason, dry_run=True
        )
        return plan_facts(now, found, await mq.metadata.route_history(subject))


async def _do(
    subject: str, planned: Planned, flags: ChangeFlags, timing: CliTiming
) -> dict[str, Any]:
    async with administration(flags.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        with Following(subject, quiet=flags.as_json) as following:
            try:
                made = await mq.metadata.change_route(
                    subject, **operation, from_version=now.route.version, reason=flags.reason
                )
                following.publish(made.change)
                groups = list(now.groups)
                if flags.wait:
                    groups = await follow(
                        lambda: mq.metadata.describe_route(subject),
                        made.change,
                        following,
                        timing.follow_s,
                    )
            except asyncio.CancelledError:
                following.leave()
                raise
        return {
            "subject": subject,
            "change": change_facts(made.change),
            "undo": undo_command(subject, made.change, now.route.partitions),
            "groups": [{"group": each.group, "version": each.version} for each in groups],
        }


async def follow(
    describe: Callable[[], Awaitable[pb.DescribeRouteResponse]],
    made: pb.RouteChangeInfo,
    following: Following,
    look_s: float,
) -> list[pb.OrderedGroup]:
    """Wait until every consumer group has advanced. While no metaserver answers, keep showing the
    last known state.
    """
    while True:
        try:
            groups = list((await describe()).groups)
        except (Unavailable, CoordinationUnavailable) as failure:
            following.trouble(str(failure))
        else:
            following.look(groups, made)
            if all(each.version >= made.to_version for each in groups):
                return groups
        await asyncio.sleep(look_s)


class Following:
    """Shows the progress on standard error: a bar for each group on a terminal, otherwise a line
    for each event.
    """

    def __init__(self, subject: str, *, quiet: bool) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn

        self._subject = subject
        self._quiet = quiet
        self._is_published = False
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = progress_of(*columns, quiet=quiet)
        self._tasks: dict[str, TaskID] = {}
        self._advanced: set[str] = set()
        self._warned: set[str] = set()

    def __enter__(self) -> Following:
        self._bars.start()
        self._first = self._bars.add_task(
            f"changing the route of {self._subject}", total=None, note=""
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def publish(self, made: pb.RouteChangeInfo) -> None:
        """The new route is published; producers use it."""
        self._is_published = True
        self._bars.update(
            self._first, description=f"version {made.to_version} is published", total=1, completed=1
        )
        self._say(f"version {made.to_version} of {self._subject} is published")

    def look(self, groups: list[pb.OrderedGroup], made: pb.RouteChangeInfo) -> None:
        """Show the groups' progress."""
        for group in groups:
            left = left_in(group, made.sources)
            is_there = group.version >= made.to_version
            if group.group not in self._tasks:
                self._tasks[group.group] = self._bars.add_task(
                    f"group {group.group}", total=max(1, left), note=""
                )
            note = (
                f"version {group.version}"
                if is_there
                else f"version {group.version}, {left:,} messages left"
            )
            total = max(left, self._bars.tasks[self._tasks[group.group]].total or 1)
            self._bars.update(
                self._tasks[group.group],
                total=total,
                completed=total if is_there else total - left,
                note=note,
            )
            if is_there and group.group not in self._advanced:
                self._advanced.add(group.group)
                self._say(f"group {group.group} reads version {group.version}")
            elif not is_there and not group.consumers and group.group not in self._warned:
                self._warned.add(group.group)
                self._tell(f"group {group.group} has no consumer: it follows when one connects")

    def trouble(self, what: str) -> None:
        """No metaserver answers at the moment."""
        self._bars.update(self._first, note=what)

    def leave(self) -> None:
        """Ctrl-C: say that the change continues."""
        published, begun = (
            "the change is published; consumer groups follow by themselves",
            "if the change has begun, it continues by itself",
        )
        state = published if self._is_published else begun
        self._tell(f"{state}: `qmq route show {self._subject}` shows its progress", always=True)

    def _say(self, what: str) -> None:
        """Print an event, unless the bars show it."""
        if self._bars.disable:
            self._tell(what)

    def _tell(self, what: str, *, always: bool = False) -> None:
        if always or not self._quiet:
            warn(what)


Subjects = Annotated[list[str], typer.Argument(help="Ordered subjects.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="The file to write, replaced atomically; default: standard output."
    ),
]


def export(subjects: Subjects, out: Out = None, server: Server = SERVER) -> None:
    """Write all partitions of all route versions, their successors, and where they were sealed, as
    JSON.

    Spark needs this file to read ordered subjects from log files: option qmq.routes. After a route
    change, export again.
    """

    from qmq.columns.files.routes import to_json

    async def _export() -> list[dict[str, Any]]:
        async with administration(server) as mq:
            found = []
            for subject in dict.fromkeys(subjects):
                first = await mq.metadata.describe_route(subject, 1)
                history = await mq.metadata.route_history(subject)
                found.append(routes_of(subject, first.route, history, first.settings.order))
            return found

    text = json.dumps(to_json(run(_export()), time.time_ns() // 1_000_000), indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    try:
        _replace(out, text)
    except OSError as cause:
        fail(InvalidArgument(f"{out} cannot be written: {cause.strerror}"))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def routes_of(
    subject: str,
    first: pb.OrderedRoute,
    changes: Sequence[pb.RouteChangeInfo],
    order: str = Order.STRICT.value,
) -> dict[str, Any]:
    """A subject's part of the file, made from its first route and its changes,
    oldest first. Pure.
    """
    from qmq.columns.files.routes import subject_json
    from qmq.columns.servers.metaservers import routes_of as followed

    return subject_json(subject, followed(first, changes, order))


app = typer.Typer(
    no_args_is_help=True,
    help="Routes of ordered subjects: show, split, merge, move, history, policy, export.",
)
app.command("split")(split)
app.command("merge")(merge)
app.command("move")(move)
app.command("export")(export)

POLICY_FIELDS: Final[dict[str, type[int] | type[float]]] = {
    "split_messages_per_s": float,
    "split_bytes_per_s": float,
    "split_backlog": int,
    "merge_messages_per_s": float,
    "merge_bytes_per_s": float,
    "merge_quiet_ms": int,
    "cool_down_ms": int,
    "partitions_min": int,
    "partitions_max": int,
}
"""The settings of a policy, and the types of their values."""


def emit(found: Any, view: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print the facts as JSON, or their view for people."""
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for each in view:
        console.print(each, soft_wrap=isinstance(each, LineTable))


# --- looking --------------------------------------------------------------------------------------


@app.command("show")
def show_route(
    subject: Subject,
    version: RouteVersion = 0,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Draw a subject's route, and show its partitions and the progress of each consumer group."""

    found = ask(server, lambda mq: described(mq.metadata, subject, version))
    emit(found, subject_view(found, console.width), as_json=as_json)


@app.command("history")
def history(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Show the changes of the route, oldest first, and how long writers were refused."""

    found = [
        change_facts(each) for each in ask(server, lambda mq: mq.metadata.route_history(subject))
    ]
    emit(found, [history_table(found, time.time_ns() // 1_000_000)], as_json=as_json)


@app.command("explain")
def explain(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Show what automatic resharding would do now, and why, and what it did last."""

    told = ask(server, lambda mq: mq.metadata.explain_reshard(subject))
    found = {
        "policy": policy_facts(told.policy, subject),
        "operation": told.operation,
        "reasons": list(told.reasons),
        "last_operation": told.last_operation,
        "last_reasons": list(told.last_reasons),
        "last_ms": told.last_ms,
    }
    emit(found, _explanation(found), as_json=as_json)


def _explanation(found: dict[str, Any]) -> list[RenderableType]:
    policy = found["policy"]
    state = (
        "on"
        if policy["is_enabled"]
        else f"off: `qmq route policy {policy['subject']} --enable` switches it on"
    )
    would = "would be done" if policy["is_enabled"] else "would do if it were on"
    said: list[RenderableType] = [f"automatic resharding of {policy['subject']} is {state}"]
    said.append(f"{would} now: {found['operation'] or 'nothing'}")
    said += [f"  {reason}" for reason in found["reasons"]]
    if found["last_ms"]:
        said.append(
            f"last, at {time_text(found['last_ms'])}: {found['last_operation'] or 'nothing'}"
        )
        said += [f"  {reason}" for reason in found["last_reasons"]]
    return said


# --- the policy -----------------------------------------------------------------------------------


@app.command("policy")
def policy(
    subject: Subject,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Turn automatic resharding on or off.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE...", help="What to change, by the names that are shown."
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show the policy of automatic resharding; with settings, change them. What is not given stays
    unchanged.

    A partition is hot, and is split, if it gets more than split_messages_per_s or
    split_bytes_per_s, or if more messages than split_backlog wait for the slowest group. Neighbours
    are cold, and are merged, if they together get less than merge_messages_per_s and
    merge_bytes_per_s for merge_quiet_ms. cool_down_ms lie between two changes. There are
    partitions_min to partitions_max partitions.
    """
    try:
        given: dict[str, Any] = dict(assignments(settings or (), POLICY_FIELDS))
    except InvalidArgument as failure:
        fail(failure)
    if enable is not None:
        given["is_enabled"] = enable
    if given and WatchPace.is_watching:
        fail(InvalidArgument("--watch shows the policy: leave it out to change the policy"))

    async def _policy() -> pb.ReshardPolicy:
        from qmq.proto.v1 import meta_pb2 as pb

        check_numbers(pb.ReshardPolicy, given)
        async with administration(server) as mq:
            now = (await mq.metadata.explain_reshard(subject)).policy
            after = pb.ReshardPolicy()
            after.CopyFrom(now)
            after.MergeFrom(pb.ReshardPolicy(subject=subject))
            for field, value in given.items():
                setattr(after, field, value)
            if 0 < after.partitions_max < after.partitions_min:
                raise InvalidArgument(
                    f"partitions_min={after.partitions_min} is above "
                    f"partitions_max={after.partitions_max}"
                )
            return after if dry_run or not given else await mq.metadata.set_reshard_policy(after)

    found = policy_facts(run(_policy()), subject)
    title = "would be" if dry_run and given else f"policy of {subject}"
    show(title, list(found), [list(found.values())], as_json=as_json) if as_json else show(
        title,
        ("setting", "value"),
        [(name.replace("_", " "), str(value)) for name, value in found.items()],
        as_json=False,
    )


def policy_facts(found: pb.ReshardPolicy, subject: str) -> dict[str, Any]:
    """A policy as JSON values."""
    return {"subject": subject, "is_enabled": found.is_enabled} | {
        field: getattr(found, field) for field in POLICY_FIELDS
    }
