"""What the commands that run a role share: the options that say where etcd is, and where to listen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from qmq.node.etcd_options import EtcdOptions

Etcd = Annotated[str, typer.Option("--etcd", envvar="QMQ_ETCD", help="etcd's members: HOST:PORT,HOST:PORT.")]
EtcdUser = Annotated[str | None, typer.Option("--etcd-user", envvar="QMQ_ETCD_USER", help="etcd's user.")]
EtcdPassword = Annotated[
    str | None, typer.Option("--etcd-password", envvar="QMQ_ETCD_PASSWORD", help="Its password; the variable keeps it out of sight.")
]
EtcdCa = Annotated[Path | None, typer.Option("--etcd-ca", envvar="QMQ_ETCD_CA", help="PEM file: who signs etcd's certificates.")]
EtcdCert = Annotated[Path | None, typer.Option("--etcd-cert", envvar="QMQ_ETCD_CERT", help="PEM file: our certificate for etcd.")]
EtcdKey = Annotated[Path | None, typer.Option("--etcd-key", envvar="QMQ_ETCD_KEY", help="PEM file: our certificate's key.")]
Host = Annotated[str, typer.Option("--host", envvar="QMQ_HOST", help="Address to listen on.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")]


def names_of(text: str, option: str) -> tuple[str, ...]:
    """A comma-separated option. Raises InvalidArgument if it is empty."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument(f"{option} is missing: give it as an option, or by its variable")
    return found


def etcd_options(
    etcd: str, user: str | None, password: str | None, ca: Path | None, cert: Path | None, key: Path | None
) -> EtcdOptions:
    """How to reach etcd. Raises InvalidArgument."""
    from qmq.node.etcd_options import EtcdOptions

    for path in (ca, cert, key):
        if path is not None and not path.is_file():
            raise InvalidArgument(f"{path} is no file: etcd's certificates are PEM files")
    return EtcdOptions(names_of(etcd, "--etcd (QMQ_ETCD)"), user, password, ca, cert, key)
