"""`qmq console` serves the web console (docs/CONSOLE.md)."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.arguments import port_option
from qmq.cli.output import SERVER, Server, fail, run
from qmq.errors import InvalidArgument, QmqError
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.console.app import ConsoleServer

HINT = "the console needs more packages: pip install 'qmq[console]'"


def console(
    server: Server = SERVER,
    host: Annotated[str, typer.Option(envvar="QMQ_CONSOLE_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, port_option("Port to listen on", "QMQ_CONSOLE_PORT")] = 20888,
    login: Annotated[
        str,
        typer.Option(
            envvar="QMQ_CONSOLE_LOGIN",
            help="Whose rights the browser has: 'own' (yours), 'token' (entered by the user), 'oidc' (identity provider), 'proxy'.",
        ),
    ] = "own",
    writable: Annotated[bool, typer.Option("--writable", envvar="QMQ_CONSOLE_WRITABLE", help="Allow changes; default: read-only.")] = False,
    name: Annotated[list[str] | None, typer.Option("--name", help="A host name that browsers use; repeatable.")] = None,
    trusted_proxy: Annotated[
        list[str] | None, typer.Option("--trusted-proxy", help="With --login proxy: an address that may send the token header.")
    ] = None,
    token_header: Annotated[
        str, typer.Option("--token-header", help="With --login proxy: the header with the token.")
    ] = "x-forwarded-access-token",  # noqa: S107 - a name
    oidc_issuer: Annotated[str, typer.Option("--oidc-issuer", help="With --login oidc: the identity provider's address.")] = "",
    oidc_client: Annotated[str, typer.Option("--oidc-client-id", help="With --login oidc: what the provider calls this console.")] = "",
    oidc_secret: Annotated[
        Path | None, typer.Option("--oidc-secret-file", help="With --login oidc: the client's secret, if it has one.")
    ] = None,
    oidc_scope: Annotated[str, typer.Option("--oidc-scope", help="With --login oidc: the scopes to ask for.")] = "openid",
    oidc_token: Annotated[
        str, typer.Option("--oidc-token", help="With --login oidc: which token the cluster is shown, 'access_token' or 'id_token'.")
    ] = "access_token",  # noqa: S107 - a name
    public_url: Annotated[
        str, typer.Option("--public-url", help="With --login oidc: where browsers find this console; default: where it listens.")
    ] = "",
    mask: Annotated[list[str] | None, typer.Option("--mask", help="A field to mask in message bodies: FIELD, or SUBJECT*:FIELD.")] = None,
    cert: Annotated[Path | None, typer.Option("--cert", help="PEM file: the console's certificate.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM file: its key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="QMQ_INSECURE", help="Listen on a public address without TLS or login.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Serve the web console. Prints one line, `the console is at URL`; Ctrl-C stops it."""
    try:
        from qmq.console.app import ConsoleServer
        from qmq.console.config import ConsoleConfig, LoginMode, MaskRule, OidcConfig, check
    except ImportError:
        fail(InvalidArgument(HINT))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    try:
        if login not in [each.value for each in LoginMode]:
            raise InvalidArgument(f"--login must be own, token, oidc or proxy, not {login!r}")
        public = public_url.rstrip("/") or f"{'https' if cert else 'http'}://{joined(host, port)}"
        oidc = (
            OidcConfig(oidc_issuer, oidc_client, f"{public}/login/callback", _secret(oidc_secret), oidc_scope, oidc_token)
            if oidc_issuer and oidc_client
            else None
        )
        config = ConsoleConfig(
            server,
            host,
            port,
            LoginMode(login),
            writable,
            tuple(name or ()),
            tuple(trusted_proxy or ()),
            token_header.lower(),
            cert,
            key,
            tuple(MaskRule.parse(each) for each in mask or ()),
            oidc,
        )
        for each in check(config, is_insecure=insecure):
            logging.getLogger("qmq.console").warning("insecure: %s", each)
        run(_serve(ConsoleServer(config)))
    except (OSError, QmqError) as failure:
        fail(failure)


def _secret(file: Path | None) -> str:
    return "" if file is None else file.read_text().strip()


async def _serve(console: ConsoleServer) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await console.start()
    sys.stdout.write(f"the console is at {console.url}\n")
    sys.stdout.flush()
    await stop.wait()
    await console.stop()
