"""The options by which every role reaches its etcd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qmq_coordination.etcd.etcd_calls import TOTAL_S
from qmq_coordination.etcd.etcd_store import EtcdStore


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Endpoints are HOST:PORT or URLs; `ca`, `cert` and `key` are PEM files."""

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def open(self, *, total_s: float = TOTAL_S) -> EtcdStore:
        """Open a store on this etcd. The store connects at its first use. A call fails after `total_s`. Raises InvalidArgument."""
        return EtcdStore(self.endpoints, user=self.user, password=self.password, ca=self.ca, cert=self.cert, key=self.key, total_s=total_s)
