"""`qmq broker`: runs one replica of one broker group; `qmq broker drain` and `resume` say whether a group takes messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import qmq
from qmq.cli.output import SERVER, DryRun, Json, Server, fail, run, show
from qmq.cli.replica import Group, described
from qmq.cli.roles import (
    Etcd,
    EtcdCa,
    EtcdCert,
    EtcdKey,
    EtcdPassword,
    EtcdUser,
    Host,
    Verbose,
    etcd_options,
    log_config,
    names_of,
    require_flush,
    set_up_logging,
)
from qmq.errors import InvalidArgument, QmqError
from qmq.model import check_name

app = typer.Typer(help="Run a broker; drain or resume a broker group.")


@app.callback(invoke_without_command=True)
def broker(
    context: typer.Context,
    group: Annotated[str, typer.Option(envvar="QMQ_GROUP", help="The broker group that this replica belongs to.")] = "",
    replica: Annotated[str, typer.Option(envvar="QMQ_REPLICA", help="This replica's name; it keeps it as long as its data.")] = "",
    replicas: Annotated[
        str, typer.Option(envvar="QMQ_REPLICAS", help="The group's first replicas, comma-separated; counts only when it is founded.")
    ] = "",
    data: Annotated[Path, typer.Option(envvar="QMQ_DATA", help="The replica's data folder; made if absent.")] = Path("qmq-data"),
    host: Host = "127.0.0.1",
    data_port: Annotated[int, typer.Option(envvar="QMQ_DATA_PORT", help="The data port; 0 for a free one.")] = 20881,
    control_port: Annotated[int, typer.Option(envvar="QMQ_CONTROL_PORT", help="The control port; 0 for a free one.")] = 20882,
    advertise: Annotated[
        str, typer.Option(envvar="QMQ_ADVERTISE", help="The host name that clients and replicas are told; --host without it.")
    ] = "",
    etcd: Etcd = "",
    etcd_user: EtcdUser = None,
    etcd_password: EtcdPassword = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    flush: Annotated[str, typer.Option(envvar="QMQ_FLUSH", help="'async' or 'sync': when the disk must have a message.")] = "async",
    flush_messages: Annotated[int, typer.Option(envvar="QMQ_FLUSH_MESSAGES", help="With async: flush after so many messages ...")] = 1_000,
    flush_interval_ms: Annotated[
        int, typer.Option(envvar="QMQ_FLUSH_INTERVAL_MS", help="... or after so many milliseconds.")
    ] = 10_000,
    segment_mib: Annotated[int, typer.Option(envvar="QMQ_SEGMENT_MIB", help="Size of a segment of the message log.")] = 1024,
    retention_hours: Annotated[
        float, typer.Option(envvar="QMQ_RETENTION_HOURS", help="Messages older than this may be deleted.")
    ] = 168.0,
    retention_mib: Annotated[
        int | None, typer.Option(envvar="QMQ_RETENTION_MIB", help="The message log's size beyond which old segments go.")
    ] = None,
    disk_free_mib: Annotated[
        int, typer.Option(envvar="QMQ_DISK_FREE_MIB", help="Free space below which messages are refused.")
    ] = 64,
    verbose: Verbose = False,
) -> None:
    """Run one replica of a broker group; or, with a verb, drain or resume a group.

    Prints one line, `qmq broker is ready at HOST:PORT`, when it serves its control port. Ctrl-C or SIGTERM stops it cleanly.
    """
    if context.invoked_subcommand is not None:
        return
    from qmq.broker.config import BrokerConfig
    from qmq.node.replica import ReplicaConfig, run_replica

    set_up_logging(verbose)
    require_flush(flush)
    try:
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
            log=log_config(flush, flush_messages, flush_interval_ms, segment_mib, retention_hours, retention_mib, disk_free_mib),
            broker=BrokerConfig(name=group),
        )  # fmt: skip
        run(run_replica(config))
    except (OSError, QmqError) as failure:
        fail(failure)


@app.command("drain")
def drain(group: Group, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Make a broker group read-only: producers go to the subjects' other groups, consumers take what is left."""
    _set_mode(group, "read-only", dry_run, as_json, server)


@app.command("resume")
def resume(group: Group, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Let a drained broker group take messages again."""
    _set_mode(group, "read-write", dry_run, as_json, server)


def _set_mode(group: str, mode: str, dry_run: bool, as_json: bool, server: str) -> None:
    async def _set() -> tuple[str, str, str]:
        async with qmq.connect(server) as mq:
            before = (await described(mq, group)).mode
            if not dry_run:
                await mq.metadata.set_group_mode(group, mode)
            return (group, before, mode)

    show("would be" if dry_run else "broker group", ("group", "from", "to"), [run(_set())], as_json=as_json)
