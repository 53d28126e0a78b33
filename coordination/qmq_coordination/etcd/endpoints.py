"""etcd's endpoints: parses addresses, and chooses the endpoint for calls. Pure.

    "etcd-0:2379", "http://127.0.0.1:2379"     plain text
    "https://etcd-0:2379"                      TLS

All calls use the current endpoint. When calls fail there, the next endpoint becomes current. Each failed call names its endpoint, and only
the current one can be left: several calls that fail together therefore switch the endpoint once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qmq.errors import InvalidArgument
from qmq.text_numbers import PORT_MAX, whole_number


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Paths of PEM files. `ca` None trusts the system's roots; `cert` and `key` are the client's own."""

    ca: Path | None
    cert: Path | None
    key: Path | None


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """Where a member listens, `HOST:PORT`."""

    address: str
    is_tls: bool


def parse_endpoint(text: str, *, has_tls_files: bool) -> EtcdEndpoint:
    """Parse an endpoint. It uses TLS if it says https, or if it has no scheme and TLS files are given. Raises InvalidArgument."""
    scheme, separator, rest = text.strip().rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or whole_number(port, PORT_MAX, 1) is None or (separator and scheme not in ("http", "https")):
        raise InvalidArgument(f"etcd endpoint {text!r} is not HOST:PORT, http://HOST:PORT or https://HOST:PORT")
    if scheme == "http" and has_tls_files:
        raise InvalidArgument(f"etcd endpoint {text!r} is plain text, but certificates are given: write https:// or leave them out")
    return EtcdEndpoint(f"{host}:{port}", scheme == "https" or has_tls_files)


class Rotation:
    """The endpoint in use."""

    def __init__(self, endpoints: Sequence[EtcdEndpoint]) -> None:
        """Begin with the first endpoint. Raises InvalidArgument if there is none."""
        if not endpoints:
            raise InvalidArgument("no etcd endpoint is given")
        self.endpoints = tuple(dict.fromkeys(endpoints))
        self._at = 0

    def current(self) -> EtcdEndpoint:
        """The endpoint for the next call."""
        return self.endpoints[self._at]

    def leave(self, failed: EtcdEndpoint) -> None:
        """Switch to the next endpoint, if `failed` is still the current one."""
        if failed == self.current():
            self._at = (self._at + 1) % len(self.endpoints)

    def __str__(self) -> str:
        return ", ".join(each.address for each in self.endpoints)
