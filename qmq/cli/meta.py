"""`qmq meta` runs a metaserver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qmq.cli.arguments import COUNT_MAX, port_option
from qmq.cli.output import fail, run
from qmq.cli.roles import (
    EtcdFlags,
    GuardFlags,
    Host,
    ProcessFlags,
    Variable,
    set_up_logging,
    taking,
)
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.meta.server import MetaConfig
    from qmq.metrics.endpoint import MetricsServer
    from qmq.node.process import EtcdOptions
    from qmq.rpc.network import Network

ETCD_S: Final = 3.0
"""Less than the five seconds that clients wait for a metaserver, so that they get an error about
etcd rather than a timeout.
"""


@dataclass(frozen=True)
class MetaPlace:
    """Options that only `qmq meta` has."""

    host: Host = "127.0.0.1"
    port: Annotated[int, port_option("The port", "QMQ_PORT")] = 20880
    create_subjects: Annotated[
        bool, Variable("QMQ_CREATE_SUBJECTS", "Create a subject at its first message.")
    ] = True
    groups_per_subject: Annotated[
        int,
        Variable(
            "QMQ_GROUPS_PER_SUBJECT",
            "How many broker groups a new subject is placed on.",
            at_least=1,
            at_most=COUNT_MAX,
        ),
    ] = 2
    evacuate: Annotated[
        bool,
        Variable(
            "QMQ_EVACUATE",
            "Move ordered partitions away from broker groups that have lost their master.",
        ),
    ] = True


@dataclass(frozen=True)
class MetaOptions(ProcessFlags, MetaPlace, GuardFlags, EtcdFlags):
    """Options of `qmq meta`."""


@taking(MetaOptions)
def meta(_: typer.Context, options: MetaOptions) -> None:
    """Run a metaserver, which locates subjects for clients and administers the cluster. A
    metaserver has no state, so run two or more.

    Prints one line, `qmq meta is ready at HOST:PORT`, when clients can connect. Ctrl-C or SIGTERM
    stops it cleanly.
    """
    from qmq.meta.server import MetaConfig
    from qmq.node.process import environment_with, require_guarded

    try:
        set_up_logging(options.verbose, options.audit_log)
        access, etcd, tls = options.access(), options.etcd_options(), options.tls()
        require_guarded(
            options.host, options.insecure, etcd, tls, metrics_host=options.open_metrics_host
        )
        config = MetaConfig(
            options.host,
            options.port,
            options.create_subjects,
            options.groups_per_subject,
            options.evacuate,
            access=access,
        )
        run(
            _serve(
                etcd,
                config,
                options.metrics_port,
                options.metrics_host,
                environment_with(tls).network,
            )
        )
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(
    options: EtcdOptions,
    config: MetaConfig,
    metrics_port: int | None,
    metrics_host: str,
    network: Network,
) -> None:
    from qmq_coordination.view import ClusterView

    from qmq.meta.access import follow_access, server_network
    from qmq.meta.server import MetaServer
    from qmq.node.audit_subject import audit_subject_of
    from qmq.node.metrics import serving
    from qmq.node.metrics.meta import MetaSource, of_meta
    from qmq.node.metrics.replica import CoordinationSource, CountedStore
    from qmq.node.metrics.serving import AccessSource, ExposureSource
    from qmq.node.process import process_status, until_signal
    from qmq.security.audit import AuditLog

    etcd = options.open(total_s=ETCD_S)
    store = CountedStore(etcd)
    view = ClusterView(store)
    audit = audit_subject_of(
        config.access, store, view, server_network(network, view), f"meta/{config.port}"
    )
    access = follow_access(view, config.access, AuditLog(sink=audit))
    process = process_status(config.host, options, network.credentials)
    server = MetaServer(
        store, view, config, network=network, access=access, process=process, members=etcd.members
    )
    sources = (
        MetaSource(server, view),
        CoordinationSource(store, view),
        AccessSource(access),
        ExposureSource(config.host, options, network.credentials),
    )
    metrics: MetricsServer | None = None

    is_serving = False

    async def start() -> str:
        nonlocal metrics, is_serving
        metrics = await serving.serve(
            serving.metrics_host(config.host, metrics_host),
            metrics_port,
            sources,
            lambda: of_meta(is_serving),
            network,
        )  # Also while etcd is unreachable.
        await view.start()
        await server.start()
        if audit is not None:
            audit.start()
        is_serving = True
        return (
            "qmq meta is ready at "
            f"{server.address}{f' (metrics at {metrics.address})' if metrics is not None else ''}"
        )

    try:
        await until_signal(start)
    finally:
        if metrics is not None:
            await metrics.stop()
        if audit is not None:
            await audit.stop()
        await server.stop()
        await view.stop()
        await store.close()
