"""`qmq gateway`: clients of Apache RocketMQ 5 send to and receive from the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.output import fail, run
from qmq.cli.roles import Host, set_up_logging, taking
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.gateway.gateway_config import GatewayConfig


@dataclass(frozen=True)
class GatewayOptions:
    """Of `qmq gateway`."""

    server: Annotated[
        str, typer.Option(envvar="QMQ_SERVER", help="The metaservers' addresses, comma-separated; without it, localhost:20880.")
    ] = ""
    host: Host = "127.0.0.1"
    port: Annotated[int, typer.Option(envvar="QMQ_PORT", help="The port for RocketMQ's clients; 0 for a free one.")] = 8081
    advertise: Annotated[
        str, typer.Option(envvar="QMQ_ADVERTISE", help="HOST:PORT that clients are told; without it, the one by which they came.")
    ] = ""
    create_topics: Annotated[
        bool, typer.Option(envvar="QMQ_CREATE_TOPICS", help="Let a first message create its topic, if the metaserver allows it.")
    ] = True
    ordered_topics: Annotated[
        bool, typer.Option("--ordered-topics", envvar="QMQ_ORDERED_TOPICS", help="Create ordered topics, which take messages of all types.")
    ] = False
    insecure: Annotated[
        bool,
        typer.Option("--insecure", envvar="QMQ_INSECURE", help="Listen beyond this machine without access control: on a private network."),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False

    def config(self) -> GatewayConfig:
        """The gateway as the options say it."""
        from qmq.gateway.gateway_config import GatewayConfig

        return GatewayConfig(self.host, self.port, self.advertise, creates_topics=self.create_topics, all_ordered=self.ordered_topics)


@taking(GatewayOptions)
def gateway(_: typer.Context, options: GatewayOptions) -> None:
    """Run a gateway for clients of Apache RocketMQ 5 (gRPC): Java, Go, C++, C#, Node, Rust, Python. It keeps nothing, so run several.

    It reaches the cluster as any client does, with the certificates and the token of the environment (QMQ_TLS_CA, QMQ_TOKEN_FILE ...).
    Prints one line, `qmq gateway is ready at HOST:PORT`, when clients may come. Ctrl-C or SIGTERM stops it cleanly.
    """
    from qmq.node.exposure import require_guarded

    try:
        set_up_logging(options.verbose)
        require_guarded(options.host, options.insecure)
        run(_serve(options.server, options.config()))
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(server: str, config: GatewayConfig) -> None:
    import qmq
    from qmq.gateway.gateway_server import GatewayServer
    from qmq.node.role_process import until_signal

    async with qmq.connect(server or None, name=None, state_dir=False) as mq:
        found = GatewayServer(mq, config)

        async def start() -> str:
            await found.start()
            return f"qmq gateway is ready at {found.address}"

        try:
            await until_signal(start)
        finally:
            await found.stop()
