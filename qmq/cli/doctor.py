"""`qmq doctor` examines a cluster twice and reports what is unusual, why it matters, and what to do
(docs/OPERATIONS.md).

`qmq health` checks whether a server is ready, for supervisors and scripts. Exit status 0: ready, 3:
not ready.

The command requests /readyz at the server's metrics port. A container engine, which asks often,
should request /readyz itself and save a Python process each time.

With TLS settings (options, variables or the context) another machine is asked over TLS, as servers
with TLS serve their metrics there. On this machine they serve metrics without TLS, unless
QMQ_METRICS_HOST names another address, so the command asks without TLS first.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import sys
import textwrap
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from qmq.cli.added_options import Watch, refreshed
from qmq.cli.arguments import COUNT_MAX, SECONDS_MAX, View, parse_duration, tls_option
from qmq.cli.output import (
    EXIT_UNAVAILABLE,
    SERVER,
    Json,
    Server,
    administration,
    fail,
    run,
    show,
)
from qmq.cli.tables import console
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.operations.findings import findings
from qmq.operations.text import Finding, Severity, Thresholds, folded, worst
from qmq.process.address import is_local, parse

if TYPE_CHECKING:
    from qmq.operations.snapshot import ClusterSnapshot
    from qmq.security.tls import Tls

EXIT_WARNING: Final = 4
EXIT_CRITICAL: Final = 5
_INDENT: Final = " " * 10
_STYLES: Final = {
    Severity.NOTICE: "cyan",
    Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red",
}
_STATUS: Final = {
    None: 0,
    Severity.NOTICE: 0,
    Severity.WARNING: EXIT_WARNING,
    Severity.CRITICAL: EXIT_CRITICAL,
}

Limit = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="Report a group whose oldest waiting message is older than this."
    ),
]


def doctor(
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval",
            min=0,
            max=SECONDS_MAX,
            help="Seconds between the two snapshots, which show what grows; 0: one snapshot.",
        ),
    ] = 1.0,
    lag: Limit = "5m",
    lag_messages: Annotated[
        int,
        typer.Option(
            min=1, max=COUNT_MAX, help="Report a group with more waiting messages than this."
        ),
    ] = Thresholds().lag_messages,
    watch: Watch = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Examine the cluster and report what is unusual, why it matters, and which command to try
    next.

    Exit status: 0 no findings, or only notices; 4 warnings; 5 critical findings; 3 no metaserver
    answers.
    """
    limits = Thresholds(lag_ms=_milliseconds(lag), lag_messages=lag_messages)
    if watch:
        refreshed(lambda: _examine(server, interval_s, limits, as_json=as_json))
    raise typer.Exit(_examine(server, interval_s, limits, as_json=as_json))


def _examine(server: str, interval_s: float, limits: Thresholds, *, as_json: bool) -> int:
    """Print one report. Returns the exit status."""
    snapshot, previous = run(_look(server, interval_s))
    found = findings(snapshot, previous, limits)
    if as_json:
        sys.stdout.write(json.dumps(report(snapshot, found, limits)) + "\n")
    else:
        show_findings(found if View.is_wide else folded(found))
        console.print(summary(snapshot, found), highlight=False, soft_wrap=True)
    return _STATUS[worst(found)] if snapshot.is_reachable else EXIT_UNAVAILABLE


def _milliseconds(text: str) -> int:
    try:
        return parse_duration(text) // timedelta(milliseconds=1)
    except InvalidArgument as failure:
        fail(failure)


async def _look(server: str, interval_s: float) -> tuple[ClusterSnapshot, ClusterSnapshot | None]:
    """The second snapshot, and the first one, or None if only one was taken."""
    from qmq.operations.snapshot_reading import read_snapshot

    async with administration(server) as mq:
        first = await read_snapshot(mq.metadata)
        if not interval_s or not first.is_reachable:
            return first, None
        await asyncio.sleep(interval_s)
        return await read_snapshot(mq.metadata), first


def report(
    snapshot: ClusterSnapshot, found: Iterable[Finding], limits: Thresholds
) -> dict[str, Any]:
    """The output of --json."""
    found = tuple(found)
    severity = worst(found)
    return {
        "severity": None if severity is None else severity.name.lower(),
        "is_complete": snapshot.is_complete,
        "time_ms": snapshot.time_ms,
        "findings": [each.as_json() for each in found],
        "thresholds": limits.as_json(),
    }


def show_findings(found: Iterable[Finding]) -> None:
    """Print the findings for people, a paragraph each."""
    width = console.width if console.is_terminal and not View.is_wide else None
    for each in found:
        for line in paragraph(each, width):
            console.print(line, soft_wrap=True)


