"""`qmq broker` runs one replica of a broker group. `qmq broker drain` and `resume` stop and restart the group's intake of messages."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

import qmq
from qmq.cli import draining
from qmq.cli.cli_timing import CliTiming, timing_of
from qmq.cli.confirm_clock import confirm_clock
from qmq.cli.hand_over import hand_over
from qmq.cli.output import SERVER, DryRun, Json, Server, errors, fail, run, show
from qmq.cli.progress_bar import progress_of
from qmq.cli.replica import Group
from qmq.cli.roles import RetryFlags, serve_replica, set_up_logging, taking
from qmq.cli.shards import ShardedOptions, shard_command, shard_options
from qmq.errors import QmqError
from qmq.shard_names import shards_of

if TYPE_CHECKING:
    from qmq.node.replica_config import ReplicaConfig

app = typer.Typer(help="Run a broker, hand its mastership over; drain or resume a broker group.")

_MODE_COLUMNS = ("group", "from", "to")


@dataclass(frozen=True)
class BrokerOptions(RetryFlags, ShardedOptions):
    """Options of `qmq broker`."""

    object_store: Annotated[
        str,
        typer.Option(envvar="QMQ_OBJECT_STORE", help="Copy sealed segments there: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER."),
    ] = ""
    local_retention_hours: Annotated[
        float | None,
        typer.Option(
            envvar="QMQ_LOCAL_RETENTION_HOURS",
            help="How long segments stay on the disk that are in the object store; without it as long as their messages are kept.",
        ),
    ] = None
    local_retention_mib: Annotated[
        int | None,
        typer.Option(
            envvar="QMQ_LOCAL_RETENTION_MIB",
            help="Keep old segments in the object store only when the message log on the disk exceeds this size.",
        ),
    ] = None
    object_store_cache_mib: Annotated[
        int, typer.Option(envvar="QMQ_OBJECT_STORE_CACHE_MIB", help="Disk space for what is read from the object store.")
    ] = 1024

    def config(self) -> ReplicaConfig:
        """The broker's configuration. Raises InvalidArgument, InvalidName, typer.BadParameter."""
        from qmq.broker.broker_config import BrokerConfig
        from qmq.node.replica_config import ReplicaConfig

        shared = self.shared_config("broker group")
        hours, mib = self.local_retention_hours, self.local_retention_mib
        shared["log"] = replace(
            shared["log"],
            object_store_url=self.object_store,
            local_retention_ms=None if hours is None else int(hours * 3_600_000),
            local_retention_bytes=None if mib is None else mib << 20,
            object_store_cache_bytes=self.object_store_cache_mib << 20,
        )
        return ReplicaConfig(**shared, broker=BrokerConfig(name=self.group, retries=self.retries()))


def serve_shards(options: BrokerOptions) -> None:
    """Run all shards of a broker until a signal stops them. Exits with their exit status."""
    from qmq.node.shard_supervisor import ShardSupervisor

    try:
        set_up_logging(options.verbose)
        options.config()
        commands = [shard_command(shard_options(options, shard), os.environ) for shard in range(1, options.shards + 1)]
    except QmqError as failure:
        fail(failure)

    async def supervise() -> int:
        ready = f"qmq broker: {len(commands)} shards of {options.group} are ready"
        return await ShardSupervisor(options.group, commands, lambda line: print(line, flush=True), ready_line=ready).run()

    raise typer.Exit(run(supervise()))


@app.callback(invoke_without_command=True)
@taking(BrokerOptions)
def broker(context: typer.Context, options: BrokerOptions) -> None:
    """Run one replica of a broker group; or, with a verb, hand its mastership over, drain or resume a group.

    Prints one line, `qmq broker is ready at HOST:PORT`, when its control port is open. Ctrl-C or SIGTERM stops it cleanly.
    With `--shards N` it runs N processes, one per core, and prints a line for each.
    """
    context.obj = options
    if context.invoked_subcommand is None and options.shards > 1:
        serve_shards(options)
    elif context.invoked_subcommand is None:
        from qmq.node.broker_node import broker_node

        serve_replica(options, options.config, lambda config, environment: broker_node(config, environment=environment))


