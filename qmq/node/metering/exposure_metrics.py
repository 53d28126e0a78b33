"""Whether strangers could reach what they must not: what --insecure allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.metrics.figures import GAUGE, Figure, Reading, one
from qmq.node.etcd_options import EtcdOptions
from qmq.node.exposure import weaknesses
from qmq.security.tls import Tls

INSECURE: Final = Figure("qmq_insecure", GAUGE, (), "1 if strangers may reach it, or etcd's password: what --insecure allows.")


class ExposureSource:
    figures: Final = (INSECURE,)

    def __init__(self, host: str, etcd: EtcdOptions | None = None, tls: Tls | None = None) -> None:
        self._is_insecure = bool(weaknesses(host, etcd, tls))

    def read(self) -> Iterator[Reading | None]:
        yield one(INSECURE, int(self._is_insecure))
