"""`qmq broker` runs one replica of a broker group, or with `--shards N` a process for each shard,
with options derived from its own (docs/SHARDS.md). `qmq broker hand-over` and `qmq delay hand-over`
come before a replica's process is stopped.

`qmq broker drain` and `resume` stop and restart the group's intake of messages. A drain moves all
partitions of ordered subjects to the least loaded other groups, one after another. It keeps no
state between runs: the partitions still on the group are the work left, so an interrupted drain
continues when it is started again. A move is done when its route is published: from then on the
group takes no messages for the partition. Messages already stored are consumed from the old group.

`qmq broker confirm-clock` and `qmq delay confirm-clock`: an operator says that a machine's clock is
right.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar, get_type_hints

import typer

from qmq.cli.arguments import (
    HOUR_MS,
    HOURS_MAX,
    MIB_MAX,
    SECONDS_MAX,
    CliTiming,
    port_of,
    timing_of,
)
from qmq.cli.cluster import GroupName as Group
from qmq.cli.output import (
    SERVER,
    DryRun,
    Json,
    Server,
    administration,
    fail,
    progress_of,
    run,
    show,
    warn,
)
from qmq.cli.roles import (
    ReplicaOptions,
    RetryFlags,
    Variable,
    serve_replica,
    set_up_logging,
    taking,
)
from qmq.errors import InvalidArgument, QmqError, RouteConflict
from qmq.process.description import shard_name, shards_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from qmq.cli.administration import Administration
    from qmq.client.metadata.service import MetadataClient
    from qmq.node.replica.context import ReplicaConfig
    from qmq.node.shards import ShardCommand
    from qmq.proto.v1 import meta_pb2 as pb

CALL_S: Final = 5.0

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm_clock(context: typer.Context, yes: Yes = False, as_json: Json = False) -> None:
    """Confirm that the clock of this machine is right: the retention of its replica, which waited
    for that, follows the clock immediately.

    Messages that are older than retention by the confirmed time are deleted then. The options
    before the verb, and their variables, are those of the server. Compare the clock with another
    source first.
    """
    assert context.parent is not None
    options = context.parent.obj
    assert isinstance(options, ReplicaOptions)
    try:
        replicas = options.processes()
        seen_ms = [run(_describe(each)) for each in replicas]
        if not yes:
            shown = ", ".join(
                datetime.fromtimestamp(each / 1000, UTC).isoformat(" ", "seconds")
                for each in sorted(set(seen_ms))
            )
            names = ",".join(each.replica for each in replicas)
            text = (
                f"the clock shows {shown}: type {names} if this is right, then retention deletes "
                "messages by it"
            )
            if typer.prompt(text, err=True) != names:
                fail(InvalidArgument("that is not the replica's name: nothing was confirmed"))
        behind_ms = [
            run(_confirm(each, time_ms)) for each, time_ms in zip(replicas, seen_ms, strict=True)
        ]
    except QmqError as failure:
        fail(failure)
    rows = [
        (each.group, each.replica, *times)
        for each, *times in zip(replicas, seen_ms, behind_ms, strict=True)
    ]
    show("confirmed", ("group", "replica", "time ms", "behind ms"), rows, as_json=as_json)


async def _describe(replica: ReplicaOptions) -> int:
    from qmq.proto.v1 import control_pb2 as pb

    return int(
        (
            await _asked(
                replica,
                lambda stub: stub.DescribeReplica(pb.DescribeReplicaRequest(), timeout=CALL_S),
            )
        ).time_ms
    )


async def _confirm(replica: ReplicaOptions, time_ms: int) -> int:
    from qmq.proto.v1 import control_pb2 as pb

    request = pb.ConfirmClockRequest(time_ms=time_ms)
    return int(
        (await _asked(replica, lambda stub: stub.ConfirmClock(request, timeout=CALL_S))).behind_ms
    )


async def _asked(replica: ReplicaOptions, ask: Callable[[Any], Awaitable[Any]]) -> Any:
    import grpc

    from qmq.proto.v1 import control_pb2_grpc
    from qmq.rpc.channel import typed_error
    from qmq.rpc.server_name import ServerName, always
    from qmq.rpc.tls_network import network_of

    address = replica.control_address()
    channel = network_of(replica.tls()).channel(
        address, always(ServerName(group=replica.group, replica=replica.replica))
    )
    try:
        return await ask(control_pb2_grpc.BrokerControlStub(channel))
    except grpc.RpcError as failure:  # a TLS channel raises another subclass than a plain one
        raise typed_error(failure, address) from failure
    finally:
        await channel.close()


Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0,
        max=SECONDS_MAX,
        help="For how many seconds it is tried while no other replica can take over.",
    ),
]


def hand_over(context: typer.Context, wait: Wait = 30.0, as_json: Json = False) -> None:
    """Hand the mastership of this machine's replica over, if it is the master, before its process
    is stopped.

    The options before the verb, and their variables, are those of the server: its control port, the
    host that it advertises, its certificates. A process that gets SIGTERM hands over, too; this
    command waits for it, and the former master still answers clients.
    """
    assert context.parent is not None
    options = context.parent.obj
    assert isinstance(options, ReplicaOptions)
    run(_hand_over(options, wait, as_json=as_json))


async def _hand_over(options: ReplicaOptions, wait_s: float, *, as_json: bool) -> None:
    import asyncio

    from qmq.node.replica.node import hand_over as ask
    from qmq.rpc.server_name import ServerName
    from qmq.rpc.tls_network import network_of

    try:
        network = network_of(options.tls())
        replicas = options.processes()
        asked = [
            ask(
                network,
                each.control_address(),
                ServerName(group=each.group, replica=each.replica),
                wait_s,
            )
            for each in replicas
        ]
        masters = await asyncio.gather(*asked)
    except QmqError as failure:
        fail(failure)
    rows = [
        (each.group, each.replica, master) for each, master in zip(replicas, masters, strict=True)
    ]
    show("masters", ("group", "replica", "master"), rows, as_json=as_json)


CONFLICTS_MAX: Final = 20
"""Attempts while another change of the subject is in progress. With their pauses they last longer
than the lease of a lost broker group.
"""


class Move(NamedTuple):
    """A partition to move, and its target group."""

    subject: str
    partition: int
    target: str


@dataclass(slots=True)
class DrainLoad:
    """The load of a broker group from ordered subjects."""

    partitions: int = 0
    messages_per_s: float = 0.0


def targets(cluster: pb.DescribeClusterResponse, drained: str) -> list[str]:
    """Possible targets: broker groups that accept messages now. Pure."""
    found = [each for each in cluster.groups if each.broker_group != drained and not each.is_delay]
    return sorted(each.broker_group for each in found if each.health == "read-write")


def plan(
    subjects: Iterable[pb.DescribeRouteResponse], drained: str, candidates: Iterable[str]
) -> list[Move]:
    """All moves: each to the group with the fewest partitions, then the fewest messages a second,
    then by name. Pure.

    Raises InvalidArgument if there are partitions to move but no target.
    """
    known = list(subjects)
    loads = {name: DrainLoad() for name in candidates}
    leaving: list[tuple[str, int, float]] = []
    for subject in known:
        rates = {each.partition: each.messages_per_s for each in subject.partitions}
        for each in subject.route.partitions:
            rate = rates.get(each.number, 0.0)
            if each.broker_group == drained:
                leaving.append((subject.settings.name, each.number, rate))
            elif each.broker_group in loads:
                _add(loads[each.broker_group], rate)
    if leaving and not loads:
        raise InvalidArgument(
            f"{len(leaving)} partitions of ordered subjects are on {drained}, "
            "and no other broker group accepts messages: add or resume a group, "
            "or use --no-move to leave the partitions there, where they keep taking messages"
        )
    moves = []
    for name, number, rate in sorted(leaving):
        target = _least(loads)
        _add(loads[target], rate)
        moves.append(Move(name, number, target))
    return moves


def _add(load: DrainLoad, rate: float) -> None:
    load.partitions += 1
    load.messages_per_s += rate


def _least(loads: Mapping[str, DrainLoad]) -> str:
    return min(loads, key=lambda name: (loads[name].partitions, loads[name].messages_per_s, name))


def warning(cluster: pb.DescribeClusterResponse, drained: str, moves: Iterable[Move]) -> str:
    """A warning about draining a group without a master; empty if the group has one. Pure."""
    if any(each.broker_group == drained and each.master for each in cluster.groups):
        return ""
    said = (
        f"broker group {drained} has no master: producers use other groups, and messages that "
        "only it has are not consumed until it is back"
    )
    if list(moves):
        said += (
            "; its partitions are fenced, which takes some seconds, until its write lease has "
            "expired; a partition of a subject with fencing 'majority' cannot leave a lost group: "
            "its move waits until the group is back"
        )
    return said


async def find(
    metadata: MetadataClient, drained: str, *, leaving: Sequence[str] = ()
) -> list[Move]:
    """The plan for the current cluster. The groups `leaving` are no targets. Raises
    InvalidArgument, Unavailable.
    """
    ordered = [each.settings.name for each in await metadata.list_subjects() if each.settings.order]
    described = [await metadata.describe_route(name) for name in ordered]
    return plan(
        described,
        drained,
        [each for each in targets(await metadata.cluster(), drained) if each not in leaving],
    )


async def carry_out(
    metadata: MetadataClient,
    drained: str,
    moves: Iterable[Move],
    moved: Callable[[Move], None],
    conflict_s: float,
) -> None:
    """Make the moves one after another. `moved` is called after each; `conflict_s` is the pause
    while another change of the subject runs.

    A partition that has left the group meanwhile is skipped. Raises what ChangeRoute raises.
    """
    for each in moves:
        await _move(metadata, drained, each, conflict_s)
        moved(each)


async def _move(metadata: MetadataClient, drained: str, wanted: Move, conflict_s: float) -> None:
    from qmq.proto.v1 import meta_pb2 as pb

    operation = pb.MoveOperation(partition=wanted.partition, broker_group=wanted.target)
    for left in range(CONFLICTS_MAX, -1, -1):
        route = (await metadata.describe_route(wanted.subject)).route
        if not any(
            each.number == wanted.partition and each.broker_group == drained
            for each in route.partitions
        ):
            return
        try:
            await metadata.change_route(
                wanted.subject,
                move=operation,
                from_version=route.version,
                reason=f"drain {drained}",
            )
        except RouteConflict:
            if not left:
                raise
            await asyncio.sleep(conflict_s)
        else:
            return


SHARDS_MAX: Final = 256
PORT_STEP: Final = 10
_SHOWN: Final = ("group", "replica", "data", "data_port", "control_port", "metrics_port")
"""Options passed on a shard's command line, where `ps` shows them. All others are passed as
variables, because some are secret.
"""


@dataclass(frozen=True)
class ShardedOptions(ReplicaOptions):
    """Options of a server that can run as several processes."""

    shards: Annotated[
        int,
        typer.Option(
            envvar="QMQ_SHARDS",
            min=1,
            max=SHARDS_MAX,
            help="Number of processes, each its own broker group: GROUP.1, GROUP.2 ...",
        ),
    ] = 1

    def processes(self) -> Sequence[ReplicaOptions]:
        return (
            [self]
            if self.shards == 1
            else [shard_options(self, shard) for shard in range(1, self.shards + 1)]
        )


_S = TypeVar("_S", bound=ShardedOptions)


def shard_options(options: _S, shard: int) -> _S:
    """The options of one shard; shards count from 1. Raises InvalidArgument if a port would be out
    of range.
    """

    def port(given: int) -> int:
        return port_of("shards", shard - 1, given, PORT_STEP)

    audit = options.audit_log
    return replace(
        options,
        shards=1,
        group=shard_name(options.group, shard),
        data=options.data / f"shard-{shard}",
        data_port=port(options.data_port),
        control_port=port(options.control_port),
        metrics_port=None if options.metrics_port is None else port(options.metrics_port),
        audit_log=None if audit is None else audit.with_name(f"{audit.stem}.{shard}{audit.suffix}"),
    )


def shard_command(options: ShardedOptions, environment: Mapping[str, str]) -> ShardCommand:
    """The command and environment of a shard's process. The given options override `environment`,
    which is the supervisor's.
    """
    return process_command("broker", options, _SHOWN, environment, verbose=options.verbose)


def process_command(
    verb: str, options: Any, shown: Sequence[str], environment: Mapping[str, str], *, verbose: bool
) -> ShardCommand:
    """How to run `qmq VERB` with these options: those of `shown` on the command line,
    and all as variables.
    """
    from qmq.node.shards import ShardCommand

    variables = _variables(type(options))
    given = {variable: _text(getattr(options, name)) for name, variable in variables.items()}
    kept = {name: value for name, value in environment.items() if name not in given}
    arguments = [sys.executable, "-m", "qmq.cli", verb]
    for name in shown:
        value = _text(getattr(options, name))
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", value]
    if verbose:
        arguments.append("--verbose")
    return ShardCommand(
        tuple(arguments),
        {**kept, **{name: value for name, value in given.items() if value is not None}},
    )


def _variables(options: type) -> dict[str, str]:
    """The variable of each field that has one."""
    hints = get_type_hints(options, include_extras=True)
    kinds: dict[str, Any] = {
        each.name: hints[each.name].__metadata__[0] for each in fields(options)
    }
    found = {
        name: kind.name if isinstance(kind, Variable) else kind.envvar
        for name, kind in kinds.items()
    }
    return {name: variable for name, variable in found.items() if variable is not None}


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if not isinstance(value, Path) else str(value.absolute())


app = typer.Typer(help="Run a broker, hand its mastership over; drain or resume a broker group.")

_MODE_COLUMNS = ("group", "from", "to")


@dataclass(frozen=True)
class BrokerOptions(RetryFlags, ShardedOptions):
    """Options of `qmq broker`."""

    object_store: Annotated[
        str,
        typer.Option(
            envvar="QMQ_OBJECT_STORE",
            help=(
                "Copy sealed segments there: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER."
            ),
        ),
    ] = ""
    local_retention_hours: Annotated[
        float | None,
        Variable(
            "QMQ_LOCAL_RETENTION_HOURS",
            (
                "How long segments stay on the disk that are in the object store; without it as "
                "long as their messages are kept."
            ),
            at_least=0,
            at_most=HOURS_MAX,
        ),
    ] = None
    local_retention_mib: Annotated[
        int | None,
        Variable(
            "QMQ_LOCAL_RETENTION_MIB",
            (
                "Keep old segments in the object store only when the message log on the disk "
                "exceeds this size."
            ),
            at_least=0,
            at_most=MIB_MAX,
        ),
    ] = None
    object_store_cache_mib: Annotated[
        int,
        Variable(
            "QMQ_OBJECT_STORE_CACHE_MIB",
            "Disk space for what is read from the object store.",
            at_least=1,
            at_most=MIB_MAX,
        ),
    ] = 1024

    def config(self) -> ReplicaConfig:
        """The broker's configuration. Raises InvalidArgument, InvalidName, typer.BadParameter."""
        from qmq.broker.config import BrokerConfig
        from qmq.node.replica.context import ReplicaConfig

        shared = self.shared_config("broker group")
        hours, mib = self.local_retention_hours, self.local_retention_mib
        shared["log"] = replace(
            shared["log"],
            object_store_url=self.object_store,
            local_retention_ms=None if hours is None else int(hours * HOUR_MS),
            local_retention_bytes=None if mib is None else mib << 20,
            object_store_cache_bytes=self.object_store_cache_mib << 20,
        )
        return ReplicaConfig(**shared, broker=BrokerConfig(name=self.group, retries=self.retries()))


