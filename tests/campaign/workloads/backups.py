"""backups: a cluster under load is backed up again and again, and each backup restored beside it.

The restored cluster has one replica, and runs beside the client that restored it.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from history.events import Record
from support.etcd_process import EtcdFailed, EtcdProcess, free_ports

import qmq
from campaign.checkers.backups import AUDITOR, READER, BackupMade, RestoredRead
from campaign.checkers.messages import all_seen
from campaign.client import Job
from campaign.programs import LEASE_MS, consume, queue_of, send_batches
from campaign.values import Role, Workload
from campaign.workloads.children import beside, done
from campaign.workloads.handling import FEW
from qmq.errors import QmqError

PLACE: Final = "backups"
BATCH: Final = 5
PAUSE_S: Final = 0.1
REST_S: Final = (0.5, 2.0)
START_S: Final = 60.0
PULL_S: Final = timedelta(seconds=2)
EMPTY: Final = 4
"""Empty pulls after which nothing comes any more: together longer than a lease."""


class NotRestored(Exception):
    """The commands that restore failed."""


async def _keep(job: Job) -> None:
    async def keep() -> None:
        for number in itertools.count():
            await asyncio.sleep(job.random.uniform(*REST_S))
            begun = job.recorder.record(BackupMade(process=job.name, type="invoke", op=number))
            if not await done(job, "backup", "create", str(job.folder / PLACE)):
                job.recorder.record(begun.ended("info"))
                continue
            job.recorder.record(begun.ended("ok"))
            folder = job.folder / f"restored-{job.name}-{number}"
            try:
                async with asyncio.timeout(START_S * 2), _restored(job, folder) as server:
                    for group in (AUDITOR, READER):
                        await _read_all(job, server, group, number)
            except (NotRestored, QmqError, EtcdFailed, TimeoutError):
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    await job.until_stopped(keep())


@asynccontextmanager
async def _restored(job: Job, folder: Path) -> AsyncIterator[str]:
    """The address of a cluster that was restored from the newest backup."""
    etcd = EtcdProcess(folder / "etcd")
    etcd.spawn()
    try:
        await asyncio.to_thread(etcd.wait_healthy)
        endpoint = f"127.0.0.1:{etcd.client_port}"
        data, meta_port, data_port, control_port = str(folder / "data"), *free_ports(3)
        into = ("--etcd", endpoint, "--into", f"g1/r={data}")
        if not await done(job, "backup", "restore", str(job.folder / PLACE), *into):
            raise NotRestored
        where = ("--host", "127.0.0.1", "--etcd", endpoint)
        ports = ("--data-port", str(data_port), "--control-port", str(control_port))
        group = ("--group", "g1", "--replica", "r", "--replicas", "r", "--data", data)
        async with (
            beside(job, "broker", *where, *ports, *group),
            beside(job, "meta", *where, "--port", str(meta_port)),
        ):
            yield f"127.0.0.1:{meta_port}"
    finally:
        await asyncio.to_thread(etcd.kill)


async def _read_all(job: Job, server: str, group: str, number: int) -> None:
    """Everything that a group gets until nothing more comes."""
    found: defaultdict[str, list[Record]] = defaultdict(list)
    async with (
        qmq.connect(server, state_dir=False) as mq,
        mq.consumer(
            job.subject, group, name=job.name, ack="explicit", lease_ms=LEASE_MS
        ) as consumer,
    ):
        await consumer.join()
        empty = 0
        while empty < EMPTY:
            messages = await consumer.pull(1000, PULL_S)
            empty = 0 if len(messages) else empty + 1
            for each in messages:
                queue = queue_of(job.subject, each.broker_group)
                found[queue].append(Record(each.sequence, int(each.body), each.attempt))
            if len(messages):
                await messages.ack_sync()
    for queue, records in found.items() or [(queue_of(job.subject, "g1"), [])]:
        job.recorder.record(
            RestoredRead(
                process=job.name,
                type="ok",
                op=number,
                group=group,
                queue=queue,
                records=tuple(records),
            )
        )


WORKLOADS = (
    Workload(
        name="backups",
        what="a cluster under load is backed up, and each backup restored beside it",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="reader", count=1),
            Role(name="keeper", count=1),
        ),
        programs={
            "producer": partial(send_batches, batch=BATCH, pause_s=PAUSE_S),
            "reader": partial(consume, groups=(READER,)),
            "keeper": _keep,
        },
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "backup_has_all",
            "backup_no_phantom",
            "backup_has_progress",
            "restored_continues",
        ),
        groups=(READER,),
        gates={"send": 50, "poll": 50, "ack": 50, "backup": 2, "restored": 2},
        is_drained=all_seen((READER,)),
        only=FEW,
    ),
)
