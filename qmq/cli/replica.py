"""`qmq replica` and `qmq transfer` change the members and the master of a broker group."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from qmq_replication.replica_membership import ReplicaMembership

import qmq
from qmq.cli.output import SERVER, DryRun, Json, Server, run, show
from qmq.errors import InvalidArgument

app = typer.Typer(no_args_is_help=True, help="Replicas of a broker group: add, remove.")

Group = Annotated[str, typer.Argument(help="The broker group.")]
_COLUMNS = ("group", "version", "voters", "learners")


async def described(mq: qmq.Client, group: str) -> Any:
    """The current state of a broker group. Raises InvalidArgument."""
    found = (await mq.metadata.cluster()).groups
    for each in found:
        if each.broker_group == group:
            return each
    known = ", ".join(each.broker_group for each in found) or "none"
    raise InvalidArgument(f"there is no broker group {group!r}; existing groups: {known}")


@app.command("add")
def add(
    group: Group,
    replica: Annotated[str, typer.Argument(help="The new replica's name. Its process must already run, with this group's name.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Add a replica. It starts as a learner and becomes a voter once it has caught up: see `qmq cluster status --watch`."""

    async def _add() -> tuple[Any, ...]:
        async with qmq.connect(server) as mq:
            if not dry_run:
                return _row(group, await mq.metadata.add_replica(group, replica))
            now = await described(mq, group)
            if replica in (*now.voters, *now.learners):
                raise InvalidArgument(f"{replica!r} is already a replica of this group")
            return (group, "", _join(now.voters), _join([*now.learners, replica]))

    _show(run(_add()), dry_run, as_json)


@app.command("remove")
def remove(
    group: Group,
    replica: Annotated[str, typer.Argument(help="The replica.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Remove a replica. Its data stays on its disk, but no longer counts for the majority. Refused if no majority of those that stay
    answers.
    """

    async def _remove() -> tuple[Any, ...]:
        async with qmq.connect(server) as mq:
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
    group: Group,
    to: Annotated[str, typer.Option("--to", help="The new master; default: the most advanced other replica.")] = "",
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Transfer a group's mastership, for example before maintenance. Messages are refused for a moment; none is lost."""

    async def _transfer() -> tuple[Any, ...]:
        async with qmq.connect(server) as mq:
            before = await described(mq, group)
            if dry_run:
                if to and to not in before.voters:
                    raise InvalidArgument(f"{to!r} is not a voter of group {group!r}; voters: {_join(before.voters)}")
                return (group, before.master, to or "the most advanced other replica", before.epoch, 0)
            done = await mq.metadata.transfer(group, to)
            return (group, before.master, done.master, done.epoch, done.refused_ms)

    columns = ("group", "from", "to", "epoch", "refused ms")
    show("would be" if dry_run else "transferred", columns, [run(_transfer())], as_json=as_json)
