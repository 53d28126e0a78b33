"""Refuses to expose a server: without mutual TLS it listens on its own machine only, unless the operator insists.

loopback, unix:/path       allowed
any other address          allowed with TLS that requires certificates of clients; otherwise refused without --insecure
                           (QMQ_INSECURE=1): any client that reaches a port may read, change and delete everything
the metrics port           the same: metrics contain names of subjects and groups
etcd's password over http  the same, because any machine on the network path can read it

docs/SECURITY.md says what is protected and what is not.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from qmq_coordination.etcd.endpoints import parse_endpoint

from qmq.errors import InvalidArgument
from qmq.network import host_of, is_local
from qmq.node.etcd_options import EtcdOptions
from qmq.security.tls import Tls

log = logging.getLogger("qmq.node")

EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - addresses to listen on, not to connect to


class Weakness(NamedTuple):
    """A way in which unauthenticated clients can reach a port or a password, and the protection against it."""

    what: str
    remedy: str


def _is_guarded(host: str, tls: Tls | None) -> bool:
    """True if only this machine, or only clients with a certificate, can reach a port on this host."""
    return is_local(host) or (tls is not None and tls.requires_clients)


def require_reachable(host: str, advertise: str) -> None:
    """Raise InvalidArgument if clients of a server that listens on `host` are told an address to which nobody can connect."""
    if not advertise and host in EVERYWHERE:
        raise InvalidArgument(
            f"clients cannot connect to {host}, on which this server listens: --advertise HOST (QMQ_ADVERTISE) is the name or address "
            "by which they reach it, for example the container's name for other containers, or localhost with published ports"
        )


def weaknesses(host: str, etcd: EtcdOptions | None = None, tls: Tls | None = None) -> list[Weakness]:
    """The weaknesses of a server that listens on `host` and gives its password to `etcd`. Raises InvalidArgument for
    a malformed endpoint.
    """
    found = []
    if not _is_guarded(host, tls):
        what = f"there is no access control: everybody who reaches {host} may read, change and delete everything"
        remedy = "--tls-ca, --tls-cert and --tls-key let in only who has a certificate; --host 127.0.0.1 or --host unix:/path"
        found.append(Weakness(what, f"{remedy} serves this machine only"))
    if etcd is not None and etcd.password is not None:
        has_tls_files = any((etcd.ca, etcd.cert, etcd.key))
        endpoints = [parse_endpoint(text, has_tls_files=has_tls_files) for text in etcd.endpoints]
        plain = [each.address for each in endpoints if not each.is_tls and not is_local(host_of(each.address))]
        if plain:
            what = f"etcd's password would go to {', '.join(plain)} in clear text"
            found.append(Weakness(what, "https:// endpoints, or --etcd-ca, keep it secret"))
    return found


def require_guarded(
    host: str, is_insecure: bool, etcd: EtcdOptions | None = None, tls: Tls | None = None, *, metrics_host: str = ""
) -> None:
    """Raise InvalidArgument if there are weaknesses. With `is_insecure` they are only logged as warnings."""
    found = weaknesses(host, etcd, tls)
    if metrics_host and not _is_guarded(metrics_host, tls):
        what = f"everybody who reaches {metrics_host} may read the metrics, which have the names of subjects and groups"
        remedy = "Certificates that are required of clients (--tls-ca, --tls-cert, --tls-key) close the metrics to all others"
        found.append(Weakness(what, f"{remedy}; without --metrics-host this machine alone may read them"))
    for what, remedy in found:
        if not is_insecure:
            raise InvalidArgument(f"{what}. {remedy}; --insecure (QMQ_INSECURE=1) allows it on a private network (docs/SECURITY.md)")
        log.warning("insecure: %s; allow only a private network to reach this process (docs/SECURITY.md)", what)
