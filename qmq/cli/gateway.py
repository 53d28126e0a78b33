"""`qmq gateway`: clients of Apache RocketMQ 5 send to and receive from the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.output import fail, run
from qmq.cli.roles import Host, set_up_logging, taking
from qmq.errors import InvalidArgument, QmqError

if TYPE_CHECKING:
    from qmq.gateway.gateway_config import GatewayConfig
    from qmq.network import Network


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
    credentials: Annotated[
        Path | None,
        typer.Option(
            envvar="QMQ_GATEWAY_CREDENTIALS",
            help="JSON file: access and secret keys of RocketMQ's clients, and a token of QMQ for each; without it, all are served.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="QMQ_GATEWAY_TLS_CERT", help="PEM file: the certificate for RocketMQ's clients; turns TLS on.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(envvar="QMQ_GATEWAY_TLS_KEY", help="PEM file: that certificate's key.")] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", envvar="QMQ_INSECURE", help="Listen beyond this machine without access control: on a private network."),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False

    def config(self) -> GatewayConfig:
        """The gateway as the options say it."""
        from qmq.gateway.gateway_config import GatewayConfig

        return GatewayConfig(self.host, self.port, self.advertise, creates_topics=self.create_topics, all_ordered=self.ordered_topics)

    def network(self) -> Network:
        """For the port. Raises InvalidArgument for files that cannot be used."""
        from qmq.network import NETWORK
        from qmq.security.expiry import ExpiryWarning
        from qmq.security.tls import Credentials, Tls
        from qmq.security.tls_network import TlsNetwork

        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert is not self.tls_key:
                raise InvalidArgument("TLS needs --tls-cert and --tls-key together: `qmq cert server` makes both files")
            return NETWORK
        # Clients show no certificates, so whoever signed the gateway's own will do as the authority for theirs.
        files = Credentials(Tls(self.tls_cert, self.tls_cert, self.tls_key, requires_clients=False))
        return TlsNetwork(files, ExpiryWarning(files).look)

    def require_closed(self) -> None:
        """Raises InvalidArgument where strangers could reach what they must not."""
        from qmq.node.exposure import require_guarded

        if self.credentials is None or self.tls_cert is None:
            require_guarded(self.host, self.insecure)


@taking(GatewayOptions)
def gateway(_: typer.Context, options: GatewayOptions) -> None:
    """Run a gateway for clients of Apache RocketMQ 5 (gRPC): Java, Go, C++, C#, Node, Rust, Python. It keeps nothing, so run several.

    It reaches the cluster as any client does, with the certificates and the token of the environment (QMQ_TLS_CA, QMQ_TOKEN_FILE ...), and
    with --credentials it shows for each of RocketMQ's clients the token that belongs to its access key.
    Prints one line, `qmq gateway is ready at HOST:PORT`, when clients may come. Ctrl-C or SIGTERM stops it cleanly.
    """
    try:
        set_up_logging(options.verbose)
        options.require_closed()
        run(_serve(options))
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(options: GatewayOptions) -> None:
    import qmq
    from qmq.gateway.gateway_credentials import GatewayCredentials
    from qmq.gateway.gateway_server import GatewayServer
    from qmq.node.role_process import until_signal

    def connect(token: str | None = None) -> qmq.Client:
        return qmq.connect(options.server or None, token=token, state_dir=False)

    credentials = GatewayCredentials.load(options.credentials) if options.credentials is not None else None
    async with connect() as mq:
        found = GatewayServer(mq, options.config(), network=options.network(), credentials=credentials, connect=connect)

        async def start() -> str:
            await found.start()
            return f"qmq gateway is ready at {found.address}"

        try:
            await until_signal(start)
        finally:
            await found.stop()