def serve_shards(options: BrokerOptions) -> None:
    """Run all shards of a broker until a signal stops them. Exits with their exit status."""
    from qmq.node.shards import ShardSupervisor

    try:
        set_up_logging(options.verbose)
        options.config()
        commands = [
            shard_command(shard_options(options, shard), os.environ)
            for shard in range(1, options.shards + 1)
        ]
    except QmqError as failure:
        fail(failure)

    async def supervise() -> int:
        ready = f"qmq broker: {len(commands)} shards of {options.group} are ready"
        return await ShardSupervisor(
            options.group, commands, lambda line: print(line, flush=True), ready_line=ready
        ).run()

    raise typer.Exit(run(supervise()))


@app.callback(invoke_without_command=True)
@taking(BrokerOptions)
def broker(context: typer.Context, options: BrokerOptions) -> None:
    """Run one replica of a broker group; or, with a verb, hand its mastership over, drain or resume
    a group.

    Prints one line, `qmq broker is ready at HOST:PORT`, when its control port is open. Ctrl-C or
    SIGTERM stops it cleanly. With `--shards N` it runs N processes, one per core, and prints a line
    for each.
    """
    context.obj = options
    if context.invoked_subcommand is None and options.shards > 1:
        serve_shards(options)
    elif context.invoked_subcommand is None:
        from qmq.node.broker import broker_node

        serve_replica(
            options,
            options.config,
            lambda config, environment: broker_node(config, environment=environment),
        )


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
            help=(
                "Move partitions of ordered subjects to other groups; --no-move leaves them in "
                "place, where they keep taking messages."
            ),
        ),
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Make a broker group read-only: producers switch to the subjects' other groups, consumers read
    what is left.

    Partitions of ordered subjects are then moved to the least loaded other groups, one after
    another. If the command is interrupted, run it again.
    """
    drained = run(_drain(group, move, dry_run, as_json, server, timing_of(context)))
    rows, moves = (
        [each.row for each in drained],
        [each for found in drained for each in found.moves],
    )
    if as_json and moves:
        columns = (*_MODE_COLUMNS, "moves")
        show(
            "",
            columns,
            [(*each.row, [move._asdict() for move in each.moves]) for each in drained],
            as_json=True,
        )
        return
    _show_mode(rows, dry_run, as_json)
    if moves and not as_json:
        moved = [(each.subject, each.partition, each.target) for each in moves]
        show(
            "would be moved" if dry_run else "moved",
            ("subject", "partition", "to"),
            moved,
            as_json=False,
        )


class _Drained(NamedTuple):
    """A broker group, its modes before and after, and the partitions that were moved away."""

    row: tuple[str, str, str]
    moves: list[Move]


async def _drain(
    name: str, is_moving: bool, dry_run: bool, quiet: bool, server: str, timing: CliTiming
) -> list[_Drained]:
    """Plan all moves first: if one is impossible, change nothing."""
    async with administration(server) as mq:
        cluster = await mq.metadata.cluster()
        modes = {each.broker_group: each.mode for each in cluster.groups}
        found: list[_Drained] = []
        groups = shards_of(name, list(modes))
        for group in groups:
            moves = await find(mq.metadata, group, leaving=groups) if is_moving else []
            said = warning(cluster, group, moves)
            if said:
                warn(said)
            found.append(_Drained((group, modes[group], "read-only"), moves))
        if not dry_run:
            for group in groups:
                await mq.metadata.set_group_mode(group, "read-only")
            for group, each in zip(groups, found, strict=True):
                await _move_all(mq, group, each.moves, quiet, timing)
        return found


async def _move_all(
    mq: Administration, group: str, moves: list[Move], quiet: bool, timing: CliTiming
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    done = 0
    columns = (
        TextColumn("moving partitions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with progress_of(*columns, quiet=quiet) as bar:
        task = bar.add_task("", total=len(moves))

        def moved(each: Move) -> None:
            nonlocal done
            done += 1
            bar.update(
                task,
                completed=done,
                description=f"{each.subject}/{each.partition} to {each.target}",
            )

        try:
            await carry_out(mq.metadata, group, moves, moved, timing.conflict_s)
        except BaseException:
            again = (
                f"{done} of {len(moves)} partitions were moved; {group} is read-only: run `qmq "
                f"broker drain {group}` again to continue"
            )
            warn(again)
            raise


@app.command("resume")
def resume(
    group: Group, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER
) -> None:
    """Make a drained broker group accept messages again."""

    async def _resume() -> list[tuple[str, str, str]]:
        async with administration(server) as mq:
            modes = {each.broker_group: each.mode for each in (await mq.metadata.cluster()).groups}
            groups = shards_of(group, list(modes))
            if not dry_run:
                for each in groups:
                    await mq.metadata.set_group_mode(each, "read-write")
            return [(each, modes[each], "read-write") for each in groups]

    _show_mode(run(_resume()), dry_run, as_json)


def _show_mode(rows: list[tuple[str, str, str]], dry_run: bool, as_json: bool) -> None:
    show("would be" if dry_run else "broker group", _MODE_COLUMNS, rows, as_json=as_json)
