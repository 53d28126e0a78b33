"""All certificates of a cluster: `qmq cert cluster`. Needs `cryptography`.

    FOLDER/authority/ca.pem, ca.key             signs what QMQ's servers and clients show to each other
    FOLDER/etcd-authority/ca.pem, ca.key        signs what etcd's members, and servers as etcd's clients, show
    FOLDER/members/NAME/ca.pem, cert.pem, key.pem
    FOLDER/members/NAME/etcd-ca.pem, etcd-cert.pem, etcd-key.pem      of a metaserver, a broker or a delay server
    FOLDER/members/etcd-root/etcd-*.pem         etcd's root user, for `qmq etcd protect`

Each member gets only its own folder. etcd uses the common name of a client certificate as the name of its user, so it has a separate
authority: an application's certificate with the name `root` has no rights there.

What if it crashes here? A member's certificate is written after its authority's and its key, so a folder with a certificate has all three;
the next run makes the missing files. A crash during `--renew` leaves a key that does not fit: run it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.network import parse
from qmq.security.authority import DAYS, Issued, Place, create_authority, has_authority, issue

ETCD: Final = "etcd"
ETCD_USER: Final = "qmq"
"""etcd's user for all servers of QMQ."""
ETCD_MEMBER_USER: Final = "etcd"
"""etcd's user for its own members: it may read nothing, which is enough for a health check."""
ETCD_ROOT: Final = "root"
ETCD_ROOT_MEMBER: Final = "etcd-root"
SERVERS: Final = ("meta", "node")


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """The server, person or application that gets a certificate. `kind` is 'etcd' or a kind of principal; a server has `hosts`."""

    kind: str
    name: str
    hosts: tuple[str, ...] = ()


def member_of(kind: str, text: str) -> CertificateHolder:
    """A server from `NAME=HOST,HOST:PORT`; NAME is one of its hosts. Raises InvalidArgument."""
    name, _, listed = text.partition("=")
    hosts = [_without_port(each.strip()) for each in listed.split(",") if each.strip()]
    if not name:
        raise InvalidArgument(f"{text!r} is not a server: write NAME=HOST,HOST")
    return CertificateHolder(kind, name, tuple(dict.fromkeys([name, *hosts])))


def make_certificates(
    folder: Path, members: Sequence[CertificateHolder], *, renews: bool = False, now: datetime | None = None, days: int = DAYS
) -> list[Issued]:
    """Make the missing certificates; with `renews`, make all certificates again, with the existing authorities. Returns the new ones.

    Raises InvalidArgument, InvalidName.
    """
    if not members:
        raise InvalidArgument("name at least one member: --meta NAME=HOST, --node NAME=HOST, --etcd NAME=HOST, --op NAME or --app NAME")
    made = []
    for asked in _papers(members):
        authority = folder / ("etcd-authority" if asked.by_etcd else "authority")
        if not has_authority(authority):
            made.append(create_authority(authority, now=now))
        place = _place(folder / "members" / check_name("certificate", asked.folder), "etcd-" if asked.is_second else "")
        if renews or not place.cert.exists():
            made.append(issue(authority, asked.name, asked.kind, asked.hosts, now=now, days=days, place=place))
    return made


@dataclass(frozen=True, slots=True)
class _Paper:
    """One certificate: its folder, its authority, and its content."""

    folder: str
    by_etcd: bool
    is_second: bool
    """If true, the certificate lies beside the member's certificate for QMQ, under another file name."""
    name: str
    kind: str
    hosts: tuple[str, ...] = ()


def _papers(members: Sequence[CertificateHolder]) -> list[_Paper]:
    has_etcd = any(each.kind == ETCD for each in members)
    papers = [_Paper(ETCD_ROOT_MEMBER, True, True, ETCD_ROOT, "op")] if has_etcd else []
    twice = [name for name, count in Counter([*(each.name for each in members), ETCD_ROOT_MEMBER]).items() if count > 1]
    if twice:
        raise InvalidArgument(f"{', '.join(twice)}: each member needs its own name, and {ETCD_ROOT_MEMBER} is taken")
    for each in members:
        if each.kind == ETCD:
            papers.append(_Paper(each.name, True, False, ETCD_MEMBER_USER, "node", each.hosts))
        else:
            papers.append(_Paper(each.name, False, False, each.name, each.kind, each.hosts))
        if has_etcd and each.kind in SERVERS:
            papers.append(_Paper(each.name, True, True, ETCD_USER, "node"))
    return papers


def _place(folder: Path, prefix: str) -> Place:
    return Place(*(folder / f"{prefix}{what}.pem" for what in ("ca", "cert", "key")))


def _without_port(text: str) -> str:
    try:
        return parse(text).host
    except InvalidArgument:
        return text
