"""A small certificate authority for a cluster, and all certificates of one: `qmq cert`. Needs
`cryptography` (`pip install qmq[server]`).

    FOLDER/ca.pem, ca.key          the authority; its key can certify any name: keep it off the
                                   servers
    FOLDER/NAME.pem, NAME.key      a certificate and its key, for one server or one client

A certificate names its principal in a URI, `spiffe://DOMAIN/KIND/NAME`, and a server's addresses as
DNS names and IP addresses. Keys are elliptic (P-256). Only their owner can read files with keys. A
certificate is valid from an hour before it is made, because clocks differ. You can also use a
company's own authority: QMQ needs only PEM files.

`qmq cert cluster` makes all certificates of a cluster:

    FOLDER/authority/ca.pem, ca.key             signs what QMQ's servers and clients show to each
                                                other
    FOLDER/etcd-authority/ca.pem, ca.key        signs what etcd's members, and servers as etcd's
                                                clients, show
    FOLDER/members/NAME/ca.pem, cert.pem, key.pem
    FOLDER/members/NAME/etcd-ca.pem, etcd-cert.pem, etcd-key.pem      of a metaserver, a broker or a
                                                                      delay server
    FOLDER/members/etcd-root/etcd-*.pem         etcd's root user, for `qmq etcd protect`

Each member gets only its own folder. etcd uses the common name of a client certificate as the name
of its user, so it has a separate authority: an application's certificate with the name `root` has
no rights there.

What if it crashes here? A member's certificate is written after its authority's and its key, so a
folder with a certificate has all three; the next run makes the missing files. A crash during
`--renew` leaves a key that does not fit: run it again.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.process.address import parse
from qmq.process.files import make_private
from qmq.security.principal import SERVERS

CA: Final = "ca"
DOMAIN: Final = "qmq"
KINDS: Final = ("node", "meta", "app", "op")
"""Broker or delay server, metaserver, application, operator."""
CA_DAYS: Final = 3650
DAYS: Final = 365
EARLIER: Final = timedelta(hours=1)
_DNS_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


class Issued(NamedTuple):
    """The files of one new certificate."""

    cert: Path
    key: Path
    ends_at: datetime


def create_authority(folder: Path, *, now: datetime | None = None, days: int = CA_DAYS) -> Issued:
    """Make an authority. Raises InvalidArgument if the folder has one: a new authority would make
    its certificates worthless.
    """
    if _key_path(folder, CA).exists():
        raise InvalidArgument(
            f"{folder} has an authority already: issue certificates with it, or choose "
            "another folder"
        )
    make_private(folder)
    now = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "QMQ authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key, now, days)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    ).add_extension(usage, critical=True)
    return _write(folder, CA, builder.sign(key, hashes.SHA256()), key)


class Place(NamedTuple):
    """Where a certificate, its key and a copy of its authority's certificate go, if not into the
    authority's folder.
    """

    ca: Path
    cert: Path
    key: Path


def issue(
    folder: Path,
    name: str,
    kind: str,
    hosts: Sequence[str] = (),
    *,
    now: datetime | None = None,
    days: int = DAYS,
    place: Place | None = None,
) -> Issued:
    """Make a certificate that the folder's authority signs, and replace an existing one.

    `hosts` are the names and addresses by which a server is reached; a client needs none. A
    client's certificate has the purpose (extended key usage) of clients only, so TLS does not
    accept it as a server's certificate, with any host names. Raises InvalidName, InvalidArgument:
    no such kind, no host, or no authority in the folder.
    """
    if kind not in KINDS:
        raise InvalidArgument(f"a certificate is for one of {', '.join(KINDS)}, not {kind!r}")
    if check_name("certificate", name) == CA:
        raise InvalidArgument(f"{CA!r} is the authority's own name")
    ca, ca_key = _authority(folder)
    now = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    names = [x509.UniformResourceIdentifier(f"spiffe://{DOMAIN}/{kind}/{name}"), *map(_host, hosts)]
    usages = [
        ExtendedKeyUsageOID.CLIENT_AUTH,
        *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts and kind in SERVERS else []),
    ]
    builder = _builder(subject, ca.subject, key, now, days)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
    )
    if place is None:
        return _write(folder, name, builder.sign(ca_key, hashes.SHA256()), key)
    make_private(place.cert.parent)
    _replace(place.ca, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    return _write_to(place.cert, place.key, builder.sign(ca_key, hashes.SHA256()), key)


def has_authority(folder: Path) -> bool:
    """True if the folder has an authority."""
    return _cert_path(folder, CA).exists()


def ends_at(pem: bytes) -> datetime:
    """The expiry of the first certificate in a PEM file. Raises ValueError."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
    )
    builder = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )
    return builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )


