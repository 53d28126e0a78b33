"""Sending from Django: through the outbox with a database transaction, or immediately; by
`settings.QMQ` of the project, which has the server and the options of outbox and client.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

import qmq
import qmq.blocking
from qmq.blocking import BlockingClient
from qmq.errors import InvalidArgument

KEYS = {"SERVER", "OUTBOX", "OPTIONS"}


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """`server` is as in `qmq.connect`, `options` are its other options. With `has_outbox`, `send`
    commits with the transaction.
    """

    server: str | None = None
    has_outbox: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls) -> SiteSettings:
        """The project's settings. Raises InvalidArgument."""
        given = getattr(settings, "QMQ", {})
        if not isinstance(given, dict) or set(given) - KEYS:
            raise InvalidArgument(
                f"settings.QMQ is a dict with some of {', '.join(sorted(KEYS))}, not {given!r}"
            )
        return cls(given.get("SERVER"), bool(given.get("OUTBOX", True)), given.get("OPTIONS", {}))


_lock = threading.Lock()
_clients: dict[int, BlockingClient] = {}
"""The clients by process. A forked child inherits its parent's client without the client's thread,
and does not use it.
"""


def client() -> BlockingClient:
    """This process's client, which connects when it is first used. Any thread may call.
    Raises InvalidArgument.
    """
    with _lock:
        found = _clients.get(os.getpid())
        if found is None:
            site = SiteSettings.read()
            found = _clients[os.getpid()] = qmq.blocking.connect(site.server, **site.options)
            atexit.register(close)
        return found


def close() -> None:
    """Disconnect this process. `client` connects again."""
    with _lock:
        found = _clients.pop(os.getpid(), None)
    if found is not None:
        found.close()


def send(subject: str, body: Any, *, using: str = DEFAULT_DB_ALIAS, **options: Any) -> None:
    """Send a message with the current transaction of the database `using`: if it commits, the
    message is sent immediately, and by a watchdog if that fails; if it is rolled back, or the
    savepoint is, nothing is sent. Outside of `atomic()` the message has its own transaction.

    With `"OUTBOX": False` in `settings.QMQ`, returns when the message is stored. `options` are
    those of `Client.send`, for the outbox those of `Outbox.send`. Raises as these.
    """
    if not SiteSettings.read().has_outbox:
        client().send(subject, body, **options)
        return
    with transaction.atomic(using=using):
        with client().outbox(connections[using].connection) as box:
            box.send(subject, qmq.payload.encode(body), **options)
        transaction.on_commit(box.committed, using=using, robust=True)