def paragraph(found: Finding, width: int | None) -> Iterator[Text]:
    """A finding in lines of at most `width` characters: what is unusual, why it matters, what to
    do. A command is never wrapped.
    """
    severity = found.severity.name.lower()
    what, *rest = _wrapped(f"{found.about}: {found.what}", width)
    yield Text.assemble((severity.ljust(len(_INDENT)), _STYLES[found.severity]), what)
    for line in rest:
        yield Text(_INDENT + line)
    for line in _wrapped(found.why, width):
        yield Text(_INDENT + line, "dim")
    yield Text.assemble(_INDENT, "try: ", (found.command, "bold"))


def _wrapped(text: str, width: int | None) -> list[str]:
    return (
        [text]
        if width is None
        else textwrap.wrap(text, max(width - len(_INDENT), 20), break_on_hyphens=False)
    )


def summary(snapshot: ClusterSnapshot, found: Iterable[Finding]) -> str:
    """The last line: how many findings there are, and what was examined."""
    found = tuple(found)
    counts = [(each, sum(one.severity is each for one in found)) for each in reversed(Severity)]
    words = ", ".join(
        f"{count} {each.name.lower()}{'s' if count > 1 and each is not Severity.CRITICAL else ''}"
        for each, count in counts
        if count
    )
    if not snapshot.is_reachable:
        return f"{words}: no metaserver answers"
    looked = (
        ("metaserver", len(snapshot.metaservers)),
        ("broker group", len(snapshot.broker_groups)),
        ("subject", len(snapshot.subjects)),
        ("consumer group", len(snapshot.groups)),
    )
    places = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for what, count in looked)
    partly = "" if snapshot.is_complete else "; not everything answered"
    return f"{words or 'nothing unusual'} in {places}{partly}"


health = typer.Typer(
    no_args_is_help=True, help="Check whether a server is ready: exit status 0 if it is."
)

HEALTH_S: Final = 3.0
PORT: Final = 20890
"""The metrics port in docker-compose.yml."""

Address = Annotated[str, typer.Argument(help="HOST:PORT of its metrics (--metrics-port).")]
Ca = Annotated[Path | None, tls_option("ca")]
Cert = Annotated[Path | None, tls_option("cert")]
Key = Annotated[Path | None, tls_option("key")]


@health.command("meta")
def meta(
    address: Address = f"localhost:{PORT}",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Check a metaserver or `qmq dev`. It is ready once it has listed the cluster, even if other
    servers are down later.
    """
    _tell(address, ca, cert, key, as_json)


@health.command("broker")
def broker(
    address: Address = f"localhost:{PORT}",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Check a replica of a broker group or delay group.
    It is ready if it is the master or follows one.
    """
    _tell(address, ca, cert, key, as_json)


def _tell(
    address: str, ca: Path | None, cert: Path | None, key: Path | None, as_json: bool
) -> None:
    try:
        health = _asked(address, _tls(ca, cert, key))
    except QmqError as failure:
        fail(failure)
    show("health", ("address", "health"), [(address, health)], as_json=as_json)


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
    """Raises InvalidArgument."""
    if ca is None:
        if cert is not None or key is not None:
            raise InvalidArgument(
                "--tls-cert and --tls-key need --tls-ca: the authority of the servers' certificates"
            )
        return None
    from qmq.security.tls import Tls

    return Tls(ca, cert, key)


def _asked(address: str, tls: Tls | None) -> str:
    """The server's answer. Raises NotConnected, TlsFailed, InvalidArgument."""
    place = parse(address, PORT)
    if place.path:
        raise InvalidArgument(
            "metrics and health are served over TCP: give the HOST:PORT of --metrics-port, "
            f"not {address}"
        )
    host = place.host.strip("[]")
    plain = http.client.HTTPConnection(host, place.port, timeout=HEALTH_S)
    if tls is None:
        return _answer(plain, address)
    from qmq.security.tls import Credentials, ended_unheard

    encrypted = http.client.HTTPSConnection(
        host, place.port, timeout=HEALTH_S, context=Credentials(tls).client_context()
    )
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
            f"the server at {address} does not speak HTTP: give its metrics port; if that "
            "has TLS, give --tls-ca (QMQ_TLS_CA), too"
        ) from cause
    except ssl.SSLError as cause:
        from qmq.security.tls import tls_failed

        raise tls_failed(address, cause) from cause
    except OSError as cause:
        raise NotConnected(
            f"no answer from {address}: is the server running with --metrics-port? ({cause})"
        ) from cause
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise NotConnected(f"{address} is not ready: {says or answer.reason}")
    return says
