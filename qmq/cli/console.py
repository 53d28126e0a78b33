"""`qmq console` serves the web console (docs/CONSOLE.md)."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.arguments import port_option
from qmq.cli.output import SERVER, Server, fail, run
from qmq.cli.roles import Variable, set_up_logging, taking
from qmq.errors import InvalidArgument, QmqError
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.console.app import ConsoleServer
    from qmq.console.config import ConsoleConfig, OidcConfig

HINT = "the console needs more packages: pip install 'qmq[console]'"


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Options of `qmq console`."""

    server: Server = SERVER
    host: Annotated[str, typer.Option(envvar="QMQ_CONSOLE_HOST", help="Address to listen on.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, port_option("Port to listen on", "QMQ_CONSOLE_PORT")] = 20888
    login: Annotated[
        str,
        typer.Option(
            envvar="QMQ_CONSOLE_LOGIN",
            help=(
                "Whose rights the browser has: 'own' (yours), 'token' (entered by the user), "
                "'oidc' (identity provider), 'proxy'."
            ),
        ),
    ] = "own"
    writable: Annotated[
        bool,
        typer.Option(
            "--writable", envvar="QMQ_CONSOLE_WRITABLE", help="Allow changes; default: read-only."
        ),
    ] = False
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A host name that browsers use; repeatable.")
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy", help="With --login proxy: an address that may send the token header."
        ),
    ] = None
    token_header: Annotated[
        str, Variable("QMQ_CONSOLE_TOKEN_HEADER", "With --login proxy: the header with the token.")
    ] = "x-forwarded-access-token"  # noqa: S105 - a name
    oidc_issuer: Annotated[
        str,
        Variable("QMQ_CONSOLE_OIDC_ISSUER", "With --login oidc: the identity provider's address."),
    ] = ""
    oidc_client: Annotated[
        str,
        Variable(
            "QMQ_CONSOLE_OIDC_CLIENT_ID", "With --login oidc: what the provider calls this console."
        ),
    ] = ""
    oidc_secret: Annotated[
        Path | None,
        Variable(
            "QMQ_CONSOLE_OIDC_SECRET_FILE",
            "With --login oidc: a file with the client's secret, if it has one.",
        ),
    ] = None
    oidc_scope: Annotated[
        str, Variable("QMQ_CONSOLE_OIDC_SCOPE", "With --login oidc: the scopes to ask for.")
    ] = "openid"
    oidc_token: Annotated[
        str,
        Variable(
            "QMQ_CONSOLE_OIDC_TOKEN",
            "With --login oidc: which token the cluster is shown, 'access_token' or 'id_token'.",
        ),
    ] = "access_token"  # noqa: S105 - a name
    public_url: Annotated[
        str,
        Variable(
            "QMQ_CONSOLE_PUBLIC_URL",
            "With --login oidc: where browsers find this console; default: where it listens.",
        ),
    ] = ""
    mask: Annotated[
        list[str] | None,
        typer.Option("--mask", help="A field to mask in message bodies: FIELD, or SUBJECT*:FIELD."),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", help="PEM file: the certificate shown to browsers; turns TLS on."
        ),
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM file: its key.")] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="QMQ_INSECURE",
            help="Listen on a public address without TLS or login.",
        ),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False

    def config(self) -> ConsoleConfig:
        """The console's configuration. Raises InvalidArgument, OSError."""
        from qmq.console.config import ConsoleConfig, LoginMode, MaskRule

        if self.login not in [each.value for each in LoginMode]:
            raise InvalidArgument(f"--login must be own, token, oidc or proxy, not {self.login!r}")
        return ConsoleConfig(
            self.server,
            self.host,
            self.port,
            LoginMode(self.login),
            self.writable,
            tuple(self.name or ()),
            tuple(self.trusted_proxy or ()),
            self.token_header.lower(),
            self.tls_cert,
            self.tls_key,
            tuple(MaskRule.parse(each) for each in self.mask or ()),
            self.oidc(),
        )

    def oidc(self) -> OidcConfig | None:
        """The identity provider, if one is named. Raises OSError."""
        from qmq.console.config import OidcConfig

        if not self.oidc_issuer or not self.oidc_client:
            return None
        public = (
            self.public_url.rstrip("/")
            or f"{'https' if self.tls_cert else 'http'}://{joined(self.host, self.port)}"
        )
        secret = "" if self.oidc_secret is None else self.oidc_secret.read_text().strip()
        return OidcConfig(
            self.oidc_issuer,
            self.oidc_client,
            f"{public}/login/callback",
            secret,
            self.oidc_scope,
            self.oidc_token,
        )


@taking(ConsoleOptions)
def console(_: typer.Context, options: ConsoleOptions) -> None:
    """Serve the web console. Prints one line, `the console is at URL`; Ctrl-C stops it."""
    try:
        from qmq.console.app import ConsoleServer
        from qmq.console.config import check
    except ImportError:
        fail(InvalidArgument(HINT))
    set_up_logging(options.verbose)
    try:
        config = options.config()
        for each in check(config, is_insecure=options.insecure):
            logging.getLogger("qmq.console").warning("insecure: %s", each)
        run(_serve(ConsoleServer(config)))
    except (OSError, QmqError) as failure:
        fail(failure)


async def _serve(console: ConsoleServer) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await console.start()
    sys.stdout.write(f"the console is at {console.url}\n")
    sys.stdout.flush()
    await stop.wait()
    await console.stop()
