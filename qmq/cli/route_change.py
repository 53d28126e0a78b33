"""`qmq route split`, `merge` and `move`: a subject's route is changed while messages flow.

Rules:
* A change starts from the version that was looked at first, so what is done is what was planned, or nothing (RouteConflict).
* It is done when the next route is published; consumer groups follow by themselves. Waiting for them is for the person who looks on:
  Ctrl-C ends the looking, never the change.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

import qmq
from qmq.cli.cli_timing import CliTiming, timing_of
from qmq.cli.output import SERVER, DryRun, Json, Server, console, errors, run
from qmq.cli.route_view import change_text, plan_view
from qmq.errors import CoordinationUnavailable, InvalidArgument, Unavailable, UnknownPartition
from qmq.operations.route_facts import change_facts, left_in, plan_facts, undo_command

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

Subject = Annotated[str, typer.Argument(help="The subject; an ordered one.")]
Partition = Annotated[int, typer.Argument(help="The partition's number, as `qmq route show` has it.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for `qmq route history`.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until every consumer group reads the new partitions.")]

Planned = Callable[["pb.DescribeRouteResponse"], dict[str, Any]]
"""The operation, as `MetadataClient.change_route` takes it, from how the subject is now. Raises InvalidArgument, UnknownPartition."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a change is made, and told."""

    reason: str
    dry_run: bool
    wait: bool
    as_json: bool
    server: str
    timing: CliTiming


