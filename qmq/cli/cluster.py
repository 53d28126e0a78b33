"""`qmq cluster` shows the broker groups, their replicas, and each replica's lag. `qmq replica` and
`qmq transfer` change the members and the master of a broker group.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from qmq_replication.membership import ReplicaMembership
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from qmq.cli.arguments import SECONDS_MAX
from qmq.cli.output import SERVER, DryRun, Json, Server, administration, run, show
from qmq.cli.tables import LineTable, console
from qmq.errors import CoordinationUnavailable, InvalidArgument, Unavailable

if TYPE_CHECKING:
    from qmq.cli.administration import Administration
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb

app = typer.Typer(no_args_is_help=True, help="The cluster: broker groups and replicas.")

_COLORS = {"read-write": "green", "read-only": "yellow", "offline": "red"}
_STORE_SILENT_MS = 5_000
"""A coordination store that was silent for longer is reported. Shorter gaps are the metaserver's
normal polling interval.
"""


@app.command("status")
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, max=SECONDS_MAX, help="With --watch: seconds between refreshes."
        ),
    ] = 1.0,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show broker groups and replicas: roles, epochs, positions, and how far each replica is behind
    its master.
    """
    run(_watch(server, interval_s, as_json) if watch else _once(server, as_json))


async def _once(server: str, as_json: bool) -> None:
    async with administration(server) as mq:
        _print(facts(await mq.metadata.cluster()), as_json)


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    else:
        console.print(view(found), soft_wrap=True)


async def _watch(server: str, interval_s: float, as_json: bool) -> None:
    """Refresh until Ctrl-C. While no metaserver answers, keep the last table and show the reason
    below it.
    """
    found: dict[str, Any] = {"groups": [], "store_silent_ms": 0}
    async with administration(server) as mq:
        with Live(
            console=console, auto_refresh=False, screen=console.is_terminal and not as_json
        ) as live:
            while True:
                trouble = ""
                try:
                    found = facts(await mq.metadata.cluster())
                except (Unavailable, CoordinationUnavailable) as failure:
                    trouble = str(failure)
                if as_json:
                    _print({**found, "error": trouble}, as_json)
                else:
                    live.update(view(found, trouble), refresh=True)
                await asyncio.sleep(interval_s)


def facts(found: pb.DescribeClusterResponse) -> dict[str, Any]:
    """The status as JSON values. Pure."""
    return {
        "store_silent_ms": found.store_silent_ms,
        "groups": [_group(group) for group in found.groups],
    }


def _group(group: pb.GroupDescription) -> dict[str, Any]:
    statuses = {each.replica: each.status for each in group.replicas if each.HasField("status")}
    master = statuses.get(group.master)
    return {
        "group": group.broker_group,
        "health": group.health,
        "mode": group.mode,
        "master": group.master,
        "epoch": group.epoch,
        "voters": list(group.voters),
        "learners": list(group.learners),
        "is_delay": group.is_delay,
        "replicas": [_replica(group, each, master) for each in group.replicas],
    }


def _replica(
    group: pb.GroupDescription, replica: pb.ReplicaDescription, master: control.ReplicaStatus | None
) -> dict[str, Any]:
    facts = {
        "replica": replica.replica,
        "is_present": replica.is_present,
        "data_address": replica.data_address,
        "control_address": replica.control_address,
        "vote": _vote(group, replica.replica),
        "role": None,
    }
    if not replica.HasField("status"):
        return facts
    told = replica.status
    return facts | {
        "role": told.role,
        "epoch": told.epoch,
        "is_serving": told.is_serving,
        "is_whole": told.is_whole,
        "fork": told.fork,
        "older_store": told.older_store,
        "last_index": told.last_index,
        "stored_index": told.stored_index,
        "commit_index": told.commit_index,
        "message_position": told.message_position,
        "action_position": told.action_position,
        "lag_entries": None if master is None else max(0, master.last_index - told.last_index),
        "lag_bytes": None if master is None else max(0, _bytes(master) - _bytes(told)),
    }


def _vote(group: pb.GroupDescription, replica: str) -> str:
    if replica in group.voters:
        return "voter"
    return "learner" if replica in group.learners else "none"


def _bytes(status: control.ReplicaStatus) -> int:
    return status.message_position + status.action_position


def view(found: dict[str, Any], trouble: str = "") -> RenderableType:
    """The status as a table of at most 80 columns:
    a line per group, followed by a line per replica.
    """
    shown = LineTable(
        ("replica", "state", "entries", "lag", "lag bytes", "note"),
        right=("entries", "lag", "lag bytes"),
    )
    for group in found["groups"]:
        kind = ", delay group" if group["is_delay"] else ""
        state = Text(group["health"], _COLORS.get(group["health"], "white"))
        shown.add_row(
            Text(group["group"], "bold"), state, "", "", "", f"epoch {group['epoch']}{kind}"
        )
        for replica in group["replicas"]:
            shown.add_row(*_cells(replica))
    silent_ms = found["store_silent_ms"]
    notes = [trouble] if trouble else []
    if silent_ms > _STORE_SILENT_MS:
        notes.append(
            f"the coordination store has been silent for {silent_ms / 1000:.0f} s: this is "
            "the metaserver's last known state"
        )
    return Group(shown, *[Text(note, "red") for note in notes])


