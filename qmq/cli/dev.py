"""`qmq dev`: a whole node in one process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from qmq.cli.output import errors, fail, run
from qmq.cli.roles import (
    ACCESS_STALE_S,
    ATTEMPTS_MAX,
    RETRY_DELAYS,
    AccessStaleS,
    Admins,
    AttemptsMax,
    AuditFile,
    AuditSubjectName,
    Insecure,
    JwtAudience,
    JwtClaim,
    JwtIssuer,
    JwtKeys,
    MetricsPort,
    RetryDelays,
    TlsCa,
    TlsCert,
    TlsClients,
    TlsKey,
    TlsPrincipal,
    access_of,
    log_config,
    require_flush,
    retries_of,
    set_up_logging,
    tls_of,
)
from qmq.errors import QmqError
from qmq.limits import FLUSH_INTERVAL_MS

if TYPE_CHECKING:
    from qmq.node.dev_node import Node


def dev(
    data: Annotated[Path, typer.Option(help="The node's data folder; made if absent.")] = Path("qmq-data"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The metaserver's port; 0 for a free one.")] = 20880,
    data_port: Annotated[int, typer.Option(help="The broker's data port; 0 for a free one.")] = 20881,
    control_port: Annotated[int, typer.Option(help="The broker's control port; 0 for a free one.")] = 20882,
    flush: Annotated[str, typer.Option(help="'async' or 'sync': when the disk must have a message.")] = "async",
    flush_interval_ms: Annotated[int, typer.Option(help="With async: flush at most so often.")] = FLUSH_INTERVAL_MS,
    segment_mib: Annotated[int, typer.Option(help="Size of a segment of the message log.")] = 1024,
    retention_hours: Annotated[float, typer.Option(help="Messages older than this may be deleted.")] = 168.0,
    retention_mib: Annotated[int | None, typer.Option(help="The message log's size beyond which old segments go.")] = None,
    disk_free_mib: Annotated[int, typer.Option(help="Free space below which messages are refused.")] = 64,
    create_subjects: Annotated[bool, typer.Option(help="Let a first message create its subject.")] = True,
    delay: Annotated[bool, typer.Option("--delay/--no-delay", help="Have a delay group, for delayed messages.")] = True,
    delay_data_port: Annotated[int, typer.Option(help="The delay group's data port; 0 for a free one.")] = 0,
    delay_control_port: Annotated[int, typer.Option(help="The delay group's control port; 0 for a free one.")] = 0,
    tick_ms: Annotated[int, typer.Option(help="Due messages leave at multiples of this.")] = 500,
    attempts_max: AttemptsMax = ATTEMPTS_MAX,
    retry_delays: RetryDelays = RETRY_DELAYS,
    metrics_port: MetricsPort = None,
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
    insecure: Insecure = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Run a whole node in this process: metaserver, broker, delay server and coordination store, on one data folder.

    Prints one line, `qmq is ready at HOST:PORT`, when clients may come. Ctrl-C or SIGTERM stops it cleanly.
    """
    from qmq.broker.broker_config import BrokerConfig
    from qmq.delay.delay_config import DelayConfig
    from qmq.node.dev_node import Node, NodeConfig
    from qmq.node.environment import environment_with
    from qmq.node.exposure import require_guarded

    require_flush(flush)
    try:
        set_up_logging(verbose, audit_log)
        log = log_config(flush, flush_interval_ms, segment_mib, retention_hours, retention_mib, disk_free_mib)
        config = NodeConfig(
            data,
            host,
            port,
            data_port,
            control_port,
            create_subjects,
            log,
            BrokerConfig(retries=retries_of(attempts_max, retry_delays)),
            delay=delay,
            delay_data_port=delay_data_port,
            delay_control_port=delay_control_port,
            delay_config=DelayConfig(tick_ms=tick_ms),
            metrics_port=metrics_port,
            access=access_of(admins, tls_principal, access_stale_s, audit_subject, jwt_issuer, jwt_keys, jwt_audience, jwt_claim),
        )
        tls = tls_of(tls_ca, tls_cert, tls_key, tls_clients)
        require_guarded(host, insecure, tls=tls)
        network = environment_with(tls).network
        with _RecoveryBar() as bar:
            run(_serve(Node(config, bar, network=network)))
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(node: Node) -> None:
    from qmq.node.process_tuning import calm_collector, tune_process

    tune_process()
    await node.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    calm_collector()
    metrics = f", metrics at {node.metrics.address}" if node.metrics is not None else ""
    sys.stdout.write(f"qmq is ready at {node.address} (data at {node.data_address}, folder {node.config.data}{metrics})\n")
    sys.stdout.flush()
    await stop.wait()
    await node.stop()


class _RecoveryBar:
    """A progress bar for a long recovery; nothing for a short one."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _RecoveryBar:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if total < 64 << 20:
            return
        if self._bar is None:
            columns = (TextColumn("replaying {task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=errors, transient=True)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done)
        if done >= total:
            self._bar.stop()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
