"""tiered: a reader begins again and again at the oldest message, which only an object store has.

The store is a folder of the test. Segments are small, and files of all but the newest few are
deleted as soon as the store has them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from history.events import Operation

import qmq
from campaign.checkers.messages import all_seen
from campaign.checkers.reset import Rewind, all_again
from campaign.checkers.tiered import Garbled, TieredSegments
from campaign.client import Job
from campaign.programs import LEASE_MS, now_ms, queue_of, send_batches
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, RETRY_S, finish, reset, take, until_stopped

GROUP: Final = "historian"
PAUSE_S: Final = 0.1
MOST: Final = 200
PASS_S: Final = 6.0
LOOK_S: Final = 1.0
REPEATED: Final = 30


def _body(value: int) -> bytes:
    """About 2 KiB that follow from the value, and that `int` reads."""
    marks = f"{value:064b}".translate({ord("0"): " ", ord("1"): "\t"})
    return f"{value}{marks * REPEATED}".encode()


class Historian:
    """Reads everything, and begins again when something new has come since it began."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last = self._begun_at = 0
        """The highest sequence that was read, and that at the last beginning."""

    async def work(self) -> None:
        """One consumer's life."""
        if self._last > self._begun_at:
            await self._begin()
        job = self._job
        until_s = time.monotonic() + PASS_S
        async with job.client.consumer(
            job.subject, GROUP, name=job.name, ack="explicit", lease_ms=LEASE_MS
        ) as consumer:
            while time.monotonic() < until_s:
                found = await take(job, GROUP, consumer, MOST)
                for message in found:
                    self._look_at(message)
                await finish(job, GROUP, found)

    def _look_at(self, message: qmq.Message) -> None:
        job, value = self._job, int(message.body)
        self._last = max(self._last, message.sequence)
        if message.body != _body(value):
            job.recorder.record(
                Garbled(
                    process=job.name,
                    type="info",
                    value=value,
                    queue=queue_of(job.subject, message.broker_group),
                    sequence=message.sequence,
                )
            )

    async def _begin(self) -> None:
        job = self._job
        last = self._last
        rewind = Rewind(
            process=job.name, type="invoke", group=GROUP, to="earliest", now_ms=now_ms()
        )
        if await reset(job, rewind, GROUP, to="earliest"):
            self._begun_at = last
        else:
            await asyncio.sleep(RETRY_S)


async def _read(job: Job) -> None:
    await until_stopped(job, Historian(job).work)


async def _watch(job: Job) -> None:
    """Count segments that a replica knows by their index alone."""

    async def watch() -> None:
        while True:
            stored = list((job.folder / "cluster").glob("**/message/*.stored"))
            files = {path.parent / path.stem for path in stored}
            kept = {
                path.parent / path.stem
                for folder in {path.parent for path in stored}
                for path in folder.iterdir()
                if path.suffix != ".stored"
            }
            if files - kept:
                count = len(files - kept)
                job.recorder.record(TieredSegments(process=job.name, type="ok", segments=count))
            await asyncio.sleep(LOOK_S)

    await until_stopped(job, watch)


def _is_drained(events: Sequence[Operation]) -> bool:
    return all_seen((GROUP,))(events) and all_again(events)


WORKLOADS = (
    Workload(
        name="tiered",
        what="a reader begins again and again at messages that are only in an object store",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="reader", count=1),
            Role(name="watcher", count=1),
        ),
        programs={
            "producer": partial(send_batches, pause_s=PAUSE_S, body=_body),
            "reader": _read,
            "watcher": _watch,
        },
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
            "reset_gives_all",
            "tiered_same",
        ),
        groups=(GROUP,),
        gates={"send": 50, "poll": 50, "ack": 50, "rewind": 2, "tiered": 2},
        is_drained=_is_drained,
        settings={
            "QMQ_OBJECT_STORE": "file://{folder}/objects",
            "QMQ_SEGMENT_MIB": "1",
            "QMQ_LOCAL_RETENTION_MIB": "2",
            "QMQ_OBJECT_STORE_CACHE_MIB": "128",
        },
        only=FEW,
    ),
)
