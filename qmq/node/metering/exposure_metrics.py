"""Metrics of security: whether unauthenticated clients can reach the server, and when its certificate expires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.metrics.figures import GAUGE, Figure, Reading, one
from qmq.node.etcd_options import EtcdOptions
from qmq.node.exposure import weaknesses
from qmq.security.expiry import left_s, now
from qmq.security.tls import Credentials

INSECURE: Final = Figure(
    "qmq_insecure", GAUGE, (), "1 if strangers may reach this process or etcd's password, which only --insecure allows."
)

EXPIRES: Final = Figure(
    "qmq_certificate_expires_seconds", GAUGE, (), "Seconds until the process's TLS certificate expires; negative after that."
)


class ExposureSource:
    figures: Final = (INSECURE, EXPIRES)

    def __init__(self, host: str, etcd: EtcdOptions | None = None, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._is_insecure = bool(weaknesses(host, etcd, None if credentials is None else credentials.files))

    def read(self) -> Iterator[Reading | None]:
        yield one(INSECURE, int(self._is_insecure))
        left = None if self._credentials is None else left_s(self._credentials, now())
        if left is not None:
            yield one(EXPIRES, left)
