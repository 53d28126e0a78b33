"""The audit log as a subject: each record is also sent as a message, for consumers and Spark.

`QMQ_AUDIT_SUBJECT=NAME` on the servers. The subject is created when the first record is sent. While
rules are enforced only servers may produce to it (`AccessControl`).

The file, or the ordinary log, is authoritative. Records wait in memory while the broker cannot be
reached; beyond `WAITING_MAX` new ones are dropped and counted, and the next message has the count.
A crash loses waiting records.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Final

from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ClusterView

from qmq.client.producing.producer import Producer, ProducerIdentity, ProducerOptions
from qmq.errors import QmqError
from qmq.meta.catalog import ClusterCatalog
from qmq.model import SubjectConfig
from qmq.node.broker_assembly import ViewLocator
from qmq.rpc.network import Network
from qmq.security.access import AccessConfig
from qmq.wire.batch_columns import Columns

log = logging.getLogger("qmq.node")

WAITING_MAX: Final = 10_000
RECORDS_MAX: Final = 1_000
"""The most records in one batch."""
PAUSE_S: Final = 1.0
"""The pause between tries."""


def audit_subject_of(
    config: AccessConfig, store: CoordinationStore, view: ClusterView, network: Network, sender: str
) -> AuditSubject | None:
    """The audit subject of a server's configuration; None if there is none."""
    return (
        AuditSubject(store, view, network, config.audit_subject, sender)
        if config.audit_subject
        else None
    )


class AuditSubject:
    """Takes records from the audit log and sends them. Call `start` in an event loop whose view
    follows the store, then `stop`.
    """

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        network: Network,
        subject: str,
        sender: str,
    ) -> None:
        self._store, self._view, self._network = store, view, network
        self._subject, self._sender = subject, sender
        self._waiting: deque[str] = deque()
        self._left_out = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, record: str) -> None:
        """Queue a record, without waiting. Raises no error."""
        if len(self._waiting) >= WAITING_MAX:
            self._left_out += 1
            return
        self._waiting.append(record)
        self._news.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and drop the waiting records."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        locator = ViewLocator(self._store, self._view, self._network)
        links = locator.links(f"qmq-audit/{self._sender}")
        try:
            producer: Producer | None = None
            while True:
                await self._news.wait()
                self._news.clear()
                try:
                    if producer is None:
                        await self._ensure_subject()
                        options = ProducerOptions(delivery_timeout_s=30.0)
                        producer = Producer(links, ProducerIdentity(), self._subject, options)
                    await self._send(producer)
                except QmqError as failure:
                    log.warning(
                        "the audit log cannot be written to subject %r, trying again: %s",
                        self._subject,
                        failure,
                    )
                    await asyncio.sleep(PAUSE_S)
                    self._news.set()
        finally:
            locator.close()
            with suppress(QmqError):
                await links.close()

    async def _ensure_subject(self) -> None:
        if self._view.subject(self._subject) is None:
            await ClusterCatalog(self._store, self._view, auto_create=True).create(
                SubjectConfig(self._subject)
            )

    async def _send(self, producer: Producer) -> None:
        """Send the waiting records. Raises QmqError, and keeps the records that were not stored."""
        while self._waiting:
            records = list(islice(self._waiting, RECORDS_MAX))
            count = len(records)
            if self._left_out:
                records.append(
                    json.dumps({"action": "audit", "result": "failed", "left out": self._left_out})
                )
            await producer.put(Columns([each.encode() for each in records]))
            for _ in range(count):
                self._waiting.popleft()
            self._left_out = 0
