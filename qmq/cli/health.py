"""`qmq health` checks whether a server is ready, for supervisors and scripts. Exit status 0: ready, 3: not ready.

The command requests /readyz at the server's metrics port. A container engine, which asks often, should request /readyz itself and save a
Python process each time.
"""

from __future__ import annotations

import http.client
from typing import Annotated, Final

import typer

from qmq.cli.output import Json, fail, show
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.network import parse

app = typer.Typer(no_args_is_help=True, help="Check whether a server is ready: exit status 0 if it is.")

HEALTH_S: Final = 3.0
PORT: Final = 20890
"""The metrics port in docker-compose.yml."""

Address = Annotated[str, typer.Argument(help="HOST:PORT of its metrics (--metrics-port).")]


@app.command("meta")
def meta(address: Address = f"localhost:{PORT}", as_json: Json = False) -> None:
    """Check a metaserver or `qmq dev`. It is ready once it has listed the cluster, even if other servers are down later."""
    _tell(address, as_json)


@app.command("broker")
def broker(address: Address = f"localhost:{PORT}", as_json: Json = False) -> None:
    """Check a replica of a broker group or delay group. It is ready if it is the master or follows one."""
    _tell(address, as_json)


def _tell(address: str, as_json: bool) -> None:
    try:
        health = _asked(address)
    except QmqError as failure:
        fail(failure)
    show("health", ("address", "health"), [(address, health)], as_json=as_json)


def _asked(address: str) -> str:
    """The server's answer. Raises NotConnected, InvalidArgument."""
    place = parse(address, PORT)
    if place.path:
        raise InvalidArgument(f"metrics and health are served over TCP: give the HOST:PORT of --metrics-port, not {address}")
    connection = http.client.HTTPConnection(place.host.strip("[]"), place.port, timeout=HEALTH_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        says = answer.read(1000).decode("utf-8", "replace").strip()
    except http.client.HTTPException as cause:
        raise NotConnected(f"the server at {address} does not speak HTTP: give its metrics port") from cause
    except OSError as cause:
        raise NotConnected(f"no answer from {address}: is the server running with --metrics-port? ({cause})") from cause
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise NotConnected(f"{address} is not ready: {says or answer.reason}")
    return says