def _host(text: str) -> x509.GeneralName:
    bare = text.strip("[]")
    try:
        return x509.IPAddress(ipaddress.ip_address(bare))
    except ValueError:
        if not _DNS_NAME.fullmatch(bare):
            raise InvalidArgument(
                f"{text!r} is neither a host name nor an address: write broker0.example.com "
                "or 10.0.0.1"
            ) from None
        return x509.DNSName(bare)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert = x509.load_pem_x509_certificate(_cert_path(folder, CA).read_bytes())
        key = serialization.load_pem_private_key(_key_path(folder, CA).read_bytes(), None)
    except (OSError, ValueError) as cause:
        raise InvalidArgument(
            f"{folder} has no authority that can be used ({cause}): `qmq cert ca` makes one"
        ) from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgument(
            f"{folder} has an authority of another kind: use its own tools to sign"
        )
    return cert, key


def _cert_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def _key_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def _write(
    folder: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> Issued:
    return _write_to(_cert_path(folder, name), _key_path(folder, name), cert, key)


def _write_to(
    cert_path: Path, key_path: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> Issued:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(key_path, secret, 0o600)
    _replace(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return Issued(cert_path, key_path, cert.not_valid_after_utc)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically: a process that reads the file gets the old content
    or the new content.
    """
    beside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(beside, mode)
    beside.rename(path)


ETCD: Final = "etcd"
ETCD_USER: Final = "qmq"
"""etcd's user for all servers of QMQ."""
ETCD_MEMBER_USER: Final = "etcd"
"""etcd's user for its own members: it may read nothing, which is enough for a health check."""
ETCD_ROOT: Final = "root"
ETCD_ROOT_MEMBER: Final = "etcd-root"
NEED_ETCD: Final = ("meta", "node")


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """The server, person or application that gets a certificate. `kind` is 'etcd' or a kind of
    principal; a server has `hosts`.
    """

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
    folder: Path,
    members: Sequence[CertificateHolder],
    *,
    renews: bool = False,
    now: datetime | None = None,
    days: int = DAYS,
) -> list[Issued]:
    """Make the missing certificates; with `renews`, make all certificates again, with the existing
    authorities. Returns the new ones.

    Raises InvalidArgument, InvalidName.
    """
    if not members:
        raise InvalidArgument(
            "name at least one member: --meta NAME=HOST, --node NAME=HOST, --etcd NAME=HOST, "
            "--op NAME or --app NAME"
        )
    made = []
    for asked in _papers(members):
        authority = folder / ("etcd-authority" if asked.by_etcd else "authority")
        if not has_authority(authority):
            made.append(create_authority(authority, now=now))
        place = _place(
            folder / "members" / check_name("certificate", asked.folder),
            "etcd-" if asked.is_second else "",
        )
        if renews or not place.cert.exists():
            made.append(
                issue(
                    authority, asked.name, asked.kind, asked.hosts, now=now, days=days, place=place
                )
            )
    return made


@dataclass(frozen=True, slots=True)
class _Paper:
    """One certificate: its folder, its authority, and its content."""

    folder: str
    by_etcd: bool
    is_second: bool
    """If true, the certificate lies beside the member's certificate for QMQ,
    under another file name.
    """
    name: str
    kind: str
    hosts: tuple[str, ...] = ()


def _papers(members: Sequence[CertificateHolder]) -> list[_Paper]:
    has_etcd = any(each.kind == ETCD for each in members)
    papers = [_Paper(ETCD_ROOT_MEMBER, True, True, ETCD_ROOT, "op")] if has_etcd else []
    twice = [
        name
        for name, count in Counter([*(each.name for each in members), ETCD_ROOT_MEMBER]).items()
        if count > 1
    ]
    if twice:
        raise InvalidArgument(
            f"{', '.join(twice)}: each member needs its own name, and {ETCD_ROOT_MEMBER} is taken"
        )
    for each in members:
        if each.kind == ETCD:
            papers.append(_Paper(each.name, True, False, ETCD_MEMBER_USER, "node", each.hosts))
        else:
            papers.append(_Paper(each.name, False, False, each.name, each.kind, each.hosts))
        if has_etcd and each.kind in NEED_ETCD:
            papers.append(_Paper(each.name, True, True, ETCD_USER, "node"))
    return papers


def _place(folder: Path, prefix: str) -> Place:
    return Place(*(folder / f"{prefix}{what}.pem" for what in ("ca", "cert", "key")))


def _without_port(text: str) -> str:
    try:
        return parse(text).host
    except InvalidArgument:
        return text
