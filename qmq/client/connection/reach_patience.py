"""How long a client waits for servers that it cannot reach because of a mistake. Pure; `now_s` is a monotonic clock.

Two failures to connect look like mistakes: a name has no address (NameUnresolved), or TLS fails (TlsFailed: one side does not trust the
other's certificate, or only one side speaks TLS). Either may also last a moment only, while DNS is away or certificates are being replaced.
So they are a mistake if nothing else has happened at an address for `patience_s`, and if the client never reached a server: then the client
says so, and no longer waits. In every other case it waits, and logs once for each address why: for a server that it reached before, and for
one that ends connections without a reason, as one does that refuses this client's certificate, but also one that is away.

    tries(a)   NameUnresolved   tries(a)   NameUnresolved ──▶ judged: UnknownHost
    0 s                         3 s
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from qmq.errors import NameUnresolved, NeverReached, NotConnected, QmqError, TlsFailed, TlsRefused, UnknownHost

log = logging.getLogger("qmq.client")

_LASTING: Final[dict[type[QmqError], type[NeverReached]]] = {NameUnresolved: UnknownHost, TlsFailed: TlsRefused}
"""What a failure that looks like a mistake becomes in the end."""


class ReachPatience:
    """For all servers of one kind to which a client connects."""

    def __init__(self, now_s: Callable[[], float], patience_s: float) -> None:
        self._now_s, self._patience_s = now_s, patience_s
        self._failing_s: dict[str, float] = {}
        """Since when each address is tried that does not answer."""
        self._mistaken_s: dict[str, float] = {}
        """Since when that has looked like a mistake."""
        self._has_reached = False
        self._told: set[str] = set()

    def tries(self, address: str) -> None:
        """The client connects to the address."""
        for since_s in (self._failing_s, self._mistaken_s):
            since_s.setdefault(address, self._now_s())

    def reached(self, address: str) -> None:
        """The server at the address has answered."""
        self._has_reached = True
        self._told.discard(address)
        for since_s in (self._failing_s, self._mistaken_s):
            since_s.pop(address, None)

    def failed(self, address: str, failure: BaseException) -> None:
        """A try has failed. If that does not look like a mistake, the patience with mistakes begins again."""
        if type(failure) not in _LASTING:
            self._mistaken_s.pop(address, None)

    def judged(self, failure: QmqError, addresses: Collection[str]) -> QmqError:
        """The error to raise for a failure, now that none of these addresses can be reached."""
        lasting = _LASTING.get(type(failure))
        if lasting is not None and not self._has_reached and self._is_over(self._mistaken_s, addresses):
            return lasting(failure.message)
        if isinstance(failure, NotConnected | TlsFailed) and self._is_over(self._failing_s, addresses):
            self._log(failure, addresses)
        return failure

    def _log(self, failure: QmqError, addresses: Collection[str]) -> None:
        if not self._told.issuperset(addresses):
            self._told.update(addresses)
            log.warning("waiting, since %s", failure.message)

    def _is_over(self, since_s: Mapping[str, float], addresses: Collection[str]) -> bool:
        begun_s = [since_s.get(each) for each in addresses]
        return all(each is not None and self._now_s() - each >= self._patience_s for each in begun_s)
