"""Sending from Django: through the outbox with a database transaction, or immediately."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction

import qmq
import qmq.blocking
from qmq.blocking import BlockingClient
from qmq.integrations.django.site_settings import SiteSettings

_lock = threading.Lock()
_clients: dict[int, BlockingClient] = {}
"""The clients by process. A forked child inherits its parent's client without the client's thread, and does not use it."""


def client() -> BlockingClient:
    """This process's client, which connects when it is first used. Any thread may call. Raises InvalidArgument."""
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
    """Send a message with the current transaction of the database `using`: if it commits, the message is sent immediately, and by a
    watchdog if that fails; if it is rolled back, or the savepoint is, nothing is sent. Outside of `atomic()` the message has its own
    transaction.

    With `"OUTBOX": False` in `settings.QMQ`, returns when the message is stored. `options` are those of `Client.send`, for the outbox those
    of `Outbox.send`. Raises as these.
    """
    if not SiteSettings.read().has_outbox:
        client().send(subject, body, **options)
        return
    with transaction.atomic(using=using):
        with client().outbox(connections[using].connection) as box:
            box.send(subject, qmq.payload.encode(body), **options)
        transaction.on_commit(box.committed, using=using, robust=True)
