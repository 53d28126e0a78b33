"""outbox: sales and their messages in one transaction of a database, effects in another database.

Sellers roll some transactions back, and handlers fail sometimes. Watchdogs send what dead sellers
left. SQLite, since it needs no server: its files are in the test's folder.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import qmq
from campaign.checkers.outbox import Audited, BookedRow, Sale, SoldRow, all_booked
from campaign.client import Job
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, until_stopped
from qmq.errors import QmqError
from qmq.model import SubjectConfig
from qmq.sql import dedup, outbox

GROUP: Final = "books"
SHOP: Final = "shop.db"
BOOKS: Final = "books.db"
PAUSE_S: Final = 0.15
ROLLED_BACK: Final = 0.2
FAILED: Final = 0.05
GRACE: Final = timedelta(seconds=2)
LEASE: Final = timedelta(seconds=3)
HELD: Final = timedelta(seconds=5)
LOOK_S: Final = 0.3


class RolledBack(Exception):
    """The seller changes its mind within the transaction."""


@asynccontextmanager
async def _engine(job: Job, name: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{job.folder / name}")
    try:
        yield engine
    finally:
        await engine.dispose()


async def _set_up(job: Job) -> None:
    for name, table in ((SHOP, "sale"), (BOOKS, "booking")):
        async with _engine(job, name) as engine:
            async with engine.connect() as connection:
                await connection.execute(text("PRAGMA journal_mode=WAL"))
            async with engine.begin() as connection:
                await connection.execute(text(f"CREATE TABLE {table} (value BIGINT NOT NULL)"))
            create = outbox.create_tables_async if name == SHOP else dedup.create_tables_async
            await create(engine)
    await job.client.metadata.create_subject(SubjectConfig(job.subject))


async def _sell(job: Job) -> None:
    async with _engine(job, SHOP) as engine:
        for value in itertools.count(job.first_value):
            await _sell_one(job, engine, value)
            if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
                return


async def _sell_one(job: Job, engine: AsyncEngine, value: int) -> None:
    begun = job.recorder.record(Sale(process=job.name, type="invoke", value=value))
    insert = text("INSERT INTO sale (value) VALUES (:value)")
    try:
        async with job.client.outbox(engine, grace=GRACE) as box:
            await box.connection.execute(insert, {"value": value})
            box.send(job.subject, b"%d" % value)
            if job.random.random() < ROLLED_BACK:
                raise RolledBack
    except RolledBack:
        job.recorder.record(begun.ended("fail"))
    except (QmqError, SQLAlchemyError):
        job.recorder.record(begun.ended("info"))
    else:
        job.recorder.record(begun.ended("ok"))


async def _watch(job: Job) -> None:
    async with _engine(job, SHOP) as engine:

        async def watch() -> None:
            await job.client.outbox_watchdog(engine, lease=LEASE).run()

        await until_stopped(job, watch)


async def _book(job: Job) -> None:
    async with _engine(job, BOOKS) as engine:
        insert = text("INSERT INTO booking (value) VALUES (:value)")

        async def book(body: bytes, context: qmq.Context) -> None:
            await context.connection.execute(insert, {"value": int(body)})
            if job.random.random() < FAILED:
                raise qmq.Retry(after=timedelta(milliseconds=100))

        job.client.listen(
            job.subject,
            book,
            GROUP,
            name=job.name,
            idempotent=dedup.SqlDedup(engine),
            lease=HELD,
        )

        async def listen() -> None:
            async with job.client.listening(grace=HELD) as listening:
                await listening.wait()

        await until_stopped(job, listen)


async def _audit(job: Job) -> None:
    seen = {BOOKS: 0, SHOP: 0}

    async def audit() -> None:
        while True:
            for row, value in await _rows(job.folder / BOOKS, "booking", seen[BOOKS]):
                seen[BOOKS] = row
                job.recorder.record(BookedRow(process=job.name, type="ok", value=value, row=row))
            for row, value in await _rows(job.folder / SHOP, "sale", seen[SHOP]):
                seen[SHOP] = row
                job.recorder.record(SoldRow(process=job.name, type="ok", value=value, row=row))
            job.recorder.record(Audited(process=job.name, type="ok"))
            await asyncio.sleep(LOOK_S)

    await job.until_stopped(audit())


async def _rows(path: Path, table: str, after: int) -> list[tuple[int, int]]:
    """Rows that were inserted later. SQLite numbers them in the order of its transactions."""

    def read() -> list[tuple[int, int]]:
        with closing(sqlite3.connect(path, timeout=30.0)) as connection:
            found = connection.execute(
                f"SELECT rowid, value FROM {table} WHERE rowid > ? ORDER BY rowid",
                (after,),
            )
            return list(found)

    return await asyncio.to_thread(read)


WORKLOADS = (
    Workload(
        name="outbox",
        what="sales and their messages commit together; handlers book each message once",
        roles=(
            Role(name="seller", count=2, is_sender=True),
            Role(name="watchdog", count=2),
            Role(name="booker", count=2),
            Role(name="auditor", count=1),
        ),
        programs={
            "setup": _set_up,
            "seller": _sell,
            "watchdog": _watch,
            "booker": _book,
            "auditor": _audit,
        },
        checkers=("outbox_comes", "outbox_no_phantom", "effect_once"),
        groups=(GROUP,),
        gates={"sale": 30, "sold": 30, "booked": 30, "audited": 5},
        is_drained=all_booked,
        only=FEW | {"stop-client", "partition-no-answers"},
    ),
)
