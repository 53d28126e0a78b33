"""`qmq gateway` lets Apache RocketMQ 5 clients send to and receive from the cluster."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qmq.cli.arguments import port_of, port_option
from qmq.cli.broker import process_command
from qmq.cli.output import fail, run
from qmq.cli.roles import Host, ProcessFlags, Variable, set_up_logging, taking
from qmq.errors import InvalidArgument, QmqError
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.gateway.config import GatewayConfig
    from qmq.integrations.http.site import HttpServer
    from qmq.metrics.endpoint import MetricsServer
    from qmq.rpc.network import Network


PROCESSES_MAX: Final = 64
_SHOWN: Final = ("host", "port", "metrics_port")


@dataclass(frozen=True)
class GatewayOptions(ProcessFlags):
    """Options of `qmq gateway`."""

    server: Annotated[
        str,
        typer.Option(
            envvar="QMQ_SERVER",
            help="The metaservers' addresses, comma-separated; default: localhost:20880.",
        ),
    ] = ""
    host: Host = "127.0.0.1"
    port: Annotated[int, port_option("The port for RocketMQ clients", "QMQ_PORT")] = 8081
    http_port: Annotated[
        int | None,
        port_option(
            (
                "The port for HTTP and CloudEvents, with --processes the first of their ports; "
                "without it, none"
            ),
            "QMQ_HTTP_PORT",
        ),
    ] = None
    advertise: Annotated[
        str,
        typer.Option(
            envvar="QMQ_ADVERTISE",
            help="HOST:PORT advertised to clients; default: the one they connected to.",
        ),
    ] = ""
    create_topics: Annotated[
        bool,
        Variable(
            "QMQ_CREATE_TOPICS", "Create a topic at its first message, if the metaserver allows it."
        ),
    ] = True
    ordered_topics: Annotated[
        bool,
        Variable(
            "QMQ_ORDERED_TOPICS", "Create topics as ordered subjects, which take all message types."
        ),
    ] = False
    credentials: Annotated[
        Path | None,
        Variable(
            "QMQ_GATEWAY_CREDENTIALS",
            (
                "JSON file: access keys and secret keys of RocketMQ clients, with a QMQ token "
                "for each; default: every client is served."
            ),
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="QMQ_GATEWAY_TLS_CERT",
            help="PEM file: the certificate shown to RocketMQ clients; turns TLS on.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="QMQ_GATEWAY_TLS_KEY", help="PEM file: that certificate's key."),
    ] = None
    tls: Annotated[
        str,
        Variable(
            "QMQ_GATEWAY_TLS",
            (
                "With a certificate: 'required', or 'optional' to serve clients without TLS at "
                "the same port, too."
            ),
        ),
    ] = "required"
    audit_log: Annotated[
        Path | None,
        typer.Option(
            envvar="QMQ_AUDIT_LOG",
            help=(
                "File for the audit log: TLS handshakes that fail, calls without a valid "
                "signature; default: the ordinary log."
            ),
        ),
    ] = None
    processes: Annotated[
        int,
        typer.Option(
            envvar="QMQ_GATEWAY_PROCESSES",
            min=1,
            max=PROCESSES_MAX,
            help="Number of processes that share the port; one keeps about one core busy.",
        ),
    ] = 1
    shared_port: Annotated[
        bool,
        Variable(
            "QMQ_GATEWAY_SHARED_PORT", "Let other gateways of this machine listen at the same port."
        ),
    ] = False

    def config(self) -> GatewayConfig:
        """The gateway's configuration."""
        from qmq.gateway.config import GatewayConfig

        return GatewayConfig(
            self.host,
            self.port,
            self.advertise,
            creates_topics=self.create_topics,
            all_ordered=self.ordered_topics,
            shares_port=self.shared_port,
            takes_plaintext=self.takes_plaintext(),
        )

    def takes_plaintext(self) -> bool:
        """Whether a client may come without TLS to a port with TLS. Raises InvalidArgument."""
        if self.tls not in ("required", "optional"):
            raise InvalidArgument(
                f"QMQ_GATEWAY_TLS must be 'required' or 'optional', not {self.tls!r}"
            )
        if self.tls == "optional" and self.tls_cert is None:
            raise InvalidArgument(
                "QMQ_GATEWAY_TLS=optional needs --tls-cert and --tls-key: without them the "
                "port serves plain text only"
            )
        return self.tls == "optional"

    def http_server(self) -> HttpServer | None:
        """The HTTP server, if it was asked for. A request without a token must not get what the
        gateway's own certificate may do.
        """
        if self.http_port is None:
            return None
        import qmq
        from qmq.integrations.http.site import HttpConfig, HttpServer

        is_open = self.credentials is None and not os.environ.get("QMQ_TLS_CERT")
        config = HttpConfig(
            self.host, self.http_port, self.tls_cert, self.tls_key, allows_anonymous=is_open
        )
        return HttpServer(
            config,
            lambda token: qmq.connect(self.server or None, token=lambda: token, state_dir=False),
        )

    def network(self) -> Network:
        """The network of the RocketMQ port, with TLS if configured. Raises InvalidArgument for
        unusable files.
        """
        from qmq.gateway.server import tls_of
        from qmq.rpc.tls_network import ServerNetwork

        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert is not self.tls_key:
                raise InvalidArgument(
                    "TLS needs --tls-cert and --tls-key together: docs/ROCKETMQ.md says how "
                    "to make them"
                )
            return ServerNetwork()
        return tls_of(self.tls_cert, self.tls_key)

    def require_closed(self) -> None:
        """Raise InvalidArgument if the gateway would listen on a public address
        without access control.
        """
        from qmq.node.process import require_guarded

        this_machine = "127.0.0.1"
        is_closed = (
            self.credentials is not None
            and self.tls_cert is not None
            and not self.takes_plaintext()
        )
        require_guarded(
            this_machine if is_closed else self.host,
            self.insecure,
            metrics_host=self.open_metrics_host,
        )


