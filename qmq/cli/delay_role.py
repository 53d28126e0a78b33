"""`qmq delay` without a verb runs one replica of a delay group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.arguments import port_option
from qmq.cli.confirm_clock import confirm_clock
from qmq.cli.hand_over import hand_over
from qmq.cli.roles import ReplicaOptions, serve_replica, taking
from qmq.cli.times import parse_duration

if TYPE_CHECKING:
    from qmq.node.delay_node import DelayReplicaConfig


@dataclass(frozen=True)
class DelayOptions(ReplicaOptions):
    """Options of `qmq delay`."""

    group: Annotated[str, typer.Option(envvar="QMQ_GROUP", help="The delay group of this replica.")] = ""
    data_port: Annotated[int, port_option("The data port", "QMQ_DATA_PORT")] = 20883
    control_port: Annotated[int, port_option("The control port", "QMQ_CONTROL_PORT")] = 20884
    bucket: Annotated[
        str, typer.Option(envvar="QMQ_BUCKET", help="The time span of one schedule file, 5m to 24h; fixed when the group is created.")
    ] = "1h"
    longest: Annotated[
        str, typer.Option("--max", envvar="QMQ_DELAY_MAX", help="The longest delay that is accepted; fixed when the group is created.")
    ] = "732d"
    tick_ms: Annotated[int, typer.Option(envvar="QMQ_TICK_MS", help="Due messages are delivered at multiples of this interval.")] = 500
    load_ahead: Annotated[
        str, typer.Option(envvar="QMQ_LOAD_AHEAD", help="Keep messages due within this time in memory, if there is room.")
    ] = "10m"
    wheel_messages: Annotated[int, typer.Option(envvar="QMQ_WHEEL_MESSAGES", help="How many messages may be in memory, 8 bytes each.")] = (
        16_000_000
    )
    retention_hours: Annotated[
        float, typer.Option(envvar="QMQ_RETENTION_HOURS", help="How long the message log is kept; the schedule is kept longer.")
    ] = 24.0

    def config(self) -> DelayReplicaConfig:
        """The delay server's configuration. Raises InvalidArgument, InvalidName, typer.BadParameter."""
        from qmq_coordination.broker_groups import DelaySettings

        from qmq.broker.broker_config import BrokerConfig
        from qmq.delay.delay_config import DelayConfig
        from qmq.node.delay_node import DelayReplicaConfig

        return DelayReplicaConfig(
            **self.shared_config("delay group"),
            broker=BrokerConfig(name=self.group),
            settings=DelaySettings(_ms(self.bucket), _ms(self.longest)),
            delay=DelayConfig(tick_ms=self.tick_ms, load_ahead_ms=_ms(self.load_ahead), wheel_messages_max=self.wheel_messages),
        )


def attach(app: typer.Typer) -> None:
    """Make `app` run a delay server when it is called without a verb, and hand the mastership of one over."""
    app.callback(invoke_without_command=True)(delay)
    app.command("hand-over")(hand_over)
    app.command("confirm-clock")(confirm_clock)


@taking(DelayOptions)
def delay(context: typer.Context, options: DelayOptions) -> None:
    """Run one replica of a delay group, which stores messages until they are due; or, with a verb, manage delayed messages.

    Prints one line, `qmq delay is ready at HOST:PORT`, when its control port is open. Ctrl-C or SIGTERM stops it cleanly.
    """
    context.obj = options
    if context.invoked_subcommand is None:
        from qmq.node.delay_node import delay_node

        serve_replica(options, options.config, lambda config, environment: delay_node(config, environment=environment), "delay")


def _ms(text: str) -> int:
    return parse_duration(text) // timedelta(milliseconds=1)
