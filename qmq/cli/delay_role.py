"""`qmq delay` without a verb: runs one replica of one delay group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from qmq.cli.output import fail, run
from qmq.cli.roles import (
    ACCESS_STALE_S,
    AccessStaleS,
    Admins,
    Advertise,
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
    set_up_logging,
    tls_of,
)
from qmq.cli.times import parse_duration
from qmq.errors import InvalidArgument, QmqError
from qmq.limits import FLUSH_INTERVAL_MS
from qmq.model import check_name


def attach(app: typer.Typer) -> None:
    """Have `app`, called without a verb, run a delay server."""
    app.callback(invoke_without_command=True)(delay)


def delay(
    context: typer.Context,
    group: Annotated[str, typer.Option(envvar="QMQ_GROUP", help="The delay group that this replica belongs to.")] = "",
    replica: Replica = "",
    replicas: Replicas = "",
    data: ReplicaData = Path("qmq-data"),
    host: Host = "127.0.0.1",
    data_port: DataPort = 20883,
    control_port: ControlPort = 20884,
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
    bucket: Annotated[
        str, typer.Option(envvar="QMQ_BUCKET", help="What a file of the schedule holds, 5m to 24h; fixed when the group is founded.")
    ] = "1h",
    longest: Annotated[
        str, typer.Option("--max", envvar="QMQ_DELAY_MAX", help="Longer delays are refused; fixed when the group is founded.")
    ] = "732d",
    tick_ms: Annotated[int, typer.Option(envvar="QMQ_TICK_MS", help="Due messages leave at multiples of this.")] = 500,
    load_ahead: Annotated[
        str, typer.Option(envvar="QMQ_LOAD_AHEAD", help="What is due within this time is in memory, if there is room.")
    ] = "10m",
    wheel_messages: Annotated[
        int, typer.Option(envvar="QMQ_WHEEL_MESSAGES", help="So many messages are in memory at most, 8 bytes each.")
    ] = 16_000_000,
    flush: FlushWhen = "async",
    flush_interval_ms: FlushIntervalMs = FLUSH_INTERVAL_MS,
    segment_mib: SegmentMib = 1024,
    retention_hours: Annotated[
        float, typer.Option(envvar="QMQ_RETENTION_HOURS", help="The message log before this may be deleted; the schedule stays.")
    ] = 24.0,
    retention_mib: RetentionMib = None,
    disk_free_mib: DiskFreeMib = 64,
    metrics_port: MetricsPort = None,
    insecure: Insecure = False,
    verbose: Verbose = False,
) -> None:
    """Run one replica of a delay group, which keeps messages until they are due; or, with a verb, look after delayed messages.

    Prints one line, `qmq delay is ready at HOST:PORT`, when it serves its control port. Ctrl-C or SIGTERM stops it cleanly.
    """
    if context.invoked_subcommand is not None:
        return
    from qmq_coordination.broker_groups import DelaySettings

    from qmq.broker.broker_config import BrokerConfig
    from qmq.delay.delay_config import DelayConfig
    from qmq.node.delay_node import DelayNode, DelayReplicaConfig
    from qmq.node.environment import environment_with
    from qmq.node.exposure import require_guarded
    from qmq.node.replica_node import run_replica

    require_flush(flush)
    try:
        set_up_logging(verbose, audit_log)
        if not group or not replica:
            raise InvalidArgument("say which replica of which group this is: --group (QMQ_GROUP) and --replica (QMQ_REPLICA)")
        config = DelayReplicaConfig(
            group=check_name("delay group", group),
            replica=check_name("replica", replica),
            replicas=names_of(replicas or replica, "--replicas (QMQ_REPLICAS)"),
            data=data,
            host=host,
            data_port=data_port,
            control_port=control_port,
            advertise=advertise or host,
            etcd=etcd_options(etcd, etcd_user, etcd_password, etcd_ca, etcd_cert, etcd_key),
            log=log_config(flush, flush_interval_ms, segment_mib, retention_hours, retention_mib, disk_free_mib),
            broker=BrokerConfig(name=group),
            metrics_port=metrics_port,
            access=access_of(admins, tls_principal, access_stale_s, audit_subject, jwt_issuer, jwt_keys, jwt_audience, jwt_claim),
            settings=DelaySettings(_ms(bucket), _ms(longest)),
            delay=DelayConfig(tick_ms=tick_ms, load_ahead_ms=_ms(load_ahead), wheel_messages_max=wheel_messages),
        )
        tls = tls_of(tls_ca, tls_cert, tls_key, tls_clients)
        require_guarded(host, insecure, config.etcd, tls)
        doors = environment_with(tls)
        run(run_replica(lambda: DelayNode(config, doors=doors), "delay"))
    except (OSError, QmqError) as failure:
        fail(failure)


def _ms(text: str) -> int:
    return parse_duration(text) // timedelta(milliseconds=1)
