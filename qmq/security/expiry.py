"""When a process's own certificate ends: a figure, and a warning a day in the last week. Needs `cryptography`, which servers have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq.metrics.figures import GAUGE, Figure, Reading, one
from qmq.security.authority import ends_at
from qmq.security.tls import Credentials

log = logging.getLogger("qmq.security")

WARNING: Final = timedelta(days=7)
AGAIN: Final = timedelta(days=1)
EXPIRES: Final = Figure("qmq_certificate_expires_seconds", GAUGE, (), "Until the process's own certificate ends; negative: since it did.")


def now() -> datetime:
    """The machine's wall clock: certificates go by it, whatever the process keeps for a time."""
    return datetime.now(UTC)


class ExpirySource:
    """Shows nothing for a process without a certificate."""

    figures: Final = (EXPIRES,)

    def __init__(self, credentials: Credentials | None, now: Callable[[], datetime] = now) -> None:
        self._credentials, self._now = credentials, now

    def read(self) -> Iterator[Reading | None]:
        if self._credentials is not None and self._credentials.pem.cert is not None:
            yield one(EXPIRES, (ends_at(self._credentials.pem.cert) - self._now()).total_seconds())


class ExpiryWarning:
    """Says so in the log, once a day."""

    def __init__(self, credentials: Credentials, now: Callable[[], datetime] = now) -> None:
        self._credentials, self._now = credentials, now
        self._said: datetime | None = None

    def look(self) -> None:
        """Called every now and then."""
        pem, now = self._credentials.pem, self._now()
        if pem.cert is None or (self._said is not None and now - self._said < AGAIN):
            return
        end = ends_at(pem.cert)
        if end - now < WARNING:
            self._said = now
            log.warning("%s ends at %s: replace it and its key; no restart is needed", self._credentials.files.cert, end.isoformat())
