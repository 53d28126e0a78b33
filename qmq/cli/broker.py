"""`qmq broker`: runs one replica of one broker group; `qmq broker drain` and `resume` say whether a group takes messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import qmq
from qmq.cli import draining
from qmq.cli.output import SERVER, DryRun, Json, Server, errors, fail, run, show
from qmq.cli.replica import Group, described
from qmq.cli.roles import (
    ACCESS_STALE_S,
    ATTEMPTS_MAX,
    RETRY_DELAYS,
    AccessStaleS,
    Admins,
    Advertise,
    AttemptsMax,
    AuditFile,
    AuditSubjectName,
    ControlPort,
    DataPort,
    DiskFreeMib,
    Etcd,
    EtcdCa,
    EtcdCert,
    EtcdKey,
    EtcdPassword,
    EtcdUser,
    FlushIntervalMs,
    FlushWhen,
    Host,
    Insecure,
    JwtAudience,
    JwtClaim,
    JwtIssuer,
    JwtKeys,
    MetricsPort,
    Replica,
    ReplicaData,
    Replicas,
    RetentionMib,
    RetryDelays,
    SegmentMib,
    TlsCa,
    TlsCert,
    TlsClients,
    TlsKey,
    TlsPrincipal,
    Verbose,
    access_of,
    etcd_options,
    log_config,
    names_of,
    require_flush,
    retries_of,
    set_up_logging,
    tls_of,
)
from qmq.errors import InvalidArgument, QmqError
from qmq.limits import FLUSH_INTERVAL_MS
from qmq.model import check_name

app = typer.Typer(help="Run a broker; drain or resume a broker group.")

_MODE_COLUMNS = ("group", "from", "to")


@app.callback(invoke_without_command=True)
def broker(
    context: typer.Context,
    group: Annotated[str, typer.Option(envvar="QMQ_GROUP", help="The broker group that this replica belongs to.")] = "",
    replica: Replica = "",
    replicas: Replicas = "",
    data: ReplicaData = Path("qmq-data"),
    host: Host = "127.0.0.1",
    data_port: DataPort = 20881,
    control_port: ControlPort = 20882,
    advertise: Advertise = "",
    etcd: Etcd = "",
    etcd_user: EtcdUser = None,
    etcd_password: EtcdPassword = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_clients: TlsClients = "required",
    tls_principal: TlsPrincipal = "uri",
    admins: Admins = "",
    access_stale_s: AccessStaleS = ACCESS_STALE_S,
    audit_log: AuditFile = None,
    audit_subject: AuditSubjectName = "",
    jwt_issuer: JwtIssuer = "",
    jwt_keys: JwtKeys = "",
    jwt_audience: JwtAudience = "qmq",
    jwt_claim: JwtClaim = "sub",
    flush: FlushWhen = "async",
    flush_interval_ms: FlushIntervalMs = FLUSH_INTERVAL_MS,
    segment_mib: SegmentMib = 1024,
    retention_hours: Annotated[float, typer.Option(envvar="QMQ_RETENTION_HOURS", help="Messages older than this may be deleted.")] = 168.0,
    retention_mib: RetentionMib = None,
    disk_free_mib: DiskFreeMib = 64,
    attempts_max: AttemptsMax = ATTEMPTS_MAX,
    retry_delays: RetryDelays = RETRY_DELAYS,
    metrics_port: MetricsPort = None,
    insecure: Insecure = False,
    verbose: Verbose = False,
) -> None:
    """Run one replica of a broker group; or, with a verb, drain or resume a group.

    Prints one line, `qmq broker is ready at HOST:PORT`, when it serves its control port. Ctrl-C or SIGTERM stops it cleanly.
    """
    if context.invoked_subcommand is not None:
        return
    from qmq.broker.broker_config import BrokerConfig
    from qmq.node.environment import environment_with
    from qmq.node.exposure import require_guarded
    from qmq.node.replica_node import ReplicaConfig, ReplicaNode, run_replica

    require_flush(flush)
    try:
        set_up_logging(verbose, audit_log)
        if not group or not replica:
            raise InvalidArgument("say which replica of which group this is: --group (QMQ_GROUP) and --replica (QMQ_REPLICA)")
        config = ReplicaConfig(
            group=check_name("broker group", group),
            replica=check_name("replica", replica),
            replicas=names_of(replicas or replica, "--replicas (QMQ_REPLICAS)"),
            data=data,
            host=host,
            data_port=data_port,
            control_port=control_port,
            advertise=advertise or host,
            etcd=etcd_options(etcd, etcd_user, etcd_password, etcd_ca, etcd_cert, etcd_key),
            log=log_config(flush, flush_interval_ms, segment_mib, retention_hours, retention_mib, disk_free_mib),
            broker=BrokerConfig(name=group, retries=retries_of(attempts_max, retry_delays)),
            metrics_port=metrics_port,
            access=access_of(admins, tls_principal, access_stale_s, audit_subject, jwt_issuer, jwt_keys, jwt_audience, jwt_claim),
        )
        tls = tls_of(tls_ca, tls_cert, tls_key, tls_clients)
        require_guarded(host, insecure, config.etcd, tls)
        doors = environment_with(tls)
        run(run_replica(lambda: ReplicaNode(config, doors=doors)))
    except (OSError, QmqError) as failure:
        fail(failure)


@app.command("drain")
def drain(
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
    row, moves = run(_drain(group, move, dry_run, as_json, server))
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


async def _drain(group: str, is_moving: bool, dry_run: bool, quiet: bool, server: str) -> tuple[tuple[str, str, str], list[draining.Move]]:
    """The plan comes first: where it cannot be made, nothing is changed."""
    async with qmq.connect(server) as mq:
        before = (await described(mq, group)).mode
        moves = await draining.find(mq.metadata, group) if is_moving else []
        said = draining.warning(await mq.metadata.cluster(), group, moves)
        if said:
            errors.print(said, highlight=False, markup=False, soft_wrap=True)
        if not dry_run:
            await mq.metadata.set_group_mode(group, "read-only")
            await _move_all(mq, group, moves, quiet)
        return (group, before, "read-only"), moves


async def _move_all(mq: qmq.Client, group: str, moves: list[draining.Move], quiet: bool) -> None:
    done = 0
    columns = (TextColumn("moving partitions"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(moves))

        def moved(each: draining.Move) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"{each.subject}/{each.partition} to {each.target}")

        try:
            await draining.carry_out(mq.metadata, group, moves, moved)
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
