"""`qmq etcd` sets up etcd's own access control, for an etcd that identifies clients by certificates (docs/SECURITY.md)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.output import fail
from qmq.cli.roles import Etcd, EtcdCa, EtcdCert, EtcdKey, etcd_options
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.node.etcd_options import EtcdOptions

app = typer.Typer(help="etcd's own users.", no_args_is_help=True)

WITHIN_S = 30.0


@app.callback()
def etcd() -> None:
    """Manage etcd's users."""


@app.command("protect")
def protect(
    etcd: Etcd,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    user: Annotated[str, typer.Option("--user", help="The common name of the certificates that QMQ's servers show to etcd.")] = "qmq",
    member: Annotated[
        str, typer.Option("--member", help="The common name of the etcd members' certificates; this user gets no rights.")
    ] = "etcd",
    prefix: Annotated[str, typer.Option("--prefix", help="The keys that this user may read and write.")] = "/qmq/",
) -> None:
    """Create the users and turn on etcd's access control. Needs a certificate with the common name root. Safe to run again."""
    try:
        options = etcd_options(etcd, None, None, etcd_ca, etcd_cert, etcd_key)
        asyncio.run(_protect(options, user, member, prefix))
    except QmqError as failure:
        fail(failure)
    typer.echo(f"etcd's access control is on: {user} may read and write {prefix}, root everything, no other user anything")


async def _protect(options: EtcdOptions, user: str, member: str, prefix: str) -> None:
    store = options.open(total_s=WITHIN_S)
    try:
        await store.protect(user, member, prefix)
    finally:
        await store.close()
