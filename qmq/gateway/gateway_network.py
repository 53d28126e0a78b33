"""TLS at the gateway's port."""

from __future__ import annotations

from pathlib import Path

from qmq.network import Network
from qmq.security.expiry import ExpiryWarning
from qmq.security.tls import Credentials, Tls
from qmq.security.tls_network import TlsNetwork


def tls_of(cert: Path, key: Path) -> Network:
    """A network whose ports use the certificate. Raises InvalidArgument for unusable files."""
    # Clients show no certificates, so any certificate can serve as their authority: here it is the gateway's own.
    files = Credentials(Tls(cert, cert, key, requires_clients=False))
    return TlsNetwork(files, ExpiryWarning(files).look)


def tls_with_own_authority(folder: Path, host: str) -> Network | None:
    """The same with a new certificate, signed by an authority in the folder (`ca.pem`). None without `cryptography`."""
    try:
        from qmq.security.authority import create_authority, has_authority, issue
    except ImportError:
        return None
    if not has_authority(folder):
        create_authority(folder)
    made = issue(folder, "gateway", "node", sorted({host, "localhost", "127.0.0.1"}))
    return tls_of(made.cert, made.key)
