"""`qmq broker`: runs one replica of one broker group; `qmq broker drain` and `resume` say whether a group takes messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import qmq
from qmq.cli import draining
from qmq.cli.cli_timing import CliTiming, timing_of
from qmq.cli.output import SERVER, DryRun, Json, Server, errors, run, show
from qmq.cli.replica import Group, described
from qmq.cli.roles import ReplicaOptions, RetryFlags, serve_replica, taking

if TYPE_CHECKING:
    from qmq.node.replica_node import ReplicaConfig

app = typer.Typer(help="Run a broker; drain or resume a broker group.")

_MODE_COLUMNS = ("group", "from", "to")


@dataclass(frozen=True)
class BrokerOptions(RetryFlags, ReplicaOptions):
    """Of `qmq broker`."""

    def config(self) -> ReplicaConfig:
        """Raises InvalidArgument, InvalidName, typer.BadParameter."""
        from qmq.broker.broker_config import BrokerConfig
        from qmq.node.replica_node import ReplicaConfig

        return ReplicaConfig(**self.shared_config("broker group"), broker=BrokerConfig(name=self.group, retries=self.retries()))


@app.callback(invoke_without_command=True)
@taking(BrokerOptions)
def broker(context: typer.Context, options: BrokerOptions) -> None:
    """Run one replica of a broker group; or, with a verb, drain or resume a group.

    Prints one line, `qmq broker is ready at HOST:PORT`, when it serves its control port. Ctrl-C or SIGTERM stops it cleanly.
    """
    if context.invoked_subcommand is None:
        from qmq.node.replica_node import ReplicaNode

        serve_replica(options, options.config, lambda config, doors: ReplicaNode(config, doors=doors))


@app.command("drain")
def drain(
    context: typer.Context,
    group: Group,
    move: Annotated[
        bool, typer.Option("--move/--no-move", help="Move partitions of ordered subjects to other groups; without it, they stay and go on.")
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Make a broker group read-only: producers go to the subjects' other groups, consumers take what is left.

    Partitions of ordered subjects are then moved to the least loaded other groups, one after another. If that breaks off, run it again.
    """
    row, moves = run(_drain(group, move, dry_run, as_json, server, timing_of(context)))
    if not as_json:
        _show_mode(row, dry_run, as_json)
        rows = [(each.subject, each.partition, each.target) for each in moves]
        if rows:
            show("would be moved" if dry_run else "moved", ("subject", "partition", "to"), rows, as_json=False)
    elif moves:
        found = dict(zip(_MODE_COLUMNS, row, strict=True)) | {"moves": [each._asdict() for each in moves]}
        show("", tuple(found), [tuple(found.values())], as_json=True)
    else:
        _show_mode(row, dry_run, as_json)


async def _drain(
    group: str, is_moving: bool, dry_run: bool, quiet: bool, server: str, timing: CliTiming
) -> tuple[tuple[str, str, str], list[draining.Move]]:
    """The plan comes first: where it cannot be made, nothing is changed."""
    async with qmq.connect(server) as mq:
        before = (await described(mq, group)).mode
        moves = await draining.find(mq.metadata, group) if is_moving else []
        said = draining.warning(await mq.metadata.cluster(), group, moves)
        if said:
            errors.print(said, highlight=False, markup=False, soft_wrap=True)
        if not dry_run:
            await mq.metadata.set_group_mode(group, "read-only")
            await _move_all(mq, group, moves, quiet, timing)
        return (group, before, "read-only"), moves


async def _move_all(mq: qmq.Client, group: str, moves: list[draining.Move], quiet: bool, timing: CliTiming) -> None:
    done = 0
    columns = (TextColumn("moving partitions"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(moves))

        def moved(each: draining.Move) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"{each.subject}/{each.partition} to {each.target}")

        try:
            await draining.carry_out(mq.metadata, group, moves, moved, timing.conflict_s)
        except BaseException:
            again = f"{done} of {len(moves)} partitions were moved; {group} is read-only: run `qmq broker drain {group}` again to go on"
            errors.print(again, highlight=False, markup=False, soft_wrap=True)
            raise


@app.command("resume")
def resume(group: Group, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Let a drained broker group take messages again."""

    async def _resume() -> tuple[str, str, str]:
        async with qmq.connect(server) as mq:
            before = (await described(mq, group)).mode
            if not dry_run:
                await mq.metadata.set_group_mode(group, "read-write")
            return (group, before, "read-write")

    _show_mode(run(_resume()), dry_run, as_json)


def _show_mode(row: tuple[str, str, str], dry_run: bool, as_json: bool) -> None:
    show("would be" if dry_run else "broker group", _MODE_COLUMNS, [row], as_json=as_json)
