"""What secures a cluster before it starts (docs/SECURITY.md): `qmq cert` makes a small certificate
authority, and certificates for servers and clients; `qmq etcd` sets up the access control of an
etcd that identifies clients by certificates.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.arguments import DAYS_MAX
from qmq.cli.output import Json, fail, show
from qmq.cli.roles import Etcd, EtcdCa, EtcdCert, EtcdKey, etcd_options, taking
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.node.process import EtcdOptions
    from qmq.security.certificates import CertificateHolder, Issued

app = typer.Typer(help="Make certificates for TLS.", no_args_is_help=True)

Folder = Annotated[
    Path,
    typer.Option(
        "--folder", envvar="QMQ_CERT_FOLDER", help="Folder of the authority and the certificates."
    ),
]
Days = Annotated[
    int, typer.Option("--days", min=1, max=DAYS_MAX, help="How long the certificate is valid.")
]
FOLDER = Path("qmq-certs")
_COLUMNS = ("certificate", "key", "valid until")


@app.command("ca")
def ca(folder: Folder = FOLDER, days: Days = 3650, as_json: Json = False) -> None:
    """Make the authority that signs a cluster's certificates.
    Do not copy its key (ca.key) to the servers.
    """
    from qmq.security.certificates import create_authority

    try:
        _show(create_authority(folder, days=days), as_json)
    except (OSError, QmqError) as failure:
        fail(failure)


@app.command("server")
def server(
    name: Annotated[
        str, typer.Argument(help="The server's name, for example the name of its replica.")
    ],
    hosts: Annotated[
        list[str], typer.Option("--host", help="A host name or address of the server; repeatable.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--kind", help="'node' for a broker or a delay server, 'meta' for a metaserver."
        ),
    ] = "node",
    folder: Folder = FOLDER,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make a server's certificate. An existing one is replaced, and the server loads the new one
    without a restart.
    """
    _issue(folder, name, kind, hosts, days, as_json)


@app.command("client")
def client(
    name: Annotated[str, typer.Argument(help="The application's or the operator's name.")],
    kind: Annotated[
        str, typer.Option("--kind", help="'app' for an application, 'op' for an operator.")
    ] = "app",
    folder: Folder = FOLDER,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make a client's certificate."""
    _issue(folder, name, kind, [], days, as_json)


Members = Annotated[
    list[str] | None, typer.Option(help="NAME=HOST,HOST (or HOST:PORT); repeatable.")
]
Names = Annotated[list[str] | None, typer.Option(help="A name; repeatable.")]


@dataclass(frozen=True)
class ClusterCertificates:
    etcd: Members = None
    meta: Members = None
    node: Members = None
    op: Names = None
    application: Annotated[list[str] | None, typer.Option("--app", help="A name; repeatable.")] = (
        None
    )
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the certificates, but keep the authorities.")
    ] = False
    folder: Folder = FOLDER
    days: Days = 365
    as_json: Json = False

    def holders(self) -> list[CertificateHolder]:
        """Who gets a certificate. Raises InvalidArgument."""
        from qmq.security.certificates import CertificateHolder, member_of

        servers = {"etcd": self.etcd, "meta": self.meta, "node": self.node}
        clients = {"op": self.op, "app": self.application}
        return [
            *(member_of(kind, text) for kind, texts in servers.items() for text in texts or ()),
            *(
                CertificateHolder(kind, name)
                for kind, names in clients.items()
                for name in names or ()
            ),
        ]


@app.command("cluster")
@taking(ClusterCertificates)
def cluster(_: typer.Context, options: ClusterCertificates) -> None:
    """Make the missing certificates of a whole cluster: one authority for QMQ, one for etcd, and a
    folder for each member.
    """
    from qmq.security.certificates import make_certificates

    try:
        made = make_certificates(
            options.folder, options.holders(), renews=options.renew, days=options.days
        )
    except (OSError, QmqError) as failure:
        fail(failure)
    show(
        "made",
        _COLUMNS,
        [(str(each.cert), str(each.key), each.ends_at.isoformat()) for each in made],
        as_json=options.as_json,
    )


def _issue(folder: Path, name: str, kind: str, hosts: list[str], days: int, as_json: bool) -> None:
    from qmq.security.certificates import issue

    try:
        _show(issue(folder, name, kind, hosts, days=days), as_json)
    except (OSError, QmqError) as failure:
        fail(failure)


def _show(made: Issued, as_json: bool) -> None:
    show(
        "made",
        _COLUMNS,
        [(str(made.cert), str(made.key), made.ends_at.isoformat())],
        as_json=as_json,
    )


etcd_users = typer.Typer(help="etcd's own users.", no_args_is_help=True)

WITHIN_S = 30.0
PREFIX = "/qmq/"
"""The keys of QMQ in etcd."""


@etcd_users.callback()
def etcd() -> None:
    """Manage etcd's users."""


@etcd_users.command("protect")
def protect(
    etcd: Etcd,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    user: Annotated[
        str,
        typer.Option(
            "--user", help="The common name of the certificates that QMQ's servers show to etcd."
        ),
    ] = "qmq",
    member: Annotated[
        str,
        typer.Option(
            "--member",
            help="The common name of the etcd members' certificates; this user gets no rights.",
        ),
    ] = "etcd",
) -> None:
    """Create the users and turn on etcd's access control. Needs a certificate with the common name
    root. Safe to run again.
    """
    try:
        options = etcd_options(etcd, None, None, etcd_ca, etcd_cert, etcd_key)
        asyncio.run(_protect(options, user, member))
    except QmqError as failure:
        fail(failure)
    typer.echo(
        f"etcd's access control is on: {user} may read and write {PREFIX}, root everything, "
        "no other user anything"
    )


async def _protect(options: EtcdOptions, user: str, member: str) -> None:
    store = options.open(total_s=WITHIN_S)
    try:
        await store.protect(user, member, PREFIX)
    finally:
        await store.close()
