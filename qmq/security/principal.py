"""Principals: `KIND:NAME`. Pure.

    node:broker0     a broker or a delay server          from a certificate
    meta:meta0       a metaserver                        from a certificate
    app:orders       an application                      from a certificate or a token
    op:alice         a person or a tool that operates    from a certificate or a token
    uid:1000         a user of the server's machine      from a Unix domain socket: the kernel
                                                         reports who connected
    any:anonymous    a peer without certificate and token

A certificate has its principal in a URI, `spiffe://DOMAIN/KIND/NAME`, as `qmq cert` writes it; for
certificates of a company's own authority another field may be used (`PrincipalRule`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from qmq.errors import InvalidArgument, InvalidName
from qmq.model import check_name

SERVERS: Final = ("node", "meta")
"""Kinds that may do everything: members of the cluster."""
APPLICATION: Final = "app"
CLIENTS: Final = (APPLICATION, "op")
LOCAL: Final = "uid"
KINDS: Final = (*SERVERS, *CLIENTS, LOCAL)
_SPIFFE: Final = re.compile(r"spiffe://[^/]+/(?:[^/]+/)*(node|meta|app|op)/([^/]+)")


class Principal(NamedTuple):
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def is_server(self) -> bool:
        return self.kind in SERVERS

    @classmethod
    def parse(cls, text: str) -> Principal:
        """The inverse of `str`. Raises InvalidArgument, InvalidName."""
        kind, separator, name = text.partition(":")
        if not separator or kind not in KINDS:
            raise InvalidArgument(
                f"a principal is KIND:NAME with a kind of {', '.join(KINDS)}, such as "
                f"app:orders, not {text!r}"
            )
        return cls(kind, check_name("principal", name))


def local_user(uid: int) -> Principal:
    """A user of this machine."""
    return Principal(LOCAL, str(uid))


ANONYMOUS: Final = Principal("any", "anonymous")


class PrincipalField(Enum):
    """The field of a certificate that names its principal."""

    URI = "uri"
    """A URI `spiffe://DOMAIN/KIND/NAME`."""
    DNS = "dns"
    """The first DNS name: `app:NAME`."""
    EMAIL = "email"
    """The first e-mail address: `op:` and the part before the @."""
    COMMON_NAME = "cn"
    """The common name of the subject: `app:NAME`."""


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """The names in a certificate."""

    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    common_name: str = ""

    @classmethod
    def of_peer(cls, peer: Mapping[str, Any] | None) -> CertificateNames:
        """The names in the result of `ssl.SSLObject.getpeercert`."""
        peer = peer or {}
        names: dict[str, list[str]] = {}
        for kind, value in peer.get("subjectAltName", ()):
            names.setdefault(kind, []).append(value)
        common = [
            value for part in peer.get("subject", ()) for key, value in part if key == "commonName"
        ]
        return cls(
            tuple(names.get("URI", ())),
            tuple(names.get("DNS", ())),
            tuple(names.get("email", ())),
            common[0] if common else "",
        )

    def names_server(self, name: str) -> bool:
        """Whether the certificate is for the server of this name: by a URI of a server, or by a DNS
        name.

        One certificate serves several replicas if it has the name of each as a DNS name. A client's
        certificate is for no server.
        """
        if self.is_of_client:
            return False
        return name in self.dns or any(each[2] == name for each in self._principals())

    @property
    def is_of_client(self) -> bool:
        """Whether the certificate has a client's principal."""
        return any(each[1] not in SERVERS for each in self._principals())

    @property
    def is_of_server(self) -> bool:
        """Whether the certificate has a server's principal, and no client's."""
        return bool(self._principals()) and not self.is_of_client

    @property
    def is_of_nobody(self) -> bool:
        """True if the peer showed a certificate without a principal, such as a certificate of
        another authority.
        """
        return not self._principals() and self != CertificateNames()

    def _principals(self) -> list[re.Match[str]]:
        return [found for uri in self.uris if (found := _SPIFFE.fullmatch(uri)) is not None]


class RpcPeer(NamedTuple):
    """The peer of a connection to a gRPC server: its address, the names in its certificate, and
    whether it uses TLS.
    """

    address: str
    names: CertificateNames
    is_encrypted: bool = False


RpcPeers = dict[str, RpcPeer]
"""By the last part of gRPC's name of the peer."""


UNIX_PEER: Final = "unix"
"""The address of a peer at a socket in the file system."""


def peer_address(peer: str, peers: RpcPeers) -> str:
    """Convert gRPC's name of a peer to the data port's form of an address: HOST:PORT, or `unix`."""
    found = peers.get(peer.rpartition("/")[2])
    if found is not None:
        return found.address
    return unquote(peer.partition(":")[2]) if peer.startswith(("ipv4:", "ipv6:")) else UNIX_PEER


@dataclass(frozen=True, slots=True)
class PrincipalRule:
    """How a certificate becomes a principal. An invalid name gives None: the peer is anonymous."""

    field: PrincipalField = PrincipalField.URI

    def principal(self, names: CertificateNames) -> Principal | None:
        try:
            return self._principal(names)
        except InvalidName:
            return None

    def _principal(self, names: CertificateNames) -> Principal | None:
        found = [each for uri in names.uris if (each := _SPIFFE.fullmatch(uri)) is not None]
        if found and (self.field is PrincipalField.URI or found[0][1] in SERVERS):
            return Principal(found[0][1], check_name("principal", found[0][2]))
        if self.field is PrincipalField.DNS and names.dns:
            return Principal("app", check_name("principal", names.dns[0]))
        if self.field is PrincipalField.EMAIL and names.emails:
            return Principal("op", check_name("principal", names.emails[0].partition("@")[0]))
        if self.field is PrincipalField.COMMON_NAME and names.common_name:
            return Principal("app", check_name("principal", names.common_name))
        return None


TokenSource = Callable[[], str]
"""The source of the token that a process shows to servers: returns the current one.
Raises InvalidArgument.
"""


def no_token() -> str:
    """The token of a process that has none: empty."""
    return ""
