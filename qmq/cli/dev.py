"""`qmq dev` runs a whole node in one process."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from qmq.cli.arguments import HOUR_MS, PORT_MAX, port_option
from qmq.cli.output import fail, run
from qmq.cli.roles import (
    GuardFlags,
    ProcessFlags,
    RetryFlags,
    StorageFlags,
    Variable,
    set_up_logging,
    taking,
)
from qmq.errors import InvalidArgument, QmqError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from qmq.console.on_demand import ConsoleOnDemand
    from qmq.node.dev_node import Node


@dataclass(frozen=True)
class DevPlace:
    """Options that only `qmq dev` has."""

    data: Annotated[Path, typer.Option(help="The node's data folder; created if missing.")] = Path(
        "qmq-data"
    )
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, port_option("The metaserver's port")] = 20880
    data_port: Annotated[int, port_option("The broker's data port")] = 20881
    control_port: Annotated[int, port_option("The broker's control port")] = 20882
    advertise: Annotated[
        str,
        typer.Option(
            envvar="QMQ_ADVERTISE", help="The host name advertised to clients; default: --host."
        ),
    ] = ""
    create_subjects: Annotated[
        bool, Variable("QMQ_CREATE_SUBJECTS", "Create a subject at its first message.")
    ] = True
    delay: Annotated[
        bool, typer.Option("--delay/--no-delay", help="Run a delay group for delayed messages.")
    ] = True
    delay_data_port: Annotated[
        int,
        Variable(
            "QMQ_DELAY_DATA_PORT",
            "The delay group's data port; 0: any free port.",
            at_least=0,
            at_most=PORT_MAX,
        ),
    ] = 0
    delay_control_port: Annotated[
        int,
        Variable(
            "QMQ_DELAY_CONTROL_PORT",
            "The delay group's control port; 0: any free port.",
            at_least=0,
            at_most=PORT_MAX,
        ),
    ] = 0
    gateway_port: Annotated[
        int | None,
        port_option("Serve Apache RocketMQ clients on this port, for example 8081; default: off"),
    ] = None
    tick_ms: Annotated[
        int,
        Variable(
            "QMQ_TICK_MS",
            "Due messages are delivered at multiples of this interval.",
            at_least=1,
            at_most=HOUR_MS,
        ),
    ] = 500
    console: Annotated[
        str,
        typer.Option(help="The web console: 'read', 'write' (allows changes) or 'off'."),
    ] = "read"
    console_port: Annotated[
        int, port_option("The console's port; another free port if it is taken", "QMQ_CONSOLE_PORT")
    ] = 20888


@dataclass(frozen=True)
class DevOptions(ProcessFlags, GuardFlags, RetryFlags, StorageFlags, DevPlace):
    """Options of `qmq dev`. The variables of brokers' storage options are ignored, because they are
    meant for deployed brokers, not for `qmq dev`.
    """

    WITHOUT_VARIABLES: ClassVar[type] = StorageFlags


@taking(DevOptions)
def dev(_: typer.Context, options: DevOptions) -> None:
    """Run a whole node in this process: metaserver, broker, delay server and coordination store, on
    one data folder.

    Prints one line, `qmq is ready at HOST:PORT`, when clients can connect; and, if `qmq[console]`
    is installed, the console's address. Ctrl-C or SIGTERM stops it cleanly.
    """
    gc.disable()  # until the node is ready: its start makes many objects, and no garbage

    from qmq.broker.config import BrokerConfig
    from qmq.delay.config import DelayConfig
    from qmq.node.dev_node import Node, NodeConfig
    from qmq.node.process import environment_with, require_guarded, require_reachable

    try:
        set_up_logging(options.verbose, options.audit_log)
        if options.console not in ("read", "write", "off"):
            raise InvalidArgument(f"--console must be read, write or off, not {options.console!r}")
        tls = options.tls()
        require_guarded(
            options.host, options.insecure, tls=tls, metrics_host=options.open_metrics_host
        )
        require_reachable(options.host, options.advertise)
        config = NodeConfig(
            options.data,
            options.host,
            options.port,
            options.data_port,
            options.control_port,
            options.create_subjects,
            options.log_config(),
            BrokerConfig(retries=options.retries()),
            delay=options.delay,
            delay_data_port=options.delay_data_port,
            delay_control_port=options.delay_control_port,
            delay_config=DelayConfig(tick_ms=options.tick_ms),
            metrics_port=options.metrics_port,
            metrics_host=options.metrics_host,
            access=options.access(),
            gateway_port=options.gateway_port,
            advertise=options.advertise,
        )
        network = environment_with(tls).network
        with _RecoveryBar() as bar:
            run(_serve(Node(config, bar, network=network), options, has_console=tls is None))
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(node: Node, options: DevOptions, *, has_console: bool) -> None:
    """Serve until a signal. With TLS there is no console: it must not act with the node's own
    certificate (`qmq console` takes another).
    """
    from qmq.process.event_loop import calm_collector, tune_process

    tune_process()
    await node.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    calm_collector()
    metrics = f", metrics at {node.metrics.address}" if node.metrics is not None else ""
    metrics += f", RocketMQ clients at {node.gateway.address}" if node.gateway is not None else ""
    sys.stdout.write(
        f"qmq is ready at {node.address} (data at {node.data_address}, folder "
        f"{node.config.data}{metrics})\n"
    )
    sys.stdout.flush()
    console = _console(node, options) if has_console and options.console != "off" else None
    await stop.wait()
    if console is not None:
        await console.stop()
    await node.stop()


def _console(node: Node, options: DevOptions) -> ConsoleOnDemand | None:
    """The console, if its packages are installed. It listens on the loopback address only."""
    from qmq.console.config import ConsoleConfig
    from qmq.console.on_demand import ConsoleOnDemand, is_installed

    if not is_installed():
        return None
    config = ConsoleConfig(
        node.address, port=options.console_port, is_writable=options.console == "write"
    )
    console = ConsoleOnDemand(config)
    try:
        url = console.start()
    except OSError:
        console = ConsoleOnDemand(replace(config, port=0))
        url = console.start()
    sys.stdout.write(f"the console is at {url}\n")
    sys.stdout.flush()
    return console


class _RecoveryBar:
    """A progress bar that appears only if recovery takes long."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _RecoveryBar:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if total < 64 << 20:
            return
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            from qmq.cli.tables import errors

            columns = (
                TextColumn("replaying {task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
            )
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
