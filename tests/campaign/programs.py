"""Programs that several workloads share: a sender of numbered batches, and a reader that
acknowledges. Values are unique integers, and a message's body is its value, or begins with it.

The error of a send decides its line: not stored is `fail`, unknown is `info`, never the other way
round.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

from history.events import Ack, Operation, Poll, Record, Recorder, Send, Type

import qmq
from campaign.client import Job
from qmq.errors import Outcome, QmqError, StaleDelivery

BATCH: Final = 10
PAUSE_S: Final = 0.04
LEASE_MS: Final = 5_000
TIMEOUT_S: Final = 60.0
T = TypeVar("T")


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


async def ask(
    job: Job,
    operation: Operation,
    act: Callable[[], Awaitable[T]],
    *,
    known: Callable[[], Mapping[str, Any]] = dict,
) -> tuple[Type, T | None]:
    """Ask for something, and write down that and the outcome, with what is `known` at its end.
    Returns both.
    """
    begun = job.recorder.record(operation)
    try:
        found = await act()
    except QmqError as failure:
        end = end_of(failure)
        job.recorder.record(begun.ended(end))
        return end, None
    job.recorder.record(begun.ended("ok", **known()))
    return "ok", found


def body_of(value: int) -> bytes:
    """A message that is its value alone."""
    return b"%d" % value


async def send_batches(
    job: Job,
    *,
    batch: int = BATCH,
    pause_s: float = PAUSE_S,
    body: Callable[[int], bytes] = body_of,
) -> None:
    """Batches of one producer, one after another, until SIGTERM."""
    values = itertools.count(job.first_value)
    async with job.client.producer(
        job.subject, delivery_timeout_s=TIMEOUT_S, acks=job.acks
    ) as producer:
        while True:
            await send(job, producer, tuple(itertools.islice(values, batch)), body=body)
            if not await job.pause(pause_s * job.random.uniform(0.5, 1.5)):
                return


async def send(
    job: Job,
    producer: qmq.Producer,
    values: tuple[int, ...],
    *,
    body: Callable[[int], bytes] = body_of,
) -> None:
    """One batch and its outcome."""
    begun = job.recorder.record(
        Send(process=job.name, type="invoke", subject=job.subject, values=values)
    )
    try:
        receipts = await producer.send_many([body(value) for value in values])
    except QmqError as failure:
        job.recorder.record(begun.ended(end_of(failure)))
        return
    at = 0
    for batch in receipts.batches:
        part = values[at : at + batch.count]
        at += batch.count
        job.recorder.record(
            begun.ended(
                "ok",
                values=part,
                queue=queue_of(job.subject, batch.broker_group),
                sequence=batch.base_sequence,
            )
        )


def end_of(failure: QmqError) -> Type:
    """An error as the end of an operation."""
    return "fail" if failure.outcome is Outcome.NOT_STORED else "info"


def queue_of(subject: str, broker_group: str) -> str:
    """The name of a queue in histories."""
    return f"{subject}/0@{broker_group}"


async def read(job: Job, group: str, *, most: int = 500) -> None:
    """Pull and acknowledge as a consumer of a group, without end."""
    async with job.client.consumer(
        job.subject, group, name=job.name, ack="explicit", lease_ms=LEASE_MS
    ) as consumer:
        while True:
            with suppress(QmqError):
                await poll(job, group, consumer, most)


async def consume(job: Job, *, groups: Sequence[str], most: int = 500) -> None:
    """Read as a consumer of one of the groups, by the number of the process, until SIGTERM."""
    await job.until_stopped(read(job, groups[job.number % len(groups)], most=most))


async def poll(job: Job, group: str, consumer: qmq.Consumer, most: int) -> None:
    """One pull, and the acknowledgement of what it brought."""
    begun = job.recorder.record(Poll(process=job.name, type="invoke", group=group))
    found = await consumer.pull(most, timedelta(seconds=1))
    by_queue: defaultdict[str, list[Record]] = defaultdict(list)
    for message in found:
        by_queue[queue_of(job.subject, message.broker_group)].append(
            Record(message.sequence, int(message.body), message.attempt)
        )
    if not by_queue:
        job.recorder.record(begun.ended("ok"))
        return
    for number, (queue, records) in enumerate(by_queue.items()):
        if number:
            begun = job.recorder.record(Poll(process=job.name, type="invoke", group=group))
        job.recorder.record(begun.ended("ok", queue=queue, records=tuple(records)))
    await acknowledge(job.recorder, job.name, group, found, by_queue)


async def acknowledge(
    recorder: Recorder,
    name: str,
    group: str,
    found: qmq.Messages,
    by_queue: dict[str, list[Record]],
) -> None:
    """One acknowledgement of all, and its outcome, with a line for each queue."""
    begun = [
        recorder.record(
            Ack(
                process=name,
                type="invoke",
                group=group,
                queue=queue,
                op=number,
                values=tuple(each.value for each in records),
            )
        )
        for number, (queue, records) in enumerate(by_queue.items())
    ]
    end: Type
    try:
        await found.ack_sync()
        end = "ok"
    except StaleDelivery:
        end = "fail"
    except QmqError:
        end = "info"
    for each in begun:
        recorder.record(each.ended(end))