@taking(GatewayOptions)
def gateway(_: typer.Context, options: GatewayOptions) -> None:
    """Run a gateway for Apache RocketMQ 5 clients (gRPC): Java, Go, C++, C#, Node, Rust, Python.
    The gateway has no state, so run several.

    The gateway is an ordinary client of the cluster and uses the certificates and the token of the
    environment (QMQ_TLS_CA, QMQ_TOKEN_FILE ...). With QMQ_GATEWAY_CREDENTIALS it uses, for each
    RocketMQ client, the token of that client's access key. Prints one line, `qmq gateway is ready
    at HOST:PORT`, when clients can connect. Ctrl-C or SIGTERM stops it cleanly.
    """
    try:
        set_up_logging(options.verbose, options.audit_log)
        options.require_closed()
        status = run(_serve(options) if options.processes == 1 else _serve_together(options))
    except (OSError, QmqError) as failure:
        fail(failure)
    raise typer.Exit(status)


async def _serve_together(options: GatewayOptions) -> int:
    """Run several processes on one port. A process that ends is restarted. The exit status is that
    of the first process that could not start.
    """
    from qmq.node.shards import ShardSupervisor

    if not options.port:
        raise InvalidArgument("several processes share one port, so name it: --port 8081")
    if options.http_port == 0:
        raise InvalidArgument(
            "several processes serve HTTP at ports one after another, so name the first: "
            "--http-port 8089"
        )
    commands = [
        process_command(
            "gateway", _one_of(options, number), _SHOWN, os.environ, verbose=options.verbose
        )
        for number in range(options.processes)
    ]
    ready = (
        f"qmq gateway: {options.processes} processes are ready at "
        f"{joined(options.host, options.port)}"
    )
    supervisor = ShardSupervisor(
        "the gateway",
        commands,
        lambda line: print(line, flush=True),
        part="process",
        ready_line=ready,
    )
    return await supervisor.run()


def _one_of(options: GatewayOptions, number: int) -> GatewayOptions:
    """The options of one process of several. Each has its own ports for metrics and HTTP, in
    ascending order, because only the process that gave an HTTP receipt knows it. Raises
    InvalidArgument if a port would be out of range.
    """

    def port(given: int | None) -> int | None:
        return None if given is None else port_of("processes", number, given)

    return replace(
        options,
        processes=1,
        shared_port=True,
        metrics_port=port(options.metrics_port),
        http_port=port(options.http_port),
    )


async def _serve(options: GatewayOptions) -> int:
    import qmq
    from qmq.gateway.clients import GatewayCredentials
    from qmq.gateway.server import GatewayServer, GatewaySource, leave
    from qmq.metrics.figures import Readiness
    from qmq.node.metrics import serving
    from qmq.node.process import until_signal

    def connect(token: str | None = None) -> qmq.Client:
        return qmq.connect(options.server or None, token=token, state_dir=False)

    credentials = (
        GatewayCredentials.load(options.credentials) if options.credentials is not None else None
    )
    async with AsyncExitStack() as ending:
        mq = connect()
        ending.push_async_callback(lambda: leave(mq.close()))
        network = options.network()
        found = GatewayServer(
            mq, options.config(), network=network, credentials=credentials, connect=connect
        )

        http = options.http_server()
        metrics: MetricsServer | None = None

        async def start() -> str:
            nonlocal metrics
            host = serving.metrics_host(options.host, options.metrics_host)
            metrics = await serving.serve(
                host,
                options.metrics_port,
                [GatewaySource(found)],
                lambda: Readiness(True, "ok"),
                network,
            )
            await found.start()
            if http is not None:
                await http.start()
            for_http = "" if http is None else f", for HTTP at {http.url}"
            for_metrics = "" if metrics is None else f" (metrics at {metrics.address})"
            return f"qmq gateway is ready at {found.address}{for_http}{for_metrics}"

        try:
            await until_signal(start)
        finally:
            if metrics is not None:
                await metrics.stop()
            await asyncio.gather(found.stop(), *([leave(http.stop())] if http is not None else []))
    return 0
