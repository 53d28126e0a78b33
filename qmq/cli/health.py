"""`qmq health`: whether a server serves, for whoever starts and watches processes. Exit status 0 if it does, 3 if it does not.

It asks /readyz at the server's metrics port. What asks often, as a container engine does, asks that itself and spares the machine a Python.
"""

from __future__ import annotations

import http.client
from typing import Annotated, Final

import typer

from qmq.cli.output import Json, fail, show
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.network import parse

app = typer.Typer(no_args_is_help=True, help="Whether a server serves: exit status 0 if it does.")

HEALTH_S: Final = 3.0
PORT: Final = 20890
"""Where docker-compose.yml has the metrics."""

Address = Annotated[str, typer.Argument(help="HOST:PORT of its metrics (--metrics-port).")]


@app.command("meta")
def meta(address: Address = f"localhost:{PORT}", as_json: Json = False) -> None:
    """Ask a metaserver, or `qmq dev`, whether it has listed the cluster: from then on it serves, whoever else is away."""
    _tell(address, as_json)


@app.command("broker")
def broker(address: Address = f"localhost:{PORT}", as_json: Json = False) -> None:
    """Ask a replica of a broker group or delay group whether it serves as master, or follows one: a slave is as healthy as a master."""
    _tell(address, as_json)


def _tell(address: str, as_json: bool) -> None:
    try:
        health = _asked(address)
    except QmqError as failure:
        fail(failure)
    show("health", ("address", "health"), [(address, health)], as_json=as_json)


def _asked(address: str) -> str:
    """How it stands. Raises NotConnected, InvalidArgument."""
    place = parse(address, PORT)
    if place.path:
        raise InvalidArgument(f"metrics and health are not at a socket: give HOST:PORT of --metrics-port, not {address}")
    connection = http.client.HTTPConnection(place.host.strip("[]"), place.port, timeout=HEALTH_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        says = answer.read(1000).decode("utf-8", "replace").strip()
    except http.client.HTTPException as cause:
        raise NotConnected(f"what is at {address} speaks no HTTP: give the server's metrics port, not another one") from cause
    except OSError as cause:
        raise NotConnected(f"nobody answers at {address}: is it running, with --metrics-port? ({cause})") from cause
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise NotConnected(f"{address} is not ready: {says or answer.reason}")
    return says
