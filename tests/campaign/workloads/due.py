"""For workloads of delayed messages. No workload itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from history.events import Operation

import qmq
from campaign.checkers.delayed import Arrive, Cancel
from campaign.client import Job
from campaign.programs import LEASE_MS, ask, body_of, queue_of
from campaign.workloads.handling import RETRY_S
from qmq.errors import QmqError

USES: Final = frozenset({"brokers", "etcds", "metas", "clients", "delays"})
DELAYS: Final = (
    *("none", "kill-master", "kill-all", "kill-delay-master", "stop-delay-master"),
    *("clock-forward-delay-master", "clock-back-delay-master"),
)
"""Faults that delay groups notice."""


def time_of(ms: int) -> datetime:
    """A moment for the client."""
    return datetime.fromtimestamp(ms / 1000, UTC)


async def send_for(
    job: Job, operation: Operation, value: int, at_ms: int, **options: Any
) -> str | None:
    """Send a message that is due then. Returns its id among the delayed ones, if it was
    acknowledged.
    """
    _, receipt = await ask(
        job,
        operation,
        lambda: job.client.send(
            job.subject, body_of(value), at=time_of(at_ms), acks=job.acks, **options
        ),
    )
    return receipt.delayed_id if receipt is not None else None


async def cancel(job: Job, value: int, delayed_id: str) -> None:
    """Cancel a message: it fails for certain if that is too late."""
    operation = Cancel(process=job.name, type="invoke", value=value, op=value)
    await ask(job, operation, lambda: job.client.delayed.cancel(delayed_id))


async def note_all(
    job: Job,
    group: str,
    event_of: Callable[[qmq.Message], Operation],
    client: qmq.Client | None = None,
) -> None:
    """Read as one of a group's consumers, and write down what comes, without end."""
    async with (client or job.client).consumer(
        job.subject, group, name=job.name, lease_ms=LEASE_MS
    ) as consumer:
        while True:
            with suppress(QmqError):
                async for message in consumer:
                    job.recorder.record(event_of(message))
            await asyncio.sleep(RETRY_S)


async def read_due(job: Job, group: str) -> None:
    """Read as one of a group's consumers what delay groups delivered, until SIGTERM."""

    def arrival(message: qmq.Message) -> Operation:
        return Arrive(
            process=job.name,
            type="ok",
            value=int(message.body),
            queue=queue_of(job.subject, message.broker_group),
            sequence=message.sequence,
            stored_ms=message.append_time_ms,
        )

    await job.until_stopped(note_all(job, group, arrival))
