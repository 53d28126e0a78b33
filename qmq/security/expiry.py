"""The expiry of a process's own certificate: a metric, and a daily warning in the last week. Needs `cryptography`, which servers have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq.security.tls import Credentials

log = logging.getLogger("qmq.security")

WARNING: Final = timedelta(days=7)
AGAIN: Final = timedelta(days=1)


def _end(cert: bytes) -> datetime:
    from qmq.security.certificates import ends_at  # `cryptography` takes 40 ms to import: do it only with TLS

    return ends_at(cert)


def now() -> datetime:
    """The machine's wall clock. A certificate's expiry depends on this clock, even if the process uses another one."""
    return datetime.now(UTC)


def left_s(credentials: Credentials, now: datetime) -> float | None:
    """Seconds until the process's own certificate ends; None without one."""
    cert = credentials.pem.cert
    return None if cert is None else (_end(cert) - now).total_seconds()


class ExpiryWarning:
    """Logs a warning, once a day."""

    def __init__(self, credentials: Credentials, now: Callable[[], datetime] = now) -> None:
        self._credentials, self._now = credentials, now
        self._said: datetime | None = None

    def look(self) -> None:
        """Log the warning if it is due. Callers call this regularly."""
        pem, now = self._credentials.pem, self._now()
        if pem.cert is None or (self._said is not None and now - self._said < AGAIN):
            return
        end = _end(pem.cert)
        if end - now < WARNING:
            self._said = now
            log.warning("%s ends at %s: replace it and its key; no restart is needed", self._credentials.files.cert, end.isoformat())
