"""`qmq health` checks whether a server is ready, for supervisors and scripts. Exit status 0: ready, 3: not ready.

The command requests /readyz at the server's metrics port. A container engine, which asks often, should request /readyz itself and save a
Python process each time.

With TLS settings (options, variables or the context) another machine is asked over TLS, as servers with TLS serve their metrics there. On
this machine they serve metrics without TLS, unless --metrics-host names another address, so the command asks without TLS first.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qmq.cli.arguments import tls_option
from qmq.cli.output import Json, fail, show
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.process.address import is_local, parse

if TYPE_CHECKING:
    from qmq.security.tls import Tls

app = typer.Typer(no_args_is_help=True, help="Check whether a server is ready: exit status 0 if it is.")

HEALTH_S: Final = 3.0
PORT: Final = 20890
"""The metrics port in docker-compose.yml."""

Address = Annotated[str, typer.Argument(help="HOST:PORT of its metrics (--metrics-port).")]
Ca = Annotated[Path | None, tls_option("ca")]
Cert = Annotated[Path | None, tls_option("cert")]
Key = Annotated[Path | None, tls_option("key")]


@app.command("meta")
def meta(address: Address = f"localhost:{PORT}", ca: Ca = None, cert: Cert = None, key: Key = None, as_json: Json = False) -> None:
    """Check a metaserver or `qmq dev`. It is ready once it has listed the cluster, even if other servers are down later."""
    _tell(address, ca, cert, key, as_json)


@app.command("broker")
def broker(address: Address = f"localhost:{PORT}", ca: Ca = None, cert: Cert = None, key: Key = None, as_json: Json = False) -> None:
    """Check a replica of a broker group or delay group. It is ready if it is the master or follows one."""
    _tell(address, ca, cert, key, as_json)


def _tell(address: str, ca: Path | None, cert: Path | None, key: Path | None, as_json: bool) -> None:
    try:
        health = _asked(address, _tls(ca, cert, key))
    except QmqError as failure:
        fail(failure)
    show("health", ("address", "health"), [(address, health)], as_json=as_json)


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
    """Raises InvalidArgument."""
    if ca is None:
        if cert is not None or key is not None:
            raise InvalidArgument("--tls-cert and --tls-key need --tls-ca: the authority of the servers' certificates")
        return None
    from qmq.security.tls import Tls

    return Tls(ca, cert, key)


def _asked(address: str, tls: Tls | None) -> str:
    """The server's answer. Raises NotConnected, TlsFailed, InvalidArgument."""
    place = parse(address, PORT)
    if place.path:
        raise InvalidArgument(f"metrics and health are served over TCP: give the HOST:PORT of --metrics-port, not {address}")
    host = place.host.strip("[]")
    plain = http.client.HTTPConnection(host, place.port, timeout=HEALTH_S)
    if tls is None:
        return _answer(plain, address)
    from qmq.security.tls import Credentials, ended_unheard

    encrypted = http.client.HTTPSConnection(host, place.port, timeout=HEALTH_S, context=Credentials(tls).client_context())
    if is_local(host):
        try:
            return _answer(plain, address)
        except _NoHttp:
            pass
    try:
        return _answer(encrypted, address)
    except _NoHttp as failure:
        if isinstance(failure.__cause__, ConnectionResetError):
            raise ended_unheard(address, tls) from failure
        raise


class _NoHttp(NotConnected):
    """The server closed the connection without an HTTP answer."""


def _answer(connection: http.client.HTTPConnection, address: str) -> str:
    """Ask once. Raises NotConnected, TlsFailed."""
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        says = answer.read(1000).decode("utf-8", "replace").strip()
    except (http.client.HTTPException, ConnectionResetError) as cause:
        raise _NoHttp(
            f"the server at {address} does not speak HTTP: give its metrics port; if that has TLS, give --tls-ca (QMQ_TLS_CA), too"
        ) from cause
    except ssl.SSLError as cause:
        from qmq.security.tls import tls_failed

        raise tls_failed(address, cause) from cause
    except OSError as cause:
        raise NotConnected(f"no answer from {address}: is the server running with --metrics-port? ({cause})") from cause
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise NotConnected(f"{address} is not ready: {says or answer.reason}")
    return says
