"""`qmq route split`, `merge` and `move` change a subject's route while messages flow.

Rules:
* A change names the route version that it was planned for, so either exactly the plan is carried out or the change fails (RouteConflict).
* The change is done when the next route is published. Consumer groups follow by themselves; waiting for them is for the operator's
  information: Ctrl-C ends the waiting, never the change.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn

import qmq
from qmq.cli.cli_timing import CliTiming, timing_of
from qmq.cli.output import SERVER, DryRun, Json, Server, console, errors, run
from qmq.cli.progress_bar import progress_of
from qmq.cli.roles import taking
from qmq.cli.route_view import change_text, plan_view
from qmq.errors import CoordinationUnavailable, InvalidArgument, Unavailable, UnknownPartition
from qmq.operations.route_facts import change_facts, left_in, plan_facts, undo_command

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

Subject = Annotated[str, typer.Argument(help="An ordered subject.")]
Partition = Annotated[int, typer.Argument(help="The partition's number, as shown by `qmq route show`.")]

Planned = Callable[["pb.DescribeRouteResponse"], dict[str, Any]]
"""Makes the operation for `MetadataClient.change_route` from the subject's current state. Raises InvalidArgument, UnknownPartition."""


@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """The options of every change. `subject` and the operation belong to the classes of the commands."""

    reason: Annotated[str, typer.Option("--reason", help="The reason, shown by `qmq route history`.")] = ""
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until every consumer group reads the new partitions.")] = True
    dry_run: DryRun = False
    as_json: Json = False
    server: Server = SERVER


@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    subject: Subject
    partition: Partition
    at: Annotated[list[int] | None, typer.Option("--at", help="First logical partition of a part; repeatable.")] = None
    parts: Annotated[int, typer.Option("--parts", min=0, help="Without --at: the number of parts, cut by load; default: 2.")] = 0
    to: Annotated[list[str] | None, typer.Option("--to", help="The parts' broker groups: one for all, or one for each part.")] = None

    def planned(self, now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        require(now, [self.partition])
        at, parts = self.at, self.parts
        if at and parts and parts != len(at) + 1:
            raise InvalidArgument(f"--at makes {len(at) + 1} parts, but --parts is {parts}: give only one of them")
        count = len(at) + 1 if at else parts or 2
        groups = names(self.to)
        if len(groups) not in (0, 1, count):
            raise InvalidArgument(f"--to names {len(groups)} broker groups for {count} parts: give one for all, or one for each")
        groups = groups * count if len(groups) == 1 else groups
        return {"split": pb.SplitOperation(partition=self.partition, at=sorted(at or ()), parts=0 if at else count, broker_groups=groups)}


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    subject: Subject
    partitions: Annotated[list[int], typer.Argument(help="The numbers of neighbouring partitions.")]
    to: Annotated[str, typer.Option("--to", help="The new partition's broker group; default: the first partition's.")] = ""

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
    """Move a partition to another broker group. Stored messages stay on the old group and are consumed from there."""
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
        raise UnknownPartition(f"partition {which} is not in route version {now.route.version} of {now.settings.name!r}: it has {there}")
    return [known[number] for number in numbers]


def change(subject: str, planned: Planned, flags: ChangeFlags, timing: CliTiming) -> None:
    """Read the subject, then print the plan (a dry run), or make the change and print the result."""
    done = run(_plan(subject, planned, flags) if flags.dry_run else _do(subject, planned, flags, timing))
    if flags.as_json:
        sys.stdout.write(json.dumps(done) + "\n")
    elif flags.dry_run:
        for each in plan_view(done, console.width):
            console.print(each)
    else:
        console.print(change_text(done["change"]), highlight=False, markup=False)


async def _plan(subject: str, planned: Planned, flags: ChangeFlags) -> dict[str, Any]:
    async with qmq.connect(flags.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        found = await mq.metadata.change_route(subject, **operation, from_version=now.route.version, reason=flags.reason, dry_run=True)
        return plan_facts(now, found, await mq.metadata.route_history(subject))


async def _do(subject: str, planned: Planned, flags: ChangeFlags, timing: CliTiming) -> dict[str, Any]:
    async with qmq.connect(flags.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        with Following(subject, quiet=flags.as_json) as following:
            try:
                made = await mq.metadata.change_route(subject, **operation, from_version=now.route.version, reason=flags.reason)
                following.publish(made.change)
                groups = list(now.groups)
                if flags.wait:
                    groups = await follow(lambda: mq.metadata.describe_route(subject), made.change, following, timing.follow_s)
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
    describe: Callable[[], Awaitable[pb.DescribeRouteResponse]], made: pb.RouteChangeInfo, following: Following, look_s: float
) -> list[pb.OrderedGroup]:
    """Wait until every consumer group has advanced. While no metaserver answers, keep showing the last known state."""
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
    """Shows the progress on standard error: a bar for each group on a terminal, otherwise a line for each event."""

    def __init__(self, subject: str, *, quiet: bool) -> None:
        self._subject = subject
        self._quiet = quiet
        self._is_published = False
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[note]}"))
        self._bars = progress_of(*columns, quiet=quiet)
        self._tasks: dict[str, TaskID] = {}
        self._advanced: set[str] = set()
        self._warned: set[str] = set()

    def __enter__(self) -> Following:
        self._bars.start()
        self._first = self._bars.add_task(f"changing the route of {self._subject}", total=None, note="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def publish(self, made: pb.RouteChangeInfo) -> None:
        """The new route is published; producers use it."""
        self._is_published = True
        self._bars.update(self._first, description=f"version {made.to_version} is published", total=1, completed=1)
        self._say(f"version {made.to_version} of {self._subject} is published")

    def look(self, groups: list[pb.OrderedGroup], made: pb.RouteChangeInfo) -> None:
        """Show the groups' progress."""
        for group in groups:
            left = left_in(group, made.sources)
            is_there = group.version >= made.to_version
            if group.group not in self._tasks:
                self._tasks[group.group] = self._bars.add_task(f"group {group.group}", total=max(1, left), note="")
            note = f"version {group.version}" if is_there else f"version {group.version}, {left:,} messages left"
            total = max(left, self._bars.tasks[self._tasks[group.group]].total or 1)
            self._bars.update(self._tasks[group.group], total=total, completed=total if is_there else total - left, note=note)
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
            errors.print(what, highlight=False, markup=False, soft_wrap=True)