app.command("hand-over")(hand_over)
app.command("confirm-clock")(confirm_clock)


@app.command("drain")
def drain(
    context: typer.Context,
    group: Group,
    move: Annotated[
        bool,
        typer.Option(
            "--move/--no-move",
            help="Move partitions of ordered subjects to other groups; --no-move leaves them in place, where they keep taking messages.",
        ),
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Make a broker group read-only: producers switch to the subjects' other groups, consumers read what is left.

    Partitions of ordered subjects are then moved to the least loaded other groups, one after another. If the command is interrupted, run
    it again.
    """
    drained = run(_drain(group, move, dry_run, as_json, server, timing_of(context)))
    rows, moves = [each.row for each in drained], [each for found in drained for each in found.moves]
    if as_json and moves:
        columns = (*_MODE_COLUMNS, "moves")
        show("", columns, [(*each.row, [move._asdict() for move in each.moves]) for each in drained], as_json=True)
        return
    _show_mode(rows, dry_run, as_json)
    if moves and not as_json:
        moved = [(each.subject, each.partition, each.target) for each in moves]
        show("would be moved" if dry_run else "moved", ("subject", "partition", "to"), moved, as_json=False)


class _Drained(NamedTuple):
    """A broker group, its modes before and after, and the partitions that were moved away."""

    row: tuple[str, str, str]
    moves: list[draining.Move]


async def _drain(name: str, is_moving: bool, dry_run: bool, quiet: bool, server: str, timing: CliTiming) -> list[_Drained]:
    """Plan all moves first: if one is impossible, change nothing."""
    async with qmq.connect(server) as mq:
        cluster = await mq.metadata.cluster()
        modes = {each.broker_group: each.mode for each in cluster.groups}
        found: list[_Drained] = []
        groups = shards_of(name, list(modes))
        for group in groups:
            moves = await draining.find(mq.metadata, group, leaving=groups) if is_moving else []
            said = draining.warning(cluster, group, moves)
            if said:
                errors.print(said, highlight=False, markup=False, soft_wrap=True)
            found.append(_Drained((group, modes[group], "read-only"), moves))
        if not dry_run:
            for group in groups:
                await mq.metadata.set_group_mode(group, "read-only")
            for group, each in zip(groups, found, strict=True):
                await _move_all(mq, group, each.moves, quiet, timing)
        return found


async def _move_all(mq: qmq.Client, group: str, moves: list[draining.Move], quiet: bool, timing: CliTiming) -> None:
    done = 0
    columns = (TextColumn("moving partitions"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with progress_of(*columns, quiet=quiet) as bar:
        task = bar.add_task("", total=len(moves))

        def moved(each: draining.Move) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"{each.subject}/{each.partition} to {each.target}")

        try:
            await draining.carry_out(mq.metadata, group, moves, moved, timing.conflict_s)
        except BaseException:
            again = f"{done} of {len(moves)} partitions were moved; {group} is read-only: run `qmq broker drain {group}` again to continue"
            errors.print(again, highlight=False, markup=False, soft_wrap=True)
            raise


@app.command("resume")
def resume(group: Group, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Make a drained broker group accept messages again."""

    async def _resume() -> list[tuple[str, str, str]]:
        async with qmq.connect(server) as mq:
            modes = {each.broker_group: each.mode for each in (await mq.metadata.cluster()).groups}
            groups = shards_of(group, list(modes))
            if not dry_run:
                for each in groups:
                    await mq.metadata.set_group_mode(each, "read-write")
            return [(each, modes[each], "read-write") for each in groups]

    _show_mode(run(_resume()), dry_run, as_json)


def _show_mode(rows: list[tuple[str, str, str]], dry_run: bool, as_json: bool) -> None:
    show("would be" if dry_run else "broker group", _MODE_COLUMNS, rows, as_json=as_json)