def _cells(replica: dict[str, Any]) -> list[str | Text]:
    numbers = [_short(replica.get(name)) for name in ("last_index", "lag_entries", "lag_bytes")]
    return [f"  {replica['replica']}", replica["role"] or "", *numbers, _note(replica)]


def _short(number: int | None) -> str:
    """A number, exact up to ten million, then with three digits. --json has the exact value."""
    if number is None:
        return ""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if number >= 10**7 and number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _note(replica: dict[str, Any]) -> str | Text:
    if replica["vote"] == "none":
        return Text("no vote: not a member", "yellow")
    if not replica["is_present"]:
        return Text("gone", "red")
    if replica["role"] is None:
        return Text("does not answer", "red")
    if replica.get("fork"):
        return Text("its master lacks committed entries", "red")
    if replica["vote"] == "learner":
        return "learner"
    if not replica["is_whole"]:
        return Text("may lack entries", "yellow")
    return (
        Text("not serving yet", "yellow")
        if replica["role"] == "master" and not replica["is_serving"]
        else ""
    )


replicas = typer.Typer(no_args_is_help=True, help="Replicas of a broker group: add, remove.")

GroupName = Annotated[str, typer.Argument(help="The broker group.")]
_COLUMNS = ("group", "version", "voters", "learners")


async def described(mq: Administration, group: str) -> Any:
    """The current state of a broker group. Raises InvalidArgument."""
    found = (await mq.metadata.cluster()).groups
    for each in found:
        if each.broker_group == group:
            return each
    known = ", ".join(each.broker_group for each in found) or "none"
    raise InvalidArgument(f"there is no broker group {group!r}; existing groups: {known}")


@replicas.command("add")
def add(
    group: GroupName,
    replica: Annotated[
        str,
        typer.Argument(
            help="The new replica's name. Its process must already run, with this group's name."
        ),
    ],
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Add a replica. It starts as a learner and becomes a voter once it has caught up: see `qmq
    cluster status --watch`.
    """

    async def _add() -> tuple[Any, ...]:
        async with administration(server) as mq:
            if not dry_run:
                return _row(group, await mq.metadata.add_replica(group, replica))
            now = await described(mq, group)
            if replica in (*now.voters, *now.learners):
                raise InvalidArgument(f"{replica!r} is already a replica of this group")
            return (group, "", _join(now.voters), _join([*now.learners, replica]))

    _show(run(_add()), dry_run, as_json)


@replicas.command("remove")
def remove(
    group: GroupName,
    replica: Annotated[str, typer.Argument(help="The replica.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Remove a replica. Its data stays on its disk, but no longer counts for the majority. Refused
    if no majority of those that stay answers.
    """

    async def _remove() -> tuple[Any, ...]:
        async with administration(server) as mq:
            if not dry_run:
                return _row(group, await mq.metadata.remove_replica(group, replica))
            now = await described(mq, group)
            after = ReplicaMembership(0, tuple(now.voters), tuple(now.learners)).without(replica)
            after.require_majority(each.replica for each in now.replicas if each.HasField("status"))
            return (group, "", _join(after.voters), _join(after.learners))

    _show(run(_remove()), dry_run, as_json)


def _row(group: str, done: Any) -> tuple[Any, ...]:
    return (group, done.membership_version, _join(done.voters), _join(done.learners))


def _join(names: Any) -> str:
    return ",".join(names)


def _show(row: tuple[Any, ...], dry_run: bool, as_json: bool) -> None:
    show("would be" if dry_run else "replicas", _COLUMNS, [row], as_json=as_json)


def transfer(
    group: GroupName,
    to: Annotated[
        str, typer.Option("--to", help="The new master; default: the most advanced other replica.")
    ] = "",
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Transfer a group's mastership, for example before maintenance. Messages are refused for a
    moment; none is lost.
    """

    async def _transfer() -> tuple[Any, ...]:
        async with administration(server) as mq:
            before = await described(mq, group)
            if dry_run:
                if to and to not in before.voters:
                    raise InvalidArgument(
                        f"{to!r} is not a voter of group {group!r}; voters: {_join(before.voters)}"
                    )
                return (
                    group,
                    before.master,
                    to or "the most advanced other replica",
                    before.epoch,
                    0,
                )
            done = await mq.metadata.transfer(group, to)
            return (group, before.master, done.master, done.epoch, done.refused_ms)

    columns = ("group", "from", "to", "epoch", "refused ms")
    show("would be" if dry_run else "transferred", columns, [run(_transfer())], as_json=as_json)