def split(
    context: typer.Context,
    subject: Subject,
    partition: Partition,
    at: Annotated[list[int] | None, typer.Option("--at", help="Where a part begins: a logical partition; may be repeated.")] = None,
    parts: Annotated[int, typer.Option("--parts", min=0, help="Without --at: into how many, cut by load; two if not given.")] = 0,
    to: Annotated[
        list[str] | None, typer.Option("--to", help="Where the parts shall live: one broker group for all, or one for each part.")
    ] = None,
    reason: Reason = "",
    wait: Wait = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Split a partition: its messages stay where they are, new ones go to the parts."""

    def planned(now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        require(now, [partition])
        if at and parts and parts != len(at) + 1:
            raise InvalidArgument(f"--at makes {len(at) + 1} parts, --parts says {parts}: give one of them")
        count = len(at) + 1 if at else parts or 2
        groups = names(to)
        if len(groups) not in (0, 1, count):
            raise InvalidArgument(f"--to names {len(groups)} broker groups for {count} parts: name one for all, or one for each")
        groups = groups * count if len(groups) == 1 else groups
        return {"split": pb.SplitOperation(partition=partition, at=sorted(at or ()), parts=0 if at else count, broker_groups=groups)}

    change(subject, planned, Manner(reason, dry_run, wait, as_json, server, timing_of(context)))


def merge(
    context: typer.Context,
    subject: Subject,
    partitions: Annotated[list[int], typer.Argument(help="The partitions' numbers; neighbours.")],
    to: Annotated[str, typer.Option("--to", help="Where the new one shall live; without it, where the first one lives.")] = "",
    reason: Reason = "",
    wait: Wait = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Make one partition of neighbours."""

    def planned(now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        require(now, partitions)
        if len(set(partitions)) < 2:
            raise InvalidArgument("name two partitions or more: a merge makes one of them")
        return {"merge": pb.MergeOperation(partitions=partitions, broker_group=to)}

    change(subject, planned, Manner(reason, dry_run, wait, as_json, server, timing_of(context)))


def move(
    context: typer.Context,
    subject: Subject,
    partition: Partition,
    to: Annotated[str, typer.Option("--to", help="The broker group that shall take its messages.")],
    reason: Reason = "",
    wait: Wait = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Let another broker group take a partition's messages; what is stored stays where it is, and is consumed from there."""

    def planned(now: pb.DescribeRouteResponse) -> dict[str, Any]:
        from qmq.proto.v1 import meta_pb2 as pb

        (place,) = require(now, [partition])
        if place.broker_group == to:
            raise InvalidArgument(f"partition {partition} lives on {to} already")
        return {"move": pb.MoveOperation(partition=partition, broker_group=to)}

    change(subject, planned, Manner(reason, dry_run, wait, as_json, server, timing_of(context)))


def names(words: list[str] | None) -> list[str]:
    """An option that may be repeated, or hold several with commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def require(now: pb.DescribeRouteResponse, numbers: list[int]) -> list[pb.OrderedPartition]:
    """Partitions of the latest route. Raises UnknownPartition."""
    known = {each.number: each for each in now.route.partitions}
    strangers = [number for number in numbers if number not in known]
    if strangers:
        which, there = ", ".join(map(str, strangers)), ", ".join(map(str, known))
        raise UnknownPartition(f"partition {which} is not in route version {now.route.version} of {now.settings.name!r}: it has {there}")
    return [known[number] for number in numbers]


def change(subject: str, planned: Planned, manner: Manner) -> None:
    """Look, then plan or do. Prints the plan, or what was done."""
    done = run(_plan(subject, planned, manner) if manner.dry_run else _do(subject, planned, manner))
    if manner.as_json:
        sys.stdout.write(json.dumps(done) + "\n")
    elif manner.dry_run:
        for each in plan_view(done, console.width):
            console.print(each)
    else:
        console.print(change_text(done["change"]), highlight=False, markup=False)


async def _plan(subject: str, planned: Planned, manner: Manner) -> dict[str, Any]:
    async with qmq.connect(manner.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        found = await mq.metadata.change_route(subject, **operation, from_version=now.route.version, reason=manner.reason, dry_run=True)
        return plan_facts(now, found, await mq.metadata.route_history(subject))


async def _do(subject: str, planned: Planned, manner: Manner) -> dict[str, Any]:
    async with qmq.connect(manner.server) as mq:
        now = await mq.metadata.describe_route(subject)
        operation = planned(now)
        with Following(subject, quiet=manner.as_json) as following:
            try:
                made = await mq.metadata.change_route(subject, **operation, from_version=now.route.version, reason=manner.reason)
                following.publish(made.change)
                groups = list(now.groups)
                if manner.wait:
                    groups = await follow(lambda: mq.metadata.describe_route(subject), made.change, following, manner.timing.follow_s)
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
    """Until every consumer group has advanced. While no metaserver answers, what was seen last stays."""
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
    """How it goes on, on standard error: a bar for each group on a terminal, a line for what happens otherwise."""

    def __init__(self, subject: str, *, quiet: bool) -> None:
        self._subject = subject
        self._quiet = quiet
        self._is_published = False
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[note]}"))
        self._bars = Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal)
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
        """Producers use the new route."""
        self._is_published = True
        self._bars.update(self._first, description=f"version {made.to_version} is published", total=1, completed=1)
        self._say(f"version {made.to_version} of {self._subject} is published")

    def look(self, groups: list[pb.OrderedGroup], made: pb.RouteChangeInfo) -> None:
        """How far the groups are."""
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
                self._tell(f"group {group.group} has no consumer: it follows when one comes")

    def trouble(self, what: str) -> None:
        """Nobody answers for now."""
        self._bars.update(self._first, note=what)

    def leave(self) -> None:
        """The one who looks on goes."""
        published, begun = "the change is published; consumer groups follow by themselves", "if the change was begun, it goes on by itself"
        state = published if self._is_published else begun
        self._tell(f"{state}: `qmq route show {self._subject}` says how far it is", always=True)

    def _say(self, what: str) -> None:
        """What the bars show anyway."""
        if self._bars.disable:
            self._tell(what)

    def _tell(self, what: str, *, always: bool = False) -> None:
        if always or not self._quiet:
            errors.print(what, highlight=False, markup=False, soft_wrap=True)
