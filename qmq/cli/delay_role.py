"""`qmq delay` without a verb: runs one replica of one delay group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.roles import ReplicaOptions, serve_replica, taking
from qmq.cli.times import parse_duration

if TYPE_CHECKING:
    from qmq.node.delay_node import DelayReplicaConfig


@dataclass(frozen=True)
class DelayOptions(ReplicaOptions):
    """Of `qmq delay`."""

    group: Annotated[str, typer.Option(envvar="QMQ_GROUP", help="The delay group that this replica belongs to.")] = ""
    data_port: Annotated[int, typer.Option(envvar="QMQ_DATA_PORT", help="The data port; 0 for a free one.")] = 20883
    control_port: Annotated[int, typer.Option(envvar="QMQ_CONTROL_PORT", help="The control port; 0 for a free one.")] = 20884
    bucket: Annotated[
        str, typer.Option(envvar="QMQ_BUCKET", help="What a file of the schedule holds, 5m to 24h; fixed when the group is founded.")
    ] = "1h"
    longest: Annotated[
        str, typer.Option("--max", envvar="QMQ_DELAY_MAX", help="Longer delays are refused; fixed when the group is founded.")
    ] = "732d"
    tick_ms: Annotated[int, typer.Option(envvar="QMQ_TICK_MS", help="Due messages leave at multiples of this.")] = 500
    load_ahead: Annotated[
        str, typer.Option(envvar="QMQ_LOAD_AHEAD", help="What is due within this time is in memory, if there is room.")
    ] = "10m"
    wheel_messages: Annotated[
        int, typer.Option(envvar="QMQ_WHEEL_MESSAGES", help="So many messages are in memory at most, 8 bytes each.")
    ] = 16_000_000
    retention_hours: Annotated[
        float, typer.Option(envvar="QMQ_RETENTION_HOURS", help="The message log before this may be deleted; the schedule stays.")
    ] = 24.0

    def config(self) -> DelayReplicaConfig:
        """Raises InvalidArgument, InvalidName, typer.BadParameter."""
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
    """Have `app`, called without a verb, run a delay server."""
    app.callback(invoke_without_command=True)(delay)


@taking(DelayOptions)
def delay(context: typer.Context, options: DelayOptions) -> None:
    """Run one replica of a delay group, which keeps messages until they are due; or, with a verb, look after delayed messages.

    Prints one line, `qmq delay is ready at HOST:PORT`, when it serves its control port. Ctrl-C or SIGTERM stops it cleanly.
    """
    if context.invoked_subcommand is None:
        from qmq.node.delay_node import DelayNode

        serve_replica(options, options.config, lambda config, environment: DelayNode(config, environment=environment), "delay")


def _ms(text: str) -> int:
    return parse_duration(text) // timedelta(milliseconds=1)
