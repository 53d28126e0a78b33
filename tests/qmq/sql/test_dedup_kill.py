"""A process that handles a message dies at each line of its way, on a real node and a real
database: the effect is there exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from asyncio import subprocess as processes
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from dedup_child import BEHIND, DIED, SUBJECT, Life, listen
from dedup_ways import rows
from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database, sqlite_database

import qmq
from qmq.errors import DeadlineExceeded, NotConnected
from qmq.node.dev_node import Node
from qmq.sql.dedup import create_tables

_HERE = Path(__file__).parent
AT_ONCE = 20
"""Consumers that wait for one connection at once: each of hundreds would wait for half a minute."""


class Lives:
    """Processes that start and die as the test says; at most this many at a time."""

    def __init__(self, makers: Sequence[processes.Process]) -> None:
        self._free: asyncio.Queue[processes.Process] = asyncio.Queue()
        for each in makers:
            self._free.put_nowait(each)

    async def live(self, life: Life) -> dict[str, Any]:
        maker = await self._free.get()
        assert maker.stdin is not None
        assert maker.stdout is not None
        maker.stdin.write(json.dumps(asdict(life)).encode() + b"\n")
        ended = json.loads(await maker.stdout.readline())
        self._free.put_nowait(maker)
        return dict(ended)


@asynccontextmanager
async def makers(count: int = 2) -> AsyncIterator[Lives]:
    found = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(_HERE / "dedup_child.py"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=1 << 20,
        )
        for _ in range(count)
    ]
    try:
        yield Lives(found)
    finally:
        for each in found:
            assert each.stdin is not None
            each.stdin.close()
            await each.wait()


def url_of(database: Database, way: str) -> str:
    if way != "driver":
        return database.async_url if way.startswith("async") else database.sync_url
    if database.server is None:
        return f"sqlite:{database.name}"
    if database.kind == "postgresql":
        return f"postgresql:host={database.server.folder} user=qmq dbname={database.name}"
    return f"mysql:{database.server.socket},{database.name}"


async def kill_at_lines(
    node: Node, database: Database, way: str, first: re.Pattern[str], again: re.Pattern[str]
) -> None:
    """A consumer dies at each of these places, each time in its own group; then another takes over.
    One message goes to all groups.

    `first` are groups that have not had the effect when the consumer begins, `again` those that had
    it from one that died before.
    """
    create_tables(database.connect)
    rows(database, "CREATE TABLE effect (consumers VARCHAR(64) NOT NULL)")
    rows(database, "CREATE TABLE total (effects INTEGER NOT NULL)")
    rows(database, "INSERT INTO total VALUES (0)")
    async with qmq.connect(node.address) as mq, makers() as lives:
        message = (await mq.send(SUBJECT, b"an order")).id

        async def live(group: str, die_at: int) -> dict[str, Any]:
            if group.startswith("again"):
                _have_done(database, message, group)
            return await lives.live(Life(node.address, way, url_of(database, way), group, die_at))

        groups: list[str] = []
        for kind, place_of_death in (("first", first), ("again", again)):
            seen = await live(f"{kind}-whole", 0)
            assert seen["status"] == 0
            places = [
                place for place, line in enumerate(seen["lines"], 1) if place_of_death.match(line)
            ]
            assert place_of_death.match(BEHIND)
            ended = await asyncio.gather(*[live(f"{kind}-{place}", place) for place in places])
            assert Counter(each["status"] for each in ended) == {DIED: len(places)}
            groups += [f"{kind}-{place}" for place in places]

        before = [
            row[0]
            for row in rows(database, "SELECT consumers FROM effect WHERE consumers LIKE 'first%'")
        ]
        assert 2 < len(before) < len([each for each in groups if each.startswith("first")]), (
            "some die before their commit, some after it"
        )
        await _take_over(node, database, groups)
        had = sorted([*groups, "first-whole", "again-whole"])
        assert sorted(row[0] for row in rows(database, "SELECT consumers FROM effect")) == had
        assert rows(database, "SELECT effects FROM total")[0][0] == len(had)


def _have_done(database: Database, message: qmq.MessageId, group: str) -> None:
    """Leave what a consumer leaves that dies after its commit."""
    rows(
        database,
        (
            f"INSERT INTO qmq_dedup VALUES ('{group}', '{SUBJECT}', '{message}', 'an earlier "
            f"one', {time.time_ns() // 1_000_000})"
        ),
    )
    rows(database, f"INSERT INTO effect VALUES ('{group}')")
    rows(database, "UPDATE total SET effects = effects + 1")


async def _take_over(node: Node, database: Database, groups: Sequence[str]) -> None:
    """Good consumers handle what the dead ones held, until all is acknowledged. A few at a time,
    because they share one connection.
    """
    engine = create_async_engine(database.async_url, pool_size=1, max_overflow=0)
    for at in range(0, len(groups), AT_ONCE):
        async with qmq.connect(node.address) as mq:
            for group in groups[at : at + AT_ONCE]:
                listen(mq, "async-engine", engine, group)
            async with mq.listening():
                await _all_acknowledged(mq, groups[at : at + AT_ONCE])
    await engine.dispose()


async def _all_acknowledged(mq: qmq.Client, groups: Sequence[str]) -> None:
    left = set(groups)
    async with asyncio.timeout(60):
        while left:
            # A broker or a machine under load may be too late with its figures.
            with contextlib.suppress(NotConnected, DeadlineExceeded):
                for each in await mq.metadata.describe_groups(SUBJECT):
                    if not each.waiting and not each.unacked and not each.requeued:
                        left.discard(each.group)
            await asyncio.sleep(0.05)


_EVERY = re.compile(
    "(?!dedup_transactions.py:(__init__|_connection_of)|connection.py:(__init__|finish|settle))"
)
"""Every line except those that only look something up."""
_ON_THE_WHOLE = re.compile(
    f"dedup.py|dedup_records.py|dedup_handlers.py|message_handling.py|{BEHIND}"
)
"""Every line except those that only call SQLAlchemy or a driver."""
_AGAIN = re.compile(f"dedup.py:once|dedup_records.py|{BEHIND}")
_AROUND = re.compile(
    f"dedup.py:once|dedup_transactions.py:commit|dedup_handlers.py|message_handling.py:(conclude|settle)|{BEHIND}"
)


@pytest.mark.longest
@pytest.mark.parametrize(
    ("way", "first", "again"),
    [("async-engine", _EVERY, _AGAIN), ("driver", _ON_THE_WHOLE, _AROUND)],
    ids=["in-the-loop", "in-a-thread"],
)
async def test_a_consumer_that_dies_at_any_line_neither_skips_nor_repeats_an_effect(
    node: Node, tmp_path: Path, way: str, first: re.Pattern[str], again: re.Pattern[str]
) -> None:
    await kill_at_lines(node, sqlite_database(tmp_path / "business.sqlite"), way, first, again)


@pytest.mark.longest
@pytest.mark.parametrize(
    ("database", "way"),
    [("postgresql", "async-session"), ("mariadb", "session")],
    indirect=["database"],
)
async def test_on_a_server_a_consumer_may_die_around_effect_commit_and_ack(
    node: Node, database: Database, way: str
) -> None:
    await kill_at_lines(node, database, way, _AROUND, _AROUND)
